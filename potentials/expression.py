"""Terminal expressions as trees.

The expressions are those that this project writes for llguidance (`pattern`, `stops`, `text`, `json_regular`): /regular
expressions/ in a small part of Rust's syntax, joined by concatenation, `|`, `&`, `~`, brackets and repetition. A tree is
(kind, ...): CHARS with sorted ranges of code points, CAT, ALT and AND with a list of trees, NOT with a tree, REPEAT with a tree
and how often.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from smcgen.potentials.pattern import MAX_CODE, SURROGATES, Ranges, complement, merge

SYMBOLS = re.compile(r"\s*(?:(/(?:[^/\\]|\\.)*/)|([|&~()])|([*+?]|\{\d+(?:,\d*)?\}))")
PIECES = re.compile(
    r"(?P<open>\(\?:)|(?P<close>\))|(?P<any>\(\?s:\.\))|(?P<none>\[a&&b\])|(?P<cls>\[\^?(?:[^\]\\]|\\x\{[0-9A-F]+\}|\\.)+\])"
    r"|(?P<or>\|)|(?P<times>[*+?]|\{\d+(?:,\d*)?\})|(?P<char>\\x\{[0-9A-F]+\}|\\.|[A-Za-z0-9])"
)
CHARACTER = re.compile(r"\\x\{([0-9A-F]+)\}|\\(.)|(.)", re.DOTALL)
ESCAPES = {"n": 10, "t": 9, "r": 13}

EMPTY, EPSILON, CHARS, CAT, ALT, AND, NOT, REPEAT = range(8)


class Sets(list[Ranges]):
    """The sets of characters in an expression, as `Alphabet` asks for them."""

    def sets(self) -> Iterator[Ranges]:
        return iter(self)


def parsed(expression: str) -> tuple[Any, Sets]:
    """The expression as a tree (kind, ...), and its sets of characters."""
    tokens, at = [], 0
    while at < len(expression.rstrip()):
        found = SYMBOLS.match(expression, at)
        if found is None:
            raise ValueError(f"not an expression of this project: {expression[at : at + 40]!r}")
        tokens.append(found.group(1) or found.group(2) or found.group(3))
        at = found.end()
    sets = Sets()
    tokens.append(")")
    tokens.reverse()
    tree = _alternatives(tokens, sets)
    sets.append([SURROGATES])
    if len(tokens) != 1:
        raise ValueError("not an expression of this project: a bracket too many")
    return tree, sets


def _alternatives(tokens: list[str], sets: Sets) -> Any:
    """Up to the closing bracket, which is left."""
    either: list[Any] = []
    while True:
        both: list[Any] = []
        while True:
            items = []
            while tokens[-1] not in "|&)":
                items.append(_item(tokens, sets))
            both.append((CAT, items))
            if tokens[-1] != "&":
                break
            tokens.pop()
        either.append((AND, both) if len(both) > 1 else both[0])
        if tokens[-1] != "|":
            return (ALT, either) if len(either) > 1 else either[0]
        tokens.pop()


def _item(tokens: list[str], sets: Sets) -> Any:
    token = tokens.pop()
    if token == "~":
        return NOT, _item(tokens, sets)
    if token == "(":
        tree = _alternatives(tokens, sets)
        tokens.pop()
    else:
        tree = _regex(token[1:-1], sets)
    while tokens[-1][0] in "*+?{":
        tree = (REPEAT, tree, *_times(tokens.pop()))
    return tree


def _regex(source: str, sets: Sets) -> Any:
    stack: list[list[list[Any]]] = [[[]]]  # open groups, their alternatives, their items
    for kind, text, ranges in _pieces(source):
        items = stack[-1][-1]
        if kind == "open":
            stack.append([[]])
        elif kind == "close":
            items = stack.pop()
            stack[-1][-1].append((ALT, [(CAT, part) for part in items]))
        elif kind == "or":
            stack[-1].append([])
        elif kind == "times":
            low, high = _times(text)
            items[-1] = (REPEAT, items[-1], low, high)
        else:
            sets.append(ranges)
            items.append((CHARS, ranges))
    (alternatives,) = stack
    return ALT, [(CAT, part) for part in alternatives]


def pieces(source: str) -> Iterator[tuple[str, Ranges | None]]:
    """The parts of a regular expression, with the characters that one stands for."""
    for kind, text, ranges in _pieces(source):
        yield text, None if kind in ("open", "close", "or", "times") else ranges


def _pieces(source: str) -> Iterator[tuple[str | None, str, Ranges]]:
    at = 0
    while at < len(source):
        found = PIECES.match(source, at)
        if found is None:
            raise ValueError(f"not an expression of this project: {source[at : at + 40]!r}")
        at, kind, text = found.end(), found.lastgroup, found.group()
        yield kind, text, [(0, MAX_CODE)] if kind == "any" else _ranges(text) if kind in ("cls", "char") else []


def _times(text: str) -> tuple[int, int | None]:
    if text in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
    low, comma, high = text[1:-1].partition(",")
    return int(low), int(high) if high else None if comma else int(low)


@functools.lru_cache(maxsize=1024)
def _ranges(text: str) -> Ranges:
    """A character, or a class of them."""
    negate = text.startswith("[^")
    inner = text[2 if negate else 1 : -1] if text[0] == "[" else text
    codes: list[Any] = [
        int(hexa, 16) if hexa else (ESCAPES.get(escaped, ord(escaped)) if escaped else ("-" if char == "-" else ord(char)))
        for hexa, escaped, char in CHARACTER.findall(inner)
    ]
    found, i = [], 0
    while i < len(codes):
        if i + 2 < len(codes) and codes[i + 1] == "-":
            found.append((codes[i], codes[i + 2]))
            i += 3
        else:
            found.append((codes[i], codes[i]))
            i += 1
    return complement(merge(found)) if negate else merge(found)
