"""Plain JSON Schemas without what the engine does not take: they admit more, never less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from smcgen.potentials.json_plain import each


def without(schema: Any, keys: Sequence[str]) -> Any:
    """The schema without these keywords."""
    if isinstance(schema, list):
        return [without(part, keys) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = each({key: part for key, part in schema.items() if key not in keys}, lambda part: without(part, keys))
    if "patternProperties" in keys and "patternProperties" in schema:
        out["additionalProperties"] = True
    return out


def without_patterns(schema: Any, bad: Callable[[str], bool]) -> Any:
    """The schema without these patterns."""
    if isinstance(schema, list):
        return [without_patterns(part, bad) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = each(schema, lambda part: without_patterns(part, bad))
    if "pattern" in out and bad(out["pattern"]):
        del out["pattern"]
    patterns = out.get("patternProperties", {})
    if kept := {pattern: part for pattern, part in patterns.items() if not bad(pattern)}:
        out["patternProperties"] = kept
    else:
        out.pop("patternProperties", None)
    if len(kept) < len(patterns):
        out["additionalProperties"] = True
    return out


def unmixed(schema: dict, inside: bool = False) -> dict:
    """The schema in which nothing stands beside a reference that leads back to itself, nor beside alternatives with one.

    inside: nor beside parts that have one anywhere inside."""
    parts = {"#": {key: part for key, part in schema.items() if key != "$defs"}}
    parts |= {f"#/$defs/{name}": part for name, part in schema.get("$defs", {}).items()}
    ways = {name: set(_references(part)) & parts.keys() for name, part in parts.items()}
    for middle in parts:  # by way of each of them in turn
        for ends in ways.values():
            if middle in ends:
                ends |= ways[middle]
    circular = {name for name, ends in ways.items() if name in ends}
    leads = (lambda part: bool(circular & set(_references(part)))) if inside else lambda part: _leads(part, circular)
    return _unmixed(schema, leads)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _unmixed(schema: Any, leads: Callable[[Any], bool]) -> Any:
    if isinstance(schema, list):
        return [_unmixed(part, leads) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = each(schema, lambda part: _unmixed(part, leads))
    kept = {"$defs": out.pop("$defs")} if "$defs" in out else {}
    parts = [part if isinstance(part, dict) else {"allOf": [part]} for part in out.get("allOf", ())]
    parts += [{key: out[key]} for key in ("$ref", "anyOf", "oneOf") if key in out]
    rest = {key: part for key, part in out.items() if key not in ("allOf", "$ref", "anyOf", "oneOf")}
    if len(parts) + bool(rest) > 1 and (mixed := [part for part in parts if leads(part)]):
        out = mixed[0]
    return {**out, **kept}


def _leads(schema: Any, circular: set[str]) -> bool:
    """Whether a value of the schema may be one of a circular reference, itself."""
    if not isinstance(schema, dict):
        return False
    options = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ())]
    return schema.get("$ref") in circular or any(_leads(part, circular) for part in options)
