"""Random JSON Schemas against `jsonschema`, on values that have one spelling."""

import datetime
import itertools
import json
import random
import re

import jsonschema
import pytest

import smcgen as sg
from smcgen.potentials.json_draft import LATEST
from smcgen.potentials.json_plain import plain_schema
from smcgen.potentials.json_schema import json_schema
from tests.test_potential_json_schema import finished

OLD = "http://json-schema.org/draft-07/schema#"
INTEGER, NULL = {"type": "integer"}, {"type": "null"}
POOL = [None, True, False, 0, 1, 2, 3, 5, -1, 10, "", "a", "ab", "abc", "b", "2024-01-01", "2023-02-29", "a@b.c", "é", [], [1],
        [1, 2], ["a"], [1, "a"], [[]], [None], {}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "ab"}, {"a": "a"}, {"c": None}, {"d": 1},
        {"a": {"a": 1}}, {"ab": 2}, [{"a": 1}], {"default": 1}, {"a": 1, "d": 2}, {"const": "ab"}]  # fmt: skip
NAMES = ["a", "b", "c", "ab", "default", "const", "enum", "$ref"]
PATTERNS = ["^a", "b$", "^[ab]*$", "^(a|ab)$", "^.?$", "^[^a]*$", "\\d", "^$", "^(?!a)", "\\bab"]


def is_date(text):
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text) is not None


CHECKER = jsonschema.FormatChecker(())
CHECKER.checks("date")(lambda value: not isinstance(value, str) or is_date(value))
CHECKER.checks("email")(lambda value: not isinstance(value, str) or "@" in value)


class Maker:
    """Random schemas over few names and values."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def some(self, chance):
        return self.random.random() < chance

    def counts(self, names, values, chance):
        return {name: self.random.choice(values) for name in names if self.some(chance)}

    def schema(self, depth, references):
        kinds = ["integer", "string", "string", "value", "other", "reference"]
        kinds += ["object", "object", "array", "options", "options", "negation"] if depth > 0 else []
        return getattr(self, self.random.choice(kinds))(depth - 1, references)

    def integer(self, *_):
        return INTEGER | self.counts(("minimum", "maximum"), [-2, 0, 1, 3], 0.3)

    def string(self, *_):
        out = {"type": "string"} if self.some(0.9) else {}
        out |= self.counts(("minLength", "maxLength"), [0, 1, 2, 3], 0.2)
        return out | (self.counts(("pattern",), PATTERNS, 0.4) or self.counts(("format",), ["date", "email"], 0.4))

    def value(self, *_):
        return {"const": self.random.choice(POOL)} if self.some(0.3) else {"enum": self.random.sample(POOL, 3)}

    def other(self, *_):
        return self.random.choice([NULL, {}, True, False, {"type": ["string", "null"]}, {"minimum": 2, "maxLength": 1}])

    def reference(self, _, references):
        beside = [{}, {}, {"description": "x"}, {"minProperties": 1}, {"type": "object"}, {"maxLength": 2}]
        return {"$ref": self.random.choice(references)} | self.random.choice(beside)

    def object(self, depth, references):
        def part():
            return self.schema(depth, references)

        out = {"type": "object"} if self.some(0.9) else {}
        out |= {"properties": {name: part() for name in self.random.sample(NAMES, self.random.randint(0, 3))}}
        out |= {"required": self.random.sample(["a", "b", "c"], 2)} if self.some(0.2) else {}
        out |= {"additionalProperties": False if self.some(0.7) else part()} if self.some(0.5) else {}
        out |= {"patternProperties": {self.random.choice(PATTERNS): part()}} if self.some(0.15) else {}
        out |= {"propertyNames": {"maxLength": 1}} if self.some(0.1) else {}
        return out | self.counts(("minProperties", "maxProperties"), [1, 2], 0.3)

    def array(self, depth, references):
        out = {"type": "array"} | self.counts(("minItems", "maxItems"), [0, 1, 2], 0.3)
        out |= {"items": self.schema(depth, references)} if self.some(0.7) else {}
        return out | ({"uniqueItems": True} if self.some(0.1) else {})

    def options(self, depth, references):
        parts = [self.schema(depth, references) for _ in range(self.random.randint(1, 3))]
        beside = self.string() if self.some(0.2) else {}
        return beside | {self.random.choice(["anyOf", "oneOf", "allOf"]): parts}

    def negation(self, depth, references):
        return {"not": self.schema(depth, references)}


def made(seed):
    """A random schema and the class of its draft, with parts that references lead to by pointers, anchors and from the root."""
    maker = Maker(seed)
    old = maker.some(0.25)
    place, anchor = ("definitions", {"$id": "#end"}) if old else ("$defs", {"$anchor": "end"})
    references = [f"#/{place}/x", f"#/{place}/y", "#", "#end"]
    root, *parts = (maker.schema(depth, references) for depth in (3, 2, 2, 2))
    root = root if isinstance(root, dict) else {"not": {}} if root is False else {}
    end = {"allOf": [parts[2]]} | anchor
    return {**root, place: {"x": parts[0], "y": parts[1], "end": end}}, jsonschema.Draft7Validator if old else LATEST


def spellings(value):
    """A value with its properties in every order: the schema's is one of them."""
    orders = itertools.permutations(value.items()) if isinstance(value, dict) else [None]
    return [json.dumps(value if order is None else dict(order), ensure_ascii=False) for order in orders]


def compared(seed):
    """The potential of a random schema was compared with `jsonschema` on every value; None if that cannot judge."""
    schema, kind = made(seed)
    judge = kind(schema, format_checker=CHECKER)
    try:
        valid = [judge.is_valid(value) for value in POOL]
    except BaseException as error:
        if type(error).__name__ in ("RecursionError", "PanicException"):  # the latter where recursion ends in its library
            return None
        raise
    try:
        constraint = json_schema({**schema, "$schema": OLD} if kind is not LATEST else schema)
    except sg.Impossible:
        assert not any(valid), schema
        return "impossible"
    for value, right in zip(POOL, valid, strict=True):
        found = any(finished(constraint, text) == 0 for text in spellings(value))
        assert found == right, (value, constraint.verdict, constraint.doubts, schema)
    return constraint.verdict


def test_random_schemas_mean_what_jsonschema_says():
    found = [compared(seed) for seed in range(80)]
    assert {"exact", "checked at the end", "impossible"} <= set(found)


@pytest.mark.slow
def test_many_random_schemas_mean_what_jsonschema_says():
    for seed in range(1000, 2000):
        compared(seed)


def test_a_plain_schema_has_plain_references_only():
    for seed in range(100):
        schema, kind = made(seed)
        found, _, _ = plain_schema(schema, kind, "x")
        found = found if isinstance(found, dict) else {}
        text = json.dumps(found)
        assert set(re.findall(r'"\$ref": "([^"]*)"', text)) <= {"#", *(f"#/$defs/{n}" for n in found.get("$defs", ()))}
        assert not re.search(r'"(\$anchor|\$id|definitions|\$schema|description)":', text)
