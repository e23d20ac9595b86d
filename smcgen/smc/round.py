"""One round of Sequential Monte Carlo, as in the textbook: propose, weigh, resample.

    log w += log gamma_c(x b) - log gamma_{c-1}(x) - log Q(b | x)
    where ESS(w) < threshold * N:  log Z-hat += log mean w;  ancestors ~ w;  w = 1

Chopin & Papaspiliopoulos, "An Introduction to Sequential Monte Carlo" (2020), algorithm 10.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from smcgen.kernels import resample as kernel
from smcgen.potentials.base import ALIVE, DEAD
from smcgen.proposals.base import Proposal, World
from smcgen.smc.factors import text_counts
from smcgen.smc.host import asks
from smcgen.smc.keys import RESAMPLE
from smcgen.smc.particles import Block, Particles, RoundInfo
from smcgen.smc.schedule import Ramp
from smcgen.smc.weights import log_mean_exp, normalize


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
    before, alive = particles.log_weight, particles.alive
    particles = commit(particles, world, block)
    if not ramp.steady:
        particles = complete(particles, world, active)

    score = particles.log_weight - penalty[:, None] * particles.length
    log_weight, chi_square = particles.log_weight, _chi_square(particles.log_weight - before, before)
    algorithm.proposal.trim(particles.length)
    world.scorer.trim(particles.length)
    deaths = (alive & (particles.reason == DEAD)).sum(-1)
    particles, resampled, ancestors, ess = resample(particles, world, algorithm, score, active)
    if not asks(resampled) or bool(resampled.any()):
        algorithm.proposal.fork(ancestors)
        world.scorer.fork(ancestors)
        world.potentials.fork(ancestors)
    if not ramp.steady:
        particles = complete(particles, world, active)  # resampling can leave finished particles alone
    particles = replace(particles, round=particles.round + active)
    evidence = particles.log_evidence + log_mean_exp(particles.log_weight)
    tested, accepted = block.judged.sum(-1), block.accepted.sum(-1)
    info = RoundInfo(
        active=active,
        ess=ess,
        resampled=resampled,
        log_evidence=evidence,
        chi_square=chi_square,
        deaths=deaths,
        log_weight=log_weight,
        log_left=_log_left(block.log_left, before) if world.potentials.hard else block.log_left[:, 0],
        ancestors=ancestors,
        tokens=block.tokens,
        counts=block.counts,
        judged=tested,
        accepted=accepted,
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
    size, room = block.tokens.shape[-1], particles.tokens.shape[-1]
    # Token t of the block goes to place length + t; what is not real goes to a column that is cut off.
    place = particles.length[..., None] + torch.arange(size, device=block.counts.device)
    real = torch.arange(size, device=block.counts.device) < block.counts[..., None]
    place = torch.where(real, place, room)

    def put(into: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([into, torch.zeros_like(into[:, :, :1])], 2)
        index = place.reshape(*place.shape, *[1] * (into.ndim - 3)).expand_as(values)
        return wide.scatter(2, index, values.to(into.dtype))[:, :, :room]

    read = potentials.read(potentials.soft, block.tokens, text_counts(block.counts, block.reason))
    tokens, length = put(particles.tokens, block.tokens), particles.length + block.counts
    ended = particles.alive & (block.reason != ALIVE) & (block.reason != DEAD)
    last_tokens = [read] if block.reading is None else [read, block.reading]
    closed = potentials.close(tokens, length, block.reason, ended, after=last_tokens)
    # What is on the host has all been asked for; it is waited for once.
    block.hear()
    soft, soft_cause = read.result()
    soft_scale = particles.soft_scale[:, None]
    particles = replace(
        particles,
        tokens=tokens,
        token_log_p=put(particles.token_log_p, block.token_log_p),
        token_log_q=put(particles.token_log_q, block.token_log_q),
        length=length,
        log_p=particles.log_p + block.token_log_p.sum(2),
        log_phi=particles.log_phi + soft,
        log_weight=particles.log_weight + block.log_weight + soft_scale * soft,
        reason=torch.where(soft == -torch.inf, DEAD, block.reason),
        stop_state=block.stop_state,
        history=block.history,
        log_z=particles.log_z + block.log_z.sum(-1),
        drawn=particles.drawn + block.counts.sum(-1),
        cause=torch.where(soft == -torch.inf, soft_cause, block.cause),
    )
    last, last_cause = closed.result()
    if potentials.bound:
        last = torch.where(ended & (particles.reason != DEAD), last, 0.0)
    weight = particles.log_weight + soft_scale * last
    # A token that a language model gives probability 0 leaves no weight and no potential to blame.
    dead = (weight == -torch.inf) & (particles.reason != DEAD)
    by_models = len(potentials.bound) + 1
    return replace(
        particles,
        log_phi=torch.where((last == -torch.inf) | (soft == -torch.inf), 0.0, particles.log_phi + last),  # finite: 0 stays 0
        log_weight=weight,
        reason=torch.where(dead, DEAD, particles.reason),
        cause=torch.where(dead, torch.where(last == -torch.inf, last_cause, by_models), particles.cause),
    )


def resample(
    particles: Particles, world: World, algorithm: Algorithm, score: torch.Tensor, active: torch.Tensor
) -> tuple[Particles, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Resamples, by log score float64 [G, N], the groups that are active, still need it and are not dead.

    Returns the particles, which groups were resampled, bool [G], the ancestors, int64 [G, N], and the ESS before, [G]."""
    n = score.shape[-1]
    uniforms = world.keys.uniform(RESAMPLE, particles.round, 0, 2 * n)
    done = kernel.resample(score, uniforms, algorithm.scheme, algorithm.threshold, active & ~particles.done)
    # After resampling by a score a, particle i stands for w_i / a_i; with a = w that is 1.
    chosen = particles.select(done.ancestors)
    left = torch.where(done.go[:, None], chosen.log_weight - score.gather(1, done.ancestors), chosen.log_weight)
    evidence = particles.log_evidence + torch.where(done.go, done.log_mean, 0.0)
    return replace(chosen, log_weight=left, log_evidence=evidence), done.go, done.ancestors, done.ess


def _chi_square(increment: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Weighted estimate of E[w**2] / E[w]**2 - 1 of the block's weights, from one round: [G, N] -> [G]."""
    base = normalize(before)
    increment = torch.where(before > -torch.inf, increment, -torch.inf)  # the dead have no increment
    top = increment.amax(-1, keepdim=True)
    w = (increment - torch.where(top.isfinite(), top, 0.0)).exp()
    mean = (base * w).sum(-1)
    return torch.where(mean > 0, (base * w.square()).sum(-1) / mean.square().clamp(min=1e-300) - 1, 0.0)


def _log_left(log_left: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """log E[share of the mass that the masks left, product over the tokens up to each]: [G, N, B], [G, N] -> [G, B]."""
    return (normalize(before).log()[..., None] + log_left.cumsum(-1)).logsumexp(1)
