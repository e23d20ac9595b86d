"""What `re.match` finds, as a finite automaton over characters.

The threads of a backtracking matcher are simulated side by side in their order of preference (Pike's machine): a set of
threads is a state, threads less preferred than a finished one are dropped. In this automaton the match that Python finds is
simply the longest accepted one, whatever the regular expression says about greed, laziness and the order of alternatives.
Look-arounds are threads of their own; what they say about the character after the match becomes a condition on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from smcgen.potentials.pattern import MAX_CODE, Inexpressible, Ranges, merge
from smcgen.potentials.program import AHEAD, BEHIND, BOUNDARY, CHAR, MATCH, NEXT, SPLIT, Program

STATES = 3_000


class Thread(NamedTuple):
    """One way to go on. `after` is a bit set of the classes that the next character may have, END among them; `ahead` holds
    the look-aheads that still run, as (negative?, threads)."""

    pc: int
    after: int
    ahead: frozenset[tuple[bool, frozenset[tuple[int, int]]]]


State = tuple[Thread, ...]


class Sets(Protocol):
    """What names sets of characters: a `Program`, or an expression (`expression.Sets`)."""

    def sets(self) -> Iterator[Ranges]: ...


class Alphabet:
    """Characters in classes: those that none of the named sets tells apart have one. `end` is the bit that stands for "no
    further character", `any` all bits."""

    def __init__(self, named: Sequence[Sets]):
        sets = {tuple(ranges) for one in named for ranges in one.sets()}
        edges = {0} | {code for ranges in sets for low, high in ranges for code in (low, high + 1)}
        self._starts = sorted(edge for edge in edges if edge <= MAX_CODE)
        members = [0] * len(self._starts)
        for number, ranges in enumerate(sets):
            for interval in self._intervals(ranges):
                members[interval] |= 1 << number
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(members))}
        self._classes = [numbers[kind] for kind in members]
        self.size = len(numbers)
        self.end = 1 << self.size
        self.any = 2 * self.end - 1

    def of(self, char: str) -> int:
        """The class of a character."""
        return self._classes[bisect_right(self._starts, ord(char)) - 1]

    def intervals(self) -> tuple[list[int], list[int]]:
        """The first code points of intervals that have one class each, and these classes."""
        return self._starts, self._classes

    def bits(self, ranges: Ranges) -> int:
        """The classes of a set that some instruction names, as bits."""
        bits = 0
        for interval in self._intervals(ranges):
            bits |= 1 << self._classes[interval]
        return bits

    def between(self, low: int, high: int) -> dict[int, int]:
        """The classes of the code points from `low` to `high`, each with its first one."""
        first, last = bisect_right(self._starts, low) - 1, bisect_right(self._starts, high)
        found: dict[int, int] = {}
        for interval in range(first, last):
            found.setdefault(self._classes[interval], max(low, self._starts[interval]))
        return found

    def ranges(self, bits: int) -> Ranges:
        """The characters of some classes."""
        ends = [*(start - 1 for start in self._starts[1:]), MAX_CODE]
        intervals = zip(self._starts, ends, self._classes, strict=True)
        return merge((low, high) for low, high, cls in intervals if bits >> cls & 1)

    def example(self, bits: int) -> str:
        """A character of one of these classes, a visible one if there is one."""
        firsts = [start for start, cls in zip(self._starts, self._classes, strict=True) if bits >> cls & 1]
        return chr(next((code for code in firsts if chr(code).isprintable()), firsts[0]))

    def _intervals(self, ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
        for low, high in ranges:
            yield from range(bisect_right(self._starts, low) - 1, bisect_right(self._starts, high))


class Automaton:
    """The automaton of one regular expression; states are numbered from 0 (the start), and made when first reached.

    Args:
        alphabet: one that has the program in it; its own by default.
        every: any way to match counts, preferred by Python or not.

    `looks`: there are look-arounds. Known after `explore`:
        unsure: (state, class) where the end of a match also depends on characters after that one; it is taken to end.
    Raises Inexpressible."""

    def __init__(self, program: Program, alphabet: Alphabet | None = None, every: bool = False):
        self.alphabet = alphabet or Alphabet([program])
        self.every = every
        self.classes, self.end, self.any = self.alphabet.size, self.alphabet.end, self.alphabet.any
        self.looks = any(operation in (BEHIND, AHEAD, NEXT, BOUNDARY) for operation, _, _ in program.code)
        self.code = [self._compile(*instruction) for instruction in program.code]
        self.unsure: set[tuple[int, int]] = set()
        self.states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._steps: list[dict[int, int]] = []
        self._accepts: dict[int, int] = {}
        self._moves: dict[int, dict[int, int]] = {}
        self._number(self._close([Thread(0, self.any, frozenset())], None))

    def step(self, state: int, cls: int) -> int:
        """The next state, -1 if no match is left."""
        known = self._steps[state]
        if cls not in known:
            threads = self._advance(self.states[state], cls)
            known[cls] = self._number(self._close(threads, cls)) if threads else -1
        return known[cls]

    def moves(self, state: int) -> dict[int, int]:
        """The states that one character leads to, with the bit set of its classes."""
        if state not in self._moves:
            targets = self._moves[state] = {}
            for cls in range(self.classes):
                if (target := self.step(state, cls)) >= 0:
                    targets[target] = targets.get(target, 0) | 1 << cls
        return self._moves[state]

    def accepts(self, state: int) -> int:
        """Bit set of the classes that may follow (END included) if the match ends here; 0: it cannot."""
        if state not in self._accepts:
            found = 0
            for place, thread in enumerate(self.states[state]):
                if self.code[thread.pc][0] == MATCH:
                    found |= self._followers(state, place) if thread.ahead else thread.after
            self._accepts[state] = found
        return self._accepts[state]

    def _followers(self, state: int, place: int) -> int:
        """The classes that may follow the match at `place` in a state, on which look-aheads still wait."""
        before, match = list(self.states[state][:place]), self.states[state][place]
        found = 0 if any(not negative for negative, _ in match.ahead) else match.after & self.end
        for cls in range(self.classes):
            if match.after >> cls & 1:
                settled = self._settle(Thread(match.pc, self.any, self._run(match.ahead, cls)), cls)
                if settled is not None and not self._outdone(settled, self._close(self._advance(before, cls), cls)):
                    found |= 1 << cls
                    if settled.ahead or settled.after != self.any:
                        self.unsure.add((state, cls))
        return found

    def explore(self) -> None:
        """Makes all states. Raises Inexpressible if they are too many."""
        state = 0
        while state < len(self.states):
            for cls in range(self.classes):
                self.step(state, cls)
            self.accepts(state)
            state += 1

    def _outdone(self, match: Thread, preferred: State) -> bool:
        """Whether a preferred thread has matched more, under no more conditions than `match` is still under."""
        return any(
            self.code[thread.pc][0] == MATCH and thread.ahead <= match.ahead and not match.after & ~thread.after
            for thread in preferred
        )

    def _compile(self, operation: int, argument: Any, after: Any) -> tuple[int, Any, Any]:
        """An instruction with bits in place of ranges."""
        if operation == CHAR:
            argument = self.alphabet.bits(argument)
        elif operation == NEXT:
            argument = self.alphabet.bits(argument) | self.end
        elif operation in (BEHIND, BOUNDARY):
            argument = argument[0], self.alphabet.bits(argument[1])
        return operation, argument, after

    def _number(self, state: State) -> int:
        if not state:
            return -1
        if state not in self._numbers:
            if len(self.states) >= STATES:
                raise Inexpressible("it has too many states")
            self._numbers[state] = len(self.states)
            self.states.append(state)
            self._steps.append({})
        return self._numbers[state]

    def _advance(self, state: Iterable[Thread], cls: int) -> list[Thread]:
        """The threads that read a character of class `cls`; a match that stands before it ends the list."""
        out = []
        for thread in state:
            if not thread.after >> cls & 1:
                continue
            operation, argument, after = self.code[thread.pc]
            if operation == MATCH:
                if not self.every and self._stands(thread, cls):  # less preferred threads can no longer win
                    break
            elif argument >> cls & 1:
                out.append(Thread(after, self.any, self._run(thread.ahead, cls)))
        return out

    def _stands(self, match: Thread, cls: int) -> bool:
        """Whether a match is final if a character of class `cls` follows it."""
        if not match.ahead:
            return True
        settled = self._settle(Thread(match.pc, self.any, self._run(match.ahead, cls)), cls)
        return settled is not None and not settled.ahead and settled.after == self.any

    def _run(self, aheads: frozenset, cls: int) -> frozenset:
        return frozenset((negative, frozenset((pc, -1) for pc in self._read(threads, cls))) for negative, threads in aheads)

    def _read(self, threads: frozenset[tuple[int, int]], cls: int) -> list[int]:
        """Where the threads of a look-ahead stand after a character; -1 stands for its end."""
        out = []
        for pc, after in threads:
            if not after >> cls & 1:
                continue
            operation, argument, following = self.code[pc]
            if operation == MATCH:
                out.append(-1)
            elif argument >> cls & 1:
                out.append(following)
        return out

    def _close(self, threads: list[Thread], last: int | None) -> State:
        """Follows all instructions that read nothing. `last`: class of the character before, None at the start."""
        out: dict[Thread, None] = {}
        seen: set[Thread] = set()
        stack = [self._settle(thread, last) for thread in reversed(threads)]
        stack = [thread for thread in stack if thread is not None]
        while stack:
            thread = stack.pop()
            if thread in seen:
                continue
            seen.add(thread)
            operation, argument, after = self.code[thread.pc]
            if operation in (CHAR, MATCH):
                out[thread] = None
                if operation == MATCH and thread.after == self.any and not thread.ahead and not self.every:
                    break
            elif operation == SPLIT:
                stack.extend(thread._replace(pc=pc) for pc in reversed(argument))
            elif operation == AHEAD:
                entry, beyond = after
                inner = self._look({(entry, self.any)}, last)
                moved = self._require(thread._replace(pc=beyond), argument, inner)
                if moved is not None:
                    stack.append(moved)
            else:
                allowed = self._allowed(operation, argument, last) & thread.after
                if allowed:
                    stack.append(thread._replace(pc=after, after=allowed))
        return tuple(sorted(out)) if self.every else tuple(out)

    def _settle(self, thread: Thread, last: int | None) -> Thread | None:
        """Closes the look-aheads of a thread that has just read a character; None if one of them kills it."""
        settled: Thread | None = thread._replace(ahead=frozenset())
        for negative, threads in thread.ahead:
            if any(pc == -1 for pc, _ in threads):
                inner = frozenset({(-1, self.any)})
            else:
                inner = self._look({(pc, self.any) for pc, _ in threads}, last)
            if settled is not None:
                settled = self._require(settled, negative, inner)
        return settled

    def _require(self, thread: Thread, negative: bool, inner: frozenset[tuple[int, int]]) -> Thread | None:
        """`thread` under a look-ahead whose threads stand at `inner`."""
        ended = 0  # the classes of the next character with which it has ended
        for pc, after in inner:
            if pc == -1 or self.code[pc][0] == MATCH:
                ended |= after
        running = frozenset(pair for pair in inner if pair[0] != -1 and self.code[pair[0]][0] != MATCH)
        if negative:
            allowed = thread.after & ~ended
            ahead = thread.ahead | {(True, running)} if running else thread.ahead
        elif ended == self.any or not running:
            allowed, ahead = thread.after & ended, thread.ahead
        elif ended:
            raise Inexpressible("a look-ahead that may end now or later is not supported")
        else:
            allowed, ahead = thread.after & ~self.end, thread.ahead | {(False, running)}
        return thread._replace(after=allowed, ahead=ahead) if allowed else None

    def _look(self, threads: set[tuple[int, int]], last: int | None) -> frozenset[tuple[int, int]]:
        """The closure of a look-ahead's threads; order does not matter in it."""
        out, stack = set(), list(threads)
        while stack:
            pair = stack.pop()
            if pair in out:
                continue
            pc, after = pair
            operation, argument, following = self.code[pc]
            if operation in (CHAR, MATCH):
                out.add(pair)
            elif operation == SPLIT:
                stack.extend((target, after) for target in argument)
            elif operation == AHEAD:
                raise Inexpressible("a look-ahead inside a look-ahead is not supported")
            elif allowed := self._allowed(operation, argument, last) & after:
                stack.append((following, allowed))
        return frozenset(out)

    def _allowed(self, operation: int, argument: Any, last: int | None) -> int:
        """The classes that may follow a look-behind, `$` or word boundary, given the character before."""
        if operation == NEXT:
            return argument
        if last is None:
            raise Inexpressible("it looks at what stands before its first character")
        first, bits = argument
        inside = bool(bits >> last & 1)
        if operation == BEHIND:
            return self.any if inside != first else 0
        words, others = bits, self.any & ~bits
        return (others if inside else words) if first else (words if inside else others)
