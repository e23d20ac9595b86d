"""JSON Schemas whose values form a regular language, as terminal expressions: no recursion, no open objects or arrays.

The language is meant to be the one that llguidance's own compiler of schemas makes: order and separators of properties,
blanks between the parts, spellings of strings and numbers. `agreement.agrees` tries it: a schema for which the two were not
found to agree stays with llguidance.
"""

from __future__ import annotations

import functools
import json

from smcgen.potentials.expression import pieces
from smcgen.potentials.json_numbers import constant, either, integers, numbers, whole
from smcgen.potentials.json_types import Array, NotRegular, Null, Number, Object, Part, Text, Truth, Types, Union
from smcgen.potentials.pattern import (
    EMPTY,
    Inexpressible,
    Ranges,
    common,
    literal,
    ranges_of,
    ranges_to_class,
    searched,
)

LENGTH = 1 << 17  # characters of an expression
QUOTE, BACKSLASH = r"\x{22}", r"\x{5C}"
PLAIN = ranges_of(r'[^"\\\x00-\x1f\x7f]')  # characters that may stand for themselves
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: QUOTE, 92: BACKSLASH}
HEX = "[0-9A-Fa-f]"
# A character of a string without a pattern: plain, or any escape of one character of Unicode.
ESCAPE = (
    rf"{BACKSLASH}(?:[bfnrt{QUOTE}{BACKSLASH}]|u(?:[0-9A-CE-Fa-ce-f]{HEX}{{3}}|[Dd][0-7]{HEX}{{2}}"
    rf"|[Dd][89ABab]{HEX}{{2}}{BACKSLASH}u[Dd][C-Fc-f]{HEX}{{2}}))"
)
CHARACTER = f"(?:{ranges_to_class(PLAIN)}|{ESCAPE})"


def regular(schema: dict, blanks: int | None) -> str | None:
    """The terminal expression of the values that a plain schema (see `json_plain`) admits, None if they form no regular
    language, or it is not known to be llguidance's. blanks: as in `json_schema`."""
    try:
        return _Writer(blanks).union(Types(schema).of(schema))
    except (NotRegular, Inexpressible, RecursionError, TypeError):  # the last: a keyword as another draft has it
        return None


class _Writer:
    def __init__(self, blanks: int | None):
        times = "*" if blanks is None else f"{{0,{blanks}}}"
        self.gap = f"/[\\x{{20}}\\x{{A}}\\x{{D}}\\x{{9}}]{times}/" if blanks != 0 else ""
        self.comma = f"{self.gap} /\\,/ {self.gap}"
        self.size = 0

    def union(self, parts: Union) -> str:
        if parts is None:
            raise NotRegular("any value may stand there")
        return self._kept(f"({' | '.join(map(self._part, parts))})" if parts else f"/{EMPTY}/")

    def _kept(self, text: str) -> str:
        self.size += len(text)
        if self.size > LENGTH:
            raise NotRegular("its expression would be too long")
        return text

    def _part(self, part: Part) -> str:
        if isinstance(part, Null):
            return "/null/"
        if isinstance(part, Truth):
            return {None: "/(?:true|false)/", True: "/true/", False: "/false/"}[part.value]
        if isinstance(part, Number):
            return _number(part)
        if isinstance(part, Text):
            return _text(part)
        return self._array(part) if isinstance(part, Array) else self._object(part)

    def _array(self, array: Array) -> str:
        if array.others is None and (array.longest is None or array.longest > len(array.first)):
            raise NotRegular("any item may stand there")
        other = None if array.others is None else self.union(array.others)
        count, low, high = len(array.first), array.shortest, array.longest
        after = ""  # what may follow the first `place` items
        if other is not None and (high is None or high > count):
            least = max(low - max(count, 1), 0)
            most = "" if high is None else high - max(count, 1)
            after = f"({self.comma} {other}){{{least},{most}}}" if most != 0 else ""
        for place in range(count - 1, 0, -1):
            if high is not None and place >= high:
                continue
            after = self._kept(f"({self.comma} {self.union(array.first[place])} {after}){'?' if place >= low else ''}")
        if high == 0 or (not count and other is None):
            inside = ""
        else:
            first = self.union(array.first[0]) if count else other
            inside = f"({first} {after} {self.gap}){'' if low else '?'}"
        return self._kept(f"/\\[/ {self.gap} {inside} /\\]/")

    def _object(self, thing: Object) -> str:
        names = [*thing.properties, *(name for name in thing.required if name not in thing.properties)]
        items = []
        for name in names:
            value = self.union(thing.properties.get(name, thing.others))
            items.append((f"/{literal(_name(name))}/ {self.gap} /\\:/ {self.gap} {value}", name in thing.required))
        if thing.others != [] and names:
            raise NotRegular("an undeclared key may be the spelling of a declared one with escapes, which the end must judge")
        if thing.others != []:
            key = f"/{QUOTE}{CHARACTER}*{QUOTE}/"
            item = f"{key} {self.gap} /\\:/ {self.gap} {self.union(thing.others)}"
            items.append((f"{item} ({self.comma} {item})*", False))
        inside, after = [], ""  # beginnings with each item; what may follow the item before
        for item, required in reversed(items):
            if required:
                inside = []
            inside.append(f"({item} {after})")
            after = self._kept(f"({self.comma} {item}){'' if required else '?'} {after}")
        must = any(required for _, required in items)
        body = f"(({' | '.join(inside)}) {self.gap}){'' if must else '?'}" if inside else ""
        return self._kept(f"/\\{{/ {self.gap} {body} /\\}}/")


def _name(name: str) -> str:
    """The name of a property as it is written."""
    return json.dumps(name, ensure_ascii=False)


def _number(number: Number) -> str:
    low, high = number.low, number.high
    with_low = number.above is None or (low is not None and low > number.above)
    with_high = number.below is None or (high is not None and high < number.below)
    low, high = low if with_low else number.above, high if with_high else number.below
    if number.whole:
        first, last = whole(low, high, with_low, with_high)
        nothing = first is not None and last is not None and first > last
        return f"/{EMPTY if nothing else integers(first, last)}/"
    if low is not None and high is not None and (low > high or (low == high and not (with_low and with_high))):
        return f"/{EMPTY}/"
    if low is not None and low == high:  # as a constant
        return f"/{constant(low)}/"
    return f"/{numbers(low, high, with_low, with_high)}/"


def _text(text: Text) -> str:
    if text.longest is not None and text.shortest > text.longest:
        return f"/{EMPTY}/"
    times = f"{{{text.shortest},{'' if text.longest is None else text.longest}}}"
    if not text.patterns and not text.literals:
        return f"/{QUOTE}{CHARACTER}{times}{QUOTE}/"
    both = [quoted(literal(one)) for one in text.literals]
    both += [quoted(searched(pattern)) for pattern in text.patterns]
    if times != "{0,}":
        both.append(quoted(f"(?s:.){times}"))
    return f"(/{QUOTE}/ ({' & '.join(f'/{part}/' for part in both)}) /{QUOTE}/)"


def quoted(source: str) -> str:
    """A regular expression for texts as one for how JSON strings spell them: plainly, where they can."""
    return "".join(text if ranges is None else _quoted(tuple(ranges)) for text, ranges in pieces(source))


@functools.lru_cache(maxsize=1024)
def _quoted(ranges: tuple[tuple[int, int], ...]) -> str:
    """How JSON strings spell one character of a set."""
    kept: Ranges = list(ranges)
    parts = [ranges_to_class(plain)] if (plain := common(kept, PLAIN)) else []
    members = [code for code in (*range(0x20), 34, 92, 0x7F) if any(low <= code <= high for low, high in kept)]
    parts += [BACKSLASH + SHORT[code] for code in members if code in SHORT]
    for high in (0, 1, 7):
        digits = "".join(f"{code % 16:X}" for code in members if code // 16 == high and code not in (34, 92))
        if digits:
            letters = "".join(digit + digit.lower() if digit.isalpha() else digit for digit in digits)
            parts.append(f"{BACKSLASH}u00{high}[{letters}]")
    return either(parts) if parts else EMPTY
