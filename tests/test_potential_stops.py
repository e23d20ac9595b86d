"""Stop strings joined with grammars, schemas and token counts, against enumeration of all token sequences."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smcgen.errors import Impossible, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import STOP, Prompt
from smcgen.potentials.check import check
from smcgen.potentials.json_schema import json_schema
from smcgen.potentials.lark import lark
from smcgen.potentials.regex import regex
from smcgen.potentials.text import length
from tests.stops import cut

CPU = torch.device("cpu")
SMALL = Vocabulary("small", [b"a", b"b", b"ab", b"ba", b"bb", b"<end>"], special=(5,), end_ids=(5,))
JSON = Vocabulary("json", [b"[", b"]", b"1", b",", b"1,", b"]\n", b"\n", b"<end>"], special=(7,), end_ids=(7,))
GRAMMARS = {
    "nested": lambda: lark('start: "a" start "b" | "b"'),
    "words": lambda: lark("start: W*\nW: /a+b/\n"),
    "exact parser": lambda: lark('start: (K | W)+\nK: "ab"\nW: /b+/', exact=True),
    "ignored": lambda: lark('start: "b" "b"\n%ignore "a"\n'),
    "everything": lambda: lark("start: W?\nW: /[ab]+/"),
    "regular": lambda: regex("(ab|bb)*a?"),
}
STOPS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3)


def walk(bound, ids):
    """Whether every token of a sample is allowed, the last of which may end it; masks, extend and validation agree."""
    vocabulary = bound.vocabulary
    state = bound.start([Prompt((), "")], 1)
    words = torch.zeros(1, (len(vocabulary) + 31) // 32, dtype=torch.int32)
    for token in ids:
        bound.mask(state, words, torch.ones(1, dtype=torch.bool))
        if not np.unpackbits(words.numpy().view(np.uint8), bitorder="little")[token]:
            assert token in vocabulary.end_ids or read(bound, state, token) == -np.inf
            return False
        if token not in vocabulary.end_ids:
            assert read(bound, state, token) == 0
    return True


def read(bound, state, token):
    return float(bound.extend(state, torch.tensor([[token]]), torch.ones(1, dtype=torch.int64))[0])


def samples(vocabulary, stops, longest):
    """Every token sequence that ends with the end token or by completing a stop string, with its text."""
    (end,) = vocabulary.end_ids
    for size in range(longest + 1):
        for ids in itertools.product(range(end), repeat=size):
            texts = [vocabulary.decode(ids[:n]) for n in range(size + 1)]
            if all(cut(text, stops) is None for text in texts[:-1]):
                short = cut(texts[-1], stops)
                yield ((*ids, end), texts[-1]) if short is None else (ids, short)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(GRAMMARS)), STOPS)
def test_samples_are_allowed_iff_the_text_before_the_stop_is_accepted(name, stops):
    constraint = GRAMMARS[name]()
    try:
        bound = constraint.bind(SMALL, stops, CPU)
    except Impossible:
        assert not any(constraint.accepts(text) for _, text in samples(SMALL, stops, 4))
        return
    for ids, text in samples(SMALL, stops, 4):
        assert walk(bound, ids) == constraint.accepts(text), (ids, text)


@pytest.mark.parametrize("stops", [["\n"], ["1,"], ["]\n"], [",1", "1,1"], ["]\n\n"]])
def test_schemas(stops):
    constraint = json_schema({"type": "array", "items": {"const": 1}})
    bound = constraint.bind(JSON, stops, CPU)
    found = 0
    for ids, text in samples(JSON, stops, 4):
        assert walk(bound, ids) == constraint.accepts(text), (ids, text)
        found += constraint.accepts(text)
    assert found > 1


@pytest.mark.parametrize("states", [2048, 0])
@pytest.mark.parametrize("stops", [["b"], ["ab", "b"], ["aba", "bb"]])
@pytest.mark.parametrize("bounds", [(0, 2), (2, 2), (1, None)])
def test_tokens_before_the_stop_are_counted(bounds, stops, states, monkeypatch):
    monkeypatch.setattr("smcgen.potentials.text.STATES", states)  # on tables, and by arithmetic
    bound = length(*bounds).bind(SMALL, stops, CPU)
    low, high = bounds
    for ids, _ in samples(SMALL, stops, 4):
        assert walk(bound, ids) == (low <= len(ids) - 1 <= (9 if high is None else high)), ids


@pytest.mark.parametrize("stops", [("b",), ("ab", "bb"), ("aba",)])
@pytest.mark.parametrize("name", [*GRAMMARS, "length", "length by arithmetic"])
def test_laws_hold(name, stops, monkeypatch):
    if name == "length by arithmetic":
        monkeypatch.setattr("smcgen.potentials.text.STATES", 0)
    constraint = length(1, 2) if name.startswith("length") else GRAMMARS[name]()
    try:
        constraint.bind(SMALL, stops, CPU)
    except Impossible:
        return
    check(constraint, SMALL, ["abb", "aabb", "b"], stops=stops, histories=6)


def test_a_stop_that_begins_inside_a_token_and_one_that_spans_tokens():
    tokens = [b"yes", b"yes\n", b"\n", b"Us", b"er", b"\nUser", b"ye", b"s\nU", b"ser", b"<end>"]
    vocabulary = Vocabulary("spans", tokens, special=(9,), end_ids=(9,))
    for constraint in (lark('start: "yes"'), lark('start: "yes"', exact=True), regex("yes")):
        bound = constraint.bind(vocabulary, ("\nUser",), CPU)
        for ids in ([0, 5], [1, 3, 4], [0, 2, 3, 4], [0, 9], [6, 7, 8]):
            assert walk(bound, ids), ids
        for ids in ([1, 9], [0, 2, 9], [0, 0], [1, 2], [5], [6, 5], [0, 3], [6, 7, 9]):
            assert not walk(bound, ids), ids


def test_what_no_text_can_do_is_refused():
    with pytest.raises(Impossible):
        lark('start: "ab"').bind(SMALL, ("a",), CPU)
    with pytest.raises(UsageError, match="stop string is empty"):
        lark('start: "ab"').bind(SMALL, ("",), CPU)


def test_the_verdict_on_a_stopped_text():
    bound = lark('start: "a" start "b" | "b"').bind(SMALL, ("bb",), CPU)
    state = bound.start([Prompt((), "")], 2)
    bound.extend(state, torch.tensor([[0, 1], [0, 0]]), torch.tensor([2, 2]))
    assert bound.finish(state, torch.arange(2), ["ab", "b"], [STOP, STOP]).tolist() == [-np.inf, 0.0]
