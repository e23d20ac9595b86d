"""Terminal expressions as finite automata over characters, by derivatives.

The derivative of a language by a character is what may follow it (Brzozowski 1964): the states of the automaton are the
languages that derivatives lead to, recognised as equal by the normal forms that are kept here (Owens, Reppy & Turon 2009).
Intersection and complement, of which stop strings and look-arounds are made, cost nothing extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smcgen.potentials.automaton import Alphabet
from smcgen.potentials.expression import ALT, AND, CAT, CHARS, EMPTY, EPSILON, NOT, REPEAT, Sets, parsed
from smcgen.potentials.pattern import SURROGATES

STATES = 4_000  # of an automaton
WORK = 100_000  # parts of languages looked at to make it; about 2 us each
LENGTH = 1 << 18  # characters of an expression
INTERVALS = 1 << 20  # edges of sets of characters, in all sets together: what their classes cost


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


def dfa(expression: str, states: int = STATES) -> Dfa:
    """The automaton of a terminal expression, with at most so many states, and STATES at the most. Raises TooLarge, after a
    second or two at the latest: everything that grows with the expression is counted."""
    if len(expression) > LENGTH:
        raise TooLarge
    try:
        return _Builder(*parsed(expression)).build(min(states, STATES))
    except RecursionError:
        raise TooLarge from None


@dataclass(eq=False, slots=True)
class Node:
    """A language; nodes of one builder are equal only if they are the same object."""

    kind: int
    parts: Any
    nullable: bool
    number: int
    kinds: tuple[int, ...] | None = None
    derivatives: dict[int, Node] = field(default_factory=dict)


class _Builder:
    """Normal forms of languages over one alphabet, each made once."""

    def __init__(self, tree: Any, sets: Sets):
        distinct = {tuple(ranges) for ranges in sets}
        if len(distinct) * sum(map(len, distinct)) > INTERVALS:
            raise TooLarge
        self.alphabet = Alphabet([sets])
        surrogates = self.alphabet.bits([SURROGATES])
        self.classes = [cls for cls in range(self.alphabet.size) if not surrogates >> cls & 1]
        self.universe = sum(1 << cls for cls in self.classes)
        self.work = 0
        self._nodes: dict[Any, Node] = {}
        self._sets: dict[tuple[tuple[int, int], ...], Node] = {}
        self.empty = self._node(EMPTY, None, False)
        self.epsilon = self._node(EPSILON, None, True)
        self.all = self._node(NOT, self.empty, True)
        self.top = self._of(tree)

    def build(self, states: int) -> Dfa:
        known, queue, rows = {self.top: 0}, [self.top], []
        for node in queue:
            row = [-1] * self.alphabet.size
            for kind in self._kinds(node):
                after = self._derivative(node, _lowest(kind))
                if after is not self.empty:
                    if after not in known:
                        if len(queue) >= states:
                            raise TooLarge
                        known[after] = len(queue)
                        queue.append(after)
                    number = known[after]
                    while kind:
                        row[_lowest(kind)] = number
                        kind &= kind - 1
            rows.append(row)
        step, accepts = np.array(rows, np.int32), np.array([node.nullable for node in queue])
        alive = _alive(step, accepts)
        alive[0] = True
        numbers = np.append(np.where(alive, np.cumsum(alive) - 1, -1), -1).astype(np.int32)
        return Dfa(self.alphabet, numbers[step[alive]], accepts[alive])

    def _node(self, kind: int, parts: Any, nullable: bool) -> Node:
        key = kind, tuple(p.number for p in parts) if kind in (CAT, ALT, AND) else getattr(parts, "number", parts)
        if key not in self._nodes:
            self._count()
            self._nodes[key] = Node(kind, parts, nullable, len(self._nodes))
        return self._nodes[key]

    def _count(self, work: int = 1) -> None:
        self.work += work
        if self.work > WORK:
            raise TooLarge

    def _of(self, tree: Any) -> Node:
        kind, *parts = tree
        if kind == CHARS:
            key = tuple(parts[0])
            if key not in self._sets:
                self._sets[key] = self._chars(self.alphabet.bits(parts[0]))
            return self._sets[key]
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
            heads = []
            while a.kind == CAT:
                heads.append(a.parts[0])
                a = a.parts[1]
            self._count(len(heads))
            for head in (a, *reversed(heads)):
                b = self._cat(head, b)
            return b
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
            self._count()
            self._nodes[key] = Node(REPEAT, (body, low, high), low == 0, len(self._nodes))
        return self._nodes[key]

    def _join(self, kind: int, nodes: list[Node]) -> Node:
        """The union (ALT) or intersection (AND) of languages."""
        neutral, absorbing = (self.empty, self.all) if kind == ALT else (self.all, self.empty)
        flat: dict[int, Node] = {}
        stack, chars = list(nodes), []
        while stack:
            node = stack.pop()
            self._count()
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

    def _kinds(self, node: Node) -> tuple[int, ...]:
        """The classes in sets of which all members have the same derivative of `node`: bit sets."""
        if node.kinds is not None:
            return node.kinds
        found: tuple[int, ...] = (self.universe,)
        if node.kind == CHARS:
            found = (node.parts, self.universe & ~node.parts)
        elif node.kind == CAT:
            found = self._kinds(node.parts[0])
            if node.parts[0].nullable:
                found = self._meet(found, self._kinds(node.parts[1]))
        elif node.kind == NOT:
            found = self._kinds(node.parts)
        elif node.kind == REPEAT:
            found = self._kinds(node.parts[0])
        elif node.kind in (ALT, AND):
            for part in node.parts:
                found = self._meet(found, self._kinds(part))
        node.kinds = tuple(kind for kind in found if kind)
        return node.kinds

    def _meet(self, some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
        if len(others) == 1:
            return some
        self._count(len(others))
        return tuple(both for kind in some for other in others if (both := kind & other))

    def _derivative(self, node: Node, cls: int) -> Node:
        known = node.derivatives.get(cls)
        if known is not None:
            return known
        self._count()
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


def _lowest(bits: int) -> int:
    """The place of the lowest bit."""
    return (bits & -bits).bit_length() - 1


def _alive(step: np.ndarray, accepts: np.ndarray) -> np.ndarray:
    """bool [states]: an accepting state can be reached."""
    return reaching([row[row >= 0] for row in step], accepts)


def reaching(after: Sequence[np.ndarray], goal: np.ndarray) -> np.ndarray:
    """bool [states]: a state of `goal` (bool [states]) can be reached; `after[s]` are the states after s."""
    found = goal.copy()
    changed = True
    while changed:  # states are numbered as they were first reached: from the last to the first, a pass or two do
        changed = False
        for state in range(len(after) - 1, -1, -1):
            if not found[state] and found[after[state]].any():
                found[state] = changed = True
    return found
