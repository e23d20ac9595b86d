"""Plain JSON Schemas without what the engine does not take: they admit more, never less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from smcgen.potentials.json_plain import deep


def without(schema: Any, keys: Sequence[str]) -> Any:
    """The schema without these keywords."""

    def widened(node: dict) -> dict:
        out = {key: part for key, part in node.items() if key not in keys}
        if "patternProperties" in keys and "patternProperties" in node:
            out["additionalProperties"] = True
        return out

    return deep(schema, widened)


def without_patterns(schema: Any, bad: Callable[[str], bool]) -> Any:
    """The schema without these patterns."""

    def widened(node: dict) -> dict:
        if "pattern" in node and bad(node["pattern"]):
            del node["pattern"]
        patterns = node.pop("patternProperties", {})
        if kept := {pattern: part for pattern, part in patterns.items() if not bad(pattern)}:
            node["patternProperties"] = kept
        if len(kept) < len(patterns):
            node["additionalProperties"] = True
        return node

    return deep(schema, widened)


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
    return deep(schema, lambda node: _unmixed(node, leads))


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _unmixed(out: dict, leads: Callable[[Any], bool]) -> dict:
    """One schema, the parts of which are so already."""
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
