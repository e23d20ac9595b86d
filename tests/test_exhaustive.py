"""Two particles, every outcome: E[Z-hat * weight of x] = gamma(x) to rounding, wherever the dial stands."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from smcgen.proposals import lenient
from smcgen.proposals.block import BlockJudgement
from smcgen.proposals.draft import DraftProposal
from smcgen.proposals.lenient import Judgement, LenientProposal
from smcgen.smc import round as round_module
from smcgen.target import WHOLE
from tests import exhaustive
from tests.exhaustive import BASE, PROMPT, TEXTS, K, Run, enumerate_runs


def gamma(alpha: float) -> dict[tuple[int, ...], float]:
    return {x: math.prod(float(BASE.probabilities(PROMPT, x[:i])[t]) for i, t in enumerate(x)) ** alpha for x in TEXTS}


def runs(leniency: float, alpha: float, chains: int = 1, **options) -> Run:
    def make(reader):
        if leniency == math.inf:
            return DraftProposal(reader, K, 1.0)
        return LenientProposal(reader, K, 1.0, WHOLE, leniency, chains)

    return enumerate_runs(make, alpha, chains=chains, **options)


def worst(run: Run, alpha: float) -> float:
    want = gamma(alpha)
    assert set(run.measure) <= set(want)
    return max(abs(run.measure.get(x, 0.0) - g) for x, g in want.items())


@pytest.mark.parametrize("alpha", [1, 2])
@pytest.mark.parametrize("leniency", [1.0, 1.5, 2.0, math.inf])
@pytest.mark.parametrize("penalty", [0.0, None, -0.7, 0.5])
def test_two_particles(leniency, alpha, penalty):
    """penalty None: lambda from the group's own past."""
    run = runs(leniency, alpha, penalty=penalty)
    assert math.isclose(sum(run.law.values()), 1, abs_tol=1e-12)
    assert worst(run, alpha) < 1e-12
    if leniency == alpha == 1 and not penalty:
        assert max(abs(run.law[x] - g) for x, g in gamma(1).items()) < 1e-12


@pytest.mark.parametrize("threshold", [0.0, 0.6, 1.0])
def test_two_particles_at_other_thresholds(threshold):
    assert worst(runs(1.5, 2, threshold=threshold), 2) < 1e-12


@pytest.mark.parametrize("alpha", [1, 2])
@pytest.mark.parametrize("leniency", [1.0, 1.5, 3.0])
def test_two_chains(leniency, alpha):
    run = runs(leniency, alpha, chains=2, particles=1)
    assert worst(run, alpha) < 1e-12


# --- block verification ---------------------------------------------------------------------------------------------


def judged_together(reader):
    return LenientProposal(reader, K, 1.0, WHOLE, 1.0, 1, BlockJudgement)


def test_block_verification_is_exact():
    """In every run of one particle; the next block goes on from wherever the last one stopped."""
    run = enumerate_runs(judged_together, 1, particles=1)
    for x, g in gamma(1).items():
        assert abs(run.law[x] - g) < 1e-12
        assert abs(run.measure[x] - g) < 1e-12


@pytest.mark.parametrize("drafted", [1, 2, 3])
def test_block_verification_keeps_more(drafted):
    def mean(judgement):
        def make(reader):
            return LenientProposal(reader, drafted, 1.0, WHOLE, 1.0, 1, judgement)

        blocks, probability = exhaustive.first_blocks(make, drafted)
        assert math.isclose(float(probability.sum()), 1, abs_tol=1e-12)
        assert bool((blocks.accepted <= blocks.judged).all())
        return float((probability * blocks.accepted[:, 0]).sum())

    token, block = mean(Judgement), mean(BlockJudgement)
    if drafted == 1:
        assert math.isclose(token, block, rel_tol=1e-12)
    else:
        assert block > token * 1.01


def residual_is_the_model(patch):
    original = Judgement._end

    def end(self):
        self.level.cost[:] = 0.0
        original(self)

    patch.setattr(Judgement, "_end", end)


def laws_out_of_step(patch):
    original = BlockJudgement._laws

    def laws(self, i, used):
        log_p, log_q = original(self, i, used)
        return log_p, (log_q + 0.2 * i).clamp(max=0.0)

    patch.setattr(BlockJudgement, "_laws", laws)


@pytest.mark.parametrize("fault", [residual_is_the_model, laws_out_of_step], ids=lambda f: f.__name__)
def test_wrong_block_verification_is_seen(monkeypatch, fault):
    fault(monkeypatch)
    run = enumerate_runs(judged_together, 1, particles=1)
    assert max(abs(run.law[x] - g) for x, g in gamma(1).items()) > 1e-3


# --- faults ---------------------------------------------------------------------------------------------------------


def one_candidate_in_the_law(patch):
    """The weight of a token as if only the first chain had been a candidate."""
    original = lenient.log_law

    def log_law(level, log_p, log_q, candidates, leniency):
        first = [0, *[1] * (level.cost.shape[-1] - 1)]
        level = lenient.Levels(level.cost[..., first], level.mass[..., first], level.reach[..., first])
        alone = candidates & (torch.arange(candidates.shape[-1]) == 0)
        return original(level, log_p, log_q, alone, leniency)

    patch.setattr(lenient, "log_law", log_law)


def test_one_candidate_in_the_law_is_seen(monkeypatch):
    one_candidate_in_the_law(monkeypatch)
    assert worst(runs(1.5, 1, chains=1, particles=1), 1) < 1e-12
    assert worst(runs(1.5, 1, chains=2, particles=1), 1) > 1e-3


def test_a_penalty_that_is_not_restored_is_seen(monkeypatch):
    original = round_module.resample

    def resample(particles, *arguments):
        chosen, go, ancestors, ess = original(particles, *arguments)
        return dataclasses.replace(chosen, log_weight=torch.where(go[:, None], 0.0, chosen.log_weight)), go, ancestors, ess

    monkeypatch.setattr(round_module, "resample", resample)
    assert worst(runs(1.5, 2, penalty=0.0), 2) < 1e-12
    assert worst(runs(1.5, 2, penalty=0.5), 2) > 1e-3


@pytest.mark.parametrize("leniency", [1.0, 1.5])
def test_returning_the_first_particle_to_finish_is_seen(monkeypatch, leniency):
    """At leniency 1 every weight is 1, and only the law of the text shows it: short texts are drawn too often."""

    def distance(run):
        total = sum(run.law.values())
        return 0.5 * sum(abs(run.law.get(x, 0.0) / total - g) for x, g in gamma(1).items())

    right = distance(runs(leniency, 1))

    def ended(states, done):
        going = {}
        for (texts, numbers), (p, z) in states.items():
            finished = [(x, math.exp(w)) for x, w in zip(texts, numbers, strict=False) if exhaustive.reason(x)]
            if not finished:
                going[texts, numbers] = p, z
            for text, w in finished:
                done.law[text] += p * w / sum(w for _, w in finished)
        return going

    monkeypatch.setattr(exhaustive, "_ended", ended)
    assert right < (1e-12 if leniency == 1 else 0.2)
    assert distance(runs(leniency, 1)) > right + 0.05
