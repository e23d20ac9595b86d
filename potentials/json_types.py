"""A plain JSON Schema (see `json_plain`) as a union of types with bounds: what its keywords come to, where they come to a
regular language.

`Types.of` resolves references and combines the keywords; a schema is a list of alternatives, one or several for each type, or
None where it admits every value. Properties keep the order in which the engine writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from smcgen.potentials.json_finite import target
from smcgen.values import is_number

NOTES = frozenset(
    ("$anchor", "$defs", "definitions", "$schema", "$comment", "title", "description", "default", "readOnly", "writeOnly",
     "examples", "contentMediaType", "contentEncoding")
)  # fmt: skip
KEYWORDS = {
    "null": frozenset(),
    "boolean": frozenset(),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "additionalProperties", "required")),
}
DIGITS = 40  # of a bound, before its point and after it
PARTS = 5_000  # schemas looked at, references followed


class NotRegular(ValueError):
    """The schema has no regular language, or none that is known to be the engine's."""


@dataclass(frozen=True)
class Null:
    pass


@dataclass(frozen=True)
class Truth:
    value: bool | None = None


@dataclass(frozen=True)
class Number:
    """Bounds as given: the engine takes the tighter of an inclusive and an exclusive one."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    whole: bool = False


@dataclass(frozen=True)
class Text:
    """`patterns` occur in it; `literals` are the text itself."""

    shortest: int = 0
    longest: int | None = None
    patterns: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Array:
    shortest: int
    longest: int | None
    first: tuple[Union, ...]
    others: Union


@dataclass(frozen=True)
class Object:
    properties: dict[str, Union]
    others: Union
    required: dict[str, None] = field(default_factory=dict)


Part = Null | Truth | Number | Text | Array | Object
Union = list[Part] | None  # None: every value


class Types:
    """Reads the parts of one schema. Raises NotRegular."""

    def __init__(self, root: dict):
        self.root, self.open, self.steps = root, [], 0

    def of(self, schema: Any) -> Union:
        self.steps += 1
        if self.steps > PARTS:
            raise NotRegular("it has too many parts")
        if isinstance(schema, bool):
            return None if schema else []
        if not isinstance(schema, dict):
            raise NotRegular("a schema that is no object")
        left = {key: value for key, value in schema.items() if key not in NOTES}
        left.pop("x-guidance", None)
        if not left:
            return None
        found: Union = None
        if "const" in left:
            found = self.meet(found, [self._constant(left.pop("const"))])
        if "enum" in left:
            found = self.meet(found, [self._constant(value) for value in left.pop("enum")])
        for key in ("allOf", "anyOf", "oneOf"):
            options = [self.of(option) for option in left.pop(key, ())]
            if key == "allOf":
                for option in options:
                    found = self.meet(found, option)
            elif key in schema and None not in options:
                found = self.meet(found, [part for option in options for part in option or ()])
        if "$ref" in left:
            found = self.meet(found, self._referred(left.pop("$ref")))
        return self.meet(found, self._typed(left)) if left else found

    def _referred(self, reference: str) -> Union:
        if reference in self.open:
            raise NotRegular("a reference to itself")
        self.open.append(reference)
        found = self.of(target(self.root, reference))
        self.open.pop()
        return found

    def _constant(self, value: Any) -> Part:
        if value is None:
            return Null()
        if isinstance(value, bool):
            return Truth(value)
        if isinstance(value, int | float):
            value_ = _bound(value)
            return Number(value_, value_, whole=isinstance(value, int))
        if isinstance(value, str):
            return Text(literals=(value,))
        if isinstance(value, list):
            return Array(len(value), len(value), tuple([self._constant(item)] for item in value), [])
        return Object({key: [self._constant(item)] for key, item in value.items()}, [], dict.fromkeys(value))

    def _typed(self, left: dict) -> Union:
        """The alternatives by type, of keywords that speak of one type each."""
        given = left.pop("type", list(KEYWORDS))
        if unknown := set(left) - set().union(*KEYWORDS.values()):
            raise NotRegular(f"the keyword {min(unknown)}")
        return [self._type(kind, left) for kind in (given if isinstance(given, list) else [given])]

    def _type(self, kind: str, given: dict) -> Part:
        if kind == "null":
            return Null()
        if kind == "boolean":
            return Truth()
        if kind in ("number", "integer"):
            names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            return Number(*(_bound(given[name]) if name in given else None for name in names), whole=kind == "integer")
        if kind == "string":
            if "format" in given:  # those of the engine's formats that are no pattern in a plain schema
                raise NotRegular(f"the format {given['format']}")
            patterns = (given["pattern"],) if "pattern" in given else ()
            return Text(_size(given.get("minLength", 0)), _size(given.get("maxLength")), patterns)
        if kind == "array":
            first, others = given.get("prefixItems", ()), given.get("items", True)
            if isinstance(others, list):
                raise NotRegular("a list of items")
            sizes = _size(given.get("minItems", 0)), _size(given.get("maxItems"))
            return Array(*sizes, tuple(map(self.of, first)), self.of(others))
        if kind == "object":
            properties = {name: self.of(schema) for name, schema in given.get("properties", {}).items()}
            return Object(
                properties, self.of(given.get("additionalProperties", True)), dict.fromkeys(given.get("required", ()))
            )
        raise NotRegular(f"the type {kind}")

    def meet(self, some: Union, others: Union) -> Union:
        """What is in both."""
        if some is None or others is None:
            return others if some is None else some
        found = []
        for a in some:
            for b in others:
                self.steps += 1
                if self.steps > PARTS:
                    raise NotRegular("it has too many parts")
                if type(a) is type(b) and (both := self._meet(a, b)) is not None:
                    found.append(both)
        return found

    def _meet(self, a: Any, b: Any) -> Part | None:
        """Of one type; None: nothing."""
        if isinstance(a, Null):
            return a
        if isinstance(a, Truth):
            return None if None not in (a.value, b.value) and a.value != b.value else b if a.value is None else a
        if isinstance(a, Number):
            lows = [(_tighter(max, x, y)) for x, y in ((a.low, b.low), (a.above, b.above))]
            highs = [(_tighter(min, x, y)) for x, y in ((a.high, b.high), (a.below, b.below))]
            return Number(lows[0], highs[0], lows[1], highs[1], a.whole or b.whole)
        if isinstance(a, Text):
            longest = _tighter(min, a.longest, b.longest)
            return Text(max(a.shortest, b.shortest), longest, a.patterns + b.patterns, a.literals + b.literals)
        if isinstance(a, Array):
            count = max(len(a.first), len(b.first))
            pairs = zip(_padded(a.first, a.others, count), _padded(b.first, b.others, count), strict=True)
            first = tuple(self.meet(x, y) for x, y in pairs)
            return Array(max(a.shortest, b.shortest), _tighter(min, a.longest, b.longest), first, self.meet(a.others, b.others))
        names = [*a.properties, *(name for name in b.properties if name not in a.properties)]
        properties = {name: self.meet(a.properties.get(name, a.others), b.properties.get(name, b.others)) for name in names}
        return Object(properties, self.meet(a.others, b.others), a.required | b.required)


def _padded(first: Sequence[Union], others: Union, count: int) -> list[Union]:
    return [*first, *[others] * (count - len(first))]


def _tighter(choose: Any, a: float | None, b: float | None) -> Any:
    return choose(a, b) if a is not None and b is not None else b if a is None else a


def _bound(number: Any) -> float:
    if not is_number(number) or not abs(number) < 10**DIGITS or (number and abs(number) < 10**-DIGITS):
        raise NotRegular(f"the bound {number}")
    return number


def _size(number: Any) -> Any:
    if number is None:
        return None
    if isinstance(number, bool) or number != int(number):
        raise NotRegular(f"the bound {number}")
    return int(number)
