"""JSON Schemas of every draft: references, dialects, patterns, formats, and what neither narrows nor escapes."""

import ipaddress
import json
import random
import re

import jsonschema
import pytest
import torch

import smcgen as sg
from smcgen.potentials.base import Prompt
from smcgen.potentials.json_draft import DRAFTS, LATEST, draft, formats
from smcgen.potentials.json_formats import ENGINE, FORMATS
from smcgen.potentials.json_pattern import NoPattern, translated
from smcgen.potentials.json_schema import json_schema
from tests.test_json_random import is_date
from tests.test_potential_json_schema import VOCABULARY, finished

INTEGER, NULL = {"type": "integer"}, {"type": "null"}
PAIR = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
OLD = "http://json-schema.org/draft-07/schema#"


def agrees(schema, accept=(), reject=()):
    """The schema's potential, if masks, end and `accepts` let these texts through and bar those."""
    constraint = json_schema(schema)
    for text in (*accept, *reject):
        assert constraint.accepts(text) == (text in accept), text
        assert (finished(constraint, text) == 0) == (text in accept), text
    return constraint


# Counts of properties.


@pytest.mark.parametrize("closed", [{}, {"additionalProperties": False}])
@pytest.mark.parametrize("count", [{"minProperties": 1}, {"minProperties": 2}, {"minProperties": 1, "maxProperties": 1}])
def test_counts_of_optional_properties_do_not_narrow_the_masks(closed, count):
    texts = ["{}", '{"a":1}', '{"b":1}', '{"a":1,"b":2}']
    for beside in ({}, {"allOf": [{"not": {"type": "string"}}]}):  # alone, and where another keyword is refused first
        schema = PAIR | closed | count | beside
        judge = LATEST(schema)
        valid = [text for text in texts if judge.is_valid(json.loads(text))]
        constraint = agrees(schema, valid, [text for text in texts if text not in valid])
        for doubt in constraint.doubts:  # the engine can count up to one where no other key is possible
            assert doubt.startswith((" and ".join(count), "not enforced"))


def test_more_properties_than_there_are_is_impossible():
    with pytest.raises(sg.Impossible):
        json_schema(PAIR | {"additionalProperties": False, "minProperties": 3})


# References.

IMPOSSIBLE = [False, {"type": "integer", "minimum": 3, "maximum": 2}, {"not": {}}, {"allOf": [NULL, INTEGER]},
              {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/n"}}}]  # fmt: skip


@pytest.mark.parametrize("part", IMPOSSIBLE)
@pytest.mark.parametrize(
    ("schema", "accept"),
    [
        ({"anyOf": [{"$ref": "#/$defs/n"}, NULL]}, ["null"]),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}}, ["{}", '{"y":1}']),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, ["[]"]),
        ({"type": ["array", "null"], "minItems": 1, "items": {"$ref": "#/$defs/n"}}, ["null"]),
    ],
)
def test_a_reference_to_what_nothing_satisfies_leaves_the_rest(schema, accept, part):
    agrees({**schema, "$defs": {"n": part}}, accept, ['{"x":1}', "[1]", "3"])


def test_masks_do_not_begin_what_has_no_end():
    endless = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/n"}}}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}, "y": INTEGER}, "$defs": {"n": endless}}
    bound = agrees(schema, ["{}", '{"y":1}']).bind(VOCABULARY, (), torch.device("cpu"))
    state, text = bound.start([Prompt((), "")], 1), list(b'{"x":')
    assert float(bound.extend(state, torch.tensor([text]), torch.tensor([len(text)]))[0]) == float("-inf")


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"x": {"$anchor": "n", **INTEGER}}, "$ref": "#n"},
        {"$defs": {"x": {"$dynamicAnchor": "n", **INTEGER}}, "$ref": "#n"},
        {"$schema": OLD, "definitions": {"x": {"$id": "#n", **INTEGER}}, "$ref": "#n"},
        {"$schema": "http://json-schema.org/draft-04/schema#", "definitions": {"x": {"id": "#n", **INTEGER}}, "$ref": "#n"},
        {"$id": "https://a.b/c", "$defs": {"x": {"$id": "d", **INTEGER}}, "$ref": "d"},
        {"$id": "https://a.b/c", "$defs": {"x": {"$id": "d", "$defs": {"e": INTEGER}, "$ref": "#/$defs/e"}}, "$ref": "d"},
        {"$id": "https://a.b/c", "$defs": {"x": INTEGER}, "$ref": "https://a.b/c#/$defs/x"},
        {"components": {"schemas": {"a/b": INTEGER}}, "$ref": "#/components/schemas/a~1b"},
        {"$schema": OLD, "definitions": {"n": INTEGER}, "$ref": "#/definitions/n", "type": "string"},  # what is beside is void
    ],
)
def test_references_are_resolved(schema):
    assert agrees(schema, ["3"], ['"a"', "null"]).exact


def test_references_that_lead_nowhere_are_refused_with_the_remedy():
    for reference in ("#/$defs/x", "#x", "other.json"):
        with pytest.raises(sg.UsageError, match=f"{re.escape(reference)}.*put what it refers to under .defs"):
            json_schema({"items": {"$ref": reference}})
    assert json_schema({"$defs": {"x": {"$ref": "#/nowhere"}}, **NULL}).accepts("null")  # nothing leads to it


def test_the_schemas_of_schemas_can_be_referred_to():
    agrees({"$ref": OLD}, ['{"type": "object"}'], ['{"type": 1}', "3"])


@pytest.mark.parametrize(
    "part",
    [
        {"$ref": "#", "required": ["a"]},
        {"allOf": [{"$ref": "#"}, {"required": ["a"]}]},
        {"anyOf": [{"$ref": "#"}, INTEGER], "required": ["a"]},
        {"properties": {"a": {"$ref": "#"}}, "patternProperties": {"^a": NULL}, "type": "object", "required": ["a"]},
        {"allOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"a": NULL}}], "type": "object", "required": ["a"]},
    ],
)
def test_keywords_beside_a_circular_reference_are_judged_at_the_end(part):
    schema = {"type": "object", "properties": {"a": part}}
    constraint = agrees(schema, ["{}", '{"b":1}'], ['{"a":{}}', '{"a":"x"}', '{"a":{"a":{}}}'])
    assert "$ref" in constraint.doubts[0]


# Drafts.


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        *((f"http{s}://json-schema.org/{name}/schema{end}", kind)
          for name, kind in DRAFTS.items() for s in ("", "s") for end in ("", "#")),
        ("http://json-schema.org/draft-07/hyper-schema#", jsonschema.Draft7Validator),
        ("http://json-schema.org/schema#", LATEST),
        ("https://json.schemastore.org/package.json", LATEST),
        ("https://spec.openapis.org/oas/3.1/dialect/base", LATEST),
        ("draft-07", LATEST),
        ("", LATEST),
    ],
)  # fmt: skip
def test_drafts_are_known_by_many_names(given, kind):
    assert draft({"$schema": given}, "x") is kind
    schema = {"$schema": given, "type": "object", "properties": {"a": {"$schema": given, "minimum": 3}}}
    agrees(schema, ['{"a": 3}'], ['{"a": 2}'])


def test_drafts_before_4_are_refused_with_the_remedy():
    with pytest.raises(sg.UsageError, match=r"draft 3, .* write the schema in draft 4"):
        json_schema({"$schema": "http://json-schema.org/draft-03/schema#", "properties": {"a": {"required": True}}})


def test_keywords_of_a_draft():
    four = {"$schema": "http://json-schema.org/draft-04/schema#"}
    assert agrees({**four, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]).exact
    assert agrees({**four, "type": "integer", "const": 3}, ["4"]).exact  # `const` came later
    tuples = {"type": "array", "items": [INTEGER], "additionalItems": NULL}
    assert agrees({**four, **tuples}, ["[1,null]"], ["[1,1]", "[null]"]).exact
    with pytest.raises(sg.UsageError, match="prefixItems"):
        json_schema(tuples)


# Patterns.


@pytest.mark.parametrize(
    ("pattern", "accept", "reject"),
    [
        (r"^\p{L}+$", ["é", "ab"], ["1", ""]),
        (r"^\P{Lu}$", ["a"], ["A"]),
        (r"^\p{General_Category=Decimal_Number}$", ["5", "٣"], ["a"]),
        (r"^(?<year>[0-9]{2})$", ["24"], ["2"]),
        (r"^(?<c>[ab])\k<c>$", ["aa", "bb"], ["ab"]),
        (r"^(?P<c>[ab])(?P=c)$", ["aa", "bb"], ["ab"]),
        (r"^[^]$", ["\n", "a"], [""]),
        (r"^a{,2}$", ["a{,2}"], ["aa"]),
        (r"^\u{1F600}\ud83d\ude00$", ["😀😀"], ["😀"]),
        (r"^[\d\-x]$", ["-", "5", "x"], ["y", "٣"]),
        (r"^.$", ["a", "\x85"], ["\r", "\u2028"]),
        (r"^\s$", ["\ufeff", "\t"], ["\x1c", "a"]),
        (r"^\w$", ["_", "a"], ["é"]),
        (r"^[a&&b]$", ["&"], ["c"]),
        (r"\bfoo\b", ["a foo", "éfoo"], ["food"]),
        (r"^a$", ["a"], ["a\n"]),
        (r"^[\b]\x41\/$", ["\bA/"], ["bA/"]),
        (r"(?i)^ab$", ["AB"], ["AC"]),
    ],
)
def test_patterns_of_ecmascript(pattern, accept, reject):
    _, python = translated(pattern)
    for text in (*accept, *reject):
        assert bool(re.search(python, text)) == (text in accept), text
    spelled = [json.dumps(text, ensure_ascii=False) for text in (*accept, *reject)]
    schema = {"type": "string", "pattern": pattern}
    agrees(schema, spelled[: len(accept)], spelled[len(accept) :])
    keys = [f"{{{text}:1}}" for text in spelled]
    agrees(
        {"type": "object", "patternProperties": {pattern: INTEGER}, "additionalProperties": False},
        keys[: len(accept)],
        keys[len(accept) :],
    )


def test_control_characters_of_ecmascript():
    agrees({"type": "string", "pattern": r"^\cA$"}, ['"\\u0001"'], ['"A"'])


@pytest.mark.parametrize("pattern", [r"\p{Script=Greek}", "(?<=a+)b", "(a", "a\\", "[b-a]", r"\k<x>"])
def test_patterns_that_cannot_be_judged_are_refused_by_name(pattern):
    with pytest.raises(NoPattern):
        translated(pattern)
    with pytest.raises(sg.UsageError, match=re.escape(f"the pattern {pattern!r}: ")):
        json_schema({"properties": {"a": {"pattern": pattern}}})


def test_properties_may_be_called_as_keywords():
    names = ["default", "examples", "const", "enum", "pattern", "minimum", "$ref", "properties", "required", "format"]
    for name in names:
        part = {"type": "string", "pattern": "^(?!x)"}
        constraint = agrees(
            {"type": "object", "properties": {name: part}, "required": [name]}, [f'{{"{name}":"a"}}'], [f'{{"{name}":"xa"}}']
        )
        assert "pattern" in constraint.doubts[0]


def test_only_what_is_beyond_the_engine_is_left_out():
    schema = {"type": "array", "prefixItems": [{"type": "string", "pattern": "^(?!x)"}, {"type": "string", "pattern": "^b$"}]}
    constraint = agrees(schema, ['["a", "b"]'], ['["x", "b"]', '["a", "c"]'])
    assert constraint._recognizer('["x", "b"]')
    assert not constraint._recognizer('["a", "c"]')


# Formats.


def test_formats_inside_oneof_and_not():
    date, email = ({"type": "string", "format": name} for name in ("date", "email"))
    agrees({"oneOf": [date, email]}, ['"2024-01-01"', '"a@b.c"'], ['"x"', "1"])
    agrees({"not": date}, ['"x"', "1"], ['"2024-01-01"'])
    agrees({"oneOf": [{"type": "string", "format": "uri"}, {"type": "string", "maxLength": 3}]}, ['"a:b:c"', '"x"'], ['"a:b"'])


def test_masks_and_judge_mean_the_same_formats():
    texts = ["", "a", "a@b.c", "2024-02-29", "2023-02-29", "12:00:00Z", "1.2.3.4", "::1", "/a~1b", "0#", "a:b", "P1D", "é@é"]
    texts += ["2024-02-29T12:00:00Z", "123e4567-e89b-42d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"]
    for name in (*FORMATS, *ENGINE):
        constraint = json_schema({"type": "string", "format": name})
        assert constraint.exact
        for text in texts:
            assert constraint._recognizer(json.dumps(text, ensure_ascii=False)) == formats().conforms(text, name), (name, text)


def test_formats_that_the_engine_lacks():
    assert "regex is not enforced" in agrees({"type": "string", "format": "regex"}, ['"a+"'], ['"("']).doubts[0]
    for name in ("color", "uri-template"):
        assert f"{name} is not checked" in agrees({"type": "string", "format": name}, ['"a"']).doubts[0]
    assert json_schema({"type": "integer", "format": "int32"}).exact
    assert json_schema({"type": "string", "format": "password"}).exact


def test_dates_are_of_the_calendar():
    date = re.compile(translated(FORMATS["date"])[1])
    days = [(2, 28), (2, 29), (2, 30), (12, 31), (4, 30), (4, 31), (0, 1), (1, 0), (13, 1)]
    for year in range(10_000):
        for month, day in days:
            text = f"{year:04}-{month:02}-{day:02}"
            assert bool(date.search(text)) == is_date(text), text
    agrees({"type": "string", "format": "date-time"}, ['"2024-02-29T12:00:00Z"'], ['"2023-02-29T12:00:00Z"'])


def test_ipv6_is_as_in_the_standard_library():
    expression, maker = re.compile(translated(FORMATS["ipv6"])[1]), random.Random(0)
    found = []
    for _ in range(20_000):
        groups = [maker.choice(["", "1", "ab", "12345", "1.2.3.4", "0", "f", "f", "f"]) for _ in range(maker.randint(1, 9))]
        text = maker.choice(["", "", "", ":", "::"]) + ":".join(groups) + maker.choice(["", "", "", ":", "::"])
        try:
            ipaddress.IPv6Address(text)
            found.append(True)
        except ValueError:
            found.append(False)
        assert bool(expression.search(text)) == found[-1], text
    assert sum(found) > 500


# Spellings of keys.


@pytest.mark.parametrize("others", [{}, {"additionalProperties": {"type": "string"}}, {"patternProperties": {"^b": NULL}}])
def test_a_key_with_escapes_is_the_key(others):
    schema = {"type": "object", "properties": {"a": INTEGER}, **others}
    constraint = agrees(schema, ['{"a":1}', '{"\\u0063":"x"}'], ['{"\\u0061":"x"}', '{"a":"x"}'])
    assert constraint.exact


def test_a_key_that_is_written_twice_counts_once():
    schema = {"type": "object", "additionalProperties": INTEGER, "minProperties": 2}
    constraint = agrees(schema, ['{"a":1,"b":2}'], ['{"a":1,"a":2}', '{"a":1}'])
    assert "written twice" in constraint.doubts[0]
    assert json_schema({**schema, "minProperties": 1}).exact


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ({"^a": {"$ref": "#"}, "b$": {"$ref": "#"}}, '{"ab": {}}'),
        ({"^a": {"allOf": [{"$ref": "#"}, {"minProperties": 1}]}, "a$": {"$ref": "#"}}, '{"axa": {"ba": {}}}'),
    ],
)
def test_keys_whose_patterns_are_left_out_are_not_barred(patterns, text):
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    constraint = json_schema(schema)
    assert any("patternProperties" in doubt for doubt in constraint.doubts)
    assert constraint.accepts(text)
    assert not constraint.accepts('{"x": {}}')
