"""Python's regular expressions re-written for the Rust engine, so that both mean the same set of texts.

The tree of `re._parser` is walked and emitted anew: every character class becomes explicit code point ranges computed
by Python itself (Unicode tables, case folding and `\\w` differ between the two), every literal is escaped. The result
is an expression in the syntax of an llguidance terminal, whose operators `&` and `~` also express look-arounds
and word boundaries. What cannot be expressed raises `Inexpressible` with the reason; nothing is approximated here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

_parser = re._parser  # type: ignore[attr-defined]
_C = re._constants  # type: ignore[attr-defined]

ANY = "/(?s:.)*/"  # every text, as a terminal expression
EMPTY = "[a&&b]"  # no text at all, as a regular expression
Ranges = list[tuple[int, int]]

MAX_CODE = 0x10FFFF
ASSIGNED = 0x40000  # from here on no code point has case, or is a digit, a space or a word character
SURROGATES = (0xD800, 0xDFFF)  # in no UTF-8 text
CATEGORIES = {
    _C.CATEGORY_DIGIT: r"\d",
    _C.CATEGORY_NOT_DIGIT: r"\D",
    _C.CATEGORY_SPACE: r"\s",
    _C.CATEGORY_NOT_SPACE: r"\S",
    _C.CATEGORY_WORD: r"\w",
    _C.CATEGORY_NOT_WORD: r"\W",
}
NO_BOUNDARY_IN_NOTHING = re.fullmatch(r"\B", "") is None  # Python before 3.14
REPEATS = (_C.MAX_REPEAT, _C.MIN_REPEAT)
BEGIN = (_C.AT_BEGINNING, _C.AT_BEGINNING_STRING)
END = (_C.AT_END, _C.AT_END_STRING)
BOUNDARIES = {_C.AT_BOUNDARY: True, _C.AT_NON_BOUNDARY: False}


class Inexpressible(ValueError):
    """A regular expression means something that the engine cannot compute; the message is the reason."""


def parse(pattern: str, flags: int = 0) -> Any:
    """Python's tree of `pattern`, its own flags resolved in `.state.flags`. Raises Inexpressible on a syntax error."""
    try:
        re.compile(pattern, flags)  # errors that the tree alone does not show, e.g. a look-behind of variable width
        return _parser.parse(pattern, flags)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise Inexpressible(f"not a regular expression: {error}") from None


def terminal(pattern: str, flags: int = 0) -> str:
    """The texts x with `re.fullmatch(pattern, x, flags)`, as an llguidance terminal expression.

    Raises Inexpressible for back-references, conditionals, possessive and atomic groups, and for look-arounds and
    anchors inside a repetition or before more text in a group."""
    tree = parse(pattern, flags)
    return expression(list(tree), tree.state.flags)


def occurring(pattern: str, flags: int = 0, plain: bool = False) -> str:
    """The texts x with `re.search(pattern, x, flags)`, as a terminal expression.

    Raises Inexpressible as `terminal`; anchors are possible at the beginning and the end of each top alternative. plain: for
    look-arounds and word boundaries too (llguidance goes wrong about complements of some)."""
    tree = parse(pattern, flags)
    items, flags = list(tree), tree.state.flags
    if plain and any(_looks_around(*item) for item in items):
        raise Inexpressible(
            "a look-around or word boundary cannot be avoided: name the characters beside it instead, for \\bbad\\b write "
            r"^bad$|^bad\W|\Wbad\W|\Wbad$"
        )
    branches = items[0][1][1] if len(items) == 1 and items[0][0] is _C.BRANCH else [items]
    lines, found = bool(flags & re.MULTILINE), []
    for branch in map(list, branches):
        before = after = "(?s:.)*"
        if branch and branch[0][0] is _C.AT and branch[0][1] in BEGIN:
            before = r"(?:(?s:.)*\n)?" if lines and branch[0][1] is _C.AT_BEGINNING else ""
            branch = branch[1:]
        if branch and branch[-1][0] is _C.AT and branch[-1][1] in END:
            line = r"(?:\n(?s:.)*)?" if lines else r"\n?"  # `$` also stands before a line break at the end
            after = line if branch[-1][1] is _C.AT_END else ""
            branch = branch[:-1]
        parts = [*_parser.parse(before), *branch, *_parser.parse(after)]
        found.append(_piece(parts, flags, False) if plain else expression(parts, flags))
    return f"({' | '.join(found)})"


def searched(pattern: str) -> str:
    """The texts in which JSON Schema's `pattern` occurs, as a regular expression in Rust's syntax. `\\d` and `\\w` are ASCII.

    Raises Inexpressible also for blanks (`\\s`), of which engines have different ideas, and for anchors within."""
    tree = parse(pattern, re.ASCII)
    if _has_blanks(list(tree)):
        raise Inexpressible("blanks as a class")
    items = list(tree)
    branches = items[0][1][1] if len(items) == 1 and items[0][0] is _C.BRANCH else [items]
    found = []
    for branch in map(list, branches):
        begins = bool(branch) and branch[0] == (_C.AT, _C.AT_BEGINNING)
        ends = len(branch) > begins and branch[-1] == (_C.AT, _C.AT_END)
        middle = _emit(branch[begins : len(branch) - ends], tree.state.flags)
        found.append(f"{'' if begins else '(?s:.)*'}{middle}{'' if ends else '(?s:.)*'}")
    return _either(found)


def _has_blanks(items: Any) -> bool:
    """Whether `\\s` or `\\S` is among parsed items, at any depth."""
    if isinstance(items, list | tuple | _parser.SubPattern):
        return any(map(_has_blanks, items))
    return items is _C.CATEGORY_SPACE or items is _C.CATEGORY_NOT_SPACE


def literal(text: str) -> str:
    """`text` itself as a regular expression in Rust's syntax."""
    return "".join(map(_char, map(ord, text)))


def words(options: Iterable[str]) -> str:
    """A terminal expression for a finite set of texts."""
    return "/" + _either([literal(option) for option in options]) + "/"


def expression(items: Sequence[Any], flags: int, first: bool = True) -> str:
    """Parsed items as a terminal expression. It ends where the text ends, and begins where the text begins if `first`.

    A look-ahead therefore speaks about exactly the items after it, and a look-behind about those before it."""
    for i, (op, arg) in enumerate(items):
        before, after = items[:i], items[i + 1 :]
        starts = first and not before
        if op in (_C.ASSERT, _C.ASSERT_NOT):
            direction, body = arg
            no = "~" if op is _C.ASSERT_NOT else ""
            left, right = _piece(before, flags, first), expression(after, flags, starts)
            if direction > 0:
                return f"({left} ({right} & {no}{_ahead(list(body), flags, starts)}))"
            _require_sight(before, body.getwidth()[1], first)
            return f"(({left} & {no}({ANY} {_piece(body, flags, False)})) {right})"
        if op is _C.AT and arg in BOUNDARIES:
            _require_sight(before, 1, first)
            left, right = _piece(before, flags, first), expression(after, flags, starts)
            found = _boundary(left, right, flags, BOUNDARIES[arg])
            return f"({found} & /(?s:.)+/)" if arg is _C.AT_NON_BOUNDARY and NO_BOUNDARY_IN_NOTHING else found
        if not after and _looks_around(op, arg):
            alternatives, inner_flags = _last(op, arg, flags)
            inner = [expression(list(branch), inner_flags, starts) for branch in alternatives]
            return f"({_piece(before, flags, first)} ({' | '.join(inner)}))"
    return _piece(items, flags, first, last=True)


def _ahead(body: list[Any], flags: int, first: bool) -> str:
    """The texts that a look-ahead sees: its body and whatever follows, or the end of the text if it asks for that."""
    if body and body[-1] == (_C.AT, _C.AT_END_STRING):
        return expression(body[:-1], flags, first)
    if body and body[-1] == (_C.AT, _C.AT_END):
        return expression([*body[:-1], *_parser.parse("\\n?")], flags, first)
    return expression([*body, *_parser.parse("(?s:.*)")], flags, first)


def _require_sight(before: Sequence[Any], width: int, first: bool) -> None:
    """A look-behind of `width` characters must not reach beyond the items before it, unless the text begins there."""
    if not first and _parser.SubPattern(_parser.State(), list(before)).getwidth()[0] < width:
        raise Inexpressible("a look-behind or word boundary may look at what stands before its group")


def ranges_of(pattern: str) -> Ranges:
    """The characters that a pattern for one character matches."""
    tree = parse(pattern)
    ((op, arg),) = list(tree)
    ranges = characters(op, arg, tree.state.flags)
    assert ranges is not None, pattern
    return ranges


def ranges_to_class(ranges: Ranges) -> str:
    """Sorted code point ranges as a character class in Rust's syntax."""
    if not ranges:
        return EMPTY
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges) + "]"


def characters(op: Any, arg: Any, flags: int) -> Ranges | None:
    """The code points that a one-character item matches, as sorted ranges; None if the item is no such item."""
    if op is _C.LITERAL:
        ranges, negate = [(arg, arg)], False
    elif op is _C.NOT_LITERAL:
        ranges, negate = [(arg, arg)], True
    elif op is _C.ANY:
        ranges, negate = ([], True) if flags & re.DOTALL else ([(10, 10)], True)
    elif op is _C.IN:
        ranges, negate = [], False
        for kind, value in arg:
            if kind is _C.NEGATE:
                negate = True
            elif kind is _C.LITERAL:
                ranges.append((value, value))
            elif kind is _C.RANGE:
                ranges.append(tuple(value))
            else:
                ranges.extend(_category(CATEGORIES[value], bool(flags & re.ASCII)))
    else:
        return None
    if flags & re.IGNORECASE and op is not _C.ANY:
        ranges, negate = _fold(op, arg, ranges, negate, flags), False
    ranges = complement(merge(ranges)) if negate else merge(ranges)
    return _subtract(ranges, [SURROGATES])


def _piece(items: Sequence[Any], flags: int, first: bool, last: bool = False) -> str:
    return f"/{_emit(items, flags, first, last) or '(?:)'}/"


def _emit(items: Sequence[Any], flags: int, first: bool = False, last: bool = False) -> str:
    """Items without look-arounds as one regular expression. Anchors are void at the very ends of the text."""
    out = []
    for i, (op, arg) in enumerate(items):
        begins, ends = first and not any(out), last and all(o is _C.AT for o, _ in items[i + 1 :])
        if (ranges := characters(op, arg, flags)) is not None:
            out.append(ranges_to_class(ranges))
        elif op is _C.BRANCH:
            out.append(_either([_emit(branch, flags, begins, ends) for branch in arg[1]]))
        elif op is _C.SUBPATTERN:
            _, added, removed, body = arg
            out.append(f"(?:{_emit(body, (flags | added) & ~removed, begins, ends)})")
        elif op in REPEATS:
            low, high, body = arg
            out.append(f"(?:{_emit(body, flags)}){_count(low, high)}")
        elif op is _C.AT and ((arg in BEGIN and begins) or (arg in END and ends)):
            continue
        else:
            raise Inexpressible(_reason(op, arg))
    return "".join(out)


def _reason(op: Any, arg: Any) -> str:
    if op in (_C.ASSERT, _C.ASSERT_NOT) or (op is _C.AT and arg in BOUNDARIES):
        return "a look-around or word boundary in a repetition, or in a group that more text follows, is not supported"
    if op is _C.AT:
        return "an anchor (^ or $) is possible only at the very beginning or the very end"
    names = {
        _C.GROUPREF: "a back-reference is not regular, write what it may repeat as alternatives",
        _C.GROUPREF_EXISTS: "a conditional group is not regular, write its two cases as alternatives",
        _C.POSSESSIVE_REPEAT: "a possessive repetition depends on the order of matching, write a plain one",
        _C.ATOMIC_GROUP: "an atomic group depends on the order of matching, write a plain one",
    }
    return names.get(op, f"{op} is not supported")


def _count(low: int, high: Any) -> str:
    if high is _C.MAXREPEAT:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"


def _either(alternatives: Sequence[str]) -> str:
    return f"(?:{'|'.join(alternatives)})" if alternatives else EMPTY


def _boundary(left: str, right: str, flags: int, wanted: bool) -> str:
    """`left \\b right`: exactly one of the two sides of the boundary is a word character (`\\B`: both or neither)."""
    word = ranges_to_class(_category(r"\w", bool(flags & re.ASCII)))
    ends, begins = f"({ANY} /{word}/)", f"(/{word}/ {ANY})"
    pairs = [("", "~"), ("~", "")] if wanted else [("", ""), ("~", "~")]
    return "(" + " | ".join(f"(({left} & {a}{ends}) ({right} & {b}{begins}))" for a, b in pairs) + ")"


def _looks_around(op: Any, arg: Any) -> bool:
    if op in (_C.ASSERT, _C.ASSERT_NOT) or (op is _C.AT and arg in BOUNDARIES):
        return True
    if op is _C.BRANCH:
        return any(_looks_around(*item) for branch in arg[1] for item in branch)
    return op is _C.SUBPATTERN and any(_looks_around(*item) for item in arg[3])


def _last(op: Any, arg: Any, flags: int) -> tuple[Sequence[Any], int]:
    """The alternatives of a group that nothing follows, and the flags inside it."""
    if op is _C.BRANCH:
        return arg[1], flags
    _, added, removed, body = arg
    return [body], (flags | added) & ~removed


def _char(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"


def _ranges(codes: Iterable[int]) -> Ranges:
    return merge([(code, code) for code in codes])


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    out: Ranges = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out


def complement(ranges: Ranges) -> Ranges:
    """The code points that are in none of sorted ranges."""
    edges = [-1, *(code for low, high in ranges for code in (low - 1, high)), MAX_CODE]
    # edges pairs up as (end of the previous range, start of the next minus 1)
    return [(low + 1, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def _subtract(ranges: Ranges, minus: Ranges) -> Ranges:
    return complement(merge([*complement(ranges), *minus]))


def common(ranges: Ranges, others: Ranges) -> Ranges:
    """The code points in both."""
    return _subtract(ranges, complement(others))


@cache
def _category(category: str, ascii_only: bool) -> Ranges:
    """The code points of `\\w`, `\\d`, ..., asked of Python's own engine."""
    if category[1].isupper():
        return complement(_category(category.lower(), ascii_only))
    top = 0x80 if ascii_only else ASSIGNED
    found = re.finditer(category + "+", _characters()[:top], re.ASCII if ascii_only else 0)
    return merge((ord(m.group()[0]), ord(m.group()[-1])) for m in found)


@cache
def _cased() -> str:
    """Every character whose case can change: only these are touched by `re.IGNORECASE`."""
    every = _characters()
    parts = (every[i : i + 256] for i in range(0, len(every), 256))
    return "".join(
        c for part in parts if not part == part.lower() == part.upper() for c in part if not c == c.lower() == c.upper()
    )


@cache
def _characters() -> str:
    """All characters below ASSIGNED."""
    codes = (range(SURROGATES[0]), range(SURROGATES[1] + 1, ASSIGNED))
    return b"".join(np.array(part, "<u4").tobytes() for part in codes).decode("utf-32-le")


def _fold(op: Any, arg: Any, ranges: Ranges, negate: bool, flags: int) -> Ranges:
    """The final ranges of a one-character item under IGNORECASE: Python is asked about each cased character."""
    plain = complement(merge(ranges)) if negate else merge(ranges)
    found: Callable[[str], list[str]] = re.compile(_class_text(op, arg), flags & (re.IGNORECASE | re.ASCII)).findall
    return merge([*_subtract(plain, _ranges(map(ord, _cased()))), *_ranges(map(ord, found(_cased())))])


def _class_text(op: Any, arg: Any) -> str:
    """A one-character item in Python's own syntax again."""

    def shown(code: int) -> str:
        return f"\\U{code:08X}"

    if op is _C.LITERAL or op is _C.NOT_LITERAL:
        return f"[{'^' if op is _C.NOT_LITERAL else ''}{shown(arg)}]"
    parts = []
    for kind, value in arg:
        if kind is _C.NEGATE:
            parts.insert(0, "^")
        elif kind is _C.LITERAL:
            parts.append(shown(value))
        elif kind is _C.RANGE:
            parts.append(f"{shown(value[0])}-{shown(value[1])}")
        else:
            parts.append(CATEGORIES[value])
    return f"[{''.join(parts)}]"
