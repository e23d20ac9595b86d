"""Which terminals of a grammar can be expected at one place of a text.

A text may have several readings, and at one place each may expect other terminals. They are followed two at a time: from the
spots of two terminals that may have read the same characters to all that can come next. What comes after the end of a rule
is taken from anywhere the rule stands, so that pairs may be found that no text has, but none is missed.

All this takes it that the readings agree where terminals end. The first place where two do not is at a pair found here, so
that one who looks for such places (`emit.obstacle`) misses none.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache

from smcgen.potentials.cfg import COMPARED, START, Budget, Cfg, Terminal, overlap
from smcgen.potentials.pattern import Inexpressible

Pairs = set[tuple[str, str]]


class Spots:
    """The places in rules where a terminal stands; spot 0 is before the text. Those with equal rests of one rule are one spot,
    unless `each` is.

    Attributes:
        terminal: the name of each spot's terminal.
        nexts: for each spot, bits of the spots that can come next, ignored text between them aside."""

    def __init__(self, cfg: Cfg, each: bool):
        numbers: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], int] = {(START, "", (), (cfg.start,)): 0}
        # The symbols of each expansion from the last to the first, with the spot of a terminal.
        backwards: list[tuple[str, list[tuple[str, int]]]] = []
        for origin, expansions in cfg.rules.items():
            for expansion in expansions:
                symbols = []
                for i in range(len(expansion) - 1, -1, -1):
                    symbol, spot = expansion[i], -1
                    if symbol in cfg.terminals:
                        before = expansion[:i] if each else ()
                        spot = numbers.setdefault((symbol, origin, before, expansion[i + 1 :]), len(numbers))
                    symbols.append((symbol, spot))
                backwards.append((origin, symbols))
        self.terminal = [key[0] for key in numbers]
        self.nexts = [0] * len(numbers)
        firsts, follow = dict.fromkeys(cfg.rules, 0), dict.fromkeys(cfg.rules, 0)
        changed = True
        while changed:
            changed = False
            for origin, symbols in backwards:
                first = 0
                for symbol, spot in symbols:
                    if spot >= 0:
                        first = 1 << spot
                    else:
                        first = firsts[symbol] | (first if symbol in cfg.nullable else 0)
                changed |= bool(first & ~firsts[origin])
                firsts[origin] |= first
        changed = True
        while changed:
            changed = False
            for origin, symbols in backwards:
                behind = follow[origin]
                for symbol, spot in symbols:
                    if spot >= 0:
                        self.nexts[spot] |= behind
                        behind = 1 << spot
                    else:
                        changed |= bool(behind & ~follow[symbol])
                        follow[symbol] |= behind
                        behind = firsts[symbol] | (behind if symbol in cfg.nullable else 0)
        self.nexts[0] = firsts[cfg.start]


def together(cfg: Cfg, budget: Budget, one_reading: bool = False) -> tuple[Pairs, Pairs]:
    """Ordered pairs of terminals, equal ones included, that can be expected at one place of a text, ignored ones too.

    In the first set are those after equal terminals. `one_reading`: lark's LALR parser follows the reading with the first
    terminal alone. In the second set are then those where a spot of the first terminal meets the second only after other
    terminals than its own; else it does not matter in which set the other pairs are.
    Raises Inexpressible if they are too many."""
    if sum(len(nexts | set(cfg.ignored)) ** 2 for nexts in cfg.nexts.values()) > COMPARED:
        raise Inexpressible("there are too many terminals to compare them")

    @cache
    def overlapping(a: str, b: str) -> bool:
        one, other = cfg.terminals[a], cfg.terminals[b]
        if not one.first & other.first:
            return False
        if one.literal and other.literal and (one.literal + other.literal).isascii():
            return one.literal.lower() == other.literal.lower()
        return overlap(one, other, budget, cfg.relevant(a), cfg.relevant(b)) is not None

    def met(terminal: list[str], nexts: list[int], apart: bool) -> tuple[Pairs, Pairs, Pairs]:
        def alike(a: str, b: str) -> bool:
            return a == b or overlapping(min(a, b), max(a, b))

        def given(a: str, b: str) -> bool:
            return one_reading and _given(cfg.terminals[a], cfg.terminals[b])

        return _met(terminal, nexts, apart, alike, given)

    # Terminals, wherever they stand, are fewer than spots, and often enough to see that nothing is to be found.
    names = [START, *cfg.terminals]
    bit = {name: 1 << number for number, name in enumerate(names)}
    same, _, apart = met(names, [sum(bit[other] for other in cfg.nexts.get(name, ())) for name in names], True)
    if apart if one_reading else apart - same:
        spots = Spots(cfg, each=one_reading)
        with contextlib.suppress(Inexpressible):  # if there are too many, it stays with more pairs than are to be had
            same, apart, _ = met(spots.terminal, spots.nexts, one_reading)
    everywhere = {*cfg.ignored, *(name for pair in same for name in pair)}
    for name in cfg.ignored:
        same.update(pair for other in everywhere for pair in ((name, other), (other, name)))
    return same, apart


def _met(
    terminal: list[str],
    nexts: list[int],
    kinds: bool,
    alike: Callable[[str, str], bool],
    given: Callable[[str, str], bool],
) -> tuple[Pairs, Pairs, Pairs]:
    """Pairs of terminals; if `kinds` matter those after equal ones, those whose spots meet only after different ones, and all
    after different ones, else all in the first set.

    `alike`: whether two terminals can match one text; `given`: whether then, both expected, it is the second for sure.
    Raises Inexpressible."""
    # Spot -> bits of spots: what else is expected at its place, what else may have read its text, what of that is new; for
    # equal terminals before, and for different ones.
    expected, read = [defaultdict(int), defaultdict(int)], [defaultdict(int), defaultdict(int)]
    fresh, queue, left = [{0: 1}, {}], [(0, 0)], COMPARED
    while queue:
        apart, spot = queue.pop()
        follow = 0
        for other in _bits(fresh[apart].pop(spot)):
            follow |= nexts[other]
        for a in _bits(nexts[spot]):
            new = follow & ~expected[apart][a]
            expected[apart][a] |= new
            if (left := left - new.bit_count()) < 0:
                raise Inexpressible("there are too many terminals to compare them")
            for b in _bits(new):
                # A reading that ends in `a`, and another one in `b`.
                one, other = terminal[a], terminal[b]
                if not alike(one, other) or (one != other and not apart and given(one, other)):
                    continue
                kind = int(kinds and (apart or one != other))
                if not read[kind][a] >> b & 1:
                    read[kind][a] |= 1 << b
                    if a not in fresh[kind]:
                        fresh[kind][a] = 0
                        queue.append((kind, a))
                    fresh[kind][a] |= 1 << b
    found: tuple[Pairs, Pairs, Pairs] = set(), set(), set()
    for a in range(len(terminal)):
        same, others = ({terminal[b] for b in _bits(bits[a])} for bits in expected)
        found[0].update((terminal[a], name) for name in same)
        found[1].update((terminal[a], name) for name in others - same)
        found[2].update((terminal[a], name) for name in others)
    return found


def _given(a: Terminal, b: Terminal) -> bool:
    """Whether the lexer of lark's LALR parser, where it expects both terminals, never says `a` of a text that both match."""
    if a.literal is None and b.literal is None:
        return b.rank < a.rank
    # Of what a regular expression matches it takes the literals out, if they are as important.
    plain = b.literal is not None and b.program.pattern == re.escape(b.literal) and not b.program.flags & re.IGNORECASE
    return plain and a.literal is None and not a.automaton.looks and a.rank[0] == b.rank[0]


def _bits(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
