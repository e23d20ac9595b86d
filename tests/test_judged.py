"""Rounds judged by `kernels.verify`: on a CPU by its torch reference, or by its Triton kernels interpreted; as they are on a
CUDA device with -m gpu."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.kernels.verify import Verdict
from smcgen.potentials.base import Potential
from smcgen.proposals import judged
from smcgen.proposals.base import World
from tests.statistics import evidence_z, law_p_value, many
from tests.tables import END, START, Exact, TableLM, log_p, tables
from tests.test_evidence import BASE, IDS, LM, PATTERN, SMALL, STOPS, exact, likes_b, matches, stop_samples
from tests.test_exact import draws, truth
from tests.test_lenient import within
from tests.test_mutations import worst_z
from tests.test_paged_engine import run, tiny, tokenizer

RAMP = sg.Ramp(first=0.5, rounds=2)


@pytest.fixture
def here(monkeypatch):
    """Rounds on the CPU are judged as on a CUDA device: the list grows by one with each."""
    rounds = []
    original = judged.judge

    def judge(judgement):
        rounds.append(judgement)
        return original(judgement)

    monkeypatch.setattr(judged, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(judged, "judge", judge)
    return rounds


def plain_numbers(patch):
    """The last token's number does not depend on the tokens of the round."""

    def uniform(self, purpose, drawing, step=0):
        return self.keys.uniform(purpose, drawing.round, step, drawing.history.shape[1])

    patch.setattr(World, "uniform", uniform)


def compare(one: sg.Posteriors, two: sg.Posteriors, tolerance: float) -> None:
    a, b = one.arrays(), two.arrays()
    same = (a["tokens"] == b["tokens"]).all((1, 2))
    assert same.mean() > (0.99 if tolerance > 1e-6 else 1 - 1e-9)  # float32 may move a number across an edge
    for name in ("length", "reason", "root", "cause"):
        assert (a[name] == b[name])[same].all(), name
    for x, y in [(one.log_evidence[:, 0], two.log_evidence[:, 0])] + [(a[n], b[n]) for n in ("log_weight", "token_log_p")]:
        x, y = x[same], y[same]
        assert ((x == -np.inf) == (y == -np.inf)).all()
        finite = np.isfinite(x)
        assert np.abs(x[finite] - y[finite]).max() < tolerance
    tried = [[(r.judged, r.accepted) for r in post.rounds[0]] for post in one]
    for p, q in zip(one[:100], two[:100], strict=True):
        if all(same) and len(p.rounds[0]) == len(q.rounds[0]):
            for r, other in zip(p.rounds[0], q.rounds[0], strict=True):
                assert np.allclose(r.log_left, other.log_left, atol=tolerance)
    assert np.mean([t == [(r.judged, r.accepted) for r in p.rounds[0]] for t, p in zip(tried, two, strict=True)]) > 0.98


class Late(Potential):
    """No two b in a row. Its mask lets everything through: what it refuses it has to read first."""

    name, hard, exact = "late", True, False

    def start(self, prompts, particles):
        self.width = particles
        return [[] for _ in range(len(prompts) * particles)]

    def restart(self, state, groups, prompts):
        for row in range(len(state)):
            if row // self.width in groups:
                state[row].clear()

    def mask(self, state, out, active):
        out[active] = -1

    def extend(self, state, tokens, counts):
        change = torch.zeros(len(state), dtype=torch.float64)
        for row, (read, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True)):
            for token in read[:count]:
                if state[row][-1:] == [1] and token == 1:
                    change[row] = -torch.inf
                state[row].append(token)
        return change

    def rollback(self, state, counts):
        for row, count in enumerate(counts.tolist()):
            del state[row][len(state[row]) - count :]

    def finish(self, state, rows, texts, reasons):
        return torch.zeros(len(rows), dtype=torch.float64)

    def fork(self, state, ancestors):
        state[:] = [list(state[ancestor]) for ancestor in ancestors.tolist()]


SAME = {
    "alpha 2": (LM**2, {"leniency": 2.0}),
    "alpha 0.5, three chains": (LM**0.5, {"leniency": 1.5, "chains": 3}),
    "function": (LM * likes_b, {"leniency": 1.0, "chains": 2}),
    "annealed": (LM**2, {"leniency": 1.5, "anneal": RAMP, "block": 1}),
    "stop strings": (LM**2, {"leniency": 1.5, "stop": STOPS, "chains": 2}),
    "warm": (LM.at(temperature=0.7) ** 2, {"leniency": 1.5, "draft": SMALL.at(temperature=1.3)}),
    "truncated": (LM.at(top_k=2) ** 2, {"leniency": 2.0}),
    "exact": (LM, {"mode": "exact", "particles": 1}),
    "exact, three chains": (LM, {"mode": "exact", "particles": 1, "chains": 3}),
    "exact, token by token": (LM, {"mode": "exact", "particles": 1, "verification": "token"}),
    "regex": (LM**2 * sg.regex(PATTERN), {"leniency": 1.5, "particles": 2}),
    "regex, three chains": (LM * sg.regex(PATTERN), {"leniency": 1.0, "chains": 3}),
    "regex that dies": (LM * sg.regex("(ab|c)a?"), {"leniency": 2.0, "chains": 2, "max_tokens": 3}),
    "on the host": (LM**2 * Late(), {"leniency": 2.0, "particles": 2}),
    "on the host, three chains": (LM * Late() * sg.regex("[abc]*"), {"leniency": 1.0, "chains": 3}),
    "stop strings and a function": (LM**2 * likes_b * sg.regex("[abc]{0,3}"), {"leniency": 2.0, "stop": STOPS}),
    "arms": (LM**2 * sg.regex(PATTERN), {"leniency": 1.5, "policy": "thompson", "block": [1, 3], "groups": 200}),
    "greedy": (LM.at(temperature=0), {"mode": "exact", "particles": 1, "chains": 2}),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_as_position_by_position(monkeypatch, request, name):
    plain_numbers(monkeypatch)
    target, options = SAME[name]
    options = {"draft": SMALL, "block": 3, "groups": 1000, **options}
    want = many(target, **options)
    rounds = request.getfixturevalue("here")
    compare(want, many(target, **options), 1e-6)
    assert rounds


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at log 0 in the interpreter
@pytest.mark.parametrize("name", ["alpha 2", "alpha 0.5, three chains", "exact", "regex, three chains"])
def test_the_same_through_the_kernels(monkeypatch, request, name):
    pytest.importorskip("triton")
    from smcgen.kernels.gpu import verify as gpu

    def verify(*tensors, temperature, draft_temperature, exponent, leniency, counts, allowed, block):
        heat = (temperature, draft_temperature)
        return Verdict(*gpu.verify(*tensors, *heat, exponent, leniency, counts, allowed, block, chunk=16))

    plain_numbers(monkeypatch)
    target, options = SAME[name]
    options = {"draft": SMALL, "block": 2, "max_tokens": 3, **options, "groups": 10, "particles": 1 if "mode" in options else 2}
    want = many(target, **options)
    rounds = request.getfixturevalue("here")
    monkeypatch.setattr(judged, "verify", verify)
    compare(want, many(target, **options), 1e-4)
    assert rounds


@pytest.mark.parametrize(("leniency", "chains"), [(1.0, 1), (1.5, 3), (3.0, 1)])
@pytest.mark.parametrize("alpha", [0.5, 1, 2])
def test_evidence_is_unbiased(here, alpha, leniency, chains):
    posts = many(LM**alpha, leniency=leniency, chains=chains, draft=SMALL, block=3, groups=10_000)
    assert here
    assert within(posts, exact(alpha)) < 4.2


def test_evidence_with_stop_strings(here):
    truth = Exact({x: math.exp(2 * log_p(BASE, IDS, x)) for x in stop_samples()})
    posts = many(LM**2, draft=SMALL, block=3, stop=STOPS, leniency=1.5, chains=2, groups=10_000)
    assert here
    assert abs(evidence_z(posts, truth)) < 4


@pytest.mark.parametrize(("chains", "verification"), [(1, "block"), (1, "token"), (3, "token")])
@pytest.mark.parametrize("block", [1, 3])
def test_law(here, block, chains, verification):
    posts = draws(block=block, chains=chains, verification=verification)
    assert here
    assert law_p_value(posts, truth()) > 1e-4
    assert np.abs(posts.log_evidence).max() < 1e-6


def test_worlds_that_are_left_alone(here):
    others = {
        LM * SMALL: {},
        LM**1.5 / SMALL**0.5: {},
        LM: {"on_budget": "condition"},
    }
    for target, options in others.items():
        many(target, draft=SMALL, block=2, leniency=1.5, groups=3, **options)
    assert not here


def test_a_broken_model_is_refused(here):
    broken = TableLM(torch.full((START + 1, START + 1, END + 1), torch.nan))
    with pytest.raises(sg.ModelError, match="NaN"):
        many(sg.LM(broken), draft=SMALL, block=2, leniency=1.5, groups=2)
    assert here


# --- faults ---------------------------------------------------------------------------------------------------------


def change(patch, alter):
    """`alter(verdict)` changes what has been judged."""
    original = judged.verify

    def verify(*tensors, **options):
        verdict = original(*tensors, **options)
        alter(verdict)
        return verdict

    patch.setattr(judged, "verify", verify)


def rejected_tokens_weigh_one(patch):
    def alter(verdict):
        last = torch.arange(verdict.tokens.shape[1]) == verdict.accepted[:, None]
        verdict.log_law[:] = torch.where(last, verdict.log_target, verdict.log_law)

    change(patch, alter)


def normaliser_forgotten(patch):
    change(patch, lambda verdict: verdict.log_z.zero_())


def exponent_forgotten(patch):
    original = judged.verify
    patch.setattr(judged, "verify", lambda *tensors, **options: original(*tensors, **{**options, "exponent": None}))


def tokens_after_the_end_weigh(patch):
    def alter(verdict):
        ended = (verdict.tokens == END).long()
        beyond = ended.cumsum(-1) > ended
        verdict.log_z[:, 0] += torch.where(beyond, verdict.log_gain, 0.0).sum(-1)

    change(patch, alter)


def acceptance_reuses_the_draft_numbers(patch):
    patch.setattr(judged, "ACCEPT", 0)


def chains_not_brought_together(patch):
    patch.setattr("smcgen.smc.factors.Scorer.follow", lambda self, rows: None)


POWER = (LM**2, exact(2), {"leniency": 2.0})
FAULTS = {
    rejected_tokens_weigh_one: POWER,
    normaliser_forgotten: POWER,
    exponent_forgotten: POWER,
    tokens_after_the_end_weigh: POWER,
    acceptance_reuses_the_draft_numbers: (LM, exact(1), {"leniency": 1.0}),
    chains_not_brought_together: (LM, exact(1), {"leniency": 1.0, "chains": 3}),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault_is_seen(monkeypatch, here, fault):
    target, truth, options = FAULTS[fault]
    options = {"draft": SMALL, "block": 2, **options}
    assert worst_z(target, truth, options) < 4.2
    fault(monkeypatch)
    assert worst_z(target, truth, options) > 6
    assert here


# --- on a device ----------------------------------------------------------------------------------------------------

RECORDED = {
    "leniency 2": (2.0, None, {"leniency": 2.0}),
    "two chains": (2.0, None, {"leniency": 1.5, "chains": 2}),
    "constraint": (2.0, "[a-d]+", {"leniency": 2.0}),
    "constraint, two chains": (1.0, "[a-d]+", {"leniency": 1.0, "chains": 2}),
    "exact": (1.0, None, {"mode": "exact", "particles": 1}),
    "exact, two chains": (1.0, None, {"mode": "exact", "particles": 1, "chains": 2}),
}


def on_device(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test))


@on_device
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_and_the_same_as_on_the_cpu(monkeypatch, name):
    """Transformers that read pages: from a recording on the device, position by position on the CPU."""
    plain_numbers(monkeypatch)
    alpha, pattern, options = RECORDED[name]
    found = []
    for device in ("cpu", "cuda"):
        lm, draft = (sg.LM(tiny(seed=seed).to(device), tokenizer()) for seed in (1, 2))
        target = lm**alpha if pattern is None else lm**alpha * sg.regex(pattern)
        found.append(run(target, [[0, 3, 1], [5]] * 250, draft=draft, block=3, max_tokens=12, groups=100, **options))
    assert [posts.info["cuda_graph"] for posts in found] == [False, True]
    compare(*found, 1e-3)


@on_device
@pytest.mark.parametrize(("leniency", "chains"), [(1.0, 1), (2.0, 1), (1.5, 3)])
@pytest.mark.parametrize("pattern", [None, PATTERN])
def test_evidence_on_the_device(pattern, leniency, chains):
    base, draft = tables(device="cuda")
    target = sg.LM(base) ** 2 if pattern is None else sg.LM(base) ** 2 * sg.regex(pattern)
    posts = many(target, draft=sg.LM(draft), block=3, leniency=leniency, chains=chains, groups=10_000)
    assert within(posts, exact(2) if pattern is None else exact(2, accept=matches)) < 4.2


@on_device
@pytest.mark.parametrize(("chains", "verification"), [(1, "block"), (1, "token"), (3, "token")])
def test_law_on_the_device(chains, verification):
    base, draft = tables(device="cuda")
    posts = draws(sg.LM(base), draft=sg.LM(draft), block=3, chains=chains, verification=verification)
    assert law_p_value(posts, truth()) > 1e-4
    assert np.abs(posts.log_evidence).max() < 1e-5
