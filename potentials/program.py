"""A regular expression as the program of a backtracking matcher: what to read, and where to go on in which order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from smcgen.potentials.pattern import _C, BOUNDARIES, Inexpressible, Ranges, characters, parse

LONGEST = 20_000  # instructions

# Read a character; go on at several places in order of preference; end; look at the character before; run a look-ahead;
# look at the character after (or find none); stand at a word boundary or not.
CHAR, SPLIT, MATCH, BEHIND, AHEAD, NEXT, BOUNDARY = range(7)


@dataclass
class Program:
    """Instructions of a pattern: (operation, argument, next)."""

    pattern: str
    flags: int
    code: list[list[Any]] = field(default_factory=list)

    @classmethod
    def of(cls, pattern: str, flags: int = 0) -> Program:
        """Raises Inexpressible."""
        tree = parse(pattern, flags)
        program = cls(pattern, flags)
        program.sequence(tree, tree.state.flags)
        program.add(MATCH)
        return program

    def sets(self) -> Iterator[Ranges]:
        """The sets of characters that are named."""
        for operation, argument, _ in self.code:
            if operation in (CHAR, NEXT):
                yield argument
            elif operation in (BEHIND, BOUNDARY):
                yield argument[1]

    def add(self, operation: int, argument: Any = None) -> int:
        if len(self.code) >= LONGEST:
            raise Inexpressible("it is too large")
        self.code.append([operation, argument, len(self.code) + 1])
        return len(self.code) - 1

    def sequence(self, items: Iterable[Any], flags: int) -> None:
        for op, arg in items:
            self.item(op, arg, flags)

    def item(self, op: Any, arg: Any, flags: int) -> None:
        if (ranges := characters(op, arg, flags)) is not None:
            self.add(CHAR, ranges)
        elif op is _C.BRANCH:
            self.branch([lambda branch=branch: self.sequence(branch, flags) for branch in arg[1]])
        elif op is _C.SUBPATTERN:
            _, added, removed, body = arg
            self.sequence(body, (flags | added) & ~removed)
        elif op in (_C.MAX_REPEAT, _C.MIN_REPEAT):
            low, high, body = arg
            self.repeat(low, high, body, flags, lazy=op is _C.MIN_REPEAT)
        elif op in (_C.ASSERT, _C.ASSERT_NOT):
            direction, body = arg
            if direction < 0:
                self.behind(body, flags, negative=op is _C.ASSERT_NOT)
                return
            at = self.add(AHEAD, op is _C.ASSERT_NOT)
            self.sequence(body, flags)
            self.add(MATCH)
            self.code[at][2] = [at + 1, len(self.code)]
        elif op is _C.AT and arg in BOUNDARIES:
            self.add(BOUNDARY, (BOUNDARIES[arg], characters(_C.IN, [(_C.CATEGORY, _C.CATEGORY_WORD)], flags)))
        elif op is _C.AT and arg is _C.AT_BEGINNING and flags & re.MULTILINE:
            self.add(BEHIND, (False, [(10, 10)]))
        elif op is _C.AT and arg is _C.AT_END and flags & re.MULTILINE:
            self.add(NEXT, [(10, 10)])
        else:
            names = {_C.GROUPREF: "a back-reference", _C.GROUPREF_EXISTS: "a conditional group"}
            names |= {_C.POSSESSIVE_REPEAT: "a possessive repetition", _C.ATOMIC_GROUP: "an atomic group"}
            names |= {_C.AT: "an anchor to the whole text"}
            raise Inexpressible(f"{names.get(op, op)} is not supported")

    def branch(self, bodies: Sequence[Any]) -> None:
        at = self.add(SPLIT, [])
        jumps = []
        for body in bodies:
            self.code[at][1].append(len(self.code))
            body()
            jumps.append(self.add(SPLIT, []))
        for jump in jumps:
            self.code[jump][1] = [len(self.code)]

    def repeat(self, low: int, high: Any, body: Any, flags: int, lazy: bool) -> None:
        for _ in range(low):
            self.sequence(body, flags)
        if high is _C.MAXREPEAT:
            loop = self.add(SPLIT, [])
            self.sequence(body, flags)
            if self.prefers_nothing(loop + 1, len(self.code)):
                raise Inexpressible("a repetition whose body would rather match nothing is not supported")
            self.add(SPLIT, [loop])
            self.code[loop][1] = self.preferred(loop + 1, len(self.code), lazy)
        else:
            splits = []
            for _ in range(high - low):
                splits.append(self.add(SPLIT, []))
                self.sequence(body, flags)
            for split in splits:
                self.code[split][1] = self.preferred(split + 1, len(self.code), lazy)

    def prefers_nothing(self, start: int, end: int) -> bool:
        """Whether the way from `start` to `end` that reads nothing comes before one that reads something: Python then
        leaves the repetition, which threads cannot."""
        empty, seen, stack = False, set(), [start]
        while stack:
            pc = stack.pop()
            if pc == end:
                empty = True
            elif pc not in seen:
                seen.add(pc)
                operation, argument, after = self.code[pc]
                if operation == CHAR and empty:
                    return True
                if operation == SPLIT:
                    stack.extend(reversed(argument))
                elif operation != CHAR:
                    stack.append(after[1] if operation == AHEAD else after)
        return False

    def preferred(self, on: int, out: int, lazy: bool) -> list[int]:
        return [out, on] if lazy else [on, out]

    def behind(self, body: Any, flags: int, negative: bool) -> None:
        items = list(body)
        ranges = characters(items[0][0], items[0][1], flags) if len(items) == 1 else None
        if ranges is None:
            raise Inexpressible("a look-behind at more than one character is not supported")
        self.add(BEHIND, (negative, ranges))
