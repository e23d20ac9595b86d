"""Options, occurrences and lengths against Python's own counting."""

import itertools
import re

import pytest
import torch

from smcgen.errors import Impossible, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import Potential
from smcgen.potentials.check import check
from smcgen.potentials.text import avoids, choice, contains, length

VOCABULARY = Vocabulary("small", [b"a", b"b", b"ab", b" ", b"\n", b"<end>", b"<pad>"], special=(5, 6), end_ids=(5,))
TEXTS = ["".join(t) for n in range(5) for t in itertools.product("ab \n", repeat=n)]
CPU = torch.device("cpu")


def count_lines(text):
    return len(text.split("\n")) - (text.endswith("\n") or not text)


@pytest.mark.parametrize(("unit", "count"), [("chars", len), ("words", lambda t: len(t.split())), ("lines", count_lines)])
@pytest.mark.parametrize("bounds", [(0, None), (0, 0), (1, 1), (2, 3), (0, 2), (2, None)])
def test_lengths(unit, count, bounds):
    low, high = bounds
    constraint = length(low, high, unit)
    for text in TEXTS:
        assert constraint.accepts(text) == (low <= count(text) <= (high if high is not None else 99)), text


@pytest.mark.parametrize(
    ("constraint", "rule"),
    [
        (choice(["a", "ab", "b a"]), lambda t: t in ("a", "ab", "b a")),
        (contains("ab"), lambda t: "ab" in t),
        (contains("a", re.compile(r"b\s")), lambda t: "a" in t and re.search(r"b\s", t)),
        (avoids("ab"), lambda t: "ab" not in t),
        (avoids("aa", re.compile("b.b", re.DOTALL)), lambda t: "aa" not in t and not re.search("(?s)b.b", t)),
    ],
)
def test_occurrences(constraint, rule):
    for text in TEXTS:
        assert constraint.accepts(text) == bool(rule(text)), text


@pytest.mark.parametrize("flags", [0, re.MULTILINE, re.DOTALL])
@pytest.mark.parametrize("pattern", ["^a", "a$", "^b|a$", "^ab$", r"\Aa\Z", "^$", "ab$|b "])
def test_anchors_are_those_of_search(pattern, flags):
    compiled = re.compile(pattern, flags)
    for text in TEXTS:
        found = compiled.search(text) is not None
        assert contains(compiled).accepts(text) == found, text
        assert avoids(compiled).accepts(text) != found, text


@pytest.mark.parametrize("pattern", [r"\bab\b", "a(?!b)", "(?<=a)b", "(?<!a)b", "^(?!a)", r"\Bb"])
def test_what_stands_around(pattern):
    for text in TEXTS:
        assert contains(re.compile(pattern)).accepts(text) == bool(re.search(pattern, text)), text
    with pytest.raises(UsageError, match="a look-around or word boundary cannot be avoided: name the characters"):
        avoids(re.compile(pattern))


def test_the_remedy_for_a_word_that_is_to_be_avoided():
    constraint = avoids(re.compile(r"^bad$|^bad\W|\Wbad\W|\Wbad$"))
    for text in ("bad", "a bad", "bad a", "a bad a", "badly", "abad", "bad\n", "bad.", "xbad bad", "\nbad\n", "(bad)", ""):
        assert constraint.accepts(text) == (re.search(r"\bbad\b", text) is None), text


@pytest.mark.parametrize(
    ("constraint", "stops"),
    [
        (choice(["a", "ab", "b a"]), ()),
        (contains("ba"), ("\n",)),
        (avoids("ba"), ("b\n",)),
        (length(1, 3, "chars"), ("b",)),
        (length(1, 2, "words"), ()),
        (length(1, 2, "lines"), ()),
        (length(1, 3), ()),
        (length(2), ()),
        (length(0, 2, "tokens"), ()),
    ],
)
def test_laws_hold(constraint: Potential, stops):
    texts = [text for text in ("a", "ab", "ba a", "") if not any(stop in text for stop in stops)]
    check(constraint, VOCABULARY, texts, stops=stops, histories=6)


def test_tokens_are_counted_not_texts():
    assert repr(length(2, 2).bind(VOCABULARY, ("x",), CPU)) == "length(2, 2, 'tokens')"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: choice("abc"), "not one text"),
        (lambda: choice(None), "not None"),
        (lambda: choice([]), "at least one text"),
        (lambda: contains(), "at least one string"),
        (lambda: avoids(""), "at least one character"),
        (lambda: contains(re.compile(b"a")), "compiled string pattern"),
        (lambda: avoids(re.compile(r"(a)\1")), "back-reference"),
        (lambda: length(-1), "no number of tokens"),
        (lambda: length(1, 2, "pages"), "unit='pages'"),
    ],
)
def test_misuse(make, reason):
    with pytest.raises(UsageError, match=reason):
        make()


def test_impossible():
    with pytest.raises(Impossible, match="at least 3 and at most 2"):
        length(3, 2)
    with pytest.raises(Impossible):
        avoids(re.compile("(?s).?")).bind(VOCABULARY, (), CPU)
