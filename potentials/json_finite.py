"""Whether a JSON Schema admits a finite value: a recursion must have an end."""

from __future__ import annotations

from typing import Any

STEPS = 10_000


class Finite:
    """Whether a plain schema (see `json_plain`) admits a finite value, as far as types, requirements and references tell; True
    where they do not.

    A schema that is met again inside itself is no way to a finite value."""

    def __init__(self, root: dict):
        self.root = root
        self.known: set[int] = set()  # schemas with a finite value
        self.open: set[int] = set()
        self.steps = 0

    def holds(self, schema: Any) -> bool:
        if not isinstance(schema, dict) or id(schema) in self.known:
            return schema is not False
        self.steps += 1
        if self.steps > STEPS:
            return True
        if id(schema) in self.open:
            return False
        self.open.add(id(schema))
        found = self._parts(schema)
        self.open.remove(id(schema))
        if found:
            self.known.add(id(schema))
        return found

    def _parts(self, schema: dict) -> bool:
        if schema.get("not") in ({}, True) or not all(map(self.holds, schema.get("allOf", ()))):
            return False
        if "$ref" in schema and not self.holds(target(self.root, schema["$ref"])):
            return False
        if any(schema.get(key) and not any(map(self.holds, schema[key])) for key in ("anyOf", "oneOf")):
            return False
        if schema.get("type") == "object":
            properties = schema.get("properties", {})
            if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
                least = schema.get("minProperties", 0)
                if least and least > sum(map(self.holds, properties.values())):
                    return False
            return all(self.holds(properties[key]) for key in schema.get("required", ()) if key in properties)
        if schema.get("type") == "array" and schema.get("minItems", 0) > 0:
            first = (schema.get("prefixItems") or [schema.get("items", True)])[0]
            return self.holds(first)
        return True


def target(root: dict, reference: str) -> Any:
    """What a reference of a plain schema leads to."""
    return root if reference == "#" else root["$defs"][reference.removeprefix("#/$defs/")]
