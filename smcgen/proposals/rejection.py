"""Adaptive weighted rejection: a proposal for potentials that cannot mask the vocabulary and can only judge a candidate.

Candidates v_1, v_2, ... are drawn without replacement from the local target P (p**alpha under the masks of those potentials
that have one) and put to the test one by one. The first that no potential kills is committed; then a few more are judged, only
to learn how much of P is good. With R_i the mass that was left before the i-th draw, v_n the last one judged and m(v) in {0, 1}
the verdict,

    log W += log Z_t + log A,        A = sum_{i<n} m(v_i) P(v_i) + R_n m(v_n),

the estimator of Raj (1956) for sampling without replacement. Given the candidates before the first good one it is an unbiased
estimate of the good mass among the rest, whichever of them came first, so that E[A 1{v is committed}] = m(v) P(v) for every
token. If the number of candidates is limited, a particle that found no good one dies; what it would have counted is in the
weight R_n of those that found one at the last try. Lipkin et al., "Fast controlled generation from language models with
adaptive weighted rejection sampling" (2025), use another estimator of A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from smcgen.kernels.categorical import draw
from smcgen.potentials.base import ALIVE
from smcgen.proposals.base import Drawing, World
from smcgen.proposals.target import commit_local, local_target
from smcgen.smc.factors import text_counts
from smcgen.smc.keys import CANDIDATE
from smcgen.smc.particles import Block, Particles


class RejectionProposal:
    """One token per round.

    Args:
        candidates: at most this many are judged for a token, at least 1; with 1 the proposal is the local target.
        more: judged after the first good one, at least 1: the more, the less noise in the weights.
    """

    block = least = 1

    def __init__(self, candidates: int, more: int = 1):
        self.candidates, self.more = candidates, more

    def admit(self, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        pass  # it reads nothing of its own

    def trim(self, length: torch.Tensor) -> None:
        pass

    def fork(self, ancestors: torch.Tensor) -> None:
        pass

    def extend(self, particles: Particles, world: World) -> Block:
        drawing = Drawing(particles, 1, len(world.scorer.columns))
        logits = world.scorer.read(particles, particles.tokens[..., :0], torch.zeros_like(particles.length))
        rows, left, allowed, cause = local_target(drawing, particles, world, logits)
        total = left.logsumexp(-1)
        if allowed is not None:
            left = left.masked_fill(~allowed, -torch.inf)
        chosen = torch.zeros_like(particles.length)
        log_q = torch.full_like(drawing.log_weight, -torch.inf)  # of the committed token under P; -inf: none yet
        good_mass = torch.zeros_like(log_q)  # of all judged but the last
        estimate = torch.zeros_like(log_q)
        to_go = torch.full_like(chosen, self.more)
        looking, log_z = drawing.alive, None
        for i in range(self.candidates):
            token, log_p, log_left = draw(left, world.uniform(CANDIDATE, drawing, i))
            log_z = log_left if log_z is None else log_z
            estimate = torch.where(looking & (log_left == -torch.inf), good_mass, estimate)  # nothing is left: it is known
            looking = looking & (log_left > -torch.inf)
            if not looking.any():
                break
            good, verdict = judge(world, particles, drawing, token, looking)
            cause = torch.where(looking & ~good & (log_q == -torch.inf), verdict, cause)
            rest = (log_left - log_z).exp()
            found = log_q > -torch.inf
            first = looking & good & ~found
            chosen = torch.where(first, token, chosen)
            log_q = torch.where(first, log_p + log_left - log_z, log_q)
            to_go = to_go - (looking & found).long()
            last = looking & ((to_go == 0) | (i == self.candidates - 1))
            estimate = torch.where(last, good_mass + rest * good, estimate)
            good_mass = good_mass + torch.where(looking & good, log_p.exp() * rest, 0.0)
            looking = looking & ~last
            left = left.scatter(-1, token[..., None], -torch.inf)
        assert log_z is not None
        log_good = log_z + estimate.log()
        drawing.leave(drawing.alive, log_good - total)
        drawn = drawing.alive & (log_q > -torch.inf)
        log_p = world.scorer.score([x[:, :, None] for x in rows], chosen[..., None], drawn[..., None])[:, :, 0]
        commit_local(drawing, world, log_p, drawing.alive, chosen, log_q, log_good, cause)
        return drawing.block()


def judge(
    world: World, particles: Particles, drawing: Drawing, token: torch.Tensor, active: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a particle that took `token` int64 [G, N] would live, bool [G, N], and else what would kill it, int64 [G, N]; for
    those that are `active`. The potentials are left as they were."""
    potentials = world.potentials
    length = particles.length + active
    reason, _ = world.ending.advance(token, drawing.stop_state, length)
    reason = torch.where(active, reason, particles.reason)
    counts = text_counts(active.long(), torch.where(active, reason, ALIVE))
    judges = [i for i, potential in enumerate(potentials.bound) if potential.kills]
    change, cause = potentials.extend(judges, token[..., None], counts)
    place = particles.length.clamp(max=particles.tokens.shape[-1] - 1)[..., None]
    tokens = torch.where(active[..., None], token[..., None], particles.tokens.gather(-1, place))
    ended = active & (reason != ALIVE) & (change > -torch.inf)
    taken = replace(particles, tokens=particles.tokens.scatter(-1, place, tokens), length=length, reason=reason)
    last, last_cause = potentials.finish(taken, ended, judges)
    potentials.rollback(counts, judges)
    return (change > -torch.inf) & (last > -torch.inf), torch.where(cause >= 0, cause, last_cause)
