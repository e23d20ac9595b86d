"""Answers of potentials that may still be under way on the host (see `smc.host`): masks, and what a text is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smcgen.kernels.categorical import unpack
from smcgen.kernels.masks import joint
from smcgen.smc.host import Task

if TYPE_CHECKING:
    from smcgen.smc.factors import Potentials


@dataclass
class Asked:
    """Masks that were asked for."""

    potentials: Potentials
    task: Task | None

    def mask(self, active: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `bits`, the tokens as bool [G, R, V]."""
        bits, cause = self.bits(active)
        return None if bits is None else unpack(bits, self.potentials.vocabulary_size), cause

    def bits(self, active: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The masks in the rows where `active` bool [G, R], all of them rows that were asked for.

        Returns bit rows int32 [G, R, words] (None without hard potentials), all set where not active, and int64 [G, R]: the
        potential that left no token, -1 if some are left; `len(bound)` if only the potentials together left none."""
        potentials, shape = self.potentials, active.shape
        if not potentials.hard:
            return None, torch.full(shape, -1, dtype=torch.int64, device=potentials.device)
        potentials.join()
        made = iter([] if self.task is None else self.task.output)
        masks = []
        for i in potentials.hard:
            potential: Any = potentials.bound[i]
            masks.append(potential.bits(potentials.states[i]).flatten(0, 1) if potential.on_device else next(made))
        bits, cause = joint(masks, active.flatten())
        if len(potentials.hard) < len(potentials.bound):
            cause = potentials.numbers[cause]
        return bits.view(*shape, -1), cause.view(shape)


@dataclass
class Reading:
    """What potentials say of something that they read.

    Attributes:
        which: the potentials.
        shape: (G, R), of the rows that read.
        here: of each one on the device, log phi after over log phi before, float64 [G, R].
        task: of the others.
    """

    potentials: Potentials
    which: list[int]
    shape: tuple[int, ...]
    here: dict[int, torch.Tensor]
    task: Task | None

    def refused_here(self, rows: int) -> torch.Tensor:
        """bool [G, rows], where one on the device gave 0, as far as that is known without waiting for the host; of the
        first of several chains."""
        refused = torch.zeros(self.shape, dtype=torch.bool, device=self.potentials.device)
        for delta in self.here.values():
            refused = refused | (delta == -torch.inf)
        return refused[:, :: self.shape[1] // rows]

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 [G, R], the change of sum_i beta_i log phi_i, and int64 [G, R], the first that gave 0, -1 if none."""
        change = torch.zeros(self.shape, dtype=torch.float64, device=self.potentials.device)
        cause = torch.full_like(change, -1, dtype=torch.int64)
        if self.task is not None:
            self.potentials.join()
        made = iter([] if self.task is None else self.task.output)
        for i in self.which:
            delta = self.here[i] if i in self.here else next(made).view(self.shape)
            cause = torch.where((delta == -torch.inf) & (cause < 0), i, cause)
            change = change + self.potentials.exponents[i] * delta
        return change, cause


def not_refused(rows: torch.Tensor, refused: Sequence[Task]) -> torch.Tensor:
    """Of `rows` bool [n] on the host, those that none of the readings `refused` has given 0; of several chains the first of
    each particle counts."""
    for task in refused:
        assert task.result is not None
        zero = (task.result == -torch.inf).any(0)
        rows = rows & ~zero[:: len(zero) // len(rows)]
    return rows
