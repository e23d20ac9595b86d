"""The report on a constraint."""

import pytest

from smcgen.errors import Impossible, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.describe import describe
from smcgen.potentials.function import potential
from smcgen.potentials.json_schema import json_schema
from smcgen.potentials.lark import lark
from smcgen.potentials.regex import regex
from smcgen.potentials.text import length
from smcgen.target import LM
from tests.tables import tables

VOCABULARY = Vocabulary("small", [*(bytes([i]) for i in range(128)), b"ab", b"<end>"], special=(129,), end_ids=(129,))


def test_report():
    report = describe(lark('start: "a" x\nx: "b"+ | y\ny: "c" y\n%ignore " "'), VOCABULARY, examples=4)
    assert report.verdict == "exact"
    assert report.notes == ("y derives no text",)
    assert report.examples
    assert all(text.replace(" ", "").strip("b") == "a" for text in report.examples)
    assert report.mask_us is not None
    assert 0 < report.mask_us[0] < 1e5
    assert "example: " in str(report)
    assert "masks: " in str(report)


def test_tables_are_reported():
    report = describe(regex("[a-z]{2}"), VOCABULARY)
    assert "tables on cpu: 4 states" in report.runs_on
    assert report.mask_us is not None
    assert "run by: tables" in str(report)


def test_examples_satisfy_what_is_checked_at_the_end():
    schema = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 3}
    report = describe(json_schema(schema), examples=8, seed=1)
    assert report.verdict == "checked at the end"
    assert report.doubts
    assert all(len(set(text.replace(" ", ""))) >= 2 and json_schema(schema).accepts(text) for text in report.examples)


def test_examples_that_fail_the_check_are_said_to():
    schema = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 2, "maxItems": 2}
    report = describe(json_schema(schema), examples=2)
    assert (report.examples, report.unfinished) == ([], 8)
    assert "8 random texts did not end within 400 bytes, or failed the check at the end" in str(report)


def test_same_seed_same_examples_and_impossible_is_raised():
    assert describe(regex("[a-z]{3}"), seed=5).examples == describe(regex("[a-z]{3}"), seed=5).examples
    with pytest.raises(Impossible):
        describe(regex("(?!a)a"))


def test_a_condition_on_tokens_is_timed_too_large_for_tables():
    report = describe(length(max=10**6), VOCABULARY)
    assert report.runs_on == "host"
    assert report.mask_us is not None


def test_the_tokens_may_be_those_of_a_model():
    assert describe(regex("a"), LM(tables()[0])).masks > 0


def test_what_has_no_masks_is_refused():
    for other in (potential(len), regex("a") * regex("b"), "a"):
        with pytest.raises(UsageError, match="has no masks"):
            describe(other)


def test_special_literals_are_reported():
    report = describe(lark('start: "<end>"'), VOCABULARY)
    assert "spelled like a special token" in report.warnings[0]
