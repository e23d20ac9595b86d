"""A JSON Schema of any draft as a plain one: what the masks are made from.

Plain means: keywords of draft 2020-12 that the named draft has too, no notes, no dialect; every reference leads to "#" or to a
part under "$defs", resolved as the `referencing` package does (anchors, `$id`, pointers to any place); patterns in the
engine's syntax, formats as patterns. It may admit more than the schema, and `doubts` says what it leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import referencing
from jsonschema.protocols import Validator
from jsonschema_specifications import REGISTRY as SPECIFICATIONS
from referencing.exceptions import Unresolvable

from smcgen.errors import UsageError
from smcgen.potentials.json_draft import IGNORES_SIBLINGS, NAMED, PART, PARTS, specification
from smcgen.potentials.json_finite import Finite
from smcgen.potentials.json_formats import ENGINE, FORMATS, FREE, JUDGED
from smcgen.potentials.json_pattern import NoPattern, translated

VALUES = ("const", "enum", "required", "dependentRequired", "type")  # keywords that hold no schemas
DYNAMIC = ("$dynamicRef", "$recursiveRef")


def plain_schema(schema: dict, kind: type[Validator], name: str) -> tuple[dict | bool, tuple[str, ...], set[int]]:
    """The plain schema, what it leaves out, and the `id`s of the parts of `schema` that are schemas.

    Raises UsageError for references that lead nowhere and patterns that cannot be judged."""
    reader = _Reader(schema, kind, name)
    found = reader.whole()
    return found, tuple(reader.doubts), reader.schemas


class _Reader:
    def __init__(self, root: dict, kind: Any, name: str):
        self.root, self.name = root, name
        self.spec = specification(kind)
        self.alone = kind in IGNORES_SIBLINGS
        self.known = set(kind.VALIDATORS)
        if "unevaluatedItems" in self.known:
            self.known |= {"minContains", "maxContains"}
        self.old_bounds = "exclusiveMinimum" not in self.known
        self.schemas: set[int] = set()
        self.doubts: dict[str, None] = {}
        self.names: dict[int, str] = {id(root): "#"}
        self.defs: dict[str, Any] = {}

    def whole(self) -> dict | bool:
        registry = SPECIFICATIONS.combine(referencing.Registry())  # nothing is fetched
        found = self.of(self.root, registry.resolver_with_root(self.spec.create_resource(self.root)))
        if isinstance(found, bool) or not self.defs:
            return found
        return pruned({**found, "$defs": self.defs})

    def of(self, schema: Any, resolver: Any) -> dict | bool:
        """One schema, plain; resolver: of references in it."""
        if not isinstance(schema, dict):
            return schema
        self.schemas.add(id(schema))
        if self.alone and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        out: dict[str, Any] = {}
        patterns = []
        for key, value in schema.items():
            if key not in self.known and not (key in ("then", "else") and "if" in schema):
                if not (self.old_bounds and key in ("exclusiveMinimum", "exclusiveMaximum")):
                    continue
            if key == "$ref":
                found = self._referred(value, resolver)
                if found is False:
                    return False
                if found is not True:
                    out[key] = found
            elif key in DYNAMIC:
                self.doubts[f"{key} is not enforced by the masks"] = None
            elif key == "pattern":
                patterns.append(self._pattern(value))
            elif key == "format":
                patterns += self._format(value, schema.get("type", "string"), out)
            elif key in PARTS:
                out[key] = [self._part(part, resolver) for part in value]
            elif key == "items" and isinstance(value, list):
                out["prefixItems"] = [self._part(part, resolver) for part in value]
                if "additionalItems" in schema:
                    out["items"] = self._part(schema["additionalItems"], resolver)
            elif key in PART or key == "items":
                out[key] = self._part(value, resolver)
            elif key in NAMED:
                parts = {name: self._part(part, resolver) for name, part in value.items()}
                out[key] = self._by_pattern(parts) if key == "patternProperties" else parts
            elif key != "additionalItems":
                out[key] = value
        if patterns:
            out["pattern"], *more = patterns
            if more:
                out["allOf"] = [*out.get("allOf", ()), *({"pattern": pattern} for pattern in more)]
        if self.old_bounds:
            _new_bounds(out)
        if "then" not in out and "else" not in out:
            out.pop("if", None)
        free = out.get("minProperties", 0) - len(out.get("required", ()))
        if free > 1 and (out.get("additionalProperties") is not False or "patternProperties" in out):
            self.doubts["minProperties: a key that is written twice counts as two for the masks"] = None
        return out

    def _part(self, schema: Any, resolver: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        return self.of(schema, resolver.in_subresource(self.spec.create_resource(schema)))

    def _referred(self, reference: str, resolver: Any) -> str | bool:
        try:
            found = resolver.lookup(reference)
        except (Unresolvable, ValueError, LookupError, TypeError):
            raise UsageError(
                f"{self.name}: the reference {reference!r} leads nowhere, and smcgen does not fetch schemas: put what it "
                "refers to under $defs"
            ) from None
        schema = found.contents
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UsageError(f"{self.name}: the reference {reference!r} leads to {type(schema).__name__}, not to a schema")
        if id(schema) not in self.names:
            stem = re.sub(r"[^0-9A-Za-z_.-]", "", re.split("[/#]", reference)[-1]) or "part"
            own, count = stem, 1
            while own in self.defs:
                count += 1
                own = f"{stem}_{count}"
            self.names[id(schema)], self.defs[own] = f"#/$defs/{own}", True
            self.defs[own] = self.of(schema, found.resolver)
        return self.names[id(schema)]

    def _pattern(self, pattern: str) -> str:
        try:
            return translated(pattern)[0]
        except NoPattern as error:
            raise UsageError(f"{self.name}: the pattern {pattern!r}: {error}") from None

    def _by_pattern(self, parts: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for pattern, part in parts.items():
            pattern = self._pattern(pattern)
            out[pattern] = {"allOf": [out[pattern], part]} if pattern in out else part
        return out

    def _format(self, name: str, types: Any, out: dict) -> Sequence[str]:
        """The pattern of a format, if it is one; what the engine knows besides is left to it."""
        if "string" not in types:  # a format speaks of strings
            return ()
        if name in FORMATS:
            return (FORMATS[name],)
        if name in ENGINE:
            out["format"] = name
        elif name in FREE:
            pass
        elif name in JUDGED:
            self.doubts[f"the format {name} is not enforced by the masks"] = None
        else:
            self.doubts[f"the format {name} is not checked: neither the masks nor the judge know it"] = None
        return ()


def _new_bounds(out: dict) -> None:
    """Draft 4 says whether a bound is exclusive, later ones give two bounds."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if out.pop(exclusive, False) and bound in out:
            out[exclusive] = out.pop(bound)


def pruned(schema: dict, dead: Sequence[str] = ()) -> dict | bool:
    """The same schema without references to parts that nothing satisfies: `false` is written there.

    dead: names of such parts; those without a finite value are found here."""
    finite = Finite(schema)
    gone = {f"#/$defs/{name}" for name, part in schema["$defs"].items() if name in dead or not finite.holds(part)}
    return _falsified(schema, gone) if gone else schema


def _falsified(schema: Any, gone: set[str]) -> Any:
    def falsify(node: dict) -> dict | bool:
        if node.get("$ref") in gone:
            return False
        if "$defs" in node:
            node["$defs"] = {name: part for name, part in node["$defs"].items() if f"#/$defs/{name}" not in gone}
        return node

    return deep(schema, falsify)


def deep(schema: Any, change: Callable[[dict], dict | bool]) -> Any:
    """A copy of the schema with `change` made to it and to every schema in it, those inside first."""
    if isinstance(schema, list):
        return [deep(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            value = {
                name: part if key == "dependencies" and isinstance(part, list) else deep(part, change)
                for name, part in value.items()
            }
        elif key not in VALUES:
            value = deep(value, change)
        out[key] = value
    return change(out)
