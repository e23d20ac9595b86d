"""How the exponents of the intermediate targets grow, the last scales being 1:

gamma_c = prod_j p_j**(scale_c * alpha_j) * prod_i phi_i**(soft_scale_c * beta_i)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from smcgen.errors import UsageError
from smcgen.values import is_number, is_whole, plain


@dataclass(frozen=True)
class Ramp:
    """A straight line from `first` in the first round to 1 in round `rounds` (counted from 0) and after.

    `Ramp()` is constant 1: no annealing. With `lm**2`, `Ramp(first=0.5, rounds=4)` starts at exponent 1.

    Attributes:
        of: whose exponents: the language "models", the soft "potentials" (rewards and other functions of the text), or "all".
    """

    first: float = 1.0
    rounds: int = 1
    of: Literal["models", "potentials", "all"] = "models"

    def __post_init__(self) -> None:
        for name in ("first", "rounds"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        numbers = is_number(self.first) and is_whole(self.rounds)
        if not numbers or not (math.isfinite(self.first) and self.first > 0) or self.rounds < 1:
            raise UsageError(f"{self}: give first > 0 (a share of the exponents) and rounds >= 1")
        if self.of not in ("models", "potentials", "all"):
            raise UsageError(f"{self}: give of='models', 'potentials' or 'all'")

    @property
    def steady(self) -> bool:
        """Whether every intermediate target has the exponents of the last."""
        return self.first == 1

    def scale(self, round: torch.Tensor) -> torch.Tensor:
        """Of the language models' exponents: int64 [groups] -> float64 [groups]. It depends on the round alone, which keeps
        the evidence unbiased."""
        return torch.ones_like(round, dtype=torch.float64) if self.of == "potentials" else self.line(round)

    def soft_scale(self, round: torch.Tensor) -> torch.Tensor:
        """Of the soft potentials' exponents, as `scale`."""
        return torch.ones_like(round, dtype=torch.float64) if self.of == "models" else self.line(round)

    def line(self, round: torch.Tensor) -> torch.Tensor:
        """The straight line itself, whatever `of` says: int64 [n] -> float64 [n]."""
        return self.first + (1 - self.first) * (round.double() / self.rounds).clamp(max=1)
