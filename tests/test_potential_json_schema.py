"""JSON Schemas: what the engine enforces, and what is judged at the end."""

import json

import numpy as np
import pydantic
import pytest
import torch

from smcgen.errors import Impossible, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import END, Prompt
from smcgen.potentials.check import check
from smcgen.potentials.json_schema import json_schema

VOCABULARY = Vocabulary(
    "bytes",
    [*(bytes([i]) for i in range(256)), b'{"', b'": ', b", ", b"true", b"12", b"<end>"],
    special=(261,),
    end_ids=(261,),
)
PERSON = {
    "title": "person",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def finished(constraint, text):
    """What a run gives for a text, spelled byte by byte: 0, or -inf where a mask or the end bars it."""
    bound = constraint.bind(VOCABULARY, (), torch.device("cpu"))
    state = bound.start([Prompt((), "")], 1)
    data = text.encode()
    value = float(bound.extend(state, torch.tensor([list(data)]), torch.tensor([len(data)]))[0])
    return value + float(bound.finish(state, torch.tensor([0]), [text], [END])[0])


@pytest.mark.parametrize("name", ["true.json", "false.json", "form.json", "types"])
def test_a_path_may_begin_like_a_value(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text('{"type": "null"}')
    assert json_schema(name).accepts("null")


def test_sources(tmp_path):
    class Person(pydantic.BaseModel):
        name: str
        age: int = 3

    path = tmp_path / "person.json"
    path.write_text(json.dumps(PERSON))
    names = []
    for source in (PERSON, json.dumps(PERSON), path, str(path), Person):
        constraint = json_schema(source)
        names.append(repr(constraint))
        assert constraint.accepts('{"name": "Bob", "age": 3}')
        assert not constraint.accepts('{"name": 3}')
        assert constraint.verdict == "exact"
    assert names == ["json_schema('person')"] * 2 + ["json_schema('person.json')"] * 2 + ["json_schema(Person)"]
    for anything in (True, "true", " true\n"):
        assert json_schema(anything).accepts("[1]")


def test_laws_hold():
    texts = ['{"name": "Bob", "age": 12}', '{"name": "é"}', '{"name": "abcdef"}', "{}"]
    check(json_schema(PERSON), VOCABULARY, texts, histories=4)


@pytest.mark.parametrize(
    ("schema", "doubt", "accept", "reject"),
    [
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "uniqueItems", "[1, 2]", "[1, 1]"),
        ({"not": {"type": "string"}}, "not", "1", '"a"'),
        ({"type": "string", "pattern": "^(?!no)[a-z]+$"}, "pattern", '"yes"', '"nope"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is read as anyOf", "1.5", "1"),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "if", "5", "1"),
        ({"type": "array", "contains": {"const": 1}}, "contains", "[2,1]", "[2]"),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames", '{"a":1}', '{"ab":1}'),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", '{"b":1}', '{"a":1}'),
    ],
)
def test_unknown_keywords_are_judged_at_the_end(schema, doubt, accept, reject):
    constraint = json_schema(schema)
    assert constraint.verdict == "checked at the end"
    assert not constraint.exact
    assert doubt in " ".join(constraint.doubts)
    assert constraint.accepts(accept)
    assert not constraint.accepts(reject)
    assert finished(constraint, accept) == 0
    assert finished(constraint, reject) == -np.inf


@pytest.mark.parametrize(
    ("schema", "accept", "reject"),
    [
        ({"type": "string", "maxLength": 2}, ['"\\u00e9\\n"', '"漢😀"'], ['"abc"', '"\\u00e9ab"']),
        ({"allOf": [{"type": "string", "maxLength": 3}, {"pattern": "^a"}]}, ['"abc"'], ['"b"', '"abcd"']),
        ({"$defs": {"n": {"enum": [1, None]}}, "type": "array", "items": {"$ref": "#/$defs/n"}}, ["[1,null]"], ["[2]"]),
        ({"type": "number", "multipleOf": 0.5}, ["1.5", "-2"], ["1.3"]),
        ({"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}}, ['{"a":null}'], ["{}"]),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"x"']),
    ],
)
def test_what_the_masks_enforce(schema, accept, reject):
    constraint = json_schema(schema)
    assert constraint.exact
    for text in accept + reject:
        assert constraint.accepts(text) == (text in accept), text
        assert (finished(constraint, text) == 0) == (text in accept), text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "not a JSON Schema at type"),
        ({"minimum": "a"}, "not a JSON Schema at minimum"),
        ('{"a": ', "not JSON"),
        ("missing.json", "cannot read missing.json"),
        ([1], "not list"),
        ({"$ref": "http://example.com/x.json"}, "does not fetch"),
    ],
)
def test_refusals(schema, reason):
    with pytest.raises(UsageError, match=reason) as error:
        json_schema(schema)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 10},
        {"enum": []},
        {"enum": [1, 2], "not": {"type": "integer"}},
        {"const": 1, "type": "string"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "array", "minItems": 1, "items": False},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "string", "pattern": r"[^\s\S]"},
        {"not": {}},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/x"}}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, False]}}},
    ],
)
def test_a_schema_that_nothing_satisfies_is_impossible(schema):
    with pytest.raises(Impossible):
        json_schema(schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a": {}}'),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
            '{"a":null}',
        ),
        ({"type": "array", "items": {"$ref": "#"}}, "[[]]"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "1"),
    ],
)
def test_recursion_that_can_end_is_possible(schema, text):
    assert json_schema(schema).accepts(text)


def test_blanks_are_bounded():
    schema = {"type": "array", "items": {"const": "x  y"}}
    wide = '[%s"x  y" ]' % (" " * 21)
    assert not json_schema(schema).accepts(wide)
    assert json_schema(schema).accepts(wide.replace(" " * 21, " "))
    assert json_schema(schema, blanks=None).accepts(wide)
    assert json_schema(schema, blanks=0).accepts('["x  y","x  y"]')
    assert not json_schema(schema, blanks=0).accepts('["x  y", "x  y"]')
    assert "at most 20 blanks in a row between the parts" in json_schema(schema).form
    with pytest.raises(UsageError, match="blanks=-1"):
        json_schema(schema, blanks=-1)


def test_schemas_from_files(tmp_path):
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + b'{"type": "null"}')
    assert json_schema(tmp_path / "bom.json").accepts("null")
    for text in ('{"items": ' * 100_000, '{"items": ' * 400 + "{}" + "}" * 400, '{"not": ' * 300 + "{}" + "}" * 300):
        (tmp_path / "deep.json").write_text(text)
        with pytest.raises(UsageError, match=r"nested too deeply|not JSON"):
            json_schema(tmp_path / "deep.json")


def test_large_schemas():
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    assert finished(json_schema(schema), '{"p3": "a"}') == 0
