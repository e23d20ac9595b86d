"""Acceptance of a round's drafted tokens by `kernels.verify`: all positions of all particles in a few launches.

`proposals.lenient` walks along the positions and keeps laws float64 [G, N, V] at each; on a CUDA device that is most of the
launches of a round. Here the logits of draft and target are judged together, and what is left is to drop what comes after the
end of a sample. The law of the text and the weights are the same. Of the random numbers one differs: particles share out the
interval of the last token's number by what they held before the round, for the tokens of the round are not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smcgen.kernels.verify import Verdict, totals, verify
from smcgen.proposals.base import World
from smcgen.smc.chains import pick
from smcgen.smc.keys import ACCEPT, BONUS

if TYPE_CHECKING:
    from smcgen.proposals.lenient import Judgement

DEVICES: tuple[str, ...] = ("cuda",)  # where it is worth while; the torch reference of `verify` serves on any


def applies(world: World) -> bool:
    """Whether the rounds of this world can be judged here: one language model, and a budget that asks nothing of the last
    token."""
    return (
        world.keys.item.device.type in DEVICES
        and len(world.scorer.columns) == 1
        and not world.scorer.contrast
        and not world.ending.condition
    )


@dataclass
class Judged:
    """What `verify` says of a round's particles."""

    verdict: Verdict  # its rows are the particles of all groups
    tokens: torch.Tensor  # int64 [G, N, K + 1]
    log_law: torch.Tensor  # float64 [G, N, K + 1]
    accepted: torch.Tensor  # int64 [G, N], 0 for particles that are not alive: they have drafted nothing
    refused: torch.Tensor | None  # bool [G, N], a hard potential refused the last of the tokens accepted; None without any
    cause: torch.Tensor | int  # int64 [G, N], the potential that leaves no token to end the block with, -1 if none


def judge(judgement: Judgement) -> Judged:
    """Which drafted tokens are taken, and the token after them; sets `judgement.row`."""
    particles, world, drawing = judgement.particles, judgement.world, judgement.drawing
    draft, steps = judgement.draft, judgement.steps
    scorer, chains, drafted = world.scorer, judgement.chains, len(judgement.steps)
    shape = particles.length.shape

    def rows(x: torch.Tensor) -> torch.Tensor:
        """[G, N * M, ...] -> [G * N, M, ...]"""
        return x.unflatten(1, (-1, chains)).flatten(0, 1)

    # Block verification is for exponent 1 alone. Elsewhere an exponent may change from round to round.
    exponent = None if judgement.whole else (scorer.exponents * particles.scale).repeat_interleave(shape[1])
    allowed, cause = _allowed(judgement)
    verdict = verify(
        rows(judgement.logits[0])[:, :, : drafted + 1],
        rows(torch.stack([step.logits for step in steps], 2)),
        rows(draft.tokens[..., :drafted]),
        rows(world.keys.uniforms(ACCEPT, particles.round, drafted, draft.counts.shape[1])),
        world.uniform(BONUS, drawing).flatten(),
        temperature=scorer.temperatures[0],
        draft_temperature=judgement.proposal.temperature,
        exponent=exponent,
        leniency=judgement.leniency,
        counts=rows(draft.counts),
        allowed=None if allowed is None else rows(allowed),
        block=judgement.whole,
    )
    alive, accepted = particles.alive, verdict.accepted.view(shape)
    drawing.accepted, drawing.judged = accepted, accepted + verdict.rejected.view(shape)
    if chains > 1:
        judgement.row = judgement.first + verdict.chain.view(shape)
    scorer.readers[0].watch(verdict.log_z.view(*shape, -1), alive[..., None])
    refused = None
    if isinstance(cause, torch.Tensor):
        whole = alive & (accepted == pick(draft.counts, judgement.row))
        refused = whole & (accepted > 0) & pick(draft.refused, judgement.row)
        cause = torch.where(whole, pick(cause, judgement.row), -1)
    tokens, log_law = (x.view(*shape, -1) for x in (verdict.tokens, verdict.log_law))
    return Judged(verdict, tokens, log_law, accepted, refused, cause)


def _allowed(judgement: Judgement) -> tuple[torch.Tensor | None, torch.Tensor | int]:
    """The tokens that the hard potentials allow at every position of every chain, int32 [G, N * M, K + 1, words], None without
    hard potentials; and which of them leaves none after all that was drafted, int64 [G, N * M], or -1 without."""
    draft, steps = judgement.draft, judgement.steps
    bits = [step.bits for step in steps if step.bits is not None]
    if not bits:
        return None, -1
    assert judgement.asked is not None
    last, cause = judgement.asked.bits(draft.alive)
    assert last is not None
    allowed = torch.stack([*bits, last], 2)
    # A chain that could draft no more has the mask that stopped it; the others go on after their last token.
    after = torch.arange(len(bits) + 1, device=last.device) == draft.counts[..., None]
    allowed = torch.where((after & draft.alive[..., None])[..., None], last[:, :, None], allowed)
    return allowed, torch.where(draft.alive, cause, draft.cause)


def accept(judgement: Judgement, judged: Judged) -> None:
    """Takes the accepted tokens; without hard potentials, which still have to be brought there, the last one too."""
    world, drawing = judgement.world, judgement.drawing
    offered = judged.accepted if world.potentials.hard else judged.accepted + 1
    drawing.append_all(world, offered, judged.tokens, judged.log_law)
    if judged.refused is not None:
        drawing.kill(judged.refused, pick(judgement.draft.cause, judgement.row))


def end(judgement: Judgement, judged: Judged) -> None:
    """Takes the token that ends each block, and the weights of all that were taken."""
    world, drawing, verdict = judgement.world, judgement.drawing, judged.verdict
    shape, positions = judged.accepted.shape, verdict.tokens.shape[1]
    if world.potentials.hard:
        active = drawing.alive
        reached = torch.arange(positions, device=active.device) < (judged.accepted + active)[..., None]
        drawing.log_left[..., :positions] = torch.where(reached, verdict.log_left.view(*shape, -1), 0.0)
        token, law = (x.gather(-1, judged.accepted[..., None])[..., 0] for x in (judged.tokens, judged.log_law))
        taken = drawing.append(world, active, token, law, judged.cause)
        drawing.read(world, token, taken)

    gain, log_z, log_p = totals(verdict, drawing.counts.flatten())
    drawing.token_log_p[..., :positions, 0] = log_p.view(*shape, -1)
    drawing.log_weight = drawing.log_weight + gain.view(shape)
    drawing.log_z = log_z.view(shape)
