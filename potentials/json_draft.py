"""Drafts of JSON Schema, and the judge of finished values: the `jsonschema` package by the draft that a schema names."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import referencing
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from smcgen.errors import UsageError
from smcgen.potentials.engine import Recognizer
from smcgen.potentials.json_exact import exact
from smcgen.potentials.json_formats import ENGINE, FORMATS
from smcgen.potentials.json_pattern import NoPattern, translated

LATEST = jsonschema.Draft202012Validator
DRAFTS: dict[str, Any] = {
    "draft-04": jsonschema.Draft4Validator,
    "draft-05": jsonschema.Draft4Validator,  # the same language, said more clearly
    "draft-06": jsonschema.Draft6Validator,
    "draft-07": jsonschema.Draft7Validator,
    "draft/2019-09": jsonschema.Draft201909Validator,
    "draft/2020-12": LATEST,
}
IGNORES_SIBLINGS = (jsonschema.Draft4Validator, jsonschema.Draft6Validator, jsonschema.Draft7Validator)
# Keywords by what they hold: one schema, a list of schemas, schemas by name.
PART = ("not", "if", "then", "else", "contains", "propertyNames", "additionalProperties", "unevaluatedItems",
        "unevaluatedProperties")  # fmt: skip
PARTS = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "dependentSchemas", "dependencies", "patternProperties", "$defs", "definitions")
SCHEMAS = (*PART, *PARTS, "items", "additionalItems")
SPECIFICATIONS: dict[Any, Any] = {
    jsonschema.Draft4Validator: DRAFT4,
    jsonschema.Draft6Validator: DRAFT6,
    jsonschema.Draft7Validator: DRAFT7,
    jsonschema.Draft201909Validator: DRAFT201909,
    LATEST: DRAFT202012,
}


def draft(schema: dict, name: str) -> Any:
    """The validator class of the draft that `$schema` names: over http or https, with or without a `#`, also for dialects of a
    draft. 2020-12 without `$schema`, and for names that are unknown. Raises UsageError for drafts before 4."""
    given = schema.get("$schema")
    found = re.match(r"https?://json-schema\.org/(draft(?:-|/)[0-9-]+)/", given) if isinstance(given, str) else None
    if found is None:
        return LATEST
    if re.fullmatch("draft-0[0-3]", found[1]):
        raise UsageError(
            f"{name}: $schema names draft {found[1][-1]}, where keywords mean something else: write the schema in draft 4 or "
            "later (`required` as a list of names beside `properties`) and name that"
        )
    return DRAFTS.get(found[1], LATEST)


def specification(kind: Any) -> Any:
    """The draft of a validator class, as `referencing` has it."""
    return SPECIFICATIONS[kind]


def check(schema: dict, kind: Any, name: str) -> None:
    """Raises UsageError if it is no schema of this draft. Patterns are not looked at."""
    try:
        kind.check_schema(schema, format_checker=jsonschema.FormatChecker(()))
    except jsonschema.SchemaError as error:
        path = list(error.absolute_path)
        where = "/".join(map(str, path)) or "the top"
        remedy = ""
        if path and path[-1] == "items" and isinstance(error.instance, list):
            remedy = ": a list of schemas is called prefixItems in draft 2020-12, or name the older draft in $schema"
        raise UsageError(f"{name}: not a JSON Schema at {where}: {error.message[:200]}{remedy}") from None


def judge(schema: dict, kind: Any, schemas: set[int]) -> Any:
    """The validator of finished values. It looks for patterns as ECMAScript does, and checks formats as the masks do.

    schemas: the `id`s of parts that are schemas, where keywords do not tell."""
    return exact(kind)(_judged(schema, schemas, True), registry=referencing.Registry(), format_checker=formats())


def _judged(node: Any, schemas: set[int], here: bool) -> Any:
    """The schema with patterns in Python's syntax and without names of dialects. here: `node` is a schema by its place."""
    if isinstance(node, list):
        return [_judged(part, schemas, here) for part in node]
    if not isinstance(node, dict):
        return node
    here = here or id(node) in schemas
    if not here:
        return {key: _judged(part, schemas, False) for key, part in node.items()}
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key == "$schema" and isinstance(value, str):
            continue
        if key in ("const", "enum", "default", "examples"):
            out[key] = value
        elif key == "pattern" and isinstance(value, str):
            out[key] = _python(value)
        elif key in NAMED:
            if isinstance(value, dict):
                change = _python if key == "patternProperties" else str
                value = {change(name): _judged(part, schemas, True) for name, part in value.items()}
            out[key] = value
        else:
            out[key] = _judged(value, schemas, key in SCHEMAS)
    return out


def _python(pattern: str) -> str:
    try:
        return translated(pattern)[1]
    except (NoPattern, OverflowError):  # in a part that no reference leads to; the others were refused
        return pattern


@functools.cache
def formats() -> jsonschema.FormatChecker:
    """Checks of the formats that the masks enforce, by the same expressions, and of `regex`."""
    checker = jsonschema.FormatChecker(())

    def add(name: str, holds: Any) -> None:
        checker.checks(name)(lambda value: not isinstance(value, str) or holds(value))

    for name, pattern in FORMATS.items():
        add(name, re.compile(translated(pattern)[1]).search)
    for name in ENGINE:
        add(name, functools.partial(_engine_takes, name))
    add("regex", _is_pattern)
    return checker


def _engine_takes(name: str, value: str) -> bool:
    return _recognizer(name)(json.dumps(value, ensure_ascii=False))


@functools.cache
def _recognizer(name: str) -> Recognizer:
    schema = {"type": "string", "format": name, "x-guidance": {"json_allow_general_unicode_escapes": True}}
    return Recognizer(f"start: %json {json.dumps(schema)}\n", f"the format {name}")


def _is_pattern(value: str) -> bool:
    try:
        translated(value)
    except (NoPattern, OverflowError):
        return False
    return True
