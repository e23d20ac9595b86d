"""Soft wishes about a text: phrases that count for or against it, and a length that it should have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from smcgen.errors import UsageError
from smcgen.options import called
from smcgen.potentials.function import FunctionPotential, potential
from smcgen.values import is_number, plain


def phrases(log_weights: Mapping[str, float]) -> FunctionPotential:
    """phi(text) = exp(sum of weight * occurrences): each occurrence of a phrase multiplies phi by exp(its weight).

    Args:
        log_weights: phrase -> a finite number, positive for what is wanted and negative for what is not. Occurrences of one
            phrase do not overlap. What must not occur at all is a hard condition: `avoids`.
    """
    if not isinstance(log_weights, Mapping):
        raise UsageError(f"phrases: {log_weights!r}: give a dict of phrases with their log weights")
    weights = {phrase: plain(weight) for phrase, weight in log_weights.items()}
    if not weights:
        raise UsageError("phrases: give at least one phrase with its log weight")
    for phrase, weight in weights.items():
        if not isinstance(phrase, str) or not phrase:
            raise UsageError(f"phrases: {phrase!r}: a phrase is a text that is not empty")
        if not is_number(weight) or not math.isfinite(weight):
            raise UsageError(f"phrases: {phrase!r} has weight {weight!r}: give a finite number (use avoids to forbid a phrase)")

    def total(text: str) -> float:
        return math.fsum(weight * text.count(phrase) for phrase, weight in weights.items())

    return potential(total, prefix=total, name=f"phrases({weights!r})")


_UNITS: dict[str, Callable[[str], int]] = {
    "characters": len,
    "words": lambda text: len(text.split()),
    "lines": lambda text: len(text.splitlines()),
}


@called
def target_length(n: float, scale: float, unit: Literal["characters", "words", "lines"] = "characters") -> FunctionPotential:
    """phi(text) = exp(-(length - n)**2 / (2 scale**2)): texts of about n units, give or take `scale`.

    A text that is too long already counts as such while it is written; one that is short may still grow.
    """
    if unit not in _UNITS:
        raise UsageError(f"target_length: unit={unit!r}: give one of {', '.join(_UNITS)} (max_tokens limits the tokens)")
    for name, value, least in (("n", n, 0), ("scale", scale, math.nextafter(0, 1))):
        if not is_number(value) or not least <= value < math.inf:
            raise UsageError(f"target_length: {name}={value!r}: give a finite {'positive' if least else 'non-negative'} number")
    measure = _UNITS[unit]

    def whole(text: str) -> float:
        return -0.5 * ((measure(text) - n) / scale) ** 2

    def prefix(text: str) -> float:
        return -0.5 * (max(0.0, measure(text) - n) / scale) ** 2

    return potential(whole, prefix=prefix, name=f"target_length({n:g}, {scale:g}, {unit!r})")
