"""What counts as a number where a user gives one: True and False do not, though they are ints to Python."""

from __future__ import annotations

import operator
from numbers import Integral, Real
from typing import Any, TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float, NaN and infinity included."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """A number of another kind, such as numpy's, as Python's int or float, and so each number in a list; anything else,
    numpy's booleans included, as it is."""
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    return operator.index(value) if isinstance(value, Integral) else float(value)
