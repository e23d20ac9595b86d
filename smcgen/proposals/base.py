"""The contract between a round and a proposal, and what a proposal may use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from smcgen.kernels.device import on_triton
from smcgen.potentials.base import ALIVE, BUDGET, DEAD, END, STOP
from smcgen.smc.chains import widen
from smcgen.smc.ending import Ending
from smcgen.smc.factors import Potentials, Scorer, text_counts
from smcgen.smc.keys import Keys
from smcgen.smc.particles import Block, Drawn, Particles

HASH = 0x5851F42D4C957F2D  # multiplies the hash of a history at each token


@dataclass
class World:
    """Everything outside the particles: the factors of the target, the rules of ending, the randomness."""

    scorer: Scorer
    potentials: Potentials
    ending: Ending
    keys: Keys
    stratify: bool = True

    def uniform(self, purpose: int, drawing: Drawing, step: int = 0) -> torch.Tensor:
        """float64 [G, N] in (0, 1) for a draw by every particle. With `stratify`, particles that hold the same tokens share
        out the interval, so that copies differ as much as the law allows; each number alone is uniform all the same."""
        if self.stratify:
            return self.keys.stratified(purpose, drawing.round, step, drawing.history)
        return self.keys.uniform(purpose, drawing.round, step, drawing.history.shape[1])


class Proposal(Protocol):
    """Draws a block of tokens for every live particle.

    Blocks may be ragged: `counts` differ between particles. A block's weight is
    log gamma(x b) - log gamma(x) - log Q(b | x), Q being exactly what was drawn from, or an unbiased estimate of that ratio.
    What a proposal decides (how many tokens, which draft) may depend on the past, never on the tokens it is about to weigh.
    """

    block: int  # tokens it can commit in one round
    least: int  # tokens that it commits to a particle that is alive after the round

    def admit(self, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Groups begin anew after these prompts (token ids)."""
        ...

    def extend(self, particles: Particles, world: World) -> Block:
        """A block for every particle; finished and dead particles get 0 tokens and log weight 0. The hard potentials and
        the models of `world` have read the block afterwards (all but its last token at least); what the former say of the
        last token need not have been heard."""
        ...

    def trim(self, length: torch.Tensor) -> None:
        """The samples have these lengths now, int64 [G, N]: anything read beyond is forgotten."""
        ...

    def fork(self, ancestors: torch.Tensor) -> None:
        """Particle n becomes a copy of particle `ancestors[g, n]`."""
        ...


class Drawing(Drawn):
    """A block under construction: tokens are committed one at a time, and after each the particle goes on, ends or dies.

    The tensors have one column more than `size`, into which rows that commit nothing write; before it they are 0 beyond
    `counts`.

    Attributes:
        limit: int64 [G, N], how many tokens each particle may commit at most; None if nothing but its end stops it.
        refused: bool [G, N], a hard potential has refused a token that its mask let through.
    """

    def __init__(self, particles: Particles, size: int, factors: int, limit: torch.Tensor | None = None):
        shape, device = particles.length.shape, particles.length.device
        self.first, self.limit = particles.length, limit
        self.size = size
        wide = (*shape, size + 1)
        self.tokens, self.counts, self.judged = _zeros([wide, shape, shape], torch.int64, device)
        real = [wide, wide, shape, shape, (*wide, factors)]
        self.token_log_q, self.log_left, self.log_weight, self.log_z, self.token_log_p = _zeros(real, torch.float64, device)
        self.accepted = self.judged
        self.reason, self.stop_state, self.cause = particles.reason, particles.stop_state, particles.cause
        self.history, self.round = particles.history, particles.round
        self.reading = None
        self.refused = torch.zeros(shape, dtype=torch.bool, device=device)
        self._going: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def alive(self) -> torch.Tensor:
        """bool [G, N]: particles that may commit another token."""
        return self.reason == ALIVE

    def going(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Particles that are alive and have committed less than `limit`: bool [G, N], and the same as 0 or 1, int64 [G, N]."""
        if self._going is None:
            going = self.alive if self.limit is None else self.alive & (self.counts < self.limit)
            self._going = going, going.long()
        return self._going

    def kill(self, dead: torch.Tensor, cause: torch.Tensor | int) -> None:
        super().kill(dead, cause)
        self._going = None

    def commit(
        self, world: World, active: torch.Tensor, token: torch.Tensor, log_q: torch.Tensor, cause: torch.Tensor | int
    ) -> None:
        """Appends `token` int64 [G, N], drawn with log probability `log_q` float64 [G, N], where `active` bool [G, N].

        A log probability of -inf says that nothing could be drawn: the particle dies of `cause` int64 [G, N], -1 if no
        potential is to blame. The hard potentials read the token, unless it ended the sample; what they say of it is there
        for `hear`."""
        taken = self.append(world, active, token, log_q, cause)
        if world.potentials.hard:
            self.read(world, token, taken)

    def append(
        self, world: World, active: torch.Tensor, token: torch.Tensor, log_q: torch.Tensor, cause: torch.Tensor | int
    ) -> torch.Tensor:
        """`commit` without the hard potentials: bool [G, N], where a token was appended."""
        if on_triton(token):
            return self._append_in_one(world, active, token, log_q, cause)
        taken = active & (log_q != -torch.inf)
        column = torch.where(taken, self.counts, self.size)[..., None]
        self.tokens.scatter_(-1, column, token[..., None])
        self.token_log_q.scatter_(-1, column, log_q[..., None])
        self.counts = self.counts + taken
        reason, state = world.ending.advance(token, self.stop_state, self.first + self.counts)
        self.reason = torch.where(taken, reason, self.reason)
        self.stop_state = torch.where(taken, state, self.stop_state)
        # A multiplicative hash; a collision of two histories would do no harm (see `World.uniform`).
        self.history = torch.where(taken, (self.history + token + 1) * HASH, self.history)
        self.kill(active & ~taken, cause)
        return taken

    def append_all(self, world: World, offered: torch.Tensor, tokens: torch.Tensor, log_q: torch.Tensor) -> None:
        """`append` to the live particles of `tokens` int64 [G, N, T] with `log_q` float64 [G, N, T], one after the other: the
        first `offered` int64 [G, N], up to the one that ends the sample."""
        if on_triton(tokens):
            self._append_in_one(world, None, tokens, log_q, -1, offered)
            return
        for t in range(tokens.shape[-1]):
            self.append(world, self.alive & (t < offered), tokens[..., t], log_q[..., t], -1)

    def _append_in_one(
        self,
        world: World,
        active: torch.Tensor | None,
        token: torch.Tensor,
        log_q: torch.Tensor,
        cause: torch.Tensor | int,
        offered: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`append` or `append_all` in one launch."""
        from smcgen.kernels.gpu.append import append

        state = (self.counts, self.reason, self.stop_state, self.history, self.cause, self.log_weight)
        rule = world.ending
        blame = cause if isinstance(cause, torch.Tensor) else None
        *state, taken, going, one = append(
            self.tokens, self.token_log_q, state, self.first, token, log_q, active, blame, rule.end, rule.next_state,
            rule.max_tokens, HASH, (ALIVE, END, STOP, BUDGET, DEAD), offered, self.limit,
        )  # fmt: skip
        self.counts, self.reason, self.stop_state, self.history, self.cause, self.log_weight = state
        self._going = going, one
        return taken

    def read(self, world: World, token: torch.Tensor, taken: torch.Tensor) -> None:
        """The hard potentials, which may follow M chains of each particle, read the token just appended where `taken`."""
        one = text_counts(taken.long(), torch.where(taken, self.reason, ALIVE))
        chains = world.potentials.rows // token.shape[1]
        self.hear()
        reading = world.potentials.read(world.potentials.hard, widen(token[..., None], chains), widen(one, chains))
        self.reading = None if world.potentials.sure else reading

    def hear(self) -> torch.Tensor | None:
        refused = super().hear()
        if refused is not None:
            self.refused = self.refused | refused
        return refused

    def leave(self, active: torch.Tensor, log_share: torch.Tensor) -> None:
        """Notes the share of the next token's law that the masks leave, log float64 [G, N], where `active`."""
        column = torch.where(active, self.counts, self.size)[..., None]
        self.log_left.scatter_(-1, column, log_share.double()[..., None])

    def block(self) -> Block:
        return Block(
            tokens=self.tokens[..., :-1],
            counts=self.counts,
            log_weight=self.log_weight,
            token_log_p=self.token_log_p[..., :-1, :],
            token_log_q=self.token_log_q[..., :-1],
            reason=self.reason,
            stop_state=self.stop_state,
            history=self.history,
            cause=self.cause,
            log_z=self.log_z,
            log_left=self.log_left[..., :-1],
            judged=self.judged,
            accepted=self.accepted,
            reading=self.reading,
        )


def _zeros(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Tensors of these shapes, all set to 0 at once."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return [x.view(*shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]
