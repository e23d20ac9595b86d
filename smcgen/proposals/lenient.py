"""From lossless speculative decoding to SMC: drafted tokens are accepted with leniency s, from M chains per particle.

With p~ = p**alpha * m / Z_t the local target and q the draft, a drafted token is accepted with probability min(1, s p~ / q);
the first rejection draws from the residual and ends the particle's block; if all are accepted, a bonus token comes from p~.
The weight needs the law L of the token, not how it came about (`kernels.verify` has L for M candidates):

    log W += log Z_t + log p~(x) - log L(x)   for every token of a block,     log W += log Z_t   for the bonus token.

s = 1 makes L = p~: nothing is approximated, whatever the draft. s infinite is `DraftProposal`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from smcgen.kernels.categorical import draw
from smcgen.kernels.verify import Levels, accept, levels, log_excess, log_law
from smcgen.lm.batch import Reader
from smcgen.proposals import judged
from smcgen.proposals.base import Drawing, World
from smcgen.proposals.draft import DraftProposal, Step
from smcgen.proposals.target import end_in_time
from smcgen.smc.asked import Asked
from smcgen.smc.chains import offspring, pick, split, widen
from smcgen.smc.factors import text_counts
from smcgen.smc.host import asks
from smcgen.smc.keys import ACCEPT, BONUS, DRAFT
from smcgen.smc.particles import Block, Particles
from smcgen.target import Truncation

DRAFTED = ("tokens", "length", "reason", "stop_state", "history", "cause")  # of the particles, what each chain begins with


class LenientProposal(DraftProposal):
    """Blocks end at the first rejection, so particles differ in length.

    Args:
        reader: the draft model, with `chains` rows for each particle (see `smc.chains`).
        drafted, temperature, truncation: as in `DraftProposal`.
        leniency: s, finite and >= 1.
        chains: M >= 1. The readers and hard potentials of the world must have as many.
        judgement: the rule of acceptance, a class derived from `Judgement`; None is that class itself.
    """

    def __init__(
        self,
        reader: Reader,
        drafted: int,
        temperature: float,
        truncation: Truncation,
        leniency: float,
        chains: int,
        judgement: type[Judgement] | None = None,
    ):
        super().__init__(reader, drafted, temperature, truncation)
        self.leniency, self.chains, self.judgement = leniency, chains, judgement or Judgement
        self.least = 1

    def trim(self, length: torch.Tensor) -> None:
        self.reader.trim(widen(length, self.chains))

    def fork(self, ancestors: torch.Tensor) -> None:
        self.reader.fork(offspring(ancestors, self.chains))

    def uniform(self, world: World, drawing: Drawing, step: int) -> torch.Tensor:
        # The candidates of one particle must be independent draws.
        if self.chains == 1:
            return super().uniform(world, drawing, step)
        return world.keys.uniform(DRAFT, drawing.round, step, drawing.counts.shape[1])

    def extend(self, particles: Particles, world: World) -> Block:
        wide = particles
        if self.chains > 1:
            wide = replace(particles, **{name: widen(getattr(particles, name), self.chains) for name in DRAFTED})
        draft = Drawing(wide, self.drafted, 0, self.limit(wide, world))
        steps = list(self._draft(draft, wide, world))
        asked = world.potentials.ask(draft.alive, draft.reading) if judged.applies(world) else None
        logits = world.scorer.read(wide, draft.tokens[..., : self.drafted], draft.counts)
        draft.hear()
        return self.settle(self.judgement(self, particles, world, draft, steps, asked, logits))

    def settle(self, judgement: Judgement) -> Block:
        """The block of a round whose drafted tokens have been scored."""
        return judgement.block()


class Judgement:
    """One round of acceptance: walks along the drafted tokens of all particles, then draws the token that ends each block.

    Attributes:
        row: int64 [G, N], the row (among R = N * M) of the chain whose tokens the particle has taken so far.
        live: bool [G, N, M], chains that agree with those tokens.
        asked: the masks after all that each chain has drafted, for rounds that are judged as a whole (`proposals.judged`).
        rejected: bool [G, N], every candidate at the particle's next position was rejected.
        level, candidates, log_q: at the position of the rejection; for other particles, what makes the residual p~ itself.
        whole: the block is judged as a whole (see `proposals.block`).
    """

    whole = False

    def __init__(
        self,
        proposal: LenientProposal,
        particles: Particles,
        world: World,
        draft: Drawing,
        steps: list[Step],
        asked: Asked | None,
        logits: list[torch.Tensor],
    ):
        self.proposal, self.particles, self.world = proposal, particles, world
        self.draft, self.steps, self.asked, self.logits = draft, steps, asked, logits
        self.chains, self.leniency = proposal.chains, proposal.leniency
        self.drawing = Drawing(particles, proposal.block, len(world.scorer.columns))
        groups, count = particles.length.shape
        device = particles.length.device
        self.first = torch.arange(0, count * self.chains, self.chains, device=device).expand(groups, -1)
        self.row = self.first

    def block(self) -> Block:
        if judged.applies(self.world):
            found = judged.judge(self)
            judged.accept(self, found)
            self._settle()
            judged.end(self, found)
            return self.drawing.block()
        self._begin()
        self._accept()
        self._settle()
        self._end()
        return self.drawing.block()

    def _begin(self) -> None:
        """Nothing is taken and nothing rejected."""
        shape, device = self.row.shape, self.row.device
        self.live = torch.ones(*shape, self.chains, dtype=torch.bool, device=device)
        self.rejected = torch.zeros_like(self.particles.alive)
        self.candidates = torch.zeros_like(self.live)
        blank = torch.zeros(*shape, self.chains + 1, dtype=torch.float64, device=device)
        self.level = Levels(blank, torch.ones_like(blank), torch.ones_like(blank))
        self.log_q = torch.full((*shape, self.logits[0].shape[-1]), -torch.inf, dtype=torch.float64, device=device)

    def _accept(self) -> None:
        """Takes drafted tokens until the first rejection."""
        for k, step in enumerate(self.steps):
            candidates = self.live & split(k < self.draft.counts, self.chains)
            going = self.drawing.alive & ~self.rejected & candidates.any(-1)
            if asks(going) and not going.any():
                break
            self._judge(k, step, candidates & going[..., None], going)

    def _judge(self, k: int, step: Step, candidates: torch.Tensor, going: torch.Tensor) -> None:
        """The k-th drafted tokens."""
        allowed = None if step.allowed is None else pick(step.allowed, self.row)
        rows, log_p, log_z = self._target(torch.full_like(self.row, k), allowed, going)
        stuck = going & (log_z == -torch.inf)  # the target has no mass on any allowed token
        self.drawing.kill(stuck, -1)
        candidates, going = candidates & ~stuck[..., None], going & ~stuck
        log_q = self._draft_law(step, allowed)
        level = levels(log_p, log_q, candidates, self.leniency)
        tokens = split(self.draft.tokens[..., k], self.chains)
        uniform = self.world.keys.uniform(ACCEPT, self.particles.round, k, self.draft.counts.shape[1])
        x_p, x_q = log_p.gather(-1, tokens), log_q.gather(-1, tokens)
        which = accept(level, x_p, x_q, candidates, split(uniform, self.chains), self.leniency)
        taken = going & (which < self.chains)
        which = which.clamp(max=self.chains - 1)

        token = tokens.gather(-1, which[..., None])[..., 0]
        log_p_token, log_q_token = (x.gather(-1, which[..., None])[..., 0] for x in (x_p, x_q))
        law = log_law(level, log_p_token, log_q_token, candidates, self.leniency)
        self._commit(taken, token, law, log_z, log_p_token - law, rows)
        self.row = torch.where(taken, self.first + which, self.row)
        later = torch.arange(self.chains, device=which.device) >= which[..., None]
        self.live = self.live & (later & (tokens == token[..., None]) | ~taken[..., None])
        ended_here = pick(self.draft.refused & (self.draft.counts == k + 1), self.row)
        self.drawing.kill(taken & ended_here, pick(self.draft.cause, self.row))

        fresh = going & ~taken
        self.drawing.accepted = self.drawing.accepted + taken
        self.drawing.judged = self.drawing.judged + going
        if not asks(fresh) or fresh.any():
            self.rejected = self.rejected | fresh
            self.candidates = torch.where(fresh[..., None], candidates, self.candidates)
            self.log_q = torch.where(fresh[..., None], log_q, self.log_q)
            old, new = self.level, level
            self.level = Levels(
                *(torch.where(fresh[..., None], getattr(new, f), getattr(old, f)) for f in ("cost", "mass", "reach"))
            )

    def _end(self) -> None:
        """The token that ends each block: from the residual after a rejection, else from the local target."""
        world, drawing = self.world, self.drawing
        active = drawing.alive
        first = torch.arange(self.chains, device=active.device) == 0
        allowed, cause = world.potentials.mask((active[..., None] & first).flatten(1))
        allowed, cause = None if allowed is None else pick(allowed, self.first), pick(cause, self.first)
        allowed, cause = end_in_time(drawing, self.particles, world, active, allowed, cause)
        rows, log_p, log_z = self._target(drawing.counts, allowed, active)
        mass = log_excess(log_p, self.log_q, self.level.cost[..., -1:])
        token, law, _ = draw(mass, world.uniform(BONUS, drawing))
        log_p_token, log_q_token = (x.gather(-1, token[..., None])[..., 0] for x in (log_p, self.log_q))
        lenient = log_law(self.level, log_p_token, log_q_token, self.candidates, self.leniency)
        law = torch.where(self.rejected & (law != -torch.inf), lenient, law)
        gain = torch.where(self.rejected, log_p_token - law, 0.0)
        taken = self._commit(active, token, law, log_z, gain, rows, cause)
        drawing.read(world, token, taken)

    def _commit(
        self,
        active: torch.Tensor,
        token: torch.Tensor,
        law: torch.Tensor,
        log_z: torch.Tensor,
        gain: torch.Tensor,
        rows: list[torch.Tensor],
        cause: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Appends tokens [G, N] where `active`, with the weight log Z_t + gain; rows: each factor's logits [G, N, V]."""
        drawing, at = self.drawing, self.drawing.counts
        taken = drawing.append(self.world, active, token, law, -1 if cause is None else cause)
        log_p = self.world.scorer.score([x[:, :, None] for x in rows], token[..., None], taken[..., None])
        column = torch.where(taken, at, drawing.size)[..., None, None].expand(*at.shape, 1, log_p.shape[-1])
        drawing.token_log_p.scatter_(2, column, log_p)
        drawing.log_weight = drawing.log_weight + torch.where(taken, log_z + gain, 0.0)
        drawing.log_z = drawing.log_z + torch.where(taken, log_z, 0.0)
        return taken

    def _settle(self) -> None:
        """Everything that read the chains goes back to the tokens each particle has taken; all its rows are equal then."""
        rows = widen(self.row, self.chains)
        if self.chains > 1:
            self.proposal.reader.fork(rows)
            self.world.scorer.follow(rows)
            self.world.potentials.follow(rows)
        if self.world.potentials.hard:
            read = pick(text_counts(self.draft.counts, self.draft.reason), self.row)
            kept = text_counts(self.drawing.counts, self.drawing.reason)
            extra = torch.where(self.particles.alive, read - kept, 0)
            self.world.potentials.rollback(widen(extra, self.chains))

    def _target(
        self, position: torch.Tensor, allowed: torch.Tensor | None, used: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """At `position` int64 [G, N] of the chain each particle follows: each factor's logits [G, N, V], log p~ float64
        [G, N, V] and log Z_t float64 [G, N]."""
        rows = []
        for x in self.logits:
            at = position[..., None, None].clamp(max=x.shape[2] - 1).expand(-1, -1, 1, x.shape[-1])
            rows.append(pick(x, self.row).gather(2, at)[:, :, 0])
        local = self.world.scorer.local(rows, self.particles.scale, used)
        log_z = local.logsumexp(-1)
        if allowed is not None:
            log_total, local = log_z, local.masked_fill(~allowed, -torch.inf)
            log_z = local.logsumexp(-1)
            self.drawing.leave(used, log_z - log_total)
        return rows, torch.where(log_z[..., None] == -torch.inf, -torch.inf, local - log_z[..., None]), log_z

    def target_law(self, i: int) -> torch.Tensor:
        """log p~ float64 [G, N, V], without masks, after i of the tokens that each particle has taken."""
        at = torch.full_like(self.row, i)
        return self._target(at, None, torch.zeros_like(self.particles.alive))[1]

    def draft_law(self, i: int) -> torch.Tensor:
        """log q float64 [G, N, V] likewise, for the draft that the group has drafted with."""
        return pick(self.steps[i].log_mass, self.row).double().log_softmax(-1)

    def _draft_law(self, step: Step, allowed: torch.Tensor | None) -> torch.Tensor:
        """log q float64 [G, N, V] of the chain each particle follows."""
        log_q = pick(step.log_mass, self.row).double() - pick(step.log_total, self.row)[..., None]
        return log_q if allowed is None else log_q.masked_fill(~allowed, -torch.inf)
