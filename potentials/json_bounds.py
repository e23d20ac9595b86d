"""Bounds on numbers, and multipleOf, in terms that llguidance gets right.

Its regular expressions for numbers between bounds miss some (0.9 below 0.95, 0.50 above an excluded 0) and let others through
(an excluded 0 below 0.5); it reads bounds as float64; its multiples need all digits of a fraction. So a schema is given to it
with each such range as a union of ranges for which its expressions are right: all numbers that begin with the same digits,
one number alone. What is beyond it is widened, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from smcgen.potentials.json_plain import each
from smcgen.potentials.json_spans import decimal, fraction_digits, interval, right, spans, widened
from smcgen.values import is_number, is_whole

RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OTHERS = ("null", "boolean", "string", "array", "object")
EXACT = 2**53  # from here on float64 has not every integer
MOST = 9  # digits of a fraction that the engine's multiples can have
MOST_BESIDE = 4  # the same where a multipleOf is given besides: the engine multiplies the two in 32 bits
PLACES = 6  # digits of the fraction of multipleOf
COEFFICIENT = 10_000  # of multipleOf: the engine's automaton has as many states; some hundredths of a second
FORM = "next to a bound, numbers have few zeros at the end of a fraction"
MULTIPLES = "multiples have no exponent, and no more digits of fraction than multipleOf"


@dataclass(frozen=True)
class Mended:
    """A schema in the engine's terms.

    Attributes:
        schema: what the engine is given.
        plain: the given schema without the keywords that were changed.
        doubts: what `schema` does not enforce.
        form: how numbers are written."""

    schema: Any
    plain: Any
    doubts: tuple[str, ...]
    form: tuple[str, ...]


def mended(schema: dict) -> Mended:
    """The plain schema (`json_plain`) with its ranges and multiples in terms that the engine gets right. `schema` itself is
    not changed."""
    nodes: list[dict] = []
    _deep(schema, lambda node: nodes.append(node) or node)
    steps = {node["multipleOf"] for node in nodes if _is_step(node.get("multipleOf"))}
    work = _Work(MOST_BESIDE if steps else MOST, _kept(steps, any(map(_meets, nodes))), {}, {})
    wider = _deep(schema, lambda node: work.mend(node, False))
    return Mended(wider, _deep(schema, lambda node: work.mend(node, True)), tuple(work.doubts), tuple(work.form))


def _deep(schema: Any, change: Callable[[dict], dict]) -> Any:
    """The schema with `change` made to it and to every schema in it, those inside first."""
    if isinstance(schema, list):
        return [_deep(part, change) for part in schema]
    return change(each(schema, lambda part: _deep(part, change))) if isinstance(schema, dict) else schema


@dataclass(frozen=True)
class _Work:
    most: int  # digits of a fraction in multiples that stand for one number
    steps: frozenset[float]  # of multipleOf, those that the engine is given
    doubts: dict[str, None]
    form: dict[str, None]

    def mend(self, node: dict, plain: bool) -> dict:
        """The node in the engine's terms, or just without what would be changed."""
        node = self._constants(node)
        types = node.get("type", [*OTHERS, "number"])
        types = types if isinstance(types, list) else [types]
        kind = "number" if "number" in types else "integer"
        if kind not in types:
            return node
        others = [{"type": [other for other in types if other not in ("number", "integer")]}]
        others = others if others[0]["type"] else []
        ranges, multiples = self._ranges(node, kind), self._multiples(node, kind)
        for keys, options in ((RANGES, ranges), (("multipleOf",), multiples)):
            if options is not None:
                node = {key: value for key, value in node.items() if key not in keys}
                if options and not plain:
                    node = _and(node, options + others)
        return node

    def _constants(self, node: dict) -> dict:
        """Without constants that the engine would take for others."""
        for key in ("const", "enum"):
            values = [node[key]] if key == "const" and key in node else node.get(key, ())
            if any(map(_beyond, values)):
                self.doubts[f"{key} has integers of more digits than the engine reads"] = None
                kept = [value for value in values if not _beyond(value)]
                kinds = sorted({_kind(value) for value in values if _beyond(value)})
                node = {other: value for other, value in node.items() if other != key}
                node = _and(node, [{"type": kinds}, *([{"enum": kept}] if kept else [])])
        return node

    def _ranges(self, node: dict, kind: str) -> list[dict] | None:
        """What stands for its bounds; None: they stay."""
        given = [key for key in RANGES if key in node]
        bounds = interval(node)
        if not given or "enum" in node or "const" in node or bounds.empty:  # single numbers the engine compares rightly
            return None
        small = all(abs(bound) < EXACT for bound in (bounds.low, bounds.high) if bound is not None)
        wider = widened(bounds, kind)
        if small and (kind == "integer" or bounds.low == bounds.high or (right(bounds) and wider == bounds)):
            return None
        if wider != bounds:
            self.doubts[f"{' and '.join(given)}: of more digits than the engine reads"] = None
        if wider.low is None and wider.high is None:
            return []
        if kind == "integer":
            return [{"type": kind, **wider.keywords()}]
        self.form[FORM] = None
        return [{"type": kind, **span} for span in spans(wider, self.most)]

    def _multiples(self, node: dict, kind: str) -> list[dict] | None:
        """What stands for its multipleOf; None: it stays."""
        if not _is_step(step := node.get("multipleOf")):
            return None
        coefficient, places = _read(decimal(step))
        if step not in self.steps:
            self.doubts[f"multipleOf {step} is not enforced by the masks: it is too large, or has too many digits"] = None
            return []
        self.form[MULTIPLES] = None
        if kind == "integer" or places < 2:
            return None
        # The engine wants all digits of a fraction, or none: those of fewer digits are multiples of more.
        steps = {Decimal(math.lcm(coefficient, 10 ** (places - size))).scaleb(-places) for size in range(1, places)}
        return [{"type": kind, "multipleOf": float(other)} for other in sorted({*steps, decimal(step)})]


def _is_step(step: Any) -> bool:
    return is_number(step) and 0 < step < math.inf


def _meets(node: dict) -> bool:
    """Whether what it says of a value may come to several schemas at once."""
    return "allOf" in node or (len(node.keys() - {"$defs"}) > 1 and not node.keys().isdisjoint(("$ref", "anyOf", "oneOf")))


def _kept(steps: set[float], together: bool) -> frozenset[float]:
    """Those of which the engine makes automata of moderate size, all `together` if they may meet in one."""
    kept, all_of = set(), Fraction(1)
    for step in sorted(steps, key=lambda step: _read(decimal(step))):
        coefficient, places = _read(decimal(step))
        if coefficient > COEFFICIENT or places > PLACES or _as_read(float(step)) != (coefficient, places):
            continue
        both = _common(all_of if together and kept else Fraction(decimal(step)), Fraction(decimal(step)))
        if _read(Decimal(both.numerator) / both.denominator)[0] <= COEFFICIENT:
            kept.add(step)
            all_of = both
    return frozenset(kept)


def _common(one: Fraction, other: Fraction) -> Fraction:
    """The least common multiple."""
    return Fraction(
        math.lcm(one.numerator * other.denominator, other.numerator * one.denominator), one.denominator * other.denominator
    )


def _and(node: dict, options: list[dict]) -> dict:
    return {**node, "allOf": [*node.get("allOf", ()), {"anyOf": options}]}


def _beyond(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_beyond, value.values() if isinstance(value, dict) else value))
    return is_whole(value) and abs(value) >= EXACT


def _kind(value: Any) -> str:
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "integer"


def _read(step: Decimal) -> tuple[int, int]:
    """The number c * 10^-n as c and the least n from 0 on."""
    places = fraction_digits(step)
    return int(step.scaleb(places)), places


def _as_read(step: float) -> tuple[float, int]:
    """The same as the engine does it, in float64; the first is no integer's equal where that goes wrong."""
    places = 0
    while step != math.floor(step) and places < 30:
        step, places = step * 10.0, places + 1
    return step, places
