"""Several drafts in one decoding: in each round, each group drafts with the one that its policy has chosen.

The choice rests on past rounds only, so that it moves neither the law of lossless decoding nor the mean of the evidence. The
reward of a round is tokens per particle and unit of cost, as a share of the most possible, so that its mean is proportional to
tokens per second: what a policy maximises is the speed, not the acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from smcgen.drafts.bandits import Policy
from smcgen.lm.batch import Reader
from smcgen.proposals.base import World
from smcgen.proposals.lenient import LenientProposal
from smcgen.smc.keys import CHOOSE
from smcgen.smc.particles import Block, Particles
from smcgen.target import Truncation


class Rivals:
    """Readers of several draft models in the place of one (see `lm.batch.Reader`): `arm` int64 [groups] says which reads.

    A draft that was not chosen for a while has more to read when its turn comes."""

    def __init__(self, readers: Sequence[Reader]):
        self.readers = list(readers)
        self.shape = readers[0].shape
        self.arm = torch.zeros(self.shape[1], dtype=torch.int64, device=readers[0].prompt_length.device)

    def admit(self, groups: Sequence[int], prompts: Sequence[Sequence[Sequence[int]]]) -> None:
        for reader in self.readers:
            reader.admit(groups, prompts)

    def unread(self, tokens: torch.Tensor, length: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `Reader`, of the chosen draft of each group; as wide as it must be."""
        counts = [reader.prompt_length + length - reader.length for reader in self.readers]
        chosen = self._chosen(counts)
        width = max(width, int(chosen.max()))
        found = [reader.unread(tokens, length, width)[0] for reader in self.readers]
        # Each reader places its own count of unread tokens at the front.
        return self._chosen(found), chosen

    def read(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        logits = []
        for d, reader in enumerate(self.readers):
            logits.append(reader.read(tokens, torch.where(self.arm[None, :, None] == d, counts, 0)).float())
        return self._chosen(logits)

    def trim(self, length: torch.Tensor) -> None:
        for reader in self.readers:
            reader.trim(length)

    def fork(self, ancestors: torch.Tensor) -> None:
        for reader in self.readers:
            reader.fork(ancestors)

    def watch(self, log_prob: torch.Tensor, used: torch.Tensor) -> None:
        for d, reader in enumerate(self.readers):
            reader.watch(log_prob, used & (self.arm[:, None] == d))

    def verify(self) -> None:
        for reader in self.readers:
            reader.verify()

    def _chosen(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of tensors [1, groups, ...], one per draft: each group's own."""
        out = values[0]
        for d, value in enumerate(values[1:], 1):
            out = torch.where((self.arm == d).view(1, -1, *[1] * (out.ndim - 2)), value, out)
        return out


class RivalProposal(LenientProposal):
    """`LenientProposal` with several drafts.

    Args:
        rivals: the readers of the drafts; a group's policy starts anew with each item.
        costs: of a drafted token of each draft, in forwards of the target.
        make: a policy for so many arms.
        others: as in `LenientProposal`.
    """

    def __init__(
        self,
        rivals: Rivals,
        drafted: int,
        temperature: float,
        truncation: Truncation,
        leniency: float,
        chains: int,
        costs: Sequence[float],
        make: Callable[[int], Policy],
    ):
        super().__init__(rivals, drafted, temperature, truncation, leniency, chains)  # pyright: ignore[reportArgumentType] reads as a Reader does
        self.rivals, self.make = rivals, make
        round_cost = 1 + drafted * np.array(costs)
        self.worth = round_cost.min() / round_cost / self.block  # reward of one token, at most 1 / block
        self.policies = [make(len(costs)) for _ in range(rivals.shape[1])]
        self.rounds = np.zeros(len(costs), np.int64)  # that each draft was used in

    def admit(self, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        super().admit(groups, prompts)
        for group in groups:
            self.policies[group] = self.make(len(self.worth))

    def extend(self, particles: Particles, world: World) -> Block:
        active = (~particles.done).nonzero()[:, 0].tolist()
        uniform = world.keys.uniform(CHOOSE, particles.round, 0, len(self.worth)).cpu().numpy()
        for group in active:
            arm = int(self.policies[group].choose(uniform[group : group + 1])[0])
            self.rivals.arm[group] = arm
            self.rounds[arm] += 1
        block = super().extend(particles, world)
        tokens, alive = block.counts.cpu().numpy(), particles.alive.cpu().numpy()
        for group in active:
            arm = self.rivals.arm[group : group + 1].cpu().numpy()
            mean = tokens[group][alive[group]].mean()
            self.policies[group].learn(arm, mean * self.worth[arm])
        return block
