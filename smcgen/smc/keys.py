"""Where every random number of a run comes from.

A number is keyed by (seed, item, run, slot, round of the group, step in the round, purpose), and no key is used twice. A key by
text position would be: a fork onto a shorter ancestor comes back to positions that its slot has already drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smcgen.kernels.philox import Key, per_slot, per_step, stratified

# What a number is for; proposals that need more purposes take the next free number here.
DRAFT, BONUS, RESAMPLE, SELECT, ACCEPT, CANDIDATE, CHOOSE, COLLAPSE = range(8)

MAX_SLOTS, MAX_STEPS, MAX_ROUNDS = 1 << 16, 1 << 16, 1 << 24


@dataclass
class Keys:
    """Keys of the groups of a batch: `item` and `run` int64 [groups], in [0, 2**32); `seed` in [0, 2**64)."""

    seed: int
    item: torch.Tensor
    run: torch.Tensor

    def __post_init__(self) -> None:
        words = self.seed & 0xFFFFFFFF, self.seed >> 32
        # On a GPU the words lie on the device, so that a captured graph reads them.
        self.words: Key = torch.tensor(words, device=self.item.device) if self.item.is_cuda else words

    def uniform(self, purpose: int, round: torch.Tensor, step: int, slots: int) -> torch.Tensor:
        """float64 [groups, slots] in (0, 1); `round` int64 [groups] is each group's own count of rounds."""
        return per_slot(self.item, self.run, round, purpose, step, slots, self.words)

    def uniforms(self, purpose: int, round: torch.Tensor, steps: int, slots: int) -> torch.Tensor:
        """float64 [groups, slots, steps]: `uniform` of the steps 0 ... steps - 1."""
        return per_step(self.item, self.run, round, purpose, steps, slots, self.words)

    def stratified(self, purpose: int, round: torch.Tensor, step: int, history: torch.Tensor) -> torch.Tensor:
        """As `uniform`, one for each particle of `history` int64 [groups, N]; see `smcgen.kernels.philox.stratified`."""
        return stratified(self.item, self.run, round, purpose, step, history, self.words)
