"""The base model as its own proposal: one token per round from the local target p**alpha * m, weight its normaliser

    Z_t = sum_v prod_j p_j(v | prefix)**alpha_j * m(v | prefix),

the locally optimal proposal (Doucet, Godsill & Andrieu 2000). Leaving Z_t out turns a power into a temperature and a
condition into mere masking.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smcgen.proposals.base import Drawing, World
from smcgen.smc.asked import Asked
from smcgen.smc.keys import BONUS
from smcgen.smc.particles import Block, Particles


class TargetProposal:
    """One locally optimal token per round."""

    block = least = 1

    def admit(self, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        pass  # it reads nothing of its own

    def trim(self, length: torch.Tensor) -> None:
        pass

    def fork(self, ancestors: torch.Tensor) -> None:
        pass

    def extend(self, particles: Particles, world: World) -> Block:
        drawing = Drawing(particles, 1, len(world.scorer.columns))
        asked = world.potentials.ask(drawing.alive)
        logits = world.scorer.read(particles, particles.tokens[..., :0], torch.zeros_like(particles.length))
        draw_local(drawing, particles, world, logits, asked)
        return drawing.block()


def draw_local(drawing: Drawing, particles: Particles, world: World, logits: Sequence[torch.Tensor], asked: Asked) -> None:
    """Commits one token from the local target to every particle that is still alive, and adds log Z_t to its weight.

    Args:
        logits: per factor [G, N, T + 1, V], as `Scorer.read` returned them after T drafted tokens; the row after each
            particle's last committed token is used.
        asked: the masks of all these particles.
    """
    active = drawing.alive
    uniform = world.uniform(BONUS, drawing)
    rows = next_rows(drawing, logits)
    allowed, cause = allowed_next(drawing, particles, world, active, asked)
    drawn, log_p = world.scorer.draw(rows, particles.scale, uniform, allowed, active)
    if allowed is not None:
        drawing.leave(active, drawn.log_left)
    commit_local(drawing, world, log_p, active, drawn.token, drawn.log_q, drawn.log_z, cause)


def next_rows(drawing: Drawing, logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Per factor, the logits [G, N, V] after each particle's last committed token; see `draw_local`."""
    if logits[0].shape[2] == 1:
        return [x[:, :, 0] for x in logits]
    return [x.gather(2, drawing.counts[..., None, None].expand(-1, -1, 1, x.shape[-1]))[:, :, 0] for x in logits]


def allowed_next(
    drawing: Drawing, particles: Particles, world: World, active: torch.Tensor, asked: Asked
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The tokens allowed next where `active`, bool [G, N, V] or None, and the potential that left none, int64 [G, N]."""
    allowed, cause = asked.mask(active)
    return end_in_time(drawing, particles, world, active, allowed, cause)


def end_in_time(
    drawing: Drawing,
    particles: Particles,
    world: World,
    active: torch.Tensor,
    allowed: torch.Tensor | None,
    cause: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`allowed` and `cause` where only texts that end within the budget count: the last token of the budget has to end one."""
    if world.ending.condition:
        last = particles.length + drawing.counts == world.ending.max_tokens - 1
        ends = world.ending.terminating(drawing.stop_state) | ~last[..., None]
        allowed = ends if allowed is None else allowed & ends
        barred = active & ~allowed.any(-1) & (cause < 0)
        cause = torch.where(barred, world.potentials.blame, cause)
    return allowed, cause


def local_target(
    drawing: Drawing, particles: Particles, world: World, logits: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """What the next token of each live particle has to follow.

    Returns the rows of `logits` (see `draw_local`) per factor, [G, N, V]; the log mass of every token, float64 [G, N, V]; the
    tokens allowed, bool [G, N, V] or None; and the potential that left none, int64 [G, N]."""
    active = drawing.alive
    rows = next_rows(drawing, logits)
    local = world.scorer.local(rows, particles.scale, active)
    allowed, cause = allowed_next(drawing, particles, world, active, world.potentials.ask(active))
    return rows, local, allowed, cause


def commit_local(
    drawing: Drawing,
    world: World,
    log_p: torch.Tensor,
    active: torch.Tensor,
    token: torch.Tensor,
    log_q: torch.Tensor,
    log_weight: torch.Tensor,
    cause: torch.Tensor,
) -> None:
    """Commits `token` int64 [G, N] of `log_p` float64 [G, N, J], drawn with log probability `log_q`, where `active`, and adds
    `log_weight` float64 [G, N]; a particle of log probability -inf dies of `cause`."""
    at = drawing.counts
    taken = drawing.append(world, active, token, log_q, cause)
    column = torch.where(taken, at, drawing.size)[..., None, None].expand(*at.shape, 1, log_p.shape[-1])
    drawing.token_log_p.scatter_(2, column, log_p[:, :, None])
    drawing.log_weight = drawing.log_weight + torch.where(taken, log_weight, 0.0)
    if world.potentials.hard:
        drawing.read(world, token, taken)
