"""Faults known from other engines, each put into this one: the test that guards against it must see it, at |z| > 6.

A mutant replaces one function of the engine; the call and the statistic are those of `test_evidence.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.kernels import categorical
from smcgen.potentials.base import ALIVE
from smcgen.potentials.base import END as ENDED
from smcgen.proposals import draft as draft_module
from smcgen.proposals import target as target_module
from smcgen.proposals.draft import DraftProposal
from smcgen.smc import factors, resampling
from smcgen.smc import round as round_module
from smcgen.smc.ending import Ending
from smcgen.smc.weights import effective_sample_size
from tests.statistics import FUNCTIONS, evidence_z, many, measure, z_score
from tests.tables import END, T, text_of
from tests.test_evidence import LM, PATTERN, SMALL, exact, likes_b, matches, ragged

POWER = (LM**2, exact(2), {"draft": SMALL, "block": 2})
LOCAL = (LM**2, exact(2), {})
MASKED = (LM * sg.regex(PATTERN), exact(1, accept=matches), {"draft": SMALL, "block": 2})
ANNEALED_BETA = (
    LM * likes_b,
    exact(1, phi=lambda t: math.exp(likes_b.function(t))),
    {"draft": SMALL, "block": 1, "anneal": sg.Ramp(first=0.3, rounds=2, of="potentials")},
)
ANNEALED = (LM**2, exact(2), {"draft": SMALL, "block": 1, "anneal": sg.Ramp(first=0.5, rounds=2)})
RAGGED = (LM**2, exact(2), {"draft": SMALL, "block": 3, "threshold": 1.0, "particles": 8, "groups": 40_000})
CACHED = (LM, exact(1), {"draft": SMALL, "block": 1, "threshold": 1.0, "groups": 60_000})
WARM = (LM.at(temperature=0.5), exact(1, temperature=0.5), {"draft": SMALL, "block": 2})


def no_weight(*args):
    """A draw with the normaliser forgotten."""
    drawn = categorical.power_draw(*args)
    return drawn._replace(log_z=torch.where(drawn.log_z > -torch.inf, 0.0, drawn.log_z))


def drop_bonus_weight(patch):
    patch.setattr(factors, "power_draw", no_weight)


def drop_mask_normaliser(patch):
    def power_draw(*args, **options):
        drawn = categorical.power_draw(*args, **options)
        return drawn._replace(log_q=drawn.log_p)

    patch.setattr(draft_module, "power_draw", power_draw)


def share_the_first_token(patch):
    original = target_module.draw_local

    def draw_local(drawing, particles, world, *rest):
        first = bool((particles.round == 0).all())
        if first:
            patch.setattr(factors, "power_draw", lambda x, u, *more: no_weight(x, u[:, :1].expand_as(u), *more))
        original(drawing, particles, world, *rest)
        if first:
            patch.setattr(factors, "power_draw", categorical.power_draw)

    patch.setattr(target_module, "draw_local", draw_local)


def ancestors_are_the_heaviest(patch):
    def scheme(weights, uniforms):
        return torch.nn.functional.one_hot(weights.argmax(-1), weights.shape[-1]) * weights.shape[-1]

    patch.setitem(resampling.SCHEMES, "systematic", scheme)


def weights_are_not_reset(patch):
    original = round_module.resample

    def resample(particles, *arguments):
        chosen, go, ancestors, ess = original(particles, *arguments)
        return dataclasses.replace(chosen, log_weight=particles.log_weight.gather(1, ancestors)), go, ancestors, ess

    patch.setattr(round_module, "resample", resample)


def evidence_only_when_all_groups_resample(patch):
    original = round_module.resample

    def resample(particles, *arguments):
        chosen, go, ancestors, ess = original(particles, *arguments)
        kept = torch.where(go & ~go.all(), particles.log_evidence, chosen.log_evidence)
        return dataclasses.replace(chosen, log_evidence=kept), go, ancestors, ess

    patch.setattr(round_module, "resample", resample)


def weigh_tokens_after_the_end(patch):
    """The draft runs on past an end token, and what it draws there stays in the weight."""
    original = DraftProposal.extend

    def extend(self, particles, world):
        class Blind(Ending):
            def advance(self, token, state, length):
                reason, state = Ending.advance(self, token, state, length)
                return torch.where(reason == ENDED, ALIVE, reason), state

        blind = Blind(**vars(world.ending))
        block = original(self, particles, dataclasses.replace(world, ending=blind))
        ends = (block.tokens == END) & (torch.arange(block.tokens.shape[-1]) < block.counts[..., None])
        first = torch.where(ends.any(-1), ends.int().argmax(-1) + 1, block.counts)
        reason = torch.where(ends.any(-1) & particles.alive, ENDED, block.reason)
        keep = torch.arange(block.tokens.shape[-1]) < first[..., None]
        log_p = torch.where(keep[..., None], block.token_log_p, 0.0)
        return dataclasses.replace(block, counts=first, reason=reason, token_log_p=log_p)

    patch.setattr(DraftProposal, "extend", extend)


def score_at_the_wrong_temperature(patch):
    patch.setattr(factors, "score", lambda logits, tokens, temperature: categorical.score(logits, tokens, 1.0))


def score_one_row_late(patch):
    original = factors.Scorer.read
    patch.setattr(factors.Scorer, "read", lambda *a: [torch.cat([x[:, :, 1:], x[:, :, -1:]], 2) for x in original(*a)])


def resample_without_moving_the_cache(patch):
    patch.setattr(factors.Scorer, "fork", lambda self, ancestors: None)


def leave_finished_particles_out_of_annealing(patch):
    original = round_module.anneal

    def anneal(particles, *arguments):
        moved = original(particles, *arguments)
        frozen = ~particles.alive & (particles.length > 0)
        return dataclasses.replace(moved, log_weight=torch.where(frozen, particles.log_weight, moved.log_weight))

    patch.setattr(round_module, "anneal", anneal)


def leave_finished_particles_out_of_annealed_rewards(patch):
    leave_finished_particles_out_of_annealing(patch)


def key_by_text_position(patch):
    patch.setattr(DraftProposal, "limit", ragged)
    original = DraftProposal.extend

    def extend(self, particles, world):
        def uniform(purpose, round, step, slots):
            at = particles.length + (step if purpose == 0 else 0) + purpose * 100
            rows = [world.keys.uniform(3, at[:, n], 0, slots)[:, n] for n in range(slots)]
            return torch.stack(rows, -1)

        return original(self, particles, dataclasses.replace(world, keys=SimpleNamespace(uniform=uniform), stratify=False))

    patch.setattr(DraftProposal, "extend", extend)


MUTANTS = {
    drop_bonus_weight: POWER,
    no_weight: LOCAL,
    drop_mask_normaliser: MASKED,
    share_the_first_token: LOCAL,
    ancestors_are_the_heaviest: POWER,
    weights_are_not_reset: POWER,
    evidence_only_when_all_groups_resample: POWER,
    weigh_tokens_after_the_end: POWER,
    score_at_the_wrong_temperature: WARM,
    score_one_row_late: POWER,
    resample_without_moving_the_cache: CACHED,
    leave_finished_particles_out_of_annealing: ANNEALED,
    leave_finished_particles_out_of_annealed_rewards: ANNEALED_BETA,
    key_by_text_position: RAGGED,
}


def worst_z(target, truth, options) -> float:
    """The largest |z| among the evidence and the eight expectations."""
    posts = many(target, **options)
    support = list(truth.gamma)
    weights = measure(posts, support)
    scores = [evidence_z(posts, truth)]
    for f in FUNCTIONS.values():
        values = np.array([float(f(x)) for x in support])
        scores.append(z_score(weights @ values, truth.z * truth.expectation(f)))
    return max(map(abs, scores))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_mutant_is_seen(monkeypatch, mutant):
    target, truth, options = MUTANTS[mutant]
    if mutant is key_by_text_position:  # the truth must hold in the same ragged runs
        monkeypatch.setattr(DraftProposal, "limit", ragged)
    assert worst_z(target, truth, options) < 4.2
    if mutant is no_weight:  # temperature alpha in place of the power alpha
        monkeypatch.setattr(factors, "power_draw", no_weight)
    else:
        mutant(monkeypatch)
    assert worst_z(target, truth, options) > 6


def test_dropping_dead_runs_is_seen():
    truth = exact(1, accept=lambda x: re.fullmatch("(a|b)*cb", text_of(x)) is not None)
    target = LM * sg.regex("(a|b)*cb")
    post = sg.sample(target, "ca", runs=20_000, groups=20_000, draft=SMALL, particles=1, max_tokens=T, seed=3)
    z = np.exp(post.run_log_evidence)
    assert (z == 0).mean() > 0.01
    assert math.isclose(post.log_evidence, math.log(z.mean()), rel_tol=1e-9)
    assert abs(z_score(z, truth.z)) < 4
    assert abs(z_score(z[z > 0], truth.z)) > 6


def test_weights_belong_to_their_particles(monkeypatch):
    """Before each resampling the log weights equal log p - log q of the particles' own tokens since the last one."""
    original, since, checked = round_module.resample, {}, []

    def total(particles):
        used = torch.arange(T) < particles.length[..., None]
        ratio = particles.token_log_p[..., 0].double() - particles.token_log_q.double()
        return torch.where(used, ratio, 0.0).sum(-1)

    def resample(particles, *arguments):
        want = total(particles) - since.get("base", 0.0)
        assert torch.allclose(particles.log_weight, want, atol=1e-5)
        chosen, go, ancestors, ess = original(particles, *arguments)
        assert torch.allclose(ess, effective_sample_size(want), atol=1e-3)
        held = torch.as_tensor(since.get("base", torch.zeros_like(want)))
        since["base"] = torch.where(go[:, None], total(chosen), held)
        checked.append(int(go.sum()))
        return chosen, go, ancestors, ess

    monkeypatch.setattr(round_module, "resample", resample)
    many(LM, groups=50, particles=16, draft=SMALL, block=1)
    assert len(checked) == 3
    assert sum(checked) > 20
