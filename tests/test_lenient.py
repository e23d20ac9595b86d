"""Leniency and chains: unbiased evidence through the public call wherever the dial stands, and the faults it must not have."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.proposals import lenient
from smcgen.proposals.lenient import Judgement
from smcgen.smc import round as round_module
from smcgen.smc.round import Algorithm
from tests.statistics import FUNCTIONS, evidence_z, many, measure, z_score
from tests.tables import END, Exact, TableLM, log_p
from tests.test_evidence import BASE, CASES, IDS, LM, SMALL, STOPS, T, exact, matches, stop_samples
from tests.test_mutations import worst_z
from tests.test_paged_engine import enumerate_samples, tiny, tokenizer
from tests.test_paged_engine import run as run_tiny

PATTERN = "a?(b|ca)*c?"


def within(posts: sg.Posteriors, truth: Exact) -> float:
    """The largest |z| among the evidence and the eight expectations."""
    support = list(truth.gamma)
    weights = measure(posts, support)
    scores = [evidence_z(posts, truth)]
    for f in FUNCTIONS.values():
        values = np.array([float(f(x)) for x in support])
        scores.append(z_score(weights @ values, truth.z * truth.expectation(f)))
    return max(map(abs, scores))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("leniency", "chains"), [(1, 1), (1.5, 3), (3, 1)])
def test_evidence_is_unbiased(name, leniency, chains):
    target, truth, options = CASES[name]
    options = {"draft": SMALL, "block": 3, "groups": 10_000, **options}
    assert within(many(target, leniency=leniency, chains=chains, **options), truth) < 4.2


@pytest.mark.parametrize("policy", ["truncate", "condition"])
@pytest.mark.parametrize("chains", [1, 3])
def test_stop_strings_and_budget_policies(policy, chains):
    def ended(x):
        return x[-1] == END or any(s in "".join("abc"[t] for t in x if t < END) for s in STOPS)

    support = [x for x in stop_samples() if policy == "truncate" or ended(x)]
    truth = Exact({x: math.exp(2 * log_p(BASE, IDS, x)) for x in support})
    options = {"draft": SMALL, "block": 3, "stop": STOPS, "on_budget": policy, "groups": 10_000}
    assert abs(evidence_z(many(LM**2, leniency=1.5, chains=chains, **options), truth)) < 4


@pytest.mark.parametrize("chains", [1, 3])
def test_one_particle_with_a_constraint(chains):
    """No population: the weights of single particles add up."""
    posts = many(LM**2 * sg.regex(PATTERN), particles=1, draft=SMALL, block=4, leniency=2.0, chains=chains)
    assert within(posts, exact(2, accept=matches)) < 4.2


def test_two_language_models():
    from tests.tables import enumerate_target
    from tests.test_evidence import DRAFT

    target = LM**1.5 * LM.given([1, 1]) ** 0.5 * SMALL.given("cb") ** 0.5
    truth = enumerate_target([(BASE, 1.5, IDS), (BASE, 0.5, (1, 1)), (DRAFT, 0.5, (2, 1))])
    assert abs(evidence_z(many(target, draft=SMALL, block=2, leniency=2.0, chains=2), truth)) < 4


@pytest.mark.parametrize("chains", [1, 3])
def test_truncated_target(chains):
    """Tokens of probability 0 have weight 0, under every leniency."""
    cut = BASE.table.masked_fill(BASE.table < BASE.table.sort(-1, descending=True).values[..., 1:2], -torch.inf)
    from tests.tables import samples

    lm = TableLM(cut)

    def gamma(x):
        return math.prod(float(lm.probabilities(IDS, x[:i])[t]) ** 2 for i, t in enumerate(x))

    truth = Exact({x: gamma(x) for x in samples() if gamma(x) > 0})
    target = LM.at(top_k=2) ** 2
    assert abs(evidence_z(many(target, draft=SMALL, block=2, leniency=2.0, chains=chains, groups=10_000), truth)) < 4
    if chains == 1:
        ramp = sg.Ramp(first=0.5, rounds=2)
        assert abs(evidence_z(many(target, draft=SMALL, block=1, anneal=ramp, groups=10_000), truth)) < 4


def test_a_truncated_target_is_covered():
    """The draft's own nucleus would be one token that leniency accepts for certain, and the target has two."""
    one, two = ([0.55, 0.38, 0.04, 0.03], [0.92, 0.06, 0.01, 0.01])
    lm, draft = (sg.LM(TableLM(torch.tensor(p).log().expand(5, 5, 4).clone())) for p in (one, two))
    posts = many(lm.at(top_p=0.9), draft=draft, block=2, leniency=2.0, groups=10_000)
    assert abs(z_score(np.exp(posts.log_evidence[:, 0]), 1.0)) < 4
    with pytest.raises(sg.UsageError, match="leaves out tokens"):
        sg.sample(lm, "ca", draft=draft.at(top_p=0.9), leniency=2.0, max_tokens=3)


def test_blocks_are_ragged_and_lengths_compensated(monkeypatch):
    seen = []
    original = Algorithm.penalty

    def penalty(self, particles):
        seen.append(original(self, particles))
        return seen[-1]

    monkeypatch.setattr(Algorithm, "penalty", penalty)
    posts = many(LM**2, draft=SMALL, block=3, leniency=1.5, particles=8)
    assert (seen[0] == 0).all()  # nothing has been drawn yet
    assert (seen[1] < -0.05).all()  # log of sum p**2 is negative
    counts = [c for r in posts[0].rounds[0] for c in r.counts]
    assert len(set(counts)) > 2
    assert abs(evidence_z(posts, exact(2))) < 4


@pytest.mark.parametrize("penalty", [-0.7, 0.0, 0.5])
def test_any_length_penalty_is_legal(monkeypatch, penalty):
    monkeypatch.setattr(Algorithm, "penalty", lambda self, particles: torch.full_like(particles.log_z, penalty))
    posts = many(LM**2, draft=SMALL, block=3, leniency=1.5, threshold=1.0)
    assert within(posts, exact(2)) < 4.2


def test_infinite_leniency_is_what_it_was():
    """Drawn before there was a leniency. Evidences agree as far as sums in float32 do on another processor."""
    options = {"draft": SMALL, "block": 2, "particles": 6, "max_tokens": T, "seed": 12, "leniency": math.inf, "chains": 1}
    power = sg.sample(LM**2, "ca", **options)
    assert [s.token_ids for s in power.particles] == [[3], [0, 3], [3], [0, 3], [1, 1, 3], [0, 3]]
    assert math.isclose(power.log_evidence, -2.525131023650049, rel_tol=1e-7)
    regex = sg.sample(LM * sg.regex(PATTERN), "ca", **options)
    assert [s.token_ids for s in regex.particles] == [[3], [0, 3], [3], [1, 1, 3], [0, 3], [2, 3]]
    assert math.isclose(regex.log_evidence, -0.6863045996606474, rel_tol=1e-7)


def test_the_bound_falls_with_the_leniency():
    bounds = []
    for leniency in (1.0, 1.5, math.inf):
        post = sg.sample(LM, "ca", draft=SMALL, block=3, particles=2, leniency=leniency, runs=2000, max_tokens=T, seed=4)
        bounds.append(post.divergence_bound)
    assert abs(bounds[0].value) < 1e-6
    assert bounds[1].value + 4 * bounds[1].se < bounds[2].value
    assert bounds[1].value > 4 * bounds[1].se
    assert "noise" not in post.divergence_note
    few = sg.sample(LM, "ca", draft=SMALL, block=3, particles=2, leniency=1.5, runs=4, max_tokens=T, seed=4)
    assert few.divergence_note.endswith(", which is no more than noise") == (
        few.divergence_bound.value < 2 * few.divergence_bound.se
    )
    assert sg.sample(LM**2, "ca", max_tokens=3).divergence_bound is None
    assert "as it is" in sg.sample(LM**2, "ca", max_tokens=3).divergence_note
    assert sg.sample(LM, "ca", max_tokens=3).divergence_bound.se is None


def test_the_bound_is_a_bound():
    """KL(law of one draw, model) by counting 200,000 draws, against -mean log Z-hat."""
    posts = many(LM, draft=SMALL, block=3, particles=2, leniency=3.0, groups=50_000, seed=9)
    truth = exact(1)
    weights = measure(posts, list(truth.gamma))
    law = (weights / weights.sum(1, keepdims=True)).mean(0)
    divergence = float(np.sum(law[law > 0] * np.log(law[law > 0] / np.array(list(truth.gamma.values()))[law > 0])))
    bound = -posts.log_evidence[:, 0]
    assert divergence < bound.mean() + 4 * bound.std() / math.sqrt(len(bound))
    assert bound.mean() < 1.0


@pytest.mark.parametrize(("leniency", "chains"), [(1.0, 3), (2.0, 1), (1.5, 2)])
def test_through_the_pages(leniency, chains):
    base = tiny(seed=1)
    noisy = tiny(seed=1)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    lm, draft = sg.LM(base, tokenizer()), sg.LM(noisy, tokenizer())
    gamma = enumerate_samples(base, [0, 3, 1], 2.0)
    options = {"draft": draft, "block": 2, "leniency": leniency, "chains": chains}
    posts = run_tiny(lm**2, [[0, 3, 1]] * 2000, **options)
    assert abs(z_score(np.exp(posts.log_evidence[:, 0]), sum(gamma.values()))) < 4
    mixed = run_tiny(lm, [[0, 3, 1], [2], [1, 5, 5, 2, 0]], max_tokens=12, deterministic=True, **options)
    for i, prompt in enumerate([[0, 3, 1], [2], [1, 5, 5, 2, 0]]):
        alone = run_tiny(lm, [prompt], max_tokens=12, deterministic=True, keys=[i], **options)
        assert [s.token_ids for s in alone[0].particles] == [s.token_ids for s in mixed[i].particles]
        assert alone[0].log_evidence == mixed[i].log_evidence
    for s in mixed[1].particles:
        logits = base(torch.tensor([[2, *s.token_ids]])).logits[0, :-1, :8].log_softmax(-1)
        want = logits.gather(-1, torch.tensor(s.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(s.token_log_p)[:, 0], want.detach(), atol=1e-5)


# --- faults ---------------------------------------------------------------------------------------------------------


def change_weights(patch, change):
    """`change(judgement, gain, log_z)` replaces the gain of every token."""
    original = Judgement._commit

    def commit(self, active, token, law, log_z, gain, rows, cause=None):
        gain, log_z = change(self, gain, log_z, law)
        return original(self, active, token, law, log_z, gain, rows, cause)

    patch.setattr(Judgement, "_commit", commit)


def rejected_tokens_weigh_one(patch):
    change_weights(patch, lambda self, gain, z, law: (torch.where(self.rejected, 0.0, gain), z))


def no_weight_of_acceptance(patch):
    change_weights(patch, lambda self, gain, z, law: (torch.zeros_like(gain), z))


def normaliser_forgotten(patch):
    change_weights(patch, lambda self, gain, z, law: (gain, torch.zeros_like(z)))


def bonus_weight_forgotten(patch):
    original = Judgement._end

    def end(self):
        before = self._target

        def target(position, allowed, used):
            rows, log_p, log_z = before(position, allowed, used)
            return rows, log_p, torch.where(self.rejected | (log_z == -torch.inf), log_z, 0.0)

        self._target = target
        original(self)

    patch.setattr(Judgement, "_end", end)


def accepted_tokens_weigh_p_over_q(patch):
    original = lenient.log_law

    def log_law(level, log_p, log_q, candidates, leniency):
        law = original(level, log_p, log_q, candidates, leniency)
        return torch.where(log_q > -torch.inf, torch.minimum(log_q, law + 50), law)

    patch.setattr(lenient, "log_law", log_law)


def residual_is_the_target(patch):
    patch.setattr(lenient, "log_excess", lambda log_p, log_q, cost: log_p)


def penalty_not_restored(patch):
    original = round_module.resample

    def resample(particles, *arguments):
        chosen, go, ancestors, ess = original(particles, *arguments)
        return dataclasses.replace(chosen, log_weight=torch.where(go[:, None], 0.0, chosen.log_weight)), go, ancestors, ess

    patch.setattr(round_module, "resample", resample)


def chains_not_brought_together(patch):
    patch.setattr("smcgen.smc.factors.Scorer.follow", lambda self, rows: None)


POWER = (LM**2, exact(2), {"leniency": 2.0})
FAULTS = {
    rejected_tokens_weigh_one: POWER,
    no_weight_of_acceptance: POWER,
    normaliser_forgotten: (LM**2, exact(2), {"leniency": 1.0}),
    bonus_weight_forgotten: POWER,
    accepted_tokens_weigh_p_over_q: POWER,
    residual_is_the_target: POWER,
    penalty_not_restored: (LM**2, exact(2), {"leniency": 1.5, "threshold": 1.0}),
    chains_not_brought_together: (LM, exact(1), {"leniency": 1.0, "chains": 3}),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault_is_seen(monkeypatch, fault):
    target, truth, options = FAULTS[fault]
    options = {"draft": SMALL, "block": 2, **options}
    assert worst_z(target, truth, options) < 4.2
    fault(monkeypatch)
    assert worst_z(target, truth, options) > 6


def test_a_constraint_that_is_not_rolled_back_is_seen(monkeypatch):
    monkeypatch.setattr("smcgen.smc.factors.Potentials.rollback", lambda self, counts: None)
    posts = many(LM * sg.regex(PATTERN), draft=SMALL, block=4, leniency=1, groups=2000)
    with pytest.raises(AssertionError, match="outside the target"):
        measure(posts, list(exact(1, accept=matches).gamma))
