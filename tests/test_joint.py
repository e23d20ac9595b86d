"""Conditions that no text satisfies together are refused before the first token."""

import itertools
import math
import re

import pytest
import torch

import smcgen as sg
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials import joint
from smcgen.potentials.joint import require_text
from smcgen.potentials.tabled import Tabled
from tests.tables import tables as models

CPU = torch.device("cpu")
VOCABULARY = Vocabulary("few", [b"a", b"b", b"ab", b"c", b"bca", b"1", b"<end>"], special=(6,), end_ids=(6,))


def bound(*potentials, stops=()):
    return [potential.bind(VOCABULARY, stops, CPU) for potential in potentials]


@pytest.fixture
def target():
    return sg.LM("tiny")


@pytest.mark.parametrize(
    ("potentials", "named"),
    [
        ([sg.regex("a+"), sg.regex("b+")], "regex('a+') * regex('b+')"),
        ([sg.contains("x"), sg.avoids("x")], "contains('x') * avoids('x')"),
        ([sg.choice(["red", "green"]), sg.regex("[A-Z].*")], "choice('red', 'green') * regex('[A-Z].*')"),
        ([sg.contains("a"), sg.length(3), sg.avoids("a"), sg.regex("(?s).*")], "contains('a') * avoids('a')"),
        ([sg.json_schema({"enum": ["a", "b"]}, 0), sg.regex("\\d+")], "json_schema(<schema>) * regex('\\\\d+')"),
        ([sg.length(0, 2, "words"), sg.regex("\\w+ \\w+ \\w+")], "length(0, 2, 'words') * regex"),
    ],
)
def test_contradictions_are_named(target, potentials, named):
    for potential in potentials:
        target = target * potential
    with pytest.raises(sg.Impossible, match=re.escape(f"{named}")) as error:
        sg.sample(target, "x", max_tokens=20, seed=0)
    assert "no text can satisfy all of them" in str(error.value)


def test_a_text_that_needs_more_tokens_than_there_are(target):
    for minimum in (31, 5000):
        with pytest.raises(sg.Impossible, match=f"length.{minimum}, None, 'tokens'.*at least {minimum} tokens.*max_tokens=30"):
            sg.sample(target * sg.length(minimum), "x", max_tokens=30)
    with pytest.raises(sg.Impossible, match="max_tokens=3 is less"):
        sg.sample(target * sg.regex("[a-z]{200}"), "x", max_tokens=3)
    both = sg.regex("(a|b)*"), sg.length(4)
    with pytest.raises(sg.Impossible, match="at least 4 tokens"):
        require_text(bound(*both), 3)
    require_text(bound(*both), 4)
    assert sg.sample(target * sg.length(30), "x", max_tokens=30, seed=0).log_evidence > -math.inf


def test_stop_strings_count():
    pair = sg.contains("c"), sg.regex("(?s).*c.*b")
    require_text(bound(*pair), 9)
    require_text(bound(*pair, stops=("1",)), 9)
    with pytest.raises(sg.Impossible, match=r"before one of the stop strings \['ca'\]"):
        require_text(bound(sg.regex("(ca)*b?"), sg.regex("c.*|a+"), stops=("ca",)), 9)


PATTERNS = ["a*b", "(ab)+", "[^a]*", ".{2,3}", "(?s).*1", "b(ca|b)*", "a?b?c?", "(aa)*"]


def test_the_shortest_common_text():
    """Against all texts of up to four tokens."""
    texts: dict[str, int] = {}
    for length in range(5):
        for tokens in itertools.product(VOCABULARY.tokens[:6], repeat=length):
            texts.setdefault(b"".join(tokens).decode(), length)
    for one, other in itertools.combinations(PATTERNS, 2):
        pair = bound(sg.regex(one), sg.regex(other))
        fit = [n for text, n in texts.items() if re.fullmatch(one, text) and re.fullmatch(other, text)]
        found = joint._shortest(tuple(p.host for p in pair))
        assert found == min(fit, default=found)
        assert fit or found > 4


def test_beyond_the_bound_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(joint, "CELLS", 1)
    joint._shortest.cache_clear()
    require_text(bound(sg.contains("a"), sg.avoids("a")), 9)
    joint._shortest.cache_clear()


def test_conditions_without_tables_are_left_alone():
    pair = bound(sg.regex("a+"), sg.lark('start: "b"+'))
    assert [isinstance(p, Tabled) for p in pair] == [True, False]
    require_text(pair, 9)


def test_what_is_possible_runs():
    base, _ = (sg.LM(model) for model in models())
    post = sg.sample(base * sg.contains("a") * sg.avoids("b") * sg.length(2, 4), "c", max_tokens=6, seed=1)
    assert "a" in post.text
    assert "b" not in post.text
