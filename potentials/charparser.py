"""An exact parser of Lark grammars, character by character: what Earley with the dynamic lexer means, and nothing else.

At every place each expected terminal (and each ignored one) is matched by itself, as `re.match` would: the longest match
that its automaton accepts. Reading from left to right one does not know yet whether a match will be the longest, so the
parser goes on both ways: the way on which it was the longest carries the automaton along and dies if that accepts again.

    column   the items of an Earley parser at one place, under one set of such promises
    run      a terminal that is being read: where its automaton stands, and the column that waits for it

Columns and runs are immutable, so that states are forked by being named twice. It is slow, and the judge of the fast engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from smcgen.potentials.cfg import Cfg, Terminal

Promises = frozenset[tuple[str, int]]  # terminals that have ended, and the states from which they must not accept again


class Item(NamedTuple):
    """`origin` derives what was read since `column`, if the rest of the expansion from `dot` on follows."""

    origin: str
    expansion: tuple[str, ...]
    dot: int
    column: Column


@dataclass(eq=False)
class Column:
    """Items at one place: by the symbol that they wait for, and the complete ones."""

    waiting: dict[str, dict[Item, None]] = field(default_factory=dict)
    complete: dict[Item, None] = field(default_factory=dict)


class Run(NamedTuple):
    """A terminal in the middle of a match that began at `column`."""

    terminal: Terminal
    state: int
    column: Column
    promises: Promises


@dataclass(eq=False)
class Place:
    """Where a text has come to: what is being read. `begins`: before which next characters which terminals end, and the
    runs that go on from there."""

    runs: tuple[Run, ...]
    begins: dict[tuple[bool, ...], list[Run]] = field(default_factory=dict)


class CharParser:
    """Reads texts of a grammar one character at a time.

    `first` is the place before any text; `read` gives the next place, `accepts` asks whether a text may end there. A place
    without runs is a dead end."""

    def __init__(self, cfg: Cfg):
        self.cfg = cfg
        self.of = cfg.alphabet.of
        root = Column()
        self._add(root, [Item("", (cfg.start,), 0, root)])
        self.first = Place(tuple(self._begin(root, frozenset())))
        self._root = root
        self._automata = {name: terminal.automaton for name, terminal in cfg.terminals.items()}

    def read(self, place: Place, char: str) -> Place:
        """The place after one more character."""
        return self.step(place, self.of(char))

    def step(self, place: Place, cls: int) -> Place:
        """The place after a character of class `cls` of the grammar's alphabet."""
        runs: dict[Run, None] = {}
        for terminal, at, column, promises in self._settled(place, 1 << cls):
            state = terminal.automaton.step(at, cls)
            if state >= 0:
                runs[Run(terminal, state, column, self._carried(promises, cls) if promises else promises)] = None
        return Place(tuple(runs))

    def accepts(self, place: Place) -> bool:
        """Whether the text up to here is one of the grammar."""
        if place is self.first:
            return self._whole(self._root)
        end = self.cfg.alphabet.end
        ended = [run for run in place.runs if run.terminal.automaton.accepts(run.state) & end]
        return any(self._whole(column) for column, _ in self._ended(run for run in ended if self._kept(run.promises, end)))

    def parse(self, text: str) -> bool:
        """Whether a whole text is one of the grammar."""
        place = self.first
        for char in text:
            place = self.read(place, char)
            if not place.runs:
                return False
        return self.accepts(place)

    def _whole(self, column: Column) -> bool:
        return any(item.origin == "" for item in column.complete)

    def _settled(self, place: Place, follower: int) -> list[Run]:
        """All runs at a place, those that begin there included, if a character of class `follower` comes next."""
        kept = [not run.promises or self._kept(run.promises, follower) for run in place.runs]
        ends = [bool(run.terminal.automaton.accepts(run.state) & follower) for run in place.runs]
        key = (*kept, *ends)
        if key not in place.begins:
            alive = [run for run, keep in zip(place.runs, kept, strict=True) if keep]
            ended = [run for run, keep, end in zip(place.runs, kept, ends, strict=True) if keep and end]
            new = [run for column, promises in self._ended(ended) for run in self._begin(column, promises)]
            place.begins[key] = [*alive, *new]
        return place.begins[key]

    def _ended(self, runs: Iterable[Run]) -> list[tuple[Column, Promises]]:
        """The columns that arise where these runs end."""
        found: dict[Promises, list[Run]] = {}
        for run in runs:
            goes_on = run.terminal.automaton.moves(run.state)
            promises = run.promises | {(run.terminal.name, run.state)} if goes_on else run.promises
            found.setdefault(promises, []).append(run)
        columns = []
        for promises, ended in found.items():
            column = Column()
            for run in ended:
                name = run.terminal.name
                waiting = run.column.waiting.get(name, {})
                self._add(column, [item._replace(dot=item.dot + 1) for item in waiting])
                if name in self.cfg.ignored:
                    self._skip(column, run.column)
            columns.append((column, promises))
        return columns

    def _skip(self, column: Column, before: Column) -> None:
        """After ignored text: what waited for a terminal before it waits still, and a whole text is still whole."""
        for symbol, items in before.waiting.items():
            if symbol in self.cfg.terminals:
                column.waiting.setdefault(symbol, {}).update(items)
        column.complete.update((item, None) for item in before.complete if item.origin == "")

    def _begin(self, column: Column, promises: Promises) -> Iterable[Run]:
        names = [name for name in column.waiting if name in self.cfg.terminals]
        for name in dict.fromkeys((*names, *self.cfg.ignored)):
            yield Run(self.cfg.terminals[name], 0, column, promises)

    def _kept(self, promises: Promises, follower: int) -> bool:
        """Whether no terminal that has ended accepts again here. One that has just ended is asked from the next place on."""
        return not any(self._automata[name].accepts(state) & follower for name, state in promises)

    def _carried(self, promises: Promises, cls: int) -> Promises:
        """The promises after one more character; those that can no longer be broken are gone."""
        steps = ((name, self._automata[name].step(state, cls)) for name, state in promises)
        return frozenset((name, state) for name, state in steps if state >= 0)

    def _add(self, column: Column, items: Iterable[Item]) -> None:
        """Adds items with all that they predict and complete at the same place."""
        stack = list(items)
        while stack:
            item = stack.pop()
            if item.dot == len(item.expansion):
                if item in column.complete:
                    continue
                column.complete[item] = None
                waiting = item.column.waiting.get(item.origin, {})
                stack.extend(other._replace(dot=other.dot + 1) for other in list(waiting))
                continue
            symbol = item.expansion[item.dot]
            waiting = column.waiting.setdefault(symbol, {})
            if item in waiting:
                continue
            known = bool(waiting)
            waiting[item] = None
            if symbol in self.cfg.rules:
                if not known:
                    stack.extend(Item(symbol, expansion, 0, column) for expansion in self.cfg.rules[symbol])
                if symbol in self.cfg.nullable:
                    stack.append(item._replace(dot=item.dot + 1))
