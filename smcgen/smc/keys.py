"""Where every random number of a run comes from.

A number is keyed by (seed, item, run, slot, round of the group, step in the round, purpose), and no key is used twice. A key by
text position would be: a fork onto a shorter ancestor comes back to positions that its slot has already drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smcgen.kernels.philox import uniforms

# What a number is for; proposals that need more purposes take the next free number here.
DRAFT, BONUS, RESAMPLE, SELECT, ACCEPT, CANDIDATE, CHOOSE = range(7)

MAX_SLOTS, MAX_STEPS, MAX_ROUNDS = 1 << 16, 1 << 16, 1 << 24


@dataclass
class Keys:
    """Keys of the groups of a batch: `item` and `run` int64 [groups], in [0, 2**32); `seed` in [0, 2**64)."""

    seed: int
    item: torch.Tensor
    run: torch.Tensor

    def uniform(self, purpose: int, round: torch.Tensor, step: int, slots: int) -> torch.Tensor:
        """float64 [groups, slots] in (0, 1); `round` int64 [groups] is each group's own count of rounds."""
        return self._pair(purpose, round, step, slots)[0]

    def stratified(self, purpose: int, round: torch.Tensor, step: int, history: torch.Tensor) -> torch.Tensor:
        """As `uniform`, one for each particle of `history` int64 [groups, N], but particles with equal histories draw from
        equal strata of (0, 1), dealt out at random: each number is uniform by itself, which is all that an unbiased
        evidence asks for, and m copies of a particle draw each token within one of m times its probability."""
        within, deal = self._pair(purpose, round, step, history.shape[1])
        ordered, order = history.sort(dim=-1, stable=True)
        place = torch.arange(history.shape[1], device=history.device).expand_as(history)
        fresh = torch.cat([torch.ones_like(place[:, :1], dtype=torch.bool), ordered[:, 1:] != ordered[:, :-1]], -1)
        first = torch.where(fresh, place, 0).cummax(-1).values  # where each family of equal histories begins
        size = torch.zeros_like(place).scatter_add_(-1, first, torch.ones_like(place)).gather(-1, first)
        shift = (deal.gather(-1, order.gather(-1, first)) * size).long()
        stratum = (place - first + shift) % size
        spread = (stratum + within.gather(-1, order)) / size
        return torch.empty_like(spread).scatter_(-1, order, spread)

    def _pair(self, purpose: int, round: torch.Tensor, step: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        slot = torch.arange(slots, device=self.item.device)
        counter = (self.item[:, None], self.run[:, None], slot + (step << 16), round[:, None] + (purpose << 24))
        return uniforms(counter, (self.seed & 0xFFFFFFFF, self.seed >> 32))
