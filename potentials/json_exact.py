"""JSON Schema's keywords on numbers, judged by the digits of a text instead of float64.

`jsonschema` takes a remainder of floats for multipleOf, by which 19.99 is no multiple of 0.01.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

import jsonschema
from jsonschema.validators import extend

from smcgen.values import is_number


class Digits(float):
    """A number of a JSON text that has a fraction or an exponent, with the digits it is written in."""

    text: str

    def __new__(cls, text: str) -> Digits:
        found = super().__new__(cls, text)
        found.text = text
        return found


def loads(text: str) -> Any:
    """The value of a JSON text, its numbers with their digits. Raises ValueError."""
    return json.loads(text, parse_float=Digits)


@cache
def exact(kind: type) -> type:
    """A validator class like this one of `jsonschema` that compares numbers as they are written."""
    holds: dict[str, Callable[[Decimal, Decimal], bool]] = {
        "minimum": lambda value, bound: value >= bound,
        "maximum": lambda value, bound: value <= bound,
        "exclusiveMinimum": lambda value, bound: value > bound,
        "exclusiveMaximum": lambda value, bound: value < bound,
        "multipleOf": is_multiple,
    }
    keywords = {name: _keyword(kind.VALIDATORS[name], test) for name, test in holds.items() if name in kind.VALIDATORS}
    return extend(kind, keywords)


def _keyword(original: Callable, test: Callable[[Decimal, Decimal], bool]) -> Callable:
    def check(validator: Any, bound: Any, instance: Any, schema: dict) -> Iterator[jsonschema.ValidationError]:
        limit, value = _decimal(bound), _decimal(instance)
        if (
            limit is None
            or value is None
            or (schema.get("exclusiveMinimum") is True)
            or (schema.get("exclusiveMaximum") is True)
        ):
            yield from original(validator, bound, instance, schema) or ()  # draft 4 has flags
        elif validator.is_type(instance, "number") and not test(value, limit):
            yield jsonschema.ValidationError(f"{instance!r} is not within {bound!r}")

    return check


def _decimal(number: Any) -> Decimal | None:
    """None for what is no number, infinite or NaN."""
    if not is_number(number):
        return None
    try:
        found = Decimal(number.text if isinstance(number, Digits) else repr(number))
    except InvalidOperation:  # an exponent of many digits
        return None
    return found if found.is_finite() else None


def is_multiple(value: Decimal, step: Decimal) -> bool:
    """Whether value / step is an integer, whatever their exponents: 10^n is never written out."""
    if not value or not step:
        return not value
    (top, up), (bottom, down) = _integer(value), _integer(step)
    if up >= down:
        return top * pow(10, up - down, bottom) % bottom == 0
    return down - up <= len(str(top)) and top % (bottom * 10 ** (down - up)) == 0


def _integer(value: Decimal) -> tuple[int, int]:
    """|value| as c * 10^n, where 10 does not divide c."""
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits))
    short = text.rstrip("0")
    return int(short), exponent + len(text) - len(short)
