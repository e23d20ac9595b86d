"""A context-free grammar as lark's loader leaves it, and what can be known of it without parsing anything.

lark resolves imports, templates, `%extend`, `%override`, priorities and aliases; here are its rules, an automaton for every
terminal, and the sets of terminals that can follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_

import lark as larklib

from smcgen.errors import Impossible, UsageError
from smcgen.potentials.automaton import Alphabet, Automaton, Program
from smcgen.potentials.engine import REMEDY, TOO_LARGE
from smcgen.potentials.indent import BREAK, LEVELS, STEP, Indentation, unfold
from smcgen.potentials.pattern import Inexpressible

START = "$start"  # stands before the first terminal, as if it were one
PAIRS = 20_000  # states of a product of two automata that are looked at
COMPARED = 1_000_000  # such states in all, about 4 us each
TERMINALS = 5_000


@dataclass(eq=False)
class Terminal:
    """A terminal, or an ignored one: its regular expression and what `re.match` finds with it."""

    name: str
    literal: str | None  # the text, if the terminal is just that, in any case of letters
    rank: tuple  # terminals in lark's order of preference for lexers that go by one
    program: Program
    automaton: Automaton

    @cached_property
    def first(self) -> int:
        """The classes of the characters it can begin with."""
        return self.on(0)

    def on(self, state: int) -> int:
        """The classes of the characters with which it can go on after `state`."""
        return sum(self.automaton.moves(state).values())


class Cfg:
    """Rules and terminals.

    Attributes:
        rules: nonterminal -> its expansions, tuples of names; only rules that can derive a text.
        terminals: name -> Terminal, those used or ignored; their automata share `alphabet`.
        ignored: names of the ignored terminals.
        dropped: names of rules and terminals that derive nothing.
    Raises UsageError for a terminal that cannot be understood, Impossible if the start rule derives no text."""

    def __init__(self, grammar: larklib.Lark, name: str, indentation: Indentation | None = None):
        (self.start,) = grammar.options.start
        flags = grammar.options.g_regex_flags
        self.ignored = tuple(dict.fromkeys(grammar.ignore_tokens))
        expansions: dict[str, list[tuple[str, ...]]] = {}
        used = set(self.ignored)
        for rule in grammar.rules:
            expansion = tuple(symbol.name for symbol in rule.expansion)
            used.update(symbol.name for symbol in rule.expansion if symbol.is_term)
            alternatives = expansions.setdefault(rule.origin.name, [])
            if expansion not in alternatives:
                alternatives.append(expansion)
        definitions = [t for t in grammar.terminals if t.name in used]
        if len(definitions) > TERMINALS:
            raise UsageError(f"{name}: {len(definitions)} terminals are too many: put words of one kind into one terminal")
        if indentation is not None:
            expansions, self.start = unfold(expansions, self.start, indentation)
            definitions = _levels(definitions, indentation, name)
            used = {*self.ignored, *(s for e in expansions.values() for x in e for s in x if s not in expansions)}
            definitions = [t for t in definitions if t.name in used]
        programs = [_program(t, flags, name) for t in definitions]
        self.alphabet = Alphabet(programs)
        self.terminals = {t.name: self._terminal(t, p, name) for t, p in zip(definitions, programs, strict=True)}
        if declared := sorted(used - self.terminals.keys()):
            raise UsageError(f"{name}: %declare leaves {', '.join(declared)} without a definition: define them as terminals")
        self.rules, self.dropped = _productive(expansions, self.terminals)
        if self.start not in self.rules:
            part = _barren_part(expansions, self.start, self.dropped)
            remedy = "give it an alternative that ends" if part in expansions else "let it match something"
            raise Impossible(f"{name}: the rule {self.start} derives no text at all, as {part} derives none: {remedy}")
        self.rules = {origin: self.rules[origin] for origin in self._reachable()}

    def _terminal(self, definition: larklib.lexer.TerminalDef, program: Program, name: str) -> Terminal:
        pattern = definition.pattern
        literal = pattern.value if pattern.type == "str" else None
        rank = (-definition.priority, -pattern.max_width, -len(pattern.value), definition.name)
        try:
            automaton = Automaton(program, self.alphabet)
            automaton.explore()
        except Inexpressible as error:
            raise _refusal(definition, name, error) from None
        return Terminal(definition.name, literal, rank, program, automaton)

    def _reachable(self) -> list[str]:
        found, stack = {}, [self.start]
        while stack:
            origin = stack.pop()
            if origin not in found:
                found[origin] = None
                stack.extend(s for expansion in self.rules[origin] for s in expansion if s in self.rules)
        return list(found)

    @cached_property
    def nullable(self) -> set[str]:
        """The nonterminals that derive the empty text."""
        found: set[str] = set()
        while more := {o for o, e in self.rules.items() if o not in found and any(found.issuperset(x) for x in e)}:
            found |= more
        return found

    @cached_property
    def firsts(self) -> dict[str, set[str]]:
        """Symbol -> the terminals with which it can begin."""
        found = {name: {name} for name in self.terminals} | {origin: set() for origin in self.rules}
        changed = True
        while changed:
            changed = False
            for origin, expansions in self.rules.items():
                before = len(found[origin])
                for expansion in expansions:
                    for symbol in expansion:
                        found[origin] |= found[symbol]
                        if symbol not in self.nullable:
                            break
                changed |= len(found[origin]) > before
        return found

    @cached_property
    def nexts(self) -> dict[str, set[str]]:
        """Terminal (or START) -> the terminals of rules that can come next, ignored text between them aside."""
        follow: dict[str, set[str]] = {symbol: set() for symbol in (*self.rules, *self.terminals)}
        changed = True
        while changed:
            changed = False
            for origin, expansions in self.rules.items():
                for expansion in expansions:
                    behind = follow[origin]
                    for symbol in reversed(expansion):
                        before = len(follow[symbol])
                        follow[symbol] |= behind
                        changed |= len(follow[symbol]) > before
                        behind = behind | self.firsts[symbol] if symbol in self.nullable else self.firsts[symbol]
        return {START: self.firsts[self.start], **{name: follow[name] for name in self.terminals}}

    @cached_property
    def last(self) -> frozenset[int]:
        """The bytes that a terminal, hence a text, can end with."""
        chars: set[int] = set()
        for terminal in self.terminals.values():
            automaton = terminal.automaton
            for state in range(len(automaton.states)):
                for target, bits in automaton.moves(state).items():
                    if automaton.accepts(target) & automaton.end:
                        ranges = self.alphabet.ranges(bits)
                        chars.update(code for low, high in ranges for code in range(low, min(high, 0x7F) + 1))
                        if ranges and ranges[-1][1] > 0x7F:
                            chars.update(range(0x80, 0xC0))  # continuation bytes
        return frozenset(chars)

    def followers(self, name: str) -> int:
        """The classes of the characters that can stand directly after the terminal `name`."""
        return self._followers[name]

    @cached_property
    def _followers(self) -> dict[str, int]:
        first = {name: terminal.first for name, terminal in self.terminals.items()}
        return {name: reduce(or_, (first[other] for other in self.after(name)), 0) for name in first}

    def after(self, name: str) -> set[str]:
        """The terminals that can stand directly after `name`, ignored ones included."""
        out = {*self.ignored, *self.nexts[name]}
        return out.union(*self.nexts.values()) if name in self.ignored else out

    def relevant(self, name: str) -> int:
        """What can stand directly after the terminal `name`: classes of characters, and the end of the text."""
        return self.followers(name) | self.alphabet.end


class Budget:
    """How many states of products may still be looked at."""

    def __init__(self) -> None:
        self.left = COMPARED

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Inexpressible("there are too many terminals to compare them")


def clash(a: Terminal, b: Terminal, followers: int, budget: Budget, preferred: bool = False) -> str | None:
    """A text that ends as `a` where `b` would read on although one of `followers` could begin something new.

    A lexer that never goes back, and reads on as long as any terminal does, misses that parse. None: no such text.
    `preferred`: where `b` matches it is right to read on."""
    automaton = a.automaton
    for text, state, other in _walk(automaton, b.automaton, budget):
        bits = automaton.accepts(state) & followers & b.on(other) if text else 0
        for cls in range(automaton.classes if bits else 0):
            longer = automaton.step(state, cls)
            certain = longer >= 0 and automaton.accepts(longer) == automaton.any
            certain |= preferred and b.automaton.accepts(b.automaton.step(other, cls)) == automaton.any
            if bits >> cls & 1 and not certain:
                return text + automaton.alphabet.example(1 << cls)
    return None


def overlap(a: Terminal, b: Terminal, budget: Budget, after: int, beyond: int) -> str | None:
    """A text that both terminals match, `a` before one of the classes `after`, `b` before one of `beyond`."""
    for text, state, other in _walk(a.automaton, b.automaton, budget):
        if text and a.automaton.accepts(state) & after and b.automaton.accepts(other) & beyond:
            return text
    return None


def _walk(a: Automaton, b: Automaton, budget: Budget) -> Iterator[tuple[str, int, int]]:
    """Every pair of states that one text leads to, with such a text."""
    seen, queue = {(0, 0)}, [("", 0, 0)]
    for text, state, other in queue:
        budget.spend()
        yield text, state, other
        for cls in range(a.classes):
            pair = a.step(state, cls), b.step(other, cls)
            if min(pair) >= 0 and pair not in seen:
                if len(seen) >= PAIRS:
                    raise Inexpressible("two terminals are too large to be compared")
                seen.add(pair)
                queue.append((text + a.alphabet.example(1 << cls), *pair))


def _levels(definitions: list[larklib.lexer.TerminalDef], names: Indentation, name: str) -> list[larklib.lexer.TerminalDef]:
    """The terminals, with a line break for each level in place of the one."""
    out = [t for t in definitions if t.name != names.line]
    (line,) = [t for t in definitions if t.name == names.line] or [None]
    for level in range(LEVELS + 1):
        if line is None or not re.fullmatch(line.pattern.to_regexp(), "\n" + STEP * level * " "):
            raise UsageError(f"{name}: terminal {names.line} must match a line break with all the blanks after it")
        pattern = larklib.lexer.PatternRE(BREAK % (STEP * level))
        out.append(larklib.lexer.TerminalDef(names.line_to(level), pattern, line.priority))
    return out


def _program(definition: larklib.lexer.TerminalDef, flags: int, name: str) -> Program:
    try:
        return Program.of(definition.pattern.to_regexp(), flags)
    except Inexpressible as error:
        raise _refusal(definition, name, error) from None


def _refusal(definition: larklib.lexer.TerminalDef, name: str, reason: Inexpressible) -> UsageError:
    remedy = f": {REMEDY}" if any(sign in str(reason) for sign in TOO_LARGE) else ""
    return UsageError(f"{name}: terminal {definition.name} (/{definition.pattern.value[:60]}/): {reason}{remedy}")


def _productive(
    expansions: dict[str, list[tuple[str, ...]]], terminals: dict[str, Terminal]
) -> tuple[dict[str, list[tuple[str, ...]]], tuple[str, ...]]:
    """The rules that derive a text, and the names of the others."""
    good = {n for n, t in terminals.items() if any(map(t.automaton.accepts, range(len(t.automaton.states))))}
    while more := {o for o, e in expansions.items() if o not in good and any(good.issuperset(x) for x in e)}:
        good |= more
    rules = {o: [x for x in e if good.issuperset(x)] for o, e in expansions.items() if o in good}
    return rules, tuple(name for name in (*expansions, *terminals) if name not in good)


def _barren_part(expansions: dict[str, list[tuple[str, ...]]], start: str, barren: tuple[str, ...]) -> str:
    """Why `start` derives nothing: a part of its first alternative, or of that one's, which comes back to itself or is a
    terminal."""
    part, before = start, set()
    while part in expansions and part not in before:
        before.add(part)
        part = next(symbol for symbol in expansions[part][0] if symbol in barren)
    return part
