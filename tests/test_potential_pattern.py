"""Python's regular expressions and their translation mean the same texts."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smcgen.errors import Impossible, UsageError
from smcgen.potentials import pattern as module
from smcgen.potentials.pattern import characters, parse
from smcgen.potentials.regex import regex

ATOMS = st.sampled_from(
    [*"abé.-~# ", "ab", "[ab]", "[^a]", r"\w", r"\d", r"\s", r"\.", "[a-c&&b]", "[[]", "[é-漢]"],
)


def grow(inner):
    sequence = st.lists(inner, min_size=1, max_size=3).map("".join)
    branch = st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})")
    suffix = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "*?", "{,2}"])
    return sequence | branch | st.tuples(inner, suffix).map(lambda p: f"(?:{p[0]}){p[1]}") | inner.map("({})".format)


PATTERNS = st.recursive(ATOMS, grow, max_leaves=6)
ROUND = st.tuples(PATTERNS, st.sampled_from(["(?={})", "(?!{})", "(?<!{})", r"\b", r"\B"]), PATTERNS)
pytestmark = pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
TEXTS = st.text(alphabet="abABé漢1 .&-~#[\n_", max_size=6)


def holds(pattern, texts):
    try:
        ours = regex(pattern)
    except UsageError:
        assume(False)
    for text in texts:
        expected = re.fullmatch(pattern, text) is not None
        try:
            assert ours.accepts(text) == expected, (pattern, text)
        except Impossible:
            assert not expected, (pattern, text)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["", "(?i)", "(?s)", "(?a)"]), PATTERNS, st.lists(TEXTS, min_size=6, max_size=6))
def test_same_texts_as_fullmatch(flags, pattern, texts):
    holds(flags + pattern, texts)


@settings(max_examples=150, deadline=None)
@given(ROUND, st.lists(TEXTS, min_size=8, max_size=8))
def test_look_arounds_and_boundaries(parts, texts):
    left, around, right = parts
    holds(left + around.format("[ab]") + right, texts)


@pytest.mark.parametrize(
    ("pattern", "accept", "reject"),
    [
        (r"straw(berry)?", ["straw", "strawberry"], ["strawb", "berry"]),
        (r"(1[0-9]|[1-9]|)[0-9](\.(1[0-9]|[1-9]|)[0-9])", ["7.8", "17.23", "123.4"], ["a.1", "7.", "2000.1"]),
        (r"[A-ZÄÖÜ][a-zäöüß]*\.", ["Über.", "Straße.", "A."], ["été.", "ab."]),
        (r"[.]+x", ["..x"], ["abx", "x"]),
        (r"^(yes|no)$", ["yes", "no"], ["yes\n", "maybe"]),
        (r"(?i)straße|k", ["STRAẞE", "\u212a", "K"], ["strasse"]),
        (r"\bfoo\b.*", ["foo", "foo bar"], ["food", "a foo"]),
        (r"(?!if\b)[a-z]+", ["iffy", "x"], ["if"]),
        (r"(?!(?:if|in)$)[a-z]+\n?", ["iffy", "inn\n"], ["if", "in\n"]),
        (r"(?=[ab]*b\Z)[ab]+", ["ab", "b"], ["ba", "a"]),
        (r"\"(?:[^\"\\]|\\.)*\"", ['"a\\"b"'], ['"a"b"']),
        (r"\x1c?\s", ["\x1c\x1d", "\u3000"], ["\x1c\u200b"]),
    ],
)
def test_verdicts(pattern, accept, reject):
    constraint = regex(pattern)
    for text in accept + reject:
        assert constraint.accepts(text) == (text in accept) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"([ab])-\1", "back-reference"),
        (r"(a)?(?(1)b|c)", "conditional"),
        (r"a*+a", "possessive"),
        (r"(?>a|ab)c", "atomic"),
        (r"a^b", "anchor"),
        (r"(a(?!b))*", "look-around"),
        (r"(a", "not a regular expression"),
        (r"z(?:y|(?<=xz)a)", "look-behind"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_the_reason(pattern, reason):
    with pytest.raises(UsageError, match=reason):
        regex(pattern)


def test_bytes_patterns_are_refused():
    with pytest.raises(UsageError, match="string pattern"):
        regex(re.compile(b"a"))


@pytest.mark.parametrize("pattern", [r"\w", r"\d", r"\s", r"\W", r"[^\d\s]", "(?i)[k-s]", "(?i)[^kſ]", "(?i)İ", "(?ai)k", "."])
def test_classes_hold_exactly_pythons_characters(pattern):
    tree = parse(pattern)
    (item,) = list(tree)
    every = [c for c in range(module.MAX_CODE + 1) if not 0xD800 <= c <= 0xDFFF]
    expected = set(map(ord, re.findall(pattern, "".join(map(chr, every)))))
    ours = set()
    for low, high in characters(*item, tree.state.flags):
        ours.update(range(low, high + 1))
    assert ours == expected
