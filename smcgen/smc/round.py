"""One round of Sequential Monte Carlo, as in the textbook: propose, weigh, resample.

    log w += log gamma_c(x b) - log gamma_{c-1}(x) - log Q(b | x)
    where ESS(w) < threshold * N:  log Z-hat += log mean w;  ancestors ~ w;  w = 1

Chopin & Papaspiliopoulos, "An Introduction to Sequential Monte Carlo" (2020), algorithm 10.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from smcgen.kernels import commit as kernel
from smcgen.kernels.resample import resample as draw_ancestors
from smcgen.potentials.base import ALIVE, DEAD
from smcgen.proposals.base import Proposal, World
from smcgen.smc.factors import text_counts
from smcgen.smc.host import asks
from smcgen.smc.keys import RESAMPLE
from smcgen.smc.particles import Block, Particles, RoundInfo
from smcgen.smc.schedule import Ramp
from smcgen.smc.weights import log_mean_exp


@dataclass(frozen=True)
class Algorithm:
    """How the engine draws, whatever the target: none of it moves what is drawn from, only how well.

    Attributes:
        proposal: draws blocks.
        scheme: a key of `smcgen.smc.resampling.SCHEMES`.
        threshold: resample a group when ESS < threshold * N; 0 never, 1 always.
        ramp: exponents of the intermediate targets.
        length_penalty: lambda: resample on w exp(-lambda * length), restored afterwards. Any value is legal; None takes the
            mean log Z_t per token of the group's past rounds, which keeps short particles from winning where lengths differ.
    """

    proposal: Proposal
    scheme: str
    threshold: float
    ramp: Ramp
    length_penalty: float | None = None

    def penalty(self, particles: Particles) -> torch.Tensor:
        """lambda of each group, float64 [G]."""
        if self.length_penalty is not None:
            return torch.full_like(particles.log_z, self.length_penalty)
        return particles.log_z / particles.drawn.clamp(min=1)


def step(particles: Particles, world: World, algorithm: Algorithm) -> tuple[Particles, RoundInfo]:
    """Runs one round in every group that has a live particle; other groups are left as they are."""
    active = ~particles.done
    ramp = algorithm.ramp
    if not ramp.steady:
        particles = anneal(particles, world, active, ramp.scale(particles.round), ramp.soft_scale(particles.round))
    penalty = algorithm.penalty(particles)
    block = algorithm.proposal.extend(particles, world)
    before = particles
    particles = commit(particles, world, block)
    if not ramp.steady:
        particles = complete(particles, world, active)

    measured = kernel.measure(particles, before, block, penalty, active, bool(world.potentials.hard))
    log_weight = particles.log_weight
    algorithm.proposal.trim(particles.length)
    world.scorer.trim(particles.length)
    particles, resampled, ancestors, ess = resample(particles, world, algorithm, measured.score, measured.eligible)
    if not asks(resampled) or bool(resampled.any()):
        algorithm.proposal.fork(ancestors)
        world.scorer.fork(ancestors)
        world.potentials.fork(ancestors)
    if not ramp.steady:
        particles = complete(particles, world, active)  # resampling can leave finished particles alone
    particles = replace(particles, round=particles.round + active)
    evidence = particles.log_evidence + log_mean_exp(particles.log_weight)
    info = RoundInfo(
        active=active,
        ess=ess,
        resampled=resampled,
        log_evidence=evidence,
        chi_square=measured.chi_square,
        deaths=measured.deaths,
        log_weight=log_weight,
        log_left=measured.log_left,
        ancestors=ancestors,
        tokens=block.tokens,
        counts=block.counts,
        judged=measured.judged,
        accepted=measured.accepted,
    )
    return particles, info


def anneal(
    particles: Particles, world: World, groups: torch.Tensor, scale: torch.Tensor, soft_scale: torch.Tensor
) -> Particles:
    """Moves every particle, finished ones included, of `groups` bool [G] to the exponents scale * alpha_j and
    soft_scale * beta_i: log w += (scale' - scale) alpha_j log p_j + (soft_scale' - soft_scale) beta_i log phi_i."""
    scale = torch.where(groups, scale, particles.scale)
    soft_scale = torch.where(groups, soft_scale, particles.soft_scale)
    exponents = world.scorer.exponents * (scale - particles.scale)[:, None]  # [G, J]
    change = (exponents[:, None] * particles.log_p).sum(-1)
    change = change + (soft_scale - particles.soft_scale)[:, None] * particles.log_phi
    # A dead particle may hold a token of probability 0, and 0 * log 0 is not a number.
    log_weight = torch.where(particles.log_weight > -torch.inf, particles.log_weight + change, -torch.inf)
    return replace(particles, log_weight=log_weight, scale=scale, soft_scale=soft_scale)


def complete(particles: Particles, world: World, active: torch.Tensor) -> Particles:
    """The last intermediate target is the target itself: a group that is done gets its full exponents."""
    full = torch.ones_like(particles.scale)
    return anneal(particles, world, active & particles.done, full, full)


def commit(particles: Particles, world: World, block: Block) -> Particles:
    """Appends a block, lets the soft potentials read it, and closes the telescope of those that ended."""
    potentials = world.potentials
    tokens, token_log_p, token_log_q, length = kernel.append(particles, block)
    read = closed = None
    if potentials.soft:
        read = potentials.read(potentials.soft, block.tokens, text_counts(block.counts, block.reason))
    if potentials.bound:
        ended = particles.alive & (block.reason != ALIVE) & (block.reason != DEAD)
        last_tokens = [reading for reading in (read, block.reading) if reading is not None]
        closed = potentials.close(tokens, length, block.reason, ended, after=last_tokens)
    # What is on the host has all been asked for; it is waited for once.
    block.hear()
    soft, last = (None if reading is None else kernel.Said(*reading.result()) for reading in (read, closed))
    weighed = kernel.weigh(particles, block, soft, last, by_models=len(potentials.bound) + 1)
    return replace(
        particles,
        tokens=tokens,
        token_log_p=token_log_p,
        token_log_q=token_log_q,
        length=length,
        stop_state=block.stop_state,
        history=block.history,
        **weighed._asdict(),
    )


def resample(
    particles: Particles, world: World, algorithm: Algorithm, score: torch.Tensor, eligible: torch.Tensor
) -> tuple[Particles, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Resamples, by log score float64 [G, N], the groups that are `eligible` bool [G], still need it and are not dead.

    Returns the particles, which groups were resampled, bool [G], the ancestors, int64 [G, N], and the ESS before, [G]."""
    uniforms = world.keys.uniform(RESAMPLE, particles.round, 0, 2 * score.shape[-1])
    done = draw_ancestors(score, uniforms, algorithm.scheme, algorithm.threshold, eligible)
    return kernel.inherit(particles, score, done), done.go, done.ancestors, done.ess
