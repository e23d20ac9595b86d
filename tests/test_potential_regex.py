"""Masks of regular expressions, stop strings included, against enumeration of all texts."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from smcgen.errors import Impossible, PotentialError, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials import constraint as module
from smcgen.potentials.base import BUDGET, END, STOP, Prompt
from smcgen.potentials.check import check
from smcgen.potentials.engine import Engine
from smcgen.potentials.regex import regex
from smcgen.smc.ending import cut_at_stop
from tests.stops import cut

PROMPT = Prompt((), "")
CPU = torch.device("cpu")
BYTES = Vocabulary(
    "bytes",
    [*(bytes([i]) for i in range(256)), b"<end>", b"<eot>", b"<pad>", b"ab", b"abc", b"\n\n", b"a\nb", b"\xc3\xa9t"],
    special=(256, 257, 258),
    end_ids=(256, 257),
)
SMALL = Vocabulary("small", [b"a", b"b", b"ab", b"ba", b"bb", b"<end>"], special=(5,), end_ids=(5,))


@pytest.fixture(params=["tables", "engine"], scope="module", autouse=True)
def runs_on(request):
    """Every test runs on tables and on llguidance."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "engine":
            patch.setattr("smcgen.potentials.tabled.token_table", lambda *_: None)
        yield request.param


def masks(bound, state, rows):
    out = torch.zeros(rows, (len(bound.vocabulary) + 31) // 32, dtype=torch.int32)
    bound.mask(state, out, torch.ones(rows, dtype=torch.bool))
    bits = np.unpackbits(out.numpy().view(np.uint8), axis=1, bitorder="little")
    return bits[:, : len(bound.vocabulary)].astype(bool)


def read(bound, state, tokens):
    return float(bound.extend(state, torch.tensor([tokens]), torch.tensor([len(tokens)]))[0])


def brute(pattern, stops, longest):
    """Every token sequence that is a sample: ended by the end token or by a completed stop string."""
    ended, stopped = set(), set()
    for length in range(longest + 1):
        for ids in itertools.product(range(5), repeat=length):
            texts = [SMALL.decode(ids[:n]) for n in range(length + 1)]
            if any(cut(text, stops) is not None for text in texts[:-1]):
                continue
            short = cut(texts[-1], stops)
            if re.fullmatch(pattern, texts[-1] if short is None else short):
                (ended if short is None else stopped).add(ids)
    return ended, stopped


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_the_stop_that_completes_first_cuts(text, stops):
    short = cut(text, stops)
    assert cut_at_stop(text.encode(), stops).decode() == (text if short is None else short)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["a*b?", "(a|bb)*", "(ab|ba){1,2}", "[ab]{0,3}", "a+b+", "(?!bb)[ab]*"]),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
)
def test_masks_equal_enumeration(pattern, stops):
    ended, stopped = brute(pattern, stops, 4)
    samples = ended | stopped
    try:
        bound = regex(pattern).bind(SMALL, stops, CPU)
    except Impossible:
        assert not samples
        return
    shorter = itertools.chain(*(itertools.product(range(5), repeat=n) for n in range(3)))
    for ids in shorter:
        if cut(SMALL.decode(ids), stops) is not None:
            continue  # such a history ended before
        state = bound.start([PROMPT], 1)
        value = read(bound, state, list(ids)) if ids else 0.0
        allowed = masks(bound, state, 1)[0]
        assert allowed[5] == (ids in ended), (ids, "end")
        for token in range(5):
            possible = any(sample[: len(ids) + 1] == (*ids, token) for sample in samples)
            # Texts beyond the enumeration may make a token possible, never impossible.
            assert allowed[token] or not possible, (ids, token)
            if allowed[token] and cut(SMALL.decode((*ids, token)), stops) is not None:
                assert (*ids, token) in stopped, (ids, token)
            if allowed[token] and cut(SMALL.decode((*ids, token)), stops) is None:
                assert alive(pattern, stops, (*ids, token)), (ids, token)
        assert (value == -np.inf) == (not allowed.any()), ids


def alive(pattern, stops, ids):
    """Whether some sample begins with `ids`, by trying up to six more letters one at a time."""
    for length in range(7):
        for more in itertools.product("ab", repeat=length):
            text = SMALL.decode(ids)
            for n in range(length + 1):
                whole = text + "".join(more[:n])
                short = cut(whole, stops)
                if short is not None or n == length:
                    break
            if re.fullmatch(pattern, whole if short is None else short):
                return True
    return False


@pytest.mark.parametrize("stops", [(), ("b",), ("\n\n", "bc"), ("ab", "b")])
def test_laws_hold(stops):
    cases = [("a+b*c?", ["aabb", "abc", "x"]), (r"(ab|é)+\w", ["abéabé", "ab"]), (r"(?s:.)*", ["a\n\nb"])]
    for pattern, texts in cases:
        check(regex(pattern), BYTES, [t for t in texts if cut(t, stops) is None], stops=stops, histories=6)


def test_every_split_and_every_end_token_are_allowed():
    bound = regex("ab(c)?").bind(BYTES, (), CPU)
    state = bound.start([PROMPT], 1)
    assert set(np.flatnonzero(masks(bound, state, 1)[0])) == {97, 259, 260}
    read(bound, state, [97])
    assert set(np.flatnonzero(masks(bound, state, 1)[0])) == {98}
    read(bound, state, [98])
    assert set(np.flatnonzero(masks(bound, state, 1)[0])) == {99, 256, 257}
    read(bound, state, [99])
    assert set(np.flatnonzero(masks(bound, state, 1)[0])) == {256, 257}
    assert read(bound, state, [97]) == -np.inf
    assert not masks(bound, state, 1).any()
    bound.rollback(state, torch.tensor([1]))
    assert set(np.flatnonzero(masks(bound, state, 1)[0])) == {256, 257}


def test_end_tokens_and_markup_are_never_read_as_text():
    bound = regex("(?s:.)*").bind(BYTES, (), CPU)
    allowed = masks(bound, bound.start([PROMPT], 1), 1)[0]
    assert allowed[256]
    assert allowed[257]
    assert not allowed[258]
    for token in (256, 258):
        assert read(bound, bound.start([PROMPT], 1), [token]) == -np.inf


def test_emoji_spelled_by_bytes():
    bound = regex("😀|😁").bind(BYTES, (), CPU)
    state = bound.start([PROMPT], 1)
    data = list("😁".encode())
    for byte in data:
        assert masks(bound, state, 1)[0][byte]
        assert not masks(bound, state, 1)[0][256]
        assert read(bound, state, [byte]) == 0
    assert masks(bound, state, 1)[0][256]
    assert bound.finish(state, torch.tensor([0]), ["😁"], [END]).tolist() == [0.0]


def test_finish_judges_by_reason():
    bound = regex("a+").bind(BYTES, ("b",), CPU)
    state = bound.start([PROMPT], 4)
    tokens = torch.tensor([[97], [97], [97], [0]])
    bound.extend(state, tokens, torch.tensor([1, 1, 1, 0]))
    values = bound.finish(state, torch.arange(4), ["a", "a", "", ""], [END, BUDGET, STOP, BUDGET])
    assert values.tolist() == [0.0, 0.0, -np.inf, -np.inf]


@pytest.mark.parametrize("pattern", ["(?!a)a", r"a\Bb(?!b)b", "[^\\s\\S]"])
def test_an_empty_language_is_refused_before_the_first_token(pattern):
    with pytest.raises(Impossible, match="no text can satisfy it"):
        regex(pattern).bind(BYTES, (), CPU)


def test_what_the_tokens_cannot_spell_is_impossible():
    with pytest.raises(Impossible, match="tokens of small"):
        regex("c+").bind(SMALL, (), CPU)


def test_stops_may_leave_nothing_and_may_not_be_empty():
    with pytest.raises(Impossible):
        regex("aba").bind(SMALL, ("b",), CPU)
    with pytest.raises(UsageError, match="stop string is empty"):
        regex("a").bind(SMALL, ("",), CPU)


def test_a_limit_of_the_engine_is_an_error_and_never_a_zero(runs_on):
    if runs_on == "tables":
        pytest.skip("tables have no engine")
    bound = regex("a*").bind(BYTES, (), CPU)
    bound.engine = Engine("start: A\nA: /[ab]*a[ab]{12}/", BYTES, "tight", LLParserLimits(max_lexer_states=40))
    state = bound.start([PROMPT], 1)

    def run():
        for token in b"abbabaabbbabaabababbbaaab":
            masks(bound, state, 1)
            read(bound, state, [token])

    with pytest.raises(PotentialError, match="tight: the grammar engine gave up"):
        run()


def test_thousands_of_groups_cost_what_their_distinct_texts_cost(monkeypatch, runs_on):
    if runs_on == "tables":
        pytest.skip("tables have no engine")
    filled = []
    fill = Engine.fill
    monkeypatch.setattr(Engine, "fill", lambda *args: filled.append(len(args[1])) or fill(*args))
    bound = regex("(a|bb|ab)*").bind(SMALL, (), CPU)
    filled.clear()
    rows = 4000
    state = bound.start([PROMPT] * 1000, 4)
    random = torch.Generator().manual_seed(0)
    for _ in range(4):
        masks(bound, state, rows)
        bound.extend(state, torch.randint(0, 5, (rows, 1), generator=random), torch.ones(rows, dtype=torch.int64))
        bound.fork(state, torch.randint(0, rows, (rows,), generator=random))
    assert sum(filled) < state.history.size <= 1 + 5 + 25 + 125 + 625
    bound.restart(state, range(1000), [PROMPT] * 1000)
    before = sum(filled)
    assert masks(bound, state, rows).any(1).all()
    assert sum(filled) == before


def test_matchers_follow_the_rows_and_memory_is_bounded(monkeypatch, runs_on):
    if runs_on == "tables":
        pytest.skip("tables have no engine")
    monkeypatch.setattr(module, "MASK_BYTES", 4 * 9 * 40)
    bound = regex("[a-z]*").bind(BYTES, (), CPU)
    rows = 16
    state = bound.start([PROMPT] * 2, rows // 2)
    random = torch.Generator().manual_seed(0)
    for _ in range(600):
        masks(bound, state, rows)
        tokens = torch.randint(97, 123, (rows, 2), generator=random)
        assert not bound.extend(state, tokens, torch.randint(0, 3, (rows,), generator=random)).any()
        bound.fork(state, torch.randint(0, rows, (rows,), generator=random))
    assert len(state.matchers) <= 64 + 2 * (rows + 1) + rows
    assert state.history.size <= 2 * (4096 + 2 * 1200)
    assert len(state.masks) <= 40
    text = state.history.text(int(state.nodes[0])).decode()
    assert bound.finish(state, torch.tensor([0]), [text], [END]).tolist() == [0.0]


@pytest.mark.parametrize("pattern", [r"(?s)(?!.*\bab\b).*", r"(?s)(?!.*\bb\b).*", r"(?s)(?!.*(?<!a)b).*"])
def test_negations_with_word_boundaries(pattern, runs_on):
    texts = ["".join(letters) for n in range(5) for letters in itertools.product("ab \n", repeat=n)]
    potential = regex(pattern)
    for text in texts:
        assert potential.accepts(text) == bool(re.fullmatch(pattern, text)), text
    if runs_on == "engine" and r"\bab\b" in pattern:  # the engine gets this complement wrong
        with pytest.raises(UsageError, match="take fewer of them"):
            potential.bind(BYTES, (), CPU)
    else:
        assert check(potential.bind(BYTES, (), CPU), BYTES, tokens=6) is None
