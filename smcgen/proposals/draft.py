"""A draft model proposes K tokens, the target scores them in one forward and adds a bonus token: SMC speculative decoding.

    log W += sum_k [ sum_j alpha_j log p_j(x_k) - log q(x_k) ] + log Z_bonus,

q being the draft as it was sampled from: its temperature, and the mask of the hard potentials with its normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smcgen.kernels.categorical import draw, scaled
from smcgen.lm.batch import Reader
from smcgen.proposals.base import Drawing, World
from smcgen.proposals.target import draw_local
from smcgen.smc.keys import DRAFT
from smcgen.smc.particles import Block, Particles


class DraftProposal:
    """Every drafted token is kept (leniency infinite, one chain), so all live particles grow in step.

    Args:
        reader: the draft model, with one context per group.
        drafted: K >= 1, tokens drafted per round; a round commits K + 1 with the bonus token.
        temperature: of the draft.
    """

    def __init__(self, reader: Reader, drafted: int, temperature: float):
        self.reader, self.drafted, self.temperature = reader, drafted, temperature
        self.block = drafted + 1

    def admit(self, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self.reader.admit(groups, [prompts])

    def trim(self, length: torch.Tensor) -> None:
        self.reader.trim(length)

    def fork(self, ancestors: torch.Tensor) -> None:
        self.reader.fork(ancestors)

    def limit(self, particles: Particles, world: World) -> torch.Tensor:
        """How many tokens to draft for each particle, int64 [G, N]."""
        return world.ending.draftable(particles.length).clamp(max=self.drafted)

    def extend(self, particles: Particles, world: World) -> Block:
        drawing = Drawing(particles, self.block, len(world.scorer.columns))
        limit = self.limit(particles, world)
        self._draft(drawing, particles, world, limit)
        drafted, counts = drawing.tokens[..., : self.drafted], drawing.counts
        logits = world.scorer.read(particles, drafted, counts)
        used = torch.arange(self.drafted, device=counts.device) < counts[..., None]
        log_p = world.scorer.score([x[:, :, :-1] for x in logits], drafted, used)
        drawing.token_log_p[..., : self.drafted, :] = log_p
        exponents = world.scorer.exponents * particles.scale[:, None]  # [G, J]
        target = (log_p * exponents[:, None, None, :]).sum((-1, -2))
        proposal = torch.where(used, drawing.token_log_q[..., : self.drafted], 0.0).sum(-1)
        drawing.log_weight = drawing.log_weight + torch.where(drawing.log_weight > -torch.inf, target - proposal, 0.0)
        draw_local(drawing, particles, world, logits)
        return drawing.block()

    def _draft(self, drawing: Drawing, particles: Particles, world: World, limit: torch.Tensor) -> None:
        """Commits up to `limit` [G, N] tokens from the draft."""
        tokens, unread = self.reader.unread(particles.tokens, particles.length, 2)
        logits = self.reader.read(tokens, torch.where(particles.alive, unread, 0))
        row = (unread - 1).clamp(0, 1)[..., None, None].expand(*unread.shape, 1, logits.shape[-1])
        logits = logits.gather(-2, row)[0, :, :, 0]
        token = particles.length  # any int64 [G, N]; replaced by the first draw
        for k in range(self.drafted):
            active = drawing.alive & (k < limit)
            if k > 0:
                logits = self.reader.read(token[None, ..., None], active[None].long())[0, :, :, 0]
            allowed, cause = world.potentials.mask(active)
            uniform = world.uniform(DRAFT, drawing, k)
            token, log_q, log_total = draw(scaled(logits, self.temperature), uniform, allowed)
            self.reader.watch(log_total, active)
            drawing.commit(world, active, token, log_q, cause)
