"""The numbers of JSON between bounds, as regular expressions.

Integers are written without fraction or exponent; other numbers between bounds without an exponent and without minus zero, with
as many zeros at the end of a fraction as one likes. Digits are compared from the left: a number of the same length is larger
iff its first other digit is.
"""

from __future__ import annotations

import math
from decimal import Decimal

FRACTION = r"(?:\.[0-9]+)?"
ZEROS = r"(?:\.0+)?"
NONZERO = "0*[1-9][0-9]*"


def integers(low: int | None, high: int | None) -> str:
    """The integers from `low` to `high` (None: no bound). Minus zero is among them where llguidance has it."""
    if low is None and high is None:
        return r"\-?(?:0|[1-9][0-9]*)"
    parts = []
    if low is None or low < 0:
        both = low is not None and high is not None and high >= 0
        least = 0 if both else 1 if high is None else max(1, -high)
        parts.append(r"\-" + naturals(least, None if low is None else -low))
    if high is None or high >= 0:
        parts.append(naturals(max(low or 0, 0), high))
    return either(parts)


def naturals(low: int, high: int | None) -> str:
    """The numbers from `low` to `high` without leading zeros."""
    longest = len(str(low if high is None else high))
    parts = []
    for size in range(len(str(low)), longest + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        last = 10**size - 1 if high is None else min(high, 10**size - 1)
        parts.append(_between(str(first), str(last)))
    if high is None:
        parts.append(f"[1-9][0-9]{{{longest},}}")
    return either(parts)


def numbers(low: float | None, high: float | None, with_low: bool, with_high: bool) -> str:
    """The numbers from `low` to `high` (None: no bound), these included or not."""
    if low is None and high is None:
        return r"\-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][\+\-]?[0-9]+)?"
    low, high = (bound if bound is None or bound else 0 for bound in (low, high))  # -0.0 is 0
    if low is None:
        assert high is not None
        if high < 0:
            return r"\-" + numbers(-high, None, with_high, False)
        parts = [r"\-" + numbers(0, None, False, False)]
        if high > 0:
            parts.append(numbers(0, high, True, with_high))
        elif with_high:
            parts.append("0" + ZEROS)
        return either(parts)
    if high is None:
        if low < 0:
            return either([numbers(low, 0, with_low, False), numbers(0, None, True, False)])
        size = len(str(int(low)))
        return either([numbers(low, 10**size, with_low, False), f"[1-9][0-9]{{{size},}}{FRACTION}"])
    if low == high:
        return constant(low) + ("0*" if "." in spelled(low) else ZEROS)
    if high < 0:
        return r"\-" + numbers(-high, -low, with_high, with_low)
    if low < 0:
        parts = [r"\-" + numbers(0, -low, False, with_low)]
        if high > 0:
            parts.append(numbers(0, high, True, with_high))
        elif with_high:
            parts.append("0" + ZEROS)
        return either(parts)
    return _positive(spelled(low), spelled(high), with_low, with_high)


def constant(number: float) -> str:
    """One number in its shortest spelling."""
    return spelled(number).replace("-", r"\-").replace(".", r"\.")


def either(parts: list[str]) -> str:
    return f"(?:{'|'.join(parts)})" if len(parts) != 1 else parts[0]


def spelled(number: float) -> str:
    """A number in the digits that tell it apart from others, without an exponent."""
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _positive(low: str, high: str, with_low: bool, with_high: bool) -> str:
    """The numbers between two different ones from 0 on."""
    (first, _, after_first), (last, _, after_last) = low.partition("."), high.partition(".")
    if first == last:
        size = max(len(after_first), len(after_last))
        inner = rf"\.{_fractions(after_first.ljust(size, '0'), after_last.ljust(size, '0'), with_low, with_high)}"
        return f"{first}(?:{inner})?" if with_low and not after_first else f"{first}{inner}"
    parts, whole = [], int(first)
    if after_first or not with_low:
        parts.append(rf"{first}\.{_above(after_first, with_low)}")
        whole += 1
    if whole < int(last):
        parts.append(naturals(whole, int(last) - 1) + FRACTION)
    if after_last:
        parts.append(rf"{last}(?:\.{_below(after_last, with_high)})?")
    elif with_high:
        parts.append(last + ZEROS)
    return either(parts)


def _between(low: str, high: str) -> str:
    """Strings of digits, as long as these two, that stand between them."""
    if low == high:
        return low
    a, b, size = int(low[0]), int(high[0]), len(low) - 1
    if a == b:
        return low[0] + _between(low[1:], high[1:])
    nines, zeros = "9" * size, "0" * size
    parts = []
    if low[1:] != zeros:
        parts.append(low[0] + _between(low[1:], nines))
        a += 1
    if high[1:] != nines:
        parts.append(high[0] + _between(zeros, high[1:]))
        b -= 1
    if a <= b:
        parts.append(_digit(a, b) + (f"[0-9]{{{size}}}" if size else ""))
    return either(parts)


def _above(digits: str, too: bool) -> str:
    """Ends of fractions above these digits, or equal to them if `too`; no digits stand for zero."""
    if not digits:
        return "[0-9]*" if too else NONZERO
    parts = [digits[0] + _above(digits[1:], too)]
    if digits[0] < "9":
        parts.append(_digit(int(digits[0]) + 1, 9) + "[0-9]*")
    return either(parts)


def _below(digits: str, too: bool) -> str:
    """Fractions of at least one digit below these, the last of which is not zero, or equal to them if `too`."""
    rest, parts = digits[1:], []
    if rest:
        parts.append(f"{digits[0]}(?:{_below(rest, too)})?")
    elif too:
        parts.append(digits[0] + "0*")
    if digits[0] > "0":
        parts.append(_digit(0, int(digits[0]) - 1) + "[0-9]*")
    return either(parts)


def _fractions(low: str, high: str, with_low: bool, with_high: bool) -> str:
    """Fractions of at least one digit between two that have equally many."""
    if low[0] == high[0]:
        rest = _fractions(low[1:], high[1:], with_low, with_high)
        return low[0] + (f"(?:{rest})?" if with_low and not low[1:].strip("0") else rest)
    parts = [low[0] + _above(low[1:].rstrip("0"), with_low)]
    if int(low[0]) + 1 < int(high[0]):
        parts.append(_digit(int(low[0]) + 1, int(high[0]) - 1) + "[0-9]*")
    if rest := high[1:].rstrip("0"):
        parts.append(f"{high[0]}(?:{_below(rest, with_high)})?")
    elif with_high:
        parts.append(high[0] + "0*")
    return either(parts)


def _digit(low: int, high: int) -> str:
    return f"[{low}-{high}]" if low < high else str(low)


def whole(low: float | None, high: float | None, with_low: bool, with_high: bool) -> tuple[int | None, int | None]:
    """The first and the last integer between bounds."""
    first = None if low is None else math.ceil(low) if with_low else math.floor(low) + 1
    last = None if high is None else math.floor(high) if with_high else math.ceil(high) - 1
    return first, last
