"""What counts as a number where a user gives one: True and False do not, though they are ints to Python."""

from __future__ import annotations

from typing import TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float, NaN and infinity included."""
    return isinstance(value, int | float) and not isinstance(value, bool)
