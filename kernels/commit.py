"""What a round does once its block is drawn: the tokens are appended, the weights moved, the round measured.

In torch these are some hundred small operations; on a GPU each function here is one launch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from smcgen.kernels.device import on_triton
from smcgen.potentials.base import ALIVE, DEAD
from smcgen.smc.weights import normalize

if TYPE_CHECKING:
    from smcgen.kernels.resample import Resampled
    from smcgen.smc.particles import Block, Particles

MOST = 1024  # particles of a group that one program takes


class Said(NamedTuple):
    """What potentials say of a block: the change of sum_i beta_i log phi_i, float64 [G, N], and which of them gave 0."""

    change: torch.Tensor
    cause: torch.Tensor  # int64 [G, N], -1 if none


class Weighed(NamedTuple):
    """Fields of the particles after a block."""

    log_p: torch.Tensor  # float64 [G, N, J]
    log_phi: torch.Tensor  # float64 [G, N]
    log_weight: torch.Tensor  # float64 [G, N]
    reason: torch.Tensor  # int64 [G, N]
    cause: torch.Tensor  # int64 [G, N]
    log_z: torch.Tensor  # float64 [G]
    drawn: torch.Tensor  # int64 [G]


class Measured(NamedTuple):
    """What is known of a round before it resamples."""

    score: torch.Tensor  # float64 [G, N], log w - lambda * length
    chi_square: torch.Tensor  # float64 [G], see `RoundInfo`
    deaths: torch.Tensor  # int64 [G]
    log_left: torch.Tensor  # float64 [G, B], see `RoundInfo`
    judged: torch.Tensor  # int64 [G]
    accepted: torch.Tensor  # int64 [G]
    eligible: torch.Tensor  # bool [G], groups that took part and have a particle that goes on


def append(particles: Particles, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their log p and log q, and lengths of the particles once the block stands behind what they hold."""
    if on_triton(block.counts):
        from smcgen.kernels.gpu import commit as gpu

        return gpu.append(particles, block)
    size, room = block.tokens.shape[-1], particles.tokens.shape[-1]
    # Token t of the block goes to place length + t; what is not real goes to a column that is cut off.
    place = particles.length[..., None] + torch.arange(size, device=block.counts.device)
    real = torch.arange(size, device=block.counts.device) < block.counts[..., None]
    place = torch.where(real, place, room)

    def put(into: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([into, torch.zeros_like(into[:, :, :1])], 2)
        index = place.reshape(*place.shape, *[1] * (into.ndim - 3)).expand_as(values)
        return wide.scatter(2, index, values.to(into.dtype))[:, :, :room]

    return (
        put(particles.tokens, block.tokens),
        put(particles.token_log_p, block.token_log_p),
        put(particles.token_log_q, block.token_log_q),
        particles.length + block.counts,
    )


def weigh(particles: Particles, block: Block, soft: Said | None, last: Said | None, by_models: int) -> Weighed:
    """Moves the weights by a block.

    Args:
        particles: before the block.
        soft: of the soft potentials that read the block; None if there are none.
        last: of all potentials at the end of a text; None if there are none. It counts for particles that end with the block.
        by_models: the cause of death by a token that a language model gives probability 0, for which no potential is to blame.
    """
    if on_triton(block.counts) and block.counts.shape[1] <= MOST:
        from smcgen.kernels.gpu import commit as gpu

        return gpu.weigh(particles, block, soft, last, by_models)
    weight, log_phi, reason, cause = particles.log_weight + block.log_weight, particles.log_phi, block.reason, block.cause
    soft_scale, refused = particles.soft_scale[:, None], torch.zeros_like(particles.alive)
    if soft is not None:
        refused = soft.change == -torch.inf
        weight, log_phi = weight + soft_scale * soft.change, log_phi + soft.change
        reason, cause = torch.where(refused, DEAD, reason), torch.where(refused, soft.cause, cause)
    closed = torch.zeros_like(refused)
    if last is not None:
        ended = particles.alive & (reason != ALIVE) & (reason != DEAD)
        change = torch.where(ended, last.change, 0.0)
        closed = change == -torch.inf
        weight, log_phi = weight + soft_scale * change, log_phi + change
    dead = (weight == -torch.inf) & (reason != DEAD)
    blame = by_models if last is None else torch.where(closed, last.cause, by_models)
    return Weighed(
        log_p=particles.log_p + block.token_log_p.sum(2),
        log_phi=torch.where(refused | closed, 0.0, log_phi),  # finite: 0 stays 0
        log_weight=weight,
        reason=torch.where(dead, DEAD, reason),
        cause=torch.where(dead, blame, cause),
        log_z=particles.log_z + block.log_z.sum(-1),
        drawn=particles.drawn + block.counts.sum(-1),
    )


def measure(
    particles: Particles, before: Particles, block: Block, penalty: torch.Tensor, active: torch.Tensor, hard: bool
) -> Measured:
    """Particles after a block and before it; `penalty` is lambda of each group, float64 [G], `active` bool [G] the groups that
    took part, `hard` whether masks left only a part of the laws."""
    if on_triton(block.counts) and block.counts.shape[1] <= MOST:
        from smcgen.kernels.gpu import commit as gpu

        return gpu.measure(particles, before, block, penalty, active, hard)
    return Measured(
        score=particles.log_weight - penalty[:, None] * particles.length,
        chi_square=_chi_square(particles.log_weight - before.log_weight, before.log_weight),
        deaths=(before.alive & (particles.reason == DEAD)).sum(-1),
        log_left=_log_left(block.log_left, before.log_weight) if hard else block.log_left[:, 0],
        judged=block.judged.sum(-1),
        accepted=block.accepted.sum(-1),
        eligible=active & ~particles.done,
    )


def inherit(particles: Particles, score: torch.Tensor, resampled: Resampled) -> Particles:
    """The particles after a step of resampling by log `score` float64 [G, N]. In a group that is resampled particle i stands
    for w_i / a_i afterwards, a being the score; with a = w that is 1."""
    if on_triton(score) and score.shape[1] <= MOST:
        from smcgen.kernels.gpu import commit as gpu

        return gpu.inherit(particles, score, resampled)
    chosen, left = particles.select(resampled.ancestors), score.gather(1, resampled.ancestors)
    return replace(
        chosen,
        log_weight=torch.where(resampled.go[:, None], chosen.log_weight - left, chosen.log_weight),
        log_evidence=particles.log_evidence + torch.where(resampled.go, resampled.log_mean, 0.0),
    )


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
