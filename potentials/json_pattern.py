"""The regular expressions of JSON Schema, which are ECMAScript's, in a syntax that both Python and Rust read in the same way.

Every class becomes the ranges of its characters: `\\d`, `\\w`, `\\s` and `.` as ECMAScript has them, `\\p{..}` from Python's
tables of Unicode. `$` is the end of the text alone. Python's own spellings (`(?P<x>..)`, `\\A`, `\\Z`, `(?i)`) stay possible.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata

from smcgen.potentials.pattern import MAX_CODE, SURROGATES, Ranges, common, complement, merge, ranges_of

BLANKS = ranges_of(r"[\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]")
CLASSES = {"d": ranges_of("[0-9]"), "w": ranges_of("[0-9A-Z_a-z]"), "s": BLANKS}
CLASSES |= {letter.upper(): complement(ranges) for letter, ranges in CLASSES.items()}
DOT = complement([(10, 10), (13, 13), (0x2028, 0x2029)])
CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7, "0": 0}
# How ECMAScript calls Unicode's general categories in full.
CATEGORIES = {
    "Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Combining_Mark": "M", "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc", "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl",
    "Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd",
    "Open_Punctuation": "Ps", "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf",
    "Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk",
    "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl", "Paragraph_Separator": "Zp",
    "Other": "C", "Control": "Cc", "cntrl": "Cc", "Format": "Cf", "Surrogate": "Cs", "Private_Use": "Co", "Unassigned": "Cn",
}  # fmt: skip
NOTHING = "[a&&b]", "(?!)"  # of no text, for the engine and for Python
END = "$", r"\Z"
FLAGS = re.compile(r"(?<!\\)\(\?[ai]*[smxuL]")  # flags that change what `.`, `$` or blanks mean: the pattern is Python's


class NoPattern(ValueError):
    """A regular expression that Python cannot judge; the message says why."""


@functools.lru_cache(maxsize=4096)
def translated(pattern: str) -> tuple[str, str]:
    """A pattern for the engine, and the same one for Python's `re.search`. Raises NoPattern, and OverflowError
    for counts that are too large."""
    try:
        engine, python = (pattern, pattern) if FLAGS.search(pattern) else _Reader(pattern).read()
        re.compile(python)
    except (re.error, RecursionError) as error:
        raise NoPattern(f"Python's regular expressions do not take it ({error}): write it in another way") from None
    return engine, python


class _Reader:
    def __init__(self, source: str):
        self.source, self.at = source, 0
        self.out: list[tuple[str, str]] = []
        self.groups, self.names = 0, {}

    def take(self, expression: str) -> re.Match[str] | None:
        """What stands here, read, if it is of this form."""
        if (found := re.compile(expression).match(self.source, self.at)) is not None:
            self.at = found.end()
        return found

    def read(self) -> tuple[str, str]:
        for found in re.finditer(r"\\.|\[(?:\\.|[^\\\]])*\]?|\((\?P?<(?P<name>[^=!>][^>]*)>|(?!\?))", self.source, re.DOTALL):
            if found[0][0] == "(":
                self.groups += 1
                if found["name"]:
                    self.names[found["name"]] = self.groups
        while self.at < len(self.source):
            piece = self._piece()
            self.out.append(piece if isinstance(piece, tuple) else (piece, piece))
        return "".join(engine for engine, _ in self.out), "".join(python for _, python in self.out)

    def _piece(self) -> str | tuple[str, str]:
        if self.take(r"\\"):
            return self._escape()
        if self.take(r"\["):
            return self._class()
        if found := self.take(r"\(\?P=([^)]*)\)"):
            return self._back(found[1])
        if self.take(r"\(\?P?<[^=!>][^>]*>"):
            return "("  # by number it is the same group, and any name will do
        if found := self.take(r"\((\?(?:<?[=!]|:|>|[a-zA-Z-]+[:)]))?|[)|^*+?]|\{[0-9]+(?:,[0-9]*)?\}"):
            return found[0]
        if self.take(r"\$"):
            return END
        if self.take(r"\."):
            return spelled(DOT)
        character = self.source[self.at]
        self.at += 1
        return spelled([(ord(character), ord(character))])

    def _escape(self) -> str | tuple[str, str]:
        if found := self.take("[1-9][0-9]*"):
            return f"(?:\\{found[0]})"
        if found := self.take("k<([^>]*)>"):
            return self._back(found[1])
        if found := self.take("[bB]"):
            return f"\\{found[0]}", f"(?a:\\{found[0]})"
        if self.take("A"):
            return "^"
        if self.take("[zZ]"):
            return END
        return spelled(self._characters())

    def _back(self, name: str) -> str:
        if name not in self.names:
            raise NoPattern(f"no group is called {name!r}")
        return f"(?:\\{self.names[name]})"

    def _characters(self) -> Ranges:
        """What an escape of one character, whose backslash was read, stands for."""
        if found := self.take("[dDwWsS]"):
            return CLASSES[found[0]]
        if found := self.take(r"([pP])(?:\{(\^?)([^}]*)\}|([A-Z]))"):
            ranges = _property(found[3] or found[4])
            return complement(ranges) if (found[1] == "P") != bool(found[2]) else ranges
        if found := self.take(r"u([Dd][89ABab][0-9A-Fa-f]{2})\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})"):
            code = 0x10000 + ((int(found[1], 16) - 0xD800) << 10) + int(found[2], 16) - 0xDC00
        elif found := self.take(r"(?:u|x)\{([0-9A-Fa-f]{1,8})\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|U([0-9A-Fa-f]{8})"):
            code = int(next(filter(None, found.groups())), 16)
        elif found := self.take("c([A-Za-z])"):
            code = ord(found[1]) % 32
        elif found := self.take("[tnvfra0]"):
            code = CONTROL[found[0]]
        elif found := self.take("(?s:.)"):
            code = ord(found[0])
        else:
            raise NoPattern("it ends with a backslash")
        if code > MAX_CODE:
            raise NoPattern("it names a character beyond Unicode")
        return [(code, code)]

    def _class(self) -> str | tuple[str, str]:
        negated, ranges = bool(self.take(r"\^")), []
        while not self.take(r"\]"):
            low = self._member()
            ahead = self.take(r"-(?!\])")
            if ahead is None:
                ranges += low
                continue
            high = self._member()
            if len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]:
                if low[0][0] > high[0][0]:
                    raise NoPattern("a range of characters in it is out of order")
                ranges.append((low[0][0], high[0][0]))
            else:  # a class beside a dash: the dash is one more character
                ranges += [*low, *high, (45, 45)]
        return spelled(complement(merge(ranges)) if negated else merge(ranges))

    def _member(self) -> Ranges:
        if self.at >= len(self.source):
            raise NoPattern("a [ in it is not closed")
        if self.take(r"\\b"):
            return [(8, 8)]
        if self.take(r"\\"):
            return self._characters()
        self.at += 1
        code = ord(self.source[self.at - 1])
        return [(code, code)]


def spelled(ranges: Ranges) -> str | tuple[str, str]:
    """One character of these, for Python and Rust alike."""
    ranges = common(ranges, complement([SURROGATES]))
    if not ranges:
        return NOTHING
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges) + "]"


def _char(code: int) -> str:
    return chr(code) if code > 0x7F or chr(code).isalnum() else f"\\x{code:02X}"


def _property(name: str) -> Ranges:
    """The characters with a property of Unicode."""
    name = re.sub(r"^(?:gc|General_Category)=", "", name)
    if name in ("Any", "ASCII"):
        return [(0, MAX_CODE if name == "Any" else 0x7F)]
    found = _categories()
    name = CATEGORIES.get(name, name)
    kinds = ("Lu", "Ll", "Lt") if name == "LC" else tuple(kind for kind in found if kind == name or kind[0] == name)
    if not kinds:
        raise NoPattern(f"\\p{{{name}}} is no general category of Unicode: write its characters as ranges")
    return merge([pair for kind in kinds for pair in found.get(kind, ())])


@functools.cache
def _categories() -> dict[str, Ranges]:
    """The characters of each general category."""
    found: dict[str, Ranges] = {}
    begin, kind = 0, unicodedata.category("\0")
    for code in range(1, sys.maxunicode + 2):
        other = unicodedata.category(chr(code)) if code <= sys.maxunicode else ""
        if other != kind:
            found.setdefault(kind, []).append((begin, code - 1))
            begin, kind = code, other
    return found
