"""Several drafts and block lengths in one decoding: in each round, each group drafts with the arm that its policy has chosen.

The choice rests on past rounds only, so that it moves neither the law of lossless decoding nor the mean of the evidence. The
reward of a round is tokens per particle and unit of cost, as a share of the most possible, so that its mean is proportional to
tokens per second: what a policy maximises is the speed, not the acceptance. With full information (`drafts.hedge`) every draft
reads the tokens that were verified, and each round teaches about all arms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from smcgen.drafts.bandits import Policy
from smcgen.drafts.hedge import Hedge
from smcgen.kernels.categorical import log_softmax
from smcgen.kernels.truncate import truncate
from smcgen.lm.batch import Reader
from smcgen.proposals.base import World
from smcgen.proposals.lenient import Judgement, LenientProposal
from smcgen.smc.chains import widen
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

    def unread(
        self, tokens: torch.Tensor, length: torch.Tensor, alive: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `Reader`, of the chosen draft of each group; as wide as it must be."""
        counts = [reader.prompt_length + length - reader.length for reader in self.readers]
        chosen = self._chosen(counts)
        width = max(width, int(chosen.max()))
        found, counts = zip(*(reader.unread(tokens, length, alive, width) for reader in self.readers), strict=True)
        # Each reader places its own count of unread tokens at the front.
        return self._chosen(found), self._chosen(counts)

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

    @property
    def broken(self) -> torch.Tensor:
        return torch.stack([reader.broken for reader in self.readers]).any()

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
    """`LenientProposal` with several arms: drafts, each with one or several block lengths.

    Args:
        rivals: the readers of the drafts; a group's policy starts anew with each item.
        arms: (draft, tokens drafted) of each arm.
        costs: of a round with each arm, in forwards of the target.
        make: a policy for these arms, as it is when an item begins.
        reward: "speed", tokens per unit of cost, times the share of the particles that the block's weights leave effective;
            or "acceptance", the share of the drafted tokens that were accepted of those judged.
        others: as in `LenientProposal`.

    Attributes:
        rounds: int64 [arms], in which each arm was used.
        together: a policy that chooses nothing, and learns from the rounds of all groups.
    """

    def __init__(
        self,
        rivals: Rivals,
        temperature: float,
        truncation: Truncation,
        leniency: float,
        chains: int,
        arms: Sequence[tuple[int, int]],
        costs: Sequence[float],
        make: Callable[[], Policy],
        reward: str = "speed",
        judgement: type[Judgement] | None = None,
    ):
        longest = max(drafted for _, drafted in arms)
        reader: Any = rivals  # reads as a Reader does
        super().__init__(reader, longest, temperature, truncation, leniency, chains, judgement)
        self.rivals, self.arms, self.make, self.reward = rivals, list(arms), make, reward
        round_cost = np.array(costs, np.float64)
        self.worth = round_cost.min() / round_cost / self.block  # reward of one token, at most 1 / block
        self.policies = [make() for _ in range(rivals.shape[1])]
        self.together = make()
        self.most = torch.zeros_like(rivals.arm)  # tokens that each group drafts
        self.rounds = np.zeros(len(arms), np.int64)

    def admit(self, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        super().admit(groups, prompts)
        for group in groups:
            self.policies[group] = self.make()

    def limit(self, particles: Particles, world: World) -> torch.Tensor:
        return torch.minimum(super().limit(particles, world), self.most[:, None])

    def extend(self, particles: Particles, world: World) -> Block:
        active = (~particles.done).nonzero()[:, 0].tolist()
        uniform = world.keys.uniform(CHOOSE, particles.round, 0, len(self.arms)).cpu().numpy()
        chosen = {}
        for group in active:
            arm = chosen[group] = int(self.policies[group].choose(uniform[group : group + 1])[0])
            self.rivals.arm[group], self.most[group] = self.arms[arm]
            self.rounds[arm] += 1
        self.drafted = max((self.arms[arm][1] for arm in chosen.values()), default=1)
        block = super().extend(particles, world)
        if not isinstance(self.together, Hedge):
            self._learn(chosen, particles, block)
        return block

    def _learn(self, chosen: dict[int, int], particles: Particles, block: Block) -> None:
        """Each group's policy learns what the arm that it chose has earned."""
        block.hear()
        tokens, alive = block.counts.cpu().numpy(), particles.alive.cpu().numpy()
        judged, accepted = block.judged.cpu().numpy(), block.accepted.cpu().numpy()
        log_weight = block.log_weight.cpu().numpy()
        for group, arm in chosen.items():
            here = alive[group]
            if self.reward == "acceptance":
                if judged[group].sum() == 0:
                    continue
                earned = accepted[group].sum() / judged[group].sum()
            else:
                earned = tokens[group][here].mean() * self.worth[arm] * effective_share(log_weight[group][here])
            for policy in (self.policies[group], self.together):
                policy.learn(np.array([arm]), np.array([earned]))

    def settle(self, judgement: Judgement) -> Block:
        block = super().settle(judgement)
        if isinstance(self.together, Hedge):
            self._learn_all(judgement, block)
        return block

    def _learn_all(self, judgement: Judgement, block: Block) -> None:
        """Every draft is scored at the positions of the tokens just committed: accepted with probability a = sum min(p, q),
        it would have made 1 + a + ... + a**K tokens with a block of K."""
        particles = judgement.particles
        used = [particles.alive & (i < block.counts) for i in range(len(judgement.steps))]
        log_p = [judgement.target_law(i) for i in range(len(used))]
        overlap = np.zeros((len(self.rivals.readers), len(block.counts)))
        for d, reader in enumerate(self.rivals.readers):
            own = self.rivals.arm == d
            others = self._catch_up(reader, particles, block, ~own)
            for i, here in enumerate(used):
                log_q = others(i)
                reader.watch(log_q, (here & ~own[:, None])[..., None])
                log_q = torch.where(own[:, None, None], judgement.draft_law(i), log_q)
                shared = torch.minimum(log_p[i], log_q).exp().sum(-1)
                overlap[d] += torch.where(here, shared, 0.0).sum(-1).cpu().numpy()
        count = torch.stack(used).sum((0, 2)).cpu().numpy()
        for group in np.flatnonzero(count):
            a = np.minimum(overlap[:, group] / count[group], 1.0)
            if self.reward == "acceptance":
                earned = [a[d] for d, _ in self.arms]
            else:
                earned = [(a[d] ** np.arange(k + 1)).sum() * w for (d, k), w in zip(self.arms, self.worth, strict=True)]
            for policy in (self.policies[group], self.together):
                assert isinstance(policy, Hedge)
                policy.learn_all(np.array([earned]))

    def _catch_up(
        self, reader: Reader, particles: Particles, block: Block, groups: torch.Tensor
    ) -> Callable[[int], torch.Tensor]:
        """A draft that was not chosen reads, in `groups` bool [G], all but the last token of the new block (the first row of
        each particle; the others become copies). Returns position in the block -> log q float64 [G, N, V]."""
        room, size = particles.tokens.shape[-1], block.tokens.shape[-1]
        step = torch.arange(size, device=block.counts.device)
        place = torch.where(step < block.counts[..., None], particles.length[..., None] + step, room)
        tokens = torch.cat([particles.tokens, torch.zeros_like(particles.tokens[..., :1])], -1)
        tokens = tokens.scatter(-1, place, block.tokens)[..., :room]
        length = widen(particles.length + block.counts - 1, self.chains)
        first = torch.arange(length.shape[1], device=length.device) % self.chains == 0
        reads = groups[:, None] & widen(particles.alive & (block.counts > 0), self.chains) & first
        behind = torch.where(reads, reader.prompt_length + length - reader.length, 0)
        width = max(int(behind.max()), 1)
        unread, _ = reader.unread(widen(tokens, self.chains), length, reads, width)
        logits = reader.read(unread, behind)[0, :, :: self.chains]
        if self.chains > 1:
            reader.fork(widen(torch.arange(particles.length.shape[1], device=length.device)[None], self.chains) * self.chains)
        start = behind[0, :, :: self.chains] - block.counts

        def law(i: int) -> torch.Tensor:
            at = (start + i).clamp(0, width - 1)[..., None, None].expand(-1, -1, 1, logits.shape[-1])
            row = truncate(logits.gather(2, at)[:, :, 0].float(), self.temperature, *self.truncation)
            return log_softmax(row, self.temperature)

        return law


def effective_share(log_weight: np.ndarray) -> float:
    """(sum w)**2 / (n sum w**2) of log weights float64 [n]: 1 where weights are equal, 0 where none is left."""
    top = log_weight.max(initial=-np.inf)
    if not np.isfinite(top):
        return 0.0
    w = np.exp(log_weight - top)
    return float(w.sum() ** 2 / (len(w) * np.square(w).sum()))
