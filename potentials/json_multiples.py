"""Multiples of numbers as llguidance has them: coefficients in 32 bits, bounds in float64.

Whether a range has a multiple at all it reckons in float64, by which 85.1 is no multiple of 0.1: ranges are laid so that it
does not matter, or it is found out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

from smcgen.potentials.json_spans import Interval, decimal, fraction_digits
from smcgen.values import is_number

PLACES = 6  # digits of the fraction of multipleOf
COEFFICIENT = 10_000  # of multipleOf: the engine's automaton has as many states; some hundredths of a second


def is_step(step: Any) -> TypeGuard[float]:
    return is_number(step) and 0 < step < math.inf


def taken(steps: Iterable[float], together: bool) -> frozenset[float]:
    """Those of which the engine makes automata of moderate size, all `together` if they may meet in one."""
    kept, all_of = set(), Fraction(1)
    for step in sorted(steps, key=lambda step: read(decimal(step))):
        exact = Fraction(decimal(step))
        both = common(all_of, exact) if together and kept else exact
        if _small(exact) and _as_read(float(step)) == read(decimal(step)) and _small(both):
            kept.add(step)
            all_of = both
    return frozenset(kept)


def _small(step: Fraction) -> bool:
    coefficient, places = read(Decimal(step.numerator) / step.denominator)
    return coefficient <= COEFFICIENT and places <= PLACES


def variants(step: Decimal) -> list[Decimal]:
    """Steps whose multiples, as the engine spells them, are those of one.

    The engine wants all digits of a fraction, or none: a multiple with fewer digits is one of a larger step too."""
    coefficient, places = read(step)
    larger = {Decimal(math.lcm(coefficient, 10 ** (places - size))).scaleb(-places) for size in range(1, places)}
    return sorted({*larger, step})


def integers_among(step: Decimal) -> int:
    """The step of the integers among its multiples."""
    return Fraction(step).numerator


def snapped(bounds: Interval, step: Decimal) -> Interval:
    """Bounds for the same multiples, each a whole number if one will do, else with no more digits than `step`."""
    low, high = bounds.low, bounds.high
    with_low, with_high = bounds.with_low, bounds.with_high
    if low is not None:
        first = _next(low, step, with_low)
        with_low = first >= 0
        low = _outward(first, step, -1, with_low)
    if high is not None:
        last = -_next(-high, step, with_high)
        with_high = last < 0
        high = _outward(last, step, 1, with_high)
    return Interval(low, high, with_low, with_high)


def _next(bound: Decimal, step: Decimal, included: bool) -> Decimal:
    """The first multiple above a bound."""
    count = math.ceil(Fraction(bound) / Fraction(step))
    if not included and count * step == bound:
        count += 1
    return count * step


def _outward(multiple: Decimal, step: Decimal, way: int, included: bool) -> Decimal:
    """A bound at a multiple, or short of the one beyond it."""
    end = multiple + way * step
    if included:
        near = Decimal(math.floor(multiple) if way < 0 else math.ceil(multiple))
        return near if (near - end) * way < 0 else multiple
    near = Decimal(math.ceil(end) if way < 0 else math.floor(end))
    return near if (near - multiple) * way > 0 else end


def seen(span: dict, step: Decimal) -> bool:
    """Whether the engine finds the multiples that a range has; it looks only where both ends are given."""
    lows = [span[key] for key in ("minimum", "exclusiveMinimum") if key in span]
    highs = [span[key] for key in ("maximum", "exclusiveMaximum") if key in span]
    if not lows or not highs:
        return True
    exact = Fraction(step)
    if "multipleOf" in span:
        exact = common(exact, Fraction(decimal(span["multipleOf"])))
    first = math.ceil(Fraction(decimal(lows[0])) / exact) * exact
    if "exclusiveMinimum" in span and first == Fraction(decimal(lows[0])):
        first += exact
    beyond = Fraction(decimal(highs[0]))
    if first > beyond or (first == beyond and "exclusiveMaximum" in span):
        return True  # there are none
    coefficient, places = read(Decimal(exact.numerator) / exact.denominator)
    rough = coefficient / 10.0**places
    least, most = math.ceil(lows[0] / rough) * rough, math.floor(highs[0] / rough) * rough
    if "exclusiveMinimum" in span and least == lows[0]:
        least += rough
    if "exclusiveMaximum" in span and most == highs[0]:
        most -= rough
    return least <= most


def common(one: Fraction, other: Fraction) -> Fraction:
    """The least common multiple."""
    below = one.denominator * other.denominator
    return Fraction(math.lcm(one.numerator * other.denominator, other.numerator * one.denominator), below)


def read(step: Decimal) -> tuple[int, int]:
    """The number c * 10^-n as c and the least n from 0 on."""
    places = fraction_digits(step)
    return int(step.scaleb(places)), places


def _as_read(step: float) -> tuple[float, int]:
    """The same as the engine does it, in float64; the first is no integer's equal where that goes wrong."""
    places = 0
    while step != math.floor(step) and places < 30:
        step, places = step * 10.0, places + 1
    return step, places
