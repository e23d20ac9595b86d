"""Counts that an engine does not take: an error that says what to lower, or a verdict at the end, in words of our own."""

import re

import pytest
import torch

import smcgen as sg
from smcgen.errors import PotentialError, UsageError
from smcgen.potentials.base import Prompt
from smcgen.potentials.engine import bytes_vocabulary

BYTES = bytes_vocabulary()
CPU = torch.device("cpu")
LOWER = "lower the counts of its repetitions, or leave out their upper bounds"


def read(potential, text):
    """Masks and tokens along `text`; whether all of it was allowed."""
    bound = potential.bind(BYTES, (), CPU)
    state = bound.start([Prompt((), "")], 1)
    words, one = torch.zeros(1, (len(BYTES) + 31) // 32, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    for byte in text.encode():
        bound.mask(state, words, one.bool())
        allowed = bool(int(words[0, byte // 32]) >> byte % 32 & 1)
        assert bound.extend(state, torch.tensor([[byte]]), one).isinf().any() != allowed
        if not allowed:
            return False
    return True


@pytest.mark.parametrize(
    "make",
    [
        lambda: sg.regex("(?:(?:[ab]{100}c?){100}){100}"),
        lambda: sg.contains(re.compile("(?:(?:[ab]{100}c?){100}){100}")),
        lambda: sg.length(1, 10**10, unit="chars"),
        lambda: sg.length(10**10, None, unit="lines"),
        lambda: sg.length(10**6, None, unit="words"),
        lambda: sg.lark("start: X\nX: /a{1,1000000}/"),
        lambda: sg.lark('start: X\nX: "a"~1..1000000'),
        lambda: sg.json_schema({"type": "string", "pattern": "^a{1,5000000000}$"}),
        lambda: sg.json_schema({"type": "object", "patternProperties": {"^a{1,5000000000}$": {}}}),
    ],
)
def test_what_is_too_large_is_refused_with_the_remedy(make):
    with pytest.raises(UsageError) as error:
        make().bind(BYTES, (), CPU)
    message = str(error.value)
    assert message.endswith(LOWER)
    assert not re.search("fuel|parse error|literal|lexeme", message)


def test_what_becomes_too_large_on_the_way_is_an_error_with_the_remedy():
    with pytest.raises(PotentialError, match=LOWER):
        read(sg.regex("(a{1,1000}){1,1000}"), "a" * 1000)


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        (lambda: sg.regex("a{1,1000000}"), "a" * 500, "ab"),
        (lambda: sg.regex("(ab|c){1,100000}"), "abc" * 100, "aa"),
        (lambda: sg.lark('start: x~1..1000000\nx: "a"'), "a" * 200, "ab"),
        (lambda: sg.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}), "[1, 2]", "[a"),
        (lambda: sg.json_schema({"type": "string", "maxLength": 10**9}), '"abc"', "1"),
        (lambda: sg.json_schema({"type": "object", "maxProperties": 10**9}), '{"a": 1}', "[1]"),
    ],
)
def test_large_counts_that_the_engine_takes(make, good, bad):
    potential = make()
    assert getattr(potential, "verdict", "exact") == "exact"
    assert read(potential, good)
    assert potential.accepts(good)
    assert not read(potential, bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2**64}, "[1, 2]", "[true]"),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2.0}, "[1, 2]", "[1, 2, 3]"),
        ({"type": "string", "maxLength": 2**32}, '"abc"', "1"),
        ({"type": "string", "minLength": 2**64}, None, '"abc"'),
        ({"type": "integer", "maximum": 10**400}, "12", "true"),
        ({"type": "integer", "multipleOf": 10**30}, "0", "7"),
        ({"type": "number", "minimum": 1e300, "maximum": 1e308}, None, "7"),
        ({"maxItems": 2**64, "enum": [{"maxItems": 3, "pattern": "x"}]}, '{"maxItems": 3, "pattern": "x"}', "1"),
    ],
)
def test_numbers_that_the_engine_does_not_take_are_checked_at_the_end(schema, good, bad):
    potential = sg.json_schema(schema)
    assert potential.verdict == "checked at the end"
    assert re.search("not enforced by the masks|than the engine", potential.doubts[0])
    if good is not None:
        assert read(potential, good)
        assert potential.accepts(good)
    assert not potential.accepts(bad)


@pytest.mark.parametrize("make", [lambda: sg.lark('start: "\udcff" | "b"'), lambda: sg.choice(["\udcff", "b"]).accepts("b")])
def test_surrogates_are_refused_in_plain_words(make):
    with pytest.raises(UsageError, match="a surrogate is no character of a text: leave it out"):
        make()


def test_strings_that_exclude_themselves_are_impossible_in_plain_words():
    with pytest.raises(sg.Impossible, match="pattern, format and lengths of a string exclude each other"):
        sg.json_schema({"type": "string", "format": "uuid", "minLength": 10**6})
