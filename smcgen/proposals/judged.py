"""Acceptance of a round's drafted tokens by `kernels.verify`: all positions of all particles in a few launches.

`proposals.lenient` walks along the positions and keeps laws float64 [G, N, V] at each; on a CUDA device that is most of the
launches of a round. Here the logits of draft and target are judged together, and what is left is to drop what comes after the
end of a sample. The law of the text and the weights are the same. Of the random numbers one differs: particles share out the
interval of the last token's number by what they held before the round, for the tokens of the round are not known yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from smcgen.kernels.verify import verify
from smcgen.proposals.base import World
from smcgen.smc.keys import ACCEPT, BONUS

if TYPE_CHECKING:
    from smcgen.proposals.lenient import Judgement

DEVICES = ("cuda",)  # where it is worth while; the torch reference of `verify` serves on any


def applies(world: World) -> bool:
    """Whether the rounds of this world can be judged here: one language model, and nothing that bars tokens."""
    return (
        world.keys.item.device.type in DEVICES
        and len(world.scorer.columns) == 1
        and not world.scorer.contrast
        and not world.ending.condition
        and not world.potentials.hard
    )


def judge(judgement: Judgement) -> None:
    """Fills `judgement.drawing` with the block of every particle, and `judgement.row`."""
    particles, world, drawing = judgement.particles, judgement.world, judgement.drawing
    draft, steps, proposal = judgement.draft, judgement.steps, judgement.proposal
    scorer, chains, drafted = world.scorer, judgement.chains, len(judgement.steps)
    shape = particles.length.shape

    def rows(x: torch.Tensor) -> torch.Tensor:
        """[G, N * M, ...] -> [G * N, M, ...]"""
        return x.unflatten(1, (-1, chains)).flatten(0, 1)

    numbers = [world.keys.uniform(ACCEPT, particles.round, k, draft.counts.shape[1]) for k in range(drafted)]
    # Block verification is for exponent 1 alone. Elsewhere an exponent may change from round to round.
    exponent = None if judgement.whole else (scorer.exponents * particles.scale).repeat_interleave(shape[1])
    verdict = verify(
        rows(judgement.logits[0])[:, :, : drafted + 1],
        rows(torch.stack([step.logits for step in steps], 2)),
        rows(draft.tokens[..., :drafted]),
        rows(torch.stack(numbers, -1)),
        world.uniform(BONUS, drawing).flatten(),
        temperature=scorer.temperatures[0],
        draft_temperature=proposal.temperature,
        exponent=exponent,
        leniency=judgement.leniency,
        counts=rows(draft.counts),
        block=judgement.whole,
    )
    active = drawing.alive
    accepted = torch.where(active, verdict.accepted.view(shape), 0)
    rejected = active & verdict.rejected.view(shape)
    if chains > 1:
        judgement.row = torch.where(active, judgement.first + verdict.chain.view(shape), judgement.first)

    none = torch.full_like(accepted, -1)
    tokens, laws = (x.t().contiguous().view(-1, *shape) for x in (verdict.tokens, verdict.log_law))
    for k in range(drafted + 1):
        drawing.append(world, drawing.alive & (k <= accepted), tokens[k], laws[k], none)

    used = torch.arange(drafted + 1, device=accepted.device) < drawing.counts[..., None]
    gain, log_z = (torch.where(used, x.view(*shape, -1), 0.0).sum(-1) for x in (verdict.log_gain, verdict.log_z))
    scorer.readers[0].watch(verdict.log_z.view(*shape, -1), active[..., None])
    drawing.token_log_p[..., : drafted + 1, 0] = verdict.log_p.view(*shape, -1)
    drawing.log_weight = drawing.log_weight + gain
    drawing.log_z = drawing.log_z + log_z
    drawing.accepted, drawing.judged = accepted, accepted + rejected
