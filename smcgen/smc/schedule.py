"""How the exponents of the intermediate targets grow: gamma_c = prod_j p_j**(scale_c * alpha_j), the last scale being 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from smcgen.errors import UsageError


@dataclass(frozen=True)
class Ramp:
    """A straight line from `first` in the first round to 1 in round `rounds` (counted from 0) and after.

    `Ramp()` is constant 1: no annealing. With `lm**2`, `Ramp(first=0.5, rounds=4)` starts at exponent 1.
    """

    first: float = 1.0
    rounds: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.first) and self.first > 0) or self.rounds < 1:
            raise UsageError(f"{self}: give first > 0 (a share of the exponents) and rounds >= 1")

    def scale(self, round: torch.Tensor) -> torch.Tensor:
        """int64 [groups] -> float64 [groups]; depends on the round alone, which keeps the evidence unbiased."""
        return self.first + (1 - self.first) * (round.double() / self.rounds).clamp(max=1)
