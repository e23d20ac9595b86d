"""Regular constraints on tables: the same verdicts as llguidance's, token by token, and the rules of the engine."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import smcgen as sg
from smcgen.errors import Impossible
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials import tables
from smcgen.potentials.base import BUDGET, END, STOP, Prompt
from smcgen.potentials.check import check
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.derivative import TooLarge, dfa
from smcgen.potentials.pattern import Inexpressible, terminal
from smcgen.potentials.tabled import Tabled
from smcgen.smc.factors import Potentials
from smcgen.smc.particles import Particles
from tests.statistics import many
from tests.tables import tables as models

CPU = torch.device("cpu")
PROMPT = Prompt((), "")
LETTERS = ["a", "b", "1", " ", "\n", "-", ".", "é", "漢", "😀", "\u2028"]
PIECES = ["ab", "ba", "a1", " a", "\n\n", "é漢", "aé", "b\n", "...", "😀a", "ab ab", "a\nb"]
HALVES = [b"a\xc3", b"\xa9b", b"\xe6\xbc", b"\xa2\xe6", b"\xf0\x9f", b"\x98\x80", b"\xff", b"\xed\xa0"]
TOKENS = [*(bytes([i]) for i in range(256)), *(p.encode() for p in PIECES), *HALVES, b"ab", b"<end>", b"<eot>", b"<pad>"]
SIZE = len(TOKENS)
VOCABULARY = Vocabulary("pieces", TOKENS, special=(SIZE - 3, SIZE - 2, SIZE - 1), end_ids=(SIZE - 3, SIZE - 2))
CONSTRAINTS = [
    sg.regex(r"\w+(-\w+)*"),
    sg.regex(r"(?i)[ab]*é?\b.*"),
    sg.regex(r"(?s).*漢[^ab]{2,3}"),
    sg.regex(r"(?!ab)\D+(?<!b)"),
    sg.regex(r"(a|ab)(b|ba)*\s?"),
    sg.choice(["a", "ab", "ab ab", "😀", "é漢"]),
    sg.contains("ab", re.compile(r"\d")),
    sg.avoids("ba", re.compile("[\n\u2028]")),
    sg.length(1, 3, "chars"),
    sg.length(1, 2, "words"),
    sg.length(0, 2, "lines"),
]


def mask(bound, state, rows=1):
    out = torch.zeros(rows, (len(VOCABULARY) + 31) // 32, dtype=torch.int32)
    bound.mask(state, out, torch.ones(rows, dtype=torch.bool))
    return out


def bits(row):
    return np.unpackbits(row.numpy().view(np.uint8), bitorder="little")[: len(VOCABULARY)]


def engine(constraint, stops):
    """The same constraint on llguidance."""
    return Constraint.bind(constraint, VOCABULARY, stops, CPU)


def same(constraint, stops, seed):
    """Masks, steps and verdicts of both along random texts."""
    random = np.random.default_rng(seed)
    bound, other = constraint.bind(VOCABULARY, stops, CPU), engine(constraint, stops)
    assert isinstance(bound, Tabled)
    for _ in range(4):
        a, b, tokens = bound.start([PROMPT], 1), other.start([PROMPT], 1), []
        for _ in range(8):
            row = mask(bound, a)
            assert torch.equal(row, mask(other, b)), (constraint, stops, tokens)
            text = VOCABULARY.decode(tokens)
            for reason in (END, BUDGET, *([STOP] if stops else [])):
                values = [x.finish(y, torch.tensor([0]), [text], [reason]) for x, y in ((bound, a), (other, b))]
                assert torch.equal(*values), (constraint, stops, tokens, reason)
            allowed = np.flatnonzero(bits(row)[: SIZE - 3])
            if not len(allowed):
                break
            tokens.append(int(random.choice(allowed if random.random() < 0.95 else SIZE - 3)))
            given = torch.tensor([tokens[-1:]]), torch.ones(1, dtype=torch.int64)
            assert torch.equal(bound.extend(a, *given), other.extend(b, *given)), (constraint, stops, tokens)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=repr)
@pytest.mark.parametrize("stops", [(), ("\n\n",), ("b", "ab"), ("é漢", "a1")])
def test_the_same_as_llguidance(constraint, stops):
    try:
        engine(constraint, stops)
    except Impossible:
        with pytest.raises(Impossible):
            constraint.bind(VOCABULARY, stops, CPU)
        return
    for seed in range(3):
        same(constraint, stops, seed)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.sampled_from([*map(re.escape, LETTERS), r"\w", r"\d", ".", "[^ab]", "[a-é]", r"\s", "(?i:A)"]),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
        ),
        max_leaves=6,
    ),
    st.lists(st.text("ab1\n", min_size=1, max_size=2), max_size=2),
    st.integers(0, 100),
)
def test_random_patterns(pattern, stops, seed):
    constraint = sg.regex(pattern)
    try:
        engine(constraint, stops)
    except Impossible:
        with pytest.raises(Impossible):
            constraint.bind(VOCABULARY, stops, CPU)
        return
    same(constraint, tuple(stops), seed)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["a*b?", r"\w\b.|é+", "(?!bb)[ab]*", "(a?){3}b", "(?<!a)b+", "[^a]{2,4}", "(?i)É."]),
    st.text("abé1 ", max_size=5),
)
def test_the_automaton_over_characters(pattern, text):
    automaton, state = dfa(terminal(pattern)), 0
    for char in text:
        state = int(automaton.step[state, automaton.alphabet.of(char)]) if state >= 0 else -1
    assert (state >= 0 and bool(automaton.accepts[state])) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize("stops", [(), ("b",)])
@pytest.mark.parametrize("constraint", CONSTRAINTS[:6], ids=repr)
def test_laws_hold(constraint, stops):
    check(constraint, VOCABULARY, ["a", "ab ab", "é漢"], stops=stops, histories=6)


def test_states_fork_and_come_back_in_bulk():
    bound = sg.regex("(a|bb|ab)*").bind(VOCABULARY, (), CPU)
    random = torch.Generator().manual_seed(0)
    state, texts, states = bound.start([PROMPT] * 3, 5), [[] for _ in range(15)], []
    for _ in range(60):
        tokens = torch.randint(97, 99, (15, 3), generator=random)
        counts = torch.randint(0, 4, (15,), generator=random)
        bound.extend(state, tokens, counts)
        for text, row, n in zip(texts, tokens.tolist(), counts.tolist(), strict=True):
            text.extend(row[:n])
        back = torch.tensor([int(torch.randint(0, min(len(text), 7) + 1, (), generator=random)) for text in texts])
        bound.rollback(state, back)
        ancestors = torch.randint(0, 15, (15,), generator=random)
        texts = [text[: len(text) - n] for text, n in zip(texts, back.tolist(), strict=True)]
        texts = [list(texts[a]) for a in ancestors.tolist()]
        bound.fork(state, ancestors)
        states.append(state.now.flatten().tolist())
    for text, now in zip(texts, states[-1], strict=True):
        alone = bound.start([PROMPT], 1)
        bound.extend(alone, torch.tensor([text or [0]]), torch.tensor([len(text)]))
        assert int(alone.now) == now


def test_ends_are_judged_without_texts():
    bound = sg.regex("a+").bind(VOCABULARY, ("b\n",), CPU)
    state = bound.start([PROMPT], 5)
    bound.extend(state, torch.tensor([[97, 98], [97, 98], [97, 0], [0, 0], [98, 0]]), torch.tensor([2, 2, 1, 0, 1]))
    last = torch.tensor([[10, 97, SIZE - 3, SIZE - 3, 10]])
    reasons = torch.tensor([[STOP, STOP, END, BUDGET, STOP]])
    assert bound.close(state, last, reasons).tolist() == [[0.0, -np.inf, 0.0, -np.inf, -np.inf]]


def test_tokens_that_do_the_same_share_a_class():
    table = tables.token_table(terminal("[0-9]{3}"), VOCABULARY)
    assert table.next.shape == (5, 2)
    assert table.bytes < 2000
    assert [int(table.extend(torch.tensor(0), torch.tensor(t))) for t in (48, 57, 97)] == [1, 1, table.dead]


def test_texts_that_the_tokens_cannot_spell_are_no_way_out():
    vocabulary = Vocabulary("few", [b"a", b"bb", b"c", b"<end>"], special=(3,), end_ids=(3,))
    bound = sg.regex("a(b|cc)|abb").bind(vocabulary, (), CPU)
    state = bound.start([PROMPT], 1)
    bound.extend(state, torch.tensor([[0]]), torch.ones(1, dtype=torch.int64))
    assert mask_of(bound, state) == {1, 2}
    with pytest.raises(Impossible, match="tokens of few"):
        sg.regex("ab").bind(vocabulary, (), CPU)


def mask_of(bound, state):
    return set(np.flatnonzero(np.unpackbits(bound.bits(state).numpy().view(np.uint8), bitorder="little")).tolist())


def test_what_is_too_large_runs_on_llguidance(monkeypatch):
    large = sg.regex("[ab]*a[ab]{15}")
    assert isinstance(large.bind(VOCABULARY, (), CPU), Constraint)
    with pytest.raises(TooLarge):
        dfa(terminal("[ab]*a[ab]{15}"))
    monkeypatch.setattr(tables, "STATES", 10)
    tables.token_table.cache_clear()
    assert isinstance(sg.regex("[ab]{30}").bind(VOCABULARY, (), CPU), Constraint)
    tables.token_table.cache_clear()


def test_llguidance_takes_many_occurrences():
    for letters in ("abcdefgh", "abcdefghi"):
        many = engine(sg.contains(*letters), ())
        state = many.start([PROMPT], 1)
        ids = torch.tensor([[ord(letter) for letter in letters]])
        many.extend(state, ids, torch.tensor([len(letters) - 1]))
        assert not bits(mask(many, state)[0])[SIZE - 3 : SIZE - 1].any()
        many.extend(state, ids[:, -1:], torch.ones(1, dtype=torch.int64))
        assert bits(mask(many, state)[0])[SIZE - 3 : SIZE - 1].all()


def test_every_expression_that_patterns_make_is_understood():
    for pattern in [r"\W[\x00-\x1f]\S\D", r"[\]\\^-]+", "[^\n\t]", r"\B|\b-", "(?s:.)", "(?i)ß|ſ", "[]", "a{0}"]:
        try:
            expression = terminal(pattern)
        except Inexpressible:
            continue
        automaton = dfa(expression)
        for text in map("".join, itertools.product("\x00-\\]^\nßS ", repeat=2)):
            state = 0
            for char in text:
                state = int(automaton.step[state, automaton.alphabet.of(char)]) if state >= 0 else -1
            assert (state >= 0 and bool(automaton.accepts[state])) == bool(re.fullmatch(pattern, text)), (pattern, text)


def test_a_run_is_the_same_on_tables_and_on_llguidance(monkeypatch):
    base, draft = (sg.LM(model) for model in models())
    target = base * sg.regex("(a|bc)*b?") * sg.contains("b")
    for options in ({"draft": draft, "block": 2}, {"draft": draft, "leniency": 2.0, "chains": 2}, {"stop": ("ca", "bb")}):
        found = []
        for table in (tables.token_table, lambda *_: None):
            monkeypatch.setattr("smcgen.potentials.tabled.token_table", table)
            posts = many(target, groups=40, **options)
            found.append((posts.log_evidence, posts.arrays()["tokens"], posts.arrays()["log_weight"]))
        for one, other in zip(*found, strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(other))


def test_nothing_waits_for_the_host():
    """Tensors without values: whoever asks for one fails."""
    meta = torch.device("meta")
    bound = [x.bind(VOCABULARY, ("b\n",), meta) for x in (sg.regex("a+"), sg.avoids("aaa"), sg.length(1, 5))]
    potentials = Potentials(bound, [1.0] * 3, (2, 4), len(VOCABULARY), lambda *_: [], meta, chains=2)
    assert potentials.on_device
    allowed, cause = potentials.mask(torch.ones(2, 8, dtype=torch.bool, device=meta))
    assert allowed is not None
    assert allowed.shape == (2, 8, len(VOCABULARY))
    tokens = torch.zeros(2, 8, 3, dtype=torch.int64, device=meta)
    counts = torch.zeros(2, 8, dtype=torch.int64, device=meta)
    change, cause = potentials.extend(potentials.hard, tokens, counts)
    assert change.shape == cause.shape == (2, 8)
    potentials.rollback(counts)
    potentials.follow(counts)
    potentials.fork(torch.zeros(2, 4, dtype=torch.int64, device=meta))
    particles = Particles.empty(2, 4, 9, 1, meta)
    change, _ = potentials.finish(particles, torch.ones(2, 4, dtype=torch.bool, device=meta))
    assert change.shape == (2, 4)
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(change.any())
