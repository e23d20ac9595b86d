"""Recorded rounds, in as many graphs as the host's work asks for, draw what rounds launched one by one draw, bit for bit.

The graphs are tapes on the CPU (`tests.tape`); on a CUDA device `test_gpu.py` does the same with real ones."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.errors import PotentialError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.proposals import judged
from smcgen.smc import graph, host
from smcgen.smc.host import pack
from tests import tape
from tests.statistics import evidence_z, many
from tests.tables import TableLM
from tests.test_evidence import LM as ENUMERATED
from tests.test_evidence import SMALL as ITS_DRAFT
from tests.test_evidence import exact as enumerated
from tests.test_judged import Late

TOKENS = (b"a", b"b", b"[", b"]", b",", b"1", b'"', b"true", b"1,", b" ", b"", b"")
END, BOS = 10, 11
WORDS = Vocabulary("recorded", [*TOKENS[:END], b"<end>", b"<s>"], special=(END, BOS), end_ids=(END,), bos_id=BOS)


class Static(TableLM):
    """A table whose contexts are written in place, and which asks for no value: as a model on the device is."""

    def open(self, *arguments, **options):
        context = super().open(*arguments, **options)
        context.history = torch.cat([context.history, context.history[:, :1]], 1)  # a column for what is not real
        return context

    def extend(self, context, tokens, counts):
        width = context.history.shape[1] - 1
        step = torch.arange(tokens.shape[1])
        at = context.length[:, None] + step
        context.history.scatter_(1, torch.where(step < counts[:, None], at, width).clamp(max=width), tokens)
        last = context.history.gather(1, at.clamp(max=width - 1))
        before = torch.where(at > 0, context.history.gather(1, (at - 1).clamp(0, width - 1)), self.start)
        context.length.add_(counts)
        return self.table[before, last]

    def fork(self, context, ancestors):
        context.history.copy_(context.history[ancestors])
        context.length.copy_(context.length[ancestors])

    def trim(self, context, lengths):
        context.length.copy_(lengths)


def model(seed: int, other: torch.Tensor | None = None) -> Static:
    size = len(TOKENS)
    noise = torch.randn(size + 1, size + 1, size, generator=torch.Generator().manual_seed(seed))
    logits = 1.2 * noise if other is None else 0.6 * other + 0.6 * noise
    logits[..., BOS] = -20.0
    logits[..., END] -= 0.5
    return Static(logits, f"model {seed}", WORDS)


BASE = model(0)
SMALL = model(1, BASE.table)
LM, DRAFT = sg.LM(BASE), sg.LM(SMALL)
OTHER = sg.LM(model(2))
GRAMMAR = 'start: value\nvalue: "1" | "true" | "[" [value ("," value)*] "]" | "\\"" /[ab ]+/ "\\""\n'


@sg.potential
def likes_b(text: str) -> float:
    return 0.7 * text.count("b") - 0.1 * len(text)


@sg.potential
def even(text: str) -> bool:
    return len(text) % 2 == 0


def guess(text: str) -> float:
    return -math.inf if "bb" in text else 0.3 * text.count("b")


# Soft, but it kills on the way.
guided = sg.potential(lambda text: guess(text) + 0.1 * text.count("a"), prefix=guess, name="guided")
length_reward = sg.reward(lambda texts: [float(text.count("1")) for text in texts], beta=0.5, at="block", name="ones")
last_reward = sg.reward(lambda texts: [float(text.count("a")) for text in texts], beta=0.4, name="as")
REGEX = sg.regex(r"[ab1, ]*[ab]")

DRAFTED = {"draft": DRAFT, "block": 3, "leniency": math.inf}
CASES = {
    "grammar": (LM * sg.lark(GRAMMAR), DRAFTED),
    "grammar, the target alone": (LM**2 * sg.lark(GRAMMAR), {}),
    "schema": (LM * sg.json_schema({"type": "array", "items": {"enum": [1, True, "a b"]}}), DRAFTED),
    "grammar, leniency 2": (LM * sg.lark(GRAMMAR), DRAFTED | {"leniency": 2.0}),
    "grammar, chains": (LM**2 * sg.lark(GRAMMAR), DRAFTED | {"leniency": 2.0, "chains": 2}),
    "regex": (LM**0.5 * REGEX, DRAFTED),
    "late": (LM**2 * Late(), DRAFTED),
    "late, the target alone": (LM**2 * Late(), {}),
    "late, leniency 1.5": (LM * Late(), DRAFTED | {"leniency": 1.5}),
    "late, chains": (LM**2 * Late() * REGEX, DRAFTED | {"leniency": 2.0, "chains": 2}),
    "function": (LM * likes_b, DRAFTED),
    "hard function": (LM * even, DRAFTED | {"leniency": 3.0, "chains": 2}),
    "guided": (LM**2 * guided, DRAFTED),
    "rewards": (LM * length_reward * last_reward, DRAFTED),
    "several": (LM**2 * Late() * REGEX * guided * last_reward, DRAFTED),
    "several, leniency 2": (LM**2 * REGEX * guided * likes_b, DRAFTED | {"leniency": 2.0}),
    "annealed": (
        LM**2 * sg.lark(GRAMMAR) * guided,
        DRAFTED | {"anneal": sg.Ramp(first=0.3, rounds=3, of="all")},
    ),
    "a product": (LM * OTHER**0.5 * sg.lark(GRAMMAR), DRAFTED),
    "a product, leniency 2": (LM * OTHER**0.5 * sg.lark(GRAMMAR), DRAFTED | {"leniency": 2.0, "chains": 2}),
    "stop strings": (LM * sg.regex("[ab1,]*"), DRAFTED | {"stop": ["bb", "1,1"]}),
    "stop strings and a late one": (LM**2 * guided, DRAFTED | {"leniency": 2.0, "stop": ["]]", "a,"]}),
    "must end": (LM * sg.lark(GRAMMAR), DRAFTED | {"on_budget": "condition"}),
    "plain": (LM**2, DRAFTED),
    "plain, leniency 2": (LM, DRAFTED | {"leniency": 2.0}),
}


@pytest.fixture
def record(monkeypatch):
    """`record(True)`: rounds are taped from now on; False: they are not. Regular constraints stay on the host."""
    monkeypatch.setattr(graph, "Capture", tape.Capture)
    monkeypatch.setattr("smcgen.potentials.tabled.token_table", lambda *_: None)
    return lambda wanted: monkeypatch.setattr(graph, "recordable", lambda *_: wanted)


def run(target, **options) -> sg.Posteriors:
    defaults = {"particles": 4, "max_tokens": 12, "seed": 5, "groups": 3}
    posts = sg.sample(target, [[4, 5], [2], [0, 1, 0]] * 3, **{**defaults, **options})
    assert isinstance(posts, sg.Posteriors)
    return posts


def same(one: sg.Posteriors, two: sg.Posteriors) -> None:
    a, b = one.arrays(), two.arrays()
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name], equal_nan=True), name
    assert np.array_equal(one.log_evidence, two.log_evidence)
    for p, q in zip(one, two, strict=True):
        assert p.failed == q.failed
        assert p.failed or p.texts(3) == q.texts(3)
        for r, s in zip(p.rounds[0], q.rounds[0], strict=True):
            assert repr(r) == repr(s)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_recorded_rounds_draw_the_same(monkeypatch, record, name, whole):
    """Groups end at different times and are filled again. `whole`: drafted tokens are judged as on a CUDA device."""
    target, options = CASES[name]
    if whole and not math.isfinite(options.get("leniency", math.inf)):
        pytest.skip("nothing is judged")
    monkeypatch.setattr(judged, "DEVICES", ("cpu",) if whole else ("cuda",))
    found = []
    for wanted in (True, False):
        record(wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(run(target, **options))
    recorded, plain = found
    assert (recorded.info["cuda_graph"], plain.info["cuda_graph"]) == (True, False)
    assert plain.info["graphs_a_round"] == 0
    same(recorded, plain)
    assert plain.info["rounds"] > 4


@pytest.mark.parametrize(
    ("target", "options", "graphs"),
    [
        (LM, DRAFTED, 1),
        (LM * sg.length(2, 5), DRAFTED, 1),  # on tables
        (LM * sg.lark(GRAMMAR), DRAFTED, 3 + 3),
        (LM * sg.lark(GRAMMAR) * REGEX * likes_b, DRAFTED, 3 + 3),
        (LM * sg.lark(GRAMMAR), {}, 3),
        (LM * likes_b, DRAFTED, 2),
    ],
)
def test_as_many_graphs_as_the_host_asks_for(record, target, options, graphs):
    """One ends when the masks of a drafted token or of the bonus token are there, one when the potentials have judged the
    block, and one with the round."""
    record(True)
    assert run(target, **options).info["graphs_a_round"] == graphs


def test_graphs_end_where_no_event_can_be_inside(monkeypatch, record):
    """As with a torch that has no external events: two graphs for each token that masks are filled for."""
    monkeypatch.setattr(host, "INSIDE", False)
    found = []
    for wanted in (True, False):
        record(wanted)
        found.append(run(LM * sg.lark(GRAMMAR), **DRAFTED))
    assert found[0].info["graphs_a_round"] == 2 * 3 + 4
    same(*found)


def test_the_host_works_while_the_models_read(monkeypatch, record):
    """Between what the host is sent and the moment that it is waited for lies a forward, but at the end of a round."""
    made = []
    original = graph.Recording.__init__
    monkeypatch.setattr(graph.Recording, "__init__", lambda self, *a: (made.append(self), original(self, *a)) and None)
    record(True)
    run(LM * sg.lark(GRAMMAR), **DRAFTED)
    (recording,) = made
    tables = [BASE.table, SMALL.table]
    forwards = []
    for play, send, do in zip(recording.steps, recording.steps[1:], recording.steps[2:], strict=False):
        if getattr(do, "__name__", "") == "_do":
            there = send.args[0].tasks[0].sent[0].untyped_storage().data_ptr()
            done = play.__self__.operations
            copied = [i for i, (_, a, _, _) in enumerate(done) if a and _storage(a[0]) == there]
            after = done[copied[0] + 1 :]
            forwards.append([sum(any(x is table for x in a) for _, a, _, _ in after) for table in tables])
    assert forwards == [[0, 1]] * 3 + [[1, 0], [0, 0]]


def _storage(x) -> int | None:
    return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else None


@pytest.mark.parametrize("refusing", [Late(), guided])
def test_finished_texts_that_were_refused_are_judged_by_nobody(refusing):
    """The host has learned of both, the refusal and the end, since it was last waited for."""

    @sg.potential
    def no_bb(text: str) -> float:
        assert "bb" not in text, "asked for nothing"
        return 0.1 * len(text)

    many(ENUMERATED * refusing * no_bb, groups=300, draft=ITS_DRAFT, block=2, max_tokens=6)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("leniency", [1.0, 2.0, math.inf])
def test_late_refusals_are_heard(monkeypatch, whole, leniency):
    """Inside a block, at its end, and at the end of a text: the evidence says so, by enumeration."""
    monkeypatch.setattr(judged, "DEVICES", ("cpu",) if whole else ("cuda",))
    truth = enumerated(accept=lambda sample: (1, 1) not in itertools.pairwise(sample))
    posts = many(ENUMERATED * Late(), groups=10_000, draft=ITS_DRAFT, block=2, leniency=leniency)
    assert abs(evidence_z(posts, truth)) < 4


def test_an_error_in_a_later_round_is_the_caller_s(record):
    @sg.potential
    def fails(text: str) -> float:
        raise ValueError("long enough")

    record(True)
    with pytest.raises(PotentialError, match=r"fails.*long enough"):
        run(LM * fails * sg.length(6, 12), **DRAFTED)
    run(LM * likes_b, **DRAFTED)  # and nothing is left of it


def test_a_model_that_asks_is_run_as_it_is(record):
    class Asking(Static):
        def extend(self, context, tokens, counts):
            assert int(counts.max()) <= tokens.shape[1]
            return super().extend(context, tokens, counts)

    target = sg.LM(Asking(BASE.table, "asking", WORDS)) * sg.lark(GRAMMAR) * guided
    record(True)
    with pytest.warns(RuntimeWarning, match="without a CUDA graph, more slowly: .*waits for the device"):
        plain = run(target, **DRAFTED)
    assert not plain.info["cuda_graph"]
    record(False)
    same(plain, run(target, **DRAFTED))


def test_values_of_all_kinds_travel_together():
    values = [torch.tensor(True), torch.arange(3), torch.rand(2, 3, dtype=torch.float64)[:, ::2], torch.rand(5).bool()]
    values += [torch.rand(5, 2)[:, 0], torch.zeros(0, 2), torch.arange(4, dtype=torch.int32)]
    packed, unpack = pack(values)
    for sent, found in zip(values, unpack(packed), strict=True):
        assert found.dtype == sent.dtype
        assert torch.equal(found, sent)
