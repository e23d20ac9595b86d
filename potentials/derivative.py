"""Terminal expressions as finite automata over characters, by derivatives.

The derivative of a language by a character is what may follow it (Brzozowski 1964): the states of the automaton are the
languages that derivatives lead to, recognised as equal by the normal forms that are kept here (Owens, Reppy & Turon 2009).
Intersection and complement, of which stop strings and look-arounds are made, cost nothing extra.

The expressions are those that this project writes for llguidance (`pattern`, `stops`, `text`): /regular expressions/ in a small
part of Rust's syntax, joined by concatenation, `|`, `&`, `~` and brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smcgen.potentials.automaton import Alphabet
from smcgen.potentials.pattern import MAX_CODE, SURROGATES, Ranges, merge

STATES = 2_000  # of an automaton
WORK = 50_000  # derivatives and unions taken for it; about 3 us each

SYMBOLS = re.compile(r"\s*(?:(/(?:[^/\\]|\\.)*/)|([|&~()]))")
PIECES = re.compile(
    r"(?P<open>\(\?:)|(?P<close>\))|(?P<any>\(\?s:\.\))|(?P<none>\[a&&b\])|(?P<cls>\[\^?(?:[^\]\\]|\\x\{[0-9A-F]+\}|\\.)+\])"
    r"|(?P<or>\|)|(?P<times>[*+?]|\{\d+(?:,\d*)?\})|(?P<char>\\x\{[0-9A-F]+\}|\\.|[A-Za-z0-9])"
)
CHARACTER = re.compile(r"\\x\{([0-9A-F]+)\}|\\(.)|(.)", re.DOTALL)
ESCAPES = {"n": 10, "t": 9, "r": 13}

EMPTY, EPSILON, CHARS, CAT, ALT, AND, NOT, REPEAT = range(8)


class TooLarge(Exception):
    """The automaton has too many states, or takes too long to make."""


@dataclass(eq=False)
class Dfa:
    """An automaton over the characters of `alphabet`; state 0 is the start.

    Attributes:
        step: int32 [states, classes], -1 where no accepted text is left.
        accepts: bool [states]."""

    alphabet: Alphabet
    step: np.ndarray
    accepts: np.ndarray


def dfa(expression: str) -> Dfa:
    """The automaton of a terminal expression. Raises TooLarge."""
    try:
        return _Builder(*_parsed(expression)).build()
    except RecursionError:
        raise TooLarge from None


@dataclass(eq=False, slots=True)
class Node:
    """A language; nodes of one builder are equal only if they are the same object."""

    kind: int
    parts: Any
    nullable: bool
    number: int
    derivatives: dict[int, Node] = field(default_factory=dict)


class _Sets(list[Ranges]):
    """The sets of characters in an expression, as `Alphabet` asks for them."""

    def sets(self) -> Iterator[Ranges]:
        return iter(self)


class _Builder:
    """Normal forms of languages over one alphabet, each made once."""

    def __init__(self, tree: Any, sets: _Sets):
        self.alphabet = Alphabet([sets])  # type: ignore[list-item]
        surrogates = self.alphabet.bits([SURROGATES])
        self.classes = [cls for cls in range(self.alphabet.size) if not surrogates >> cls & 1]
        self.universe = sum(1 << cls for cls in self.classes)
        self.work = 0
        self._nodes: dict[Any, Node] = {}
        self.empty = self._node(EMPTY, None, False)
        self.epsilon = self._node(EPSILON, None, True)
        self.all = self._node(NOT, self.empty, True)
        self.top = self._of(tree)

    def build(self) -> Dfa:
        numbers, queue, rows = {self.top: 0}, [self.top], []
        for node in queue:
            row = np.full(self.alphabet.size, -1, np.int32)
            for cls in self.classes:
                after = self._derivative(node, cls)
                if after is not self.empty:
                    if after not in numbers:
                        if len(queue) >= STATES:
                            raise TooLarge
                        numbers[after] = len(queue)
                        queue.append(after)
                    row[cls] = numbers[after]
            rows.append(row)
        step, accepts = np.array(rows), np.array([node.nullable for node in queue])
        alive = _alive(step, accepts)
        step[(step >= 0) & ~alive[step]] = -1
        return Dfa(self.alphabet, step, accepts)

    def _node(self, kind: int, parts: Any, nullable: bool) -> Node:
        key = kind, tuple(p.number for p in parts) if kind in (CAT, ALT, AND) else getattr(parts, "number", parts)
        if key not in self._nodes:
            self.work += 1
            if self.work > WORK:
                raise TooLarge
            self._nodes[key] = Node(kind, parts, nullable, len(self._nodes))
        return self._nodes[key]

    def _of(self, tree: Any) -> Node:
        kind, *parts = tree
        if kind == CHARS:
            return self._chars(self.alphabet.bits(parts[0]))
        if kind == REPEAT:
            return self._repeat(self._of(parts[0]), parts[1], parts[2])
        if kind == NOT:
            return self._not(self._of(parts[0]))
        if kind == CAT:
            node = self.epsilon
            for part in reversed(parts[0]):
                node = self._cat(self._of(part), node)
            return node
        return self._join(kind, [self._of(part) for part in parts[0]])

    def _chars(self, bits: int) -> Node:
        bits &= self.universe
        return self._node(CHARS, bits, False) if bits else self.empty

    def _not(self, node: Node) -> Node:
        return node.parts if node.kind == NOT else self._node(NOT, node, not node.nullable)

    def _cat(self, a: Node, b: Node) -> Node:
        if a is self.empty or b is self.empty:
            return self.empty
        if a is self.epsilon:
            return b
        if b is self.epsilon:
            return a
        if a.kind == CAT:
            return self._cat(a.parts[0], self._cat(a.parts[1], b))
        if a is self.all and (b is self.all or (b.kind == CAT and b.parts[0] is self.all)):
            return b
        return self._node(CAT, (a, b), a.nullable and b.nullable)

    def _repeat(self, body: Node, low: int, high: int | None) -> Node:
        if high == 0 or body is self.epsilon or (body is self.empty and low == 0):
            return self.epsilon
        if body is self.empty or (low, high) == (1, 1):
            return body
        if body.nullable:
            low = 0
        if body.kind == CHARS and body.parts == self.universe and (low, high) == (0, None):
            return self.all
        key = REPEAT, body.number, low, high
        if key not in self._nodes:
            self._nodes[key] = Node(REPEAT, (body, low, high), low == 0, len(self._nodes))
        return self._nodes[key]

    def _join(self, kind: int, nodes: list[Node]) -> Node:
        """The union (ALT) or intersection (AND) of languages."""
        neutral, absorbing = (self.empty, self.all) if kind == ALT else (self.all, self.empty)
        flat: dict[int, Node] = {}
        stack, chars = list(nodes), []
        while stack:
            node = stack.pop()
            if node is absorbing:
                return absorbing
            if node.kind == kind:
                stack.extend(node.parts)
            elif node.kind == CHARS:
                chars.append(node.parts)
            elif node is not neutral:
                flat[node.number] = node
        if chars:
            bits = chars[0]
            for other in chars[1:]:
                bits = bits | other if kind == ALT else bits & other
            joined = self._chars(bits)
            if joined is absorbing:
                return absorbing
            flat[joined.number] = joined
        if any(n.kind == NOT and n.parts.number in flat for n in flat.values()):
            return absorbing
        if kind == ALT:
            if self.epsilon.number in flat and any(n.nullable for n in flat.values() if n is not self.epsilon):
                del flat[self.epsilon.number]
            flat = self._factored(flat)
        elif self.epsilon.number in flat:
            return self.epsilon if all(n.nullable for n in flat.values()) else self.empty
        if len(flat) < 2:
            return next(iter(flat.values()), neutral)
        parts = tuple(sorted(flat.values(), key=lambda n: n.number))
        return self._node(kind, parts, any(n.nullable for n in parts) if kind == ALT else all(n.nullable for n in parts))

    def _factored(self, flat: dict[int, Node]) -> dict[int, Node]:
        """`ab | ac` as `a(b | c)`: a list of words becomes a tree."""
        heads: dict[int, list[Node]] = {}
        for node in flat.values():
            heads.setdefault((node.parts[0] if node.kind == CAT else node).number, []).append(node)
        if len(heads) == len(flat):
            return flat
        out: dict[int, Node] = {}
        for same in heads.values():
            node = same[0]
            if len(same) > 1:
                head = node.parts[0] if node.kind == CAT else node
                node = self._cat(head, self._join(ALT, [n.parts[1] if n.kind == CAT else self.epsilon for n in same]))
            out[node.number] = node
        return out

    def _derivative(self, node: Node, cls: int) -> Node:
        known = node.derivatives.get(cls)
        if known is not None:
            return known
        self.work += 1
        if self.work > WORK:
            raise TooLarge
        if node.kind in (EMPTY, EPSILON):
            after = self.empty
        elif node.kind == CHARS:
            after = self.epsilon if node.parts >> cls & 1 else self.empty
        elif node.kind == CAT:
            a, b = node.parts
            after = self._cat(self._derivative(a, cls), b)
            if a.nullable:
                after = self._join(ALT, [after, self._derivative(b, cls)])
        elif node.kind == NOT:
            after = self._not(self._derivative(node.parts, cls))
        elif node.kind == REPEAT:
            body, low, high = node.parts
            rest = self._repeat(body, max(low - 1, 0), None if high is None else high - 1)
            after = self._cat(self._derivative(body, cls), rest)
        else:
            after = self._join(node.kind, [self._derivative(part, cls) for part in node.parts])
        node.derivatives[cls] = after
        return after


def _alive(step: np.ndarray, accepts: np.ndarray) -> np.ndarray:
    """bool [states]: an accepting state can be reached."""
    alive = accepts.copy()
    while True:
        more = alive | ((step >= 0) & alive[step]).any(1)
        if (more == alive).all():
            return alive
        alive = more


def _parsed(expression: str) -> tuple[Any, _Sets]:
    """The expression as a tree (kind, ...), and its sets of characters."""
    tokens, at = [], 0
    while at < len(expression.rstrip()):
        found = SYMBOLS.match(expression, at)
        if found is None:
            raise ValueError(f"not an expression of this project: {expression[at : at + 40]!r}")
        tokens.append(found.group(1) or found.group(2))
        at = found.end()
    sets = _Sets()
    tokens.append(")")
    tokens.reverse()
    tree = _alternatives(tokens, sets)
    sets.append([SURROGATES])
    if len(tokens) != 1:
        raise ValueError("not an expression of this project: a bracket too many")
    return tree, sets


def _alternatives(tokens: list[str], sets: _Sets) -> Any:
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


def _item(tokens: list[str], sets: _Sets) -> Any:
    token = tokens.pop()
    if token == "~":
        return NOT, _item(tokens, sets)
    if token == "(":
        tree = _alternatives(tokens, sets)
        tokens.pop()
        return tree
    return _regex(token[1:-1], sets)


def _regex(source: str, sets: _Sets) -> Any:
    stack: list[list[list[Any]]] = [[[]]]  # open groups, their alternatives, their items
    at = 0
    while at < len(source):
        found = PIECES.match(source, at)
        if found is None:
            raise ValueError(f"not an expression of this project: {source[at : at + 40]!r}")
        at, kind, text = found.end(), found.lastgroup, found.group()
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
            ranges = [] if kind == "none" else [(0, MAX_CODE)] if kind == "any" else _ranges(text)
            sets.append(ranges)
            items.append((CHARS, ranges))
    (alternatives,) = stack
    return ALT, [(CAT, part) for part in alternatives]


def _times(text: str) -> tuple[int, int | None]:
    if text in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
    low, comma, high = text[1:-1].partition(",")
    return int(low), int(high) if high else None if comma else int(low)


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
    ranges = merge(found)
    if not negate:
        return ranges
    edges = [-1, *(code for low, high in ranges for code in (low - 1, high)), MAX_CODE]
    return [(low + 1, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
