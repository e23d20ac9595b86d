"""The evidence is unbiased and expectations are right, through the public call: every text of the fixture is enumerated.

Each test runs thousands of independent groups at once. The truth stays within |z| < 4 (two-sided false alarm 6e-5 a test,
and the seeds are fixed); `test_mutations.py` shows that the faults known from other engines are far outside.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import smcgen as sg
from smcgen.proposals.draft import DraftProposal
from smcgen.smc.resampling import SCHEMES
from tests.statistics import (
    FUNCTIONS,
    GROUPS,
    coefficient_of_variation,
    evidence_z,
    many,
    measure,
    z_score,
)
from tests.tables import END, T, enumerate_target, samples, tables, text_of

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
IDS = (2, 0)


@sg.potential
def likes_b(text: str) -> float:
    return 0.7 * text.count("b") - 0.4 * len(text)


PATTERN = "a?(b|ca)*c?"


def matches(sample: tuple[int, ...]) -> bool:
    import re

    return re.fullmatch(PATTERN, text_of(sample)) is not None


def exact(alpha: float = 1.0, **options):
    return enumerate_target([(BASE, alpha, IDS)], **options)


def test_the_fixture_is_hard_enough():
    table = BASE.table.softmax(-1)
    same_last = [0.5 * (table[i, k] - table[j, k]).abs().sum() for k in range(3) for i in range(3) for j in range(i)]
    assert min(same_last) > 0.1
    assert np.mean(same_last) > 0.2
    posts = many(LM**2, groups=4000, draft=SMALL, block=2)
    assert 0.3 < coefficient_of_variation(posts) < 1.0


CASES = {
    "alpha 0.5": (LM**0.5, exact(0.5), {}),
    "alpha 1": (LM, exact(1), {}),
    "alpha 2": (LM**2, exact(2), {}),
    "alpha 2, regex": (LM**2 * sg.regex(PATTERN), exact(2, accept=matches), {}),
    "alpha 1, function": (LM * likes_b, exact(1, phi=lambda t: math.exp(likes_b.function(t))), {}),
    "alpha 1, function annealed": (
        LM * likes_b,
        exact(1, phi=lambda t: math.exp(likes_b.function(t))),
        {"anneal": sg.Ramp(first=0.3, rounds=2, of="potentials"), "block": 1},
    ),
    "alpha 2, function and model annealed": (
        LM**2 * likes_b * sg.regex("[abc]{0,3}|[abc]*b"),
        exact(2, phi=lambda t: math.exp(likes_b.function(t)), accept=lambda x: len(text_of(x)) < 4 or text_of(x)[-1] == "b"),
        {"anneal": sg.Ramp(first=0.3, rounds=3, of="all"), "block": 1},
    ),
    "alpha 2, annealed": (LM**2, exact(2), {"anneal": sg.Ramp(first=0.5, rounds=2), "block": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_evidence_is_unbiased(name):
    target, truth, options = CASES[name]
    posts = many(target, **{"draft": SMALL, "block": 2, **options})
    assert len(posts) == GROUPS
    assert abs(evidence_z(posts, truth)) < 4


@pytest.mark.parametrize("name", CASES)
def test_expectations_are_unbiased(name):
    target, truth, options = CASES[name]
    posts = many(target, **{"draft": SMALL, "block": 2, "seed": 2, **options})
    support = list(truth.gamma)
    weights = measure(posts, support)
    for label, f in FUNCTIONS.items():
        values = np.array([float(f(x)) for x in support])
        assert abs(z_score(weights @ values, truth.z * truth.expectation(f))) < 4.2, label


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_threshold(threshold):
    assert abs(evidence_z(many(LM**2, draft=SMALL, block=2, threshold=threshold), exact(2))) < 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(scheme):
    posts = many(LM**2, draft=SMALL, block=2, resampling=scheme)
    assert abs(evidence_z(posts, exact(2))) < 4


@pytest.mark.parametrize("block", [1, 3, 4, 7])
def test_blocks_that_do_not_divide_the_budget(block):
    assert abs(evidence_z(many(LM**2, draft=SMALL, block=block), exact(2))) < 4


@pytest.mark.parametrize("draft", [None, SMALL])
def test_two_language_models_with_their_own_prompts(draft):
    target = LM**1.5 * LM.given([1, 1]) ** 0.5 * SMALL.given("cb") ** 0.5
    truth = enumerate_target([(BASE, 1.5, IDS), (BASE, 0.5, (1, 1)), (DRAFT, 0.5, (2, 1))])
    options = {} if draft is None else {"draft": draft, "block": 2}
    assert abs(evidence_z(many(target, **options), truth)) < 4


def test_contrast():
    truth = enumerate_target([(BASE, 1.5, IDS), (DRAFT, -0.5, IDS)])
    assert abs(evidence_z(many(LM**1.5 / SMALL**0.5, draft=SMALL, block=2), truth)) < 4


def test_temperature_of_the_target():
    truth = exact(2, temperature=0.7)
    assert abs(evidence_z(many(LM.at(temperature=0.7) ** 2, draft=SMALL, block=2), truth)) < 4


STOPS = ("bc", "ab")


def stopped(sample: tuple[int, ...]) -> bool:
    """Whether a stop string is complete at the end and not before."""
    inside = any(s in text_of(sample[:-1]) for s in STOPS)
    return not inside and (len(sample) == T or sample[-1] == END or any(s in text_of(sample) for s in STOPS))


def stop_samples():
    """All samples under STOPS: sequences that END, a stop string or the budget ends."""
    cut = {x[:n] for x in samples() for n in range(1, len(x) + 1)}
    return [x for x in cut if stopped(x)]


@pytest.mark.parametrize("policy", ["truncate", "condition"])
@pytest.mark.parametrize("draft", [None, SMALL])
def test_stop_strings_and_budget_policies(policy, draft):
    from tests.tables import Exact, log_p

    def ended(x):
        return x[-1] == END or any(s in text_of(x) for s in STOPS)

    support = [x for x in stop_samples() if policy == "truncate" or ended(x)]
    truth = Exact({x: math.exp(2 * log_p(BASE, IDS, x)) for x in support})
    options = {} if draft is None else {"draft": draft, "block": 2}
    posts = many(LM**2, stop=STOPS, on_budget=policy, **options)
    assert abs(evidence_z(posts, truth)) < 4
    weights = measure(posts, support).mean(0)
    assert 0.5 * np.abs(weights / weights.sum() - np.array(list(truth.gamma.values())) / truth.z).sum() < 0.03


@pytest.mark.parametrize("draft", [None, SMALL])
def test_conditioned_on_ending(draft):
    truth = exact(1, accept=lambda x: x[-1] == END)
    options = {} if draft is None else {"draft": draft, "block": 2}
    posts = many(LM, on_budget="condition", **options)
    assert abs(evidence_z(posts, truth)) < 4
    assert not (posts.arrays()["reason"] == 3).any()


def ragged(proposal: DraftProposal, particles, world):
    """A block length for each particle from its slot and round alone: decided before anything is drawn."""
    slot = np.arange(particles.length.shape[1])
    lengths = (particles.round[:, None] * 7 + particles.length.new_tensor(slot) * 5) % (proposal.drafted + 1)
    return world.ending.draftable(particles.length).minimum(lengths)


@pytest.mark.parametrize("penalty", [0.0, -0.4])
def test_ragged_blocks(monkeypatch, penalty):
    from smcgen.smc.round import Algorithm

    monkeypatch.setattr(DraftProposal, "limit", ragged)
    monkeypatch.setattr(Algorithm, "length_penalty", penalty)
    original = Algorithm.__init__
    monkeypatch.setattr(Algorithm, "__init__", lambda self, *a: original(self, *a, length_penalty=penalty))
    posts = many(LM**2, draft=SMALL, block=3)
    assert any(len(set(r.counts)) > 2 for r in posts[0].rounds[0])
    assert abs(evidence_z(posts, exact(2))) < 4


def test_total_variation_with_many_particles():
    posts = many(LM**2, groups=4000, particles=32, draft=SMALL, block=2)
    truth = exact(2)
    weights = measure(posts, list(truth.gamma)).mean(0)
    assert 0.5 * np.abs(weights / weights.sum() - np.array(list(truth.gamma.values())) / truth.z).sum() < 0.02


@pytest.mark.slow
def test_the_bias_of_one_draw_falls_as_one_over_n():
    """The law is that of independent draws. With strata the bias is several times smaller and falls faster, into the noise."""
    truth = exact(1.5)
    f = FUNCTIONS["full length"]
    support = list(truth.gamma)
    values = np.array([float(f(x)) for x in support])
    biases = []
    for particles, groups in ((4, 80_000), (8, 80_000), (16, 60_000), (32, 40_000)):
        means = []
        for seed in range(groups // 20_000):
            posts = many(LM**1.5, particles=particles, draft=SMALL, block=2, resampling="multinomial", seed=100 + seed)
            weights = measure(posts, support)
            means.append((weights @ values) / weights.sum(1))
        biases.append(np.concatenate(means).mean() - truth.expectation(f))
    slope = np.polyfit(np.log([4, 8, 16, 32]), np.log(np.abs(biases)), 1)[0]
    assert -1.6 < slope < -0.8, (slope, biases)
