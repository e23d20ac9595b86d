"""Ranges of numbers for which llguidance's regular expressions are right, and which make up any other.

In each the numbers begin with the same digits, but for the last of these; or it is one number alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from smcgen.values import is_number

MIRRORED = {
    "minimum": "maximum",
    "maximum": "minimum",
    "exclusiveMinimum": "exclusiveMaximum",
    "exclusiveMaximum": "exclusiveMinimum",
}
LARGE = Decimal(10) ** 17  # from here on the engine's own integers overflow
DIGITS = 15  # of any decimal that float64 tells apart from the others
NEAR = 9  # zeros after the digits of an excluded bound, FEWEST of large numbers
FEWEST = 4
ZEROS = 6  # zeros after the digits of an included one


@dataclass(frozen=True)
class Interval:
    """Numbers between bounds (None: no bound), these included or not."""

    low: Decimal | None
    high: Decimal | None
    with_low: bool
    with_high: bool

    @property
    def empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and not (self.with_low and self.with_high))

    def keywords(self) -> dict[str, float]:
        found = {}
        if self.low is not None:
            found["minimum" if self.with_low else "exclusiveMinimum"] = _number(self.low)
        if self.high is not None:
            found["maximum" if self.with_high else "exclusiveMaximum"] = _number(self.high)
        return found


def interval(node: dict) -> Interval:
    """What its bounds say; in draft 4 an exclusive one is a flag."""
    sides = []
    for within, beyond, tighter in (("minimum", "exclusiveMinimum", max), ("maximum", "exclusiveMaximum", min)):
        inner, outer = (decimal(node[key]) if is_number(node.get(key)) else None for key in (within, beyond))
        if outer is None:
            sides.append((inner, node.get(beyond) is not True))
        else:
            sides.append((inner, True) if inner is not None and tighter(inner, outer) != outer else (outer, False))
    (low, with_low), (high, with_high) = sides
    return Interval(low, high, with_low, with_high)


def decimal(number: float) -> Decimal:
    return Decimal(repr(number)) if number else Decimal(0)  # -0.0 is 0


def _number(value: Decimal) -> float:
    return int(value) if _whole(value) else float(value)


def _whole(number: Decimal) -> bool:
    return number == number.to_integral_value()


def right(bounds: Interval) -> bool:
    """Whether the engine's own expression is right: from 0 on, with a whole number between the bounds."""
    low, high = bounds.low, bounds.high
    return low is not None and low >= 0 and bounds.with_low and (high is None or (_whole(high) and int(low) < int(high)))


def widened(bounds: Interval, kind: str) -> Interval:
    """Bounds further apart where the engine would not read their digits."""
    low, high = _cut(bounds.low, ROUND_FLOOR), _cut(bounds.high, ROUND_CEILING)
    with_low, with_high = bounds.with_low or low != bounds.low, bounds.with_high or high != bounds.high
    if kind == "number":
        if not with_low and low is not None and low >= 0:
            with_low = _near(low, high) is None
        if not with_high and high is not None and high < 0:
            with_high = _near(-high, None if low is None else -low) is None
    return Interval(low, high, with_low, with_high)


def _cut(bound: Decimal | None, way: str) -> Decimal | None:
    if bound is None or not bound.is_finite() or abs(bound) >= LARGE:
        return None
    rounded = Context(prec=DIGITS, rounding=way).plus(bound)
    return rounded if rounded.adjusted() >= -DIGITS else rounded.quantize(ulp(DIGITS), way)


def _near(low: Decimal, high: Decimal | None) -> int | None:
    """To how many digits numbers are told from an excluded bound; None: to none that help."""
    places = max(fraction_digits(low) + NEAR, 0 if high is None else fraction_digits(high) + 2)
    if low:
        places = min(places, DIGITS - 1 - low.adjusted())
    return places if places >= fraction_digits(low) + FEWEST and (high is None or low + ulp(places) <= high) else None


def spans(bounds: Interval, most: int) -> Iterator[dict]:
    """Ranges, as keywords, that make up one, and for which the engine's expressions are right. most: digits of a fraction that
    multiples can have."""
    low, high = bounds.low, bounds.high
    if low is None or low < 0:
        least, included = (Decimal(0), False) if high is None or high >= 0 else (-high, bounds.with_high)
        for span in _positive(Interval(least, None if low is None else -low, included, bounds.with_low), most):
            yield {MIRRORED.get(key, key): -value if key in MIRRORED else value for key, value in span.items()}
    if high is None or high >= 0:
        least, included = (Decimal(0), True) if low is None or low < 0 else (low, bounds.with_low)
        if not (positive := Interval(least, high, included, bounds.with_high)).empty:
            yield from _positive(positive, most)


def _positive(bounds: Interval, most: int) -> Iterator[dict]:
    """The same from 0 on: up from `low` to numbers of ever fewer digits, then on to those of `high`. In each range numbers
    begin with the same digits, but for the last of these."""
    low, high = bounds.low, bounds.high
    assert low is not None
    if right(bounds):
        yield bounds.keywords()
        return
    if not bounds.with_low:
        places = _near(low, high)
        assert places is not None
        low += ulp(places)
    while places := fraction_digits(low):
        ten = ulp(places - 1)
        border = (low // ten + 1) * ten
        if high is not None and border > high:
            break
        yield Interval(low, border, True, False).keywords()
        low = border
    if high is None:
        yield {"minimum": _number(low)}
        return
    while low < high:
        unit = ulp(places)
        last = high // unit * unit
        if last > low:
            yield Interval(low, last, True, bounds.with_high and last == high and not places).keywords()
            low = last
        if low < high:
            yield from _spelled(low, places, most)
            places += 1
        elif bounds.with_high and not places:
            return
    if bounds.with_high:
        for size in range(fraction_digits(high), fraction_digits(high) + ZEROS + 1):
            yield from _spelled(high, size, most)


def _spelled(value: Decimal, places: int, most: int) -> Iterator[dict]:
    """One number with so many digits after the point."""
    if places == fraction_digits(value):
        yield {"minimum": _number(value), "maximum": _number(value)}
    elif places <= min(most, DIGITS - len(str(int(value))) - 1):
        unit = ulp(places)
        # The engine looks in float64 for a multiple in the range: no end of it is one, so that rounding does not matter.
        low = value - unit / 2 if value else value
        yield {**Interval(low, value + unit, True, False).keywords(), "multipleOf": float(2 * unit)}


def fraction_digits(value: Decimal) -> int:
    """Digits after the point."""
    exponent = value.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def ulp(places: int) -> Decimal:
    """The unit of the last of so many digits after the point."""
    return Decimal(1).scaleb(-places)
