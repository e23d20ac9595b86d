"""A draft model proposes K tokens, the target scores them in one forward and adds a bonus token: SMC speculative decoding.

    log W += sum_k [ sum_j alpha_j log p_j(x_k) - log q(x_k) ] + log Z_bonus,

q being the draft as it was sampled from: its temperature, and the mask of the hard potentials with its normaliser.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from smcgen.kernels.categorical import power_draw, scaled, unpack
from smcgen.kernels.truncate import truncate
from smcgen.lm.batch import Reader
from smcgen.proposals.base import Drawing, World
from smcgen.proposals.target import draw_local
from smcgen.smc.keys import DRAFT
from smcgen.smc.particles import Block, Particles
from smcgen.target import WHOLE, Truncation


@dataclass
class Step:
    """What the tokens of one drafting step were drawn from: q = exp(log_mass) * allowed / exp(log_total)."""

    logits: torch.Tensor  # [G, R, V], -inf beyond a truncation
    temperature: float
    bits: torch.Tensor | None  # int32 [G, R, words], the tokens allowed (see `kernels.categorical`)

    @cached_property
    def allowed(self) -> torch.Tensor | None:
        """bool [G, R, V]."""
        return None if self.bits is None else unpack(self.bits, self.logits.shape[-1])

    @cached_property
    def log_mass(self) -> torch.Tensor:
        """float32 [G, R, V]."""
        return scaled(self.logits, self.temperature)

    @cached_property
    def log_total(self) -> torch.Tensor:
        """float64 [G, R]."""
        mass = self.log_mass.exp()
        return (mass if self.allowed is None else mass * self.allowed).sum(-1, dtype=torch.float64).log()


class DraftProposal:
    """Every drafted token is kept (leniency infinite, one chain), so all live particles grow in step.

    Args:
        reader: the draft model, with one context per group.
        drafted: K >= 1, tokens drafted per round; a round commits K + 1 with the bonus token.
        temperature, truncation: of the draft.
    """

    def __init__(self, reader: Reader, drafted: int, temperature: float, truncation: Truncation = WHOLE):
        self.reader, self.drafted, self.temperature, self.truncation = reader, drafted, temperature, truncation
        self.block = self.least = drafted + 1

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
        drawing = Drawing(particles, self.block, len(world.scorer.columns), self.limit(particles, world))
        for _ in self._draft(drawing, particles, world):
            pass
        counts = drawing.counts
        asked = world.potentials.ask(drawing.alive, drawing.reading)
        logits = world.scorer.read(particles, drawing.tokens[..., : self.drafted], counts)
        drawing.hear()
        # The row after the last drafted token is scored with the others, of which it is no copy, and then left out.
        used = torch.arange(self.block, device=counts.device) < counts[..., None]
        log_p = world.scorer.score(logits, drawing.tokens[..., : self.block], used)[..., : self.drafted, :]
        drawing.token_log_p[..., : self.drafted, :] = log_p
        exponents = world.scorer.exponents * particles.scale[:, None]  # [G, J]
        target = (log_p * exponents[:, None, None, :]).sum((-1, -2))
        proposal = drawing.token_log_q[..., : self.drafted].sum(-1)
        drawing.log_weight = drawing.log_weight + torch.where(drawing.log_weight > -torch.inf, target - proposal, 0.0)
        drawing.kill(target == -torch.inf, -1)  # a token that the target truncates away
        draw_local(drawing, particles, world, logits, asked)
        return drawing.block()

    def _draft(self, drawing: Drawing, particles: Particles, world: World) -> Iterator[Step]:
        """Commits tokens from the draft, one a step, up to the limit of `drawing`."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        token = particles.length  # any int64 [G, N]; replaced by the first draw
        for k in range(self.drafted):
            active, one = drawing.going()
            asked = world.potentials.ask(active, drawing.reading)  # the host is at it while the draft reads
            if k == 0:
                logits = self._first(particles)
            else:
                logits = self.reader.read(token[None, ..., None], one[None])[0, :, :, 0]
            if drawing.hear() is not None:
                active, _ = drawing.going()
            bits, cause = asked.bits(active) if world.potentials.hard else (None, -1)
            law = truncate(logits, self.temperature, *self.truncation)
            step = Step(law, self.temperature, bits)
            allowed = bits if law.is_cuda else step.allowed
            drawn = power_draw(law, self.uniform(world, drawing, k), self.temperature, allowed=allowed)
            token = drawn.token
            seen.append((drawn.log_z, active))
            if allowed is not None:
                drawing.leave(active, drawn.log_left)
            drawing.commit(world, active, token, drawn.log_q, cause)
            yield step
        self.reader.watch(torch.cat([log_z for log_z, _ in seen], -1), torch.cat([used for _, used in seen], -1))

    def _first(self, particles: Particles) -> torch.Tensor:
        """The draft reads what it has not read of the samples: logits [G, R, V] after their last tokens."""
        tokens, unread = self.reader.unread(particles.tokens, particles.length, particles.alive, 2)
        logits = self.reader.read(tokens, unread)
        row = (unread - 1).clamp(min=0)[..., None, None].expand(*unread.shape, 1, logits.shape[-1])
        return logits.gather(-2, row)[0, :, :, 0]

    def uniform(self, world: World, drawing: Drawing, step: int) -> torch.Tensor:
        """float64 [G, R] for the draft's draws."""
        return world.uniform(DRAFT, drawing, step)
