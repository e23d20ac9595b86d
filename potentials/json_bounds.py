"""Bounds on numbers, and multipleOf, in terms that llguidance gets right.

Its regular expressions for numbers between bounds miss some (0.9 below 0.95, 0.50 above an excluded 0) and let others through
(an excluded 0 below 0.5); it reads bounds as float64; its multiples need all digits of a fraction. So a schema is given to it
with each such range as a union of ranges for which its expressions are right: all numbers that begin with the same digits,
one number alone. What is beyond it is widened, and said to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smcgen.potentials.json_exact import is_multiple
from smcgen.potentials.json_multiples import integers_among, is_step, seen, snapped, taken, variants
from smcgen.potentials.json_plain import deep
from smcgen.potentials.json_spans import decimal, interval, right, spans, widened
from smcgen.values import is_number, is_whole

RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OTHERS = ("null", "boolean", "string", "array", "object")
EXACT = 2**53  # from here on float64 has not every integer
MOST = 9  # digits of a fraction that the engine's multiples can have
MOST_BESIDE = 4  # the same where a multipleOf is given besides: the engine multiplies the two in 32 bits
FORM = "next to a bound, numbers have few zeros after its digits (4 to 9)"
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
    deep(schema, lambda node: nodes.append(node) or node)
    steps = {step for node in nodes if (step := _step(node)) is not None}
    work = _Work(MOST_BESIDE if steps else MOST, taken(steps, any(map(_meets, nodes))), {}, {})
    wider = deep(schema, lambda node: work.mend(node, False))
    return Mended(wider, deep(schema, lambda node: work.mend(node, True)), tuple(work.doubts), tuple(work.form))


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
        """Without constants that the engine would take for others, or of which it would not see that they are multiples."""
        if is_step(step := node.get("multipleOf")) and ("const" in node) != ("enum" in node):
            values = [node["const"]] if "const" in node else node["enum"]
            fit = [value for value in values if not is_number(value) or is_multiple(decimal(value), decimal(step))]
            node = {key: value for key, value in node.items() if key not in ("multipleOf", "const")} | {"enum": fit}
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
        if small and kind == "integer":
            return None
        asked, step = bounds, None
        if kind == "number" and node.get("multipleOf") in self.steps:
            step = decimal(node["multipleOf"])
            bounds = snapped(bounds, step)
        wider = widened(bounds, kind)
        if small and wider == asked and (bounds.low == bounds.high or right(bounds)):
            return None
        if wider != bounds:
            self.doubts[f"{' and '.join(given)}: of more digits than the engine reads"] = None
        if wider.low is None and wider.high is None:
            return []
        if kind == "integer" or bounds.empty:
            return [{"type": kind, **wider.keywords()}]
        self.form[FORM] = None
        found = list(spans(wider, self.most))
        if step is not None and not all(seen(span, one) for span in found for one in variants(step)):
            self.doubts[f"{' and '.join(given)} beside multipleOf {step}: the engine would round"] = None
            return []
        return [{"type": kind, **span} for span in found]

    def _multiples(self, node: dict, kind: str) -> list[dict] | None:
        """What stands for its multipleOf; None: it stays."""
        if (step := _step(node)) is None:
            return None
        given = node["multipleOf"]
        if step not in self.steps:
            self.doubts[f"multipleOf {given} is not enforced by the masks: it is too large, or has too many digits"] = None
            return []
        if kind == "integer":
            return None if step == given else [{"type": kind, "multipleOf": step}]
        self.form[MULTIPLES] = None
        steps = variants(decimal(step))
        return None if len(steps) == 1 else [{"type": kind, "multipleOf": float(one)} for one in steps]


def _step(node: dict) -> float | None:
    """Its multipleOf; of integers the step of these."""
    if not is_step(step := node.get("multipleOf")):
        return None
    types = node.get("type", ())
    return integers_among(decimal(step)) if types == "integer" or ("integer" in types and "number" not in types) else step


def _meets(node: dict) -> bool:
    """Whether what it says of a value may come to several schemas at once."""
    return "allOf" in node or (len(node.keys() - {"$defs"}) > 1 and not node.keys().isdisjoint(("$ref", "anyOf", "oneOf")))


def _and(node: dict, options: list[dict]) -> dict:
    return {**node, "allOf": [*node.get("allOf", ()), {"anyOf": options}]}


def _beyond(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_beyond, value.values() if isinstance(value, dict) else value))
    return is_whole(value) and abs(value) >= EXACT


def _kind(value: Any) -> str:
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "integer"
