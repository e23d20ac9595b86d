"""Indentation, unfolded into a context-free grammar: each level of blocks gets rules of its own.

lark's Indenter turns a line break into a token that includes the blanks after it, and adds INDENT or DEDENT tokens as the
blanks become more or fewer. That is a finite automaton as long as levels are bounded; here are the rules of the grammar
multiplied with it. What is left out, and said: deeper levels, other steps than four blanks, line breaks inside brackets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import lark as larklib
from lark.indenter import Indenter

LEVELS = 5
STEP = 4
BREAK = r"(?:\n[\t ]*)*?\n {%d}(?![ \t\n])"  # all line breaks and blanks up to the next text, which is so far to the right

State = tuple[str, int, int]  # ("at", level, level), ("to", level, level of the next line), ("end", level, 0)
Expansions = dict[str, list[tuple[str, ...]]]


@dataclass(frozen=True)
class Indentation:
    """The names of the three terminals that an Indenter deals in."""

    line: str
    indent: str
    dedent: str

    @classmethod
    def of(cls, indenter: Indenter) -> Indentation:
        return cls(indenter.NL_type, indenter.INDENT_type, indenter.DEDENT_type)

    def line_to(self, level: int) -> str:
        """The name of the line break before a line of that level."""
        return f"{self.line}@{level}"


def indenter(declared: list[str], terminals: list[str]) -> Indenter | None:
    """lark's Indenter for a grammar that declares an INDENT and a DEDENT terminal, by their customary names."""
    line = next((name for name in ("_NEWLINE", "_NL", "NEWLINE", "NL") if name in terminals), None)
    inner = [name for name in declared if name.endswith("INDENT")]
    outer = [name for name in declared if name.endswith("DEDENT")]
    if line is None or len(inner) != 1 or len(outer) != 1 or len(declared) != 2:
        return None

    names = {
        "NL_type": line,
        "OPEN_PAREN_types": [name for name in ("LPAR", "LSQB", "LBRACE") if name in terminals],
        "CLOSE_PAREN_types": [name for name in ("RPAR", "RSQB", "RBRACE") if name in terminals],
        "INDENT_type": inner[0],
        "DEDENT_type": outer[0],
        "tab_len": 8,
    }
    return type("Blanks", (Indenter,), names)()


def declared(text: str) -> list[str]:
    """The terminals that a grammar declares without a definition."""
    lines = [line.split("//")[0].split() for line in text.splitlines() if line.strip().startswith("%declare")]
    return [name for line in lines for name in line[1:]]


def unfold(rules: Expansions, start: str, names: Indentation) -> tuple[Expansions, str]:
    """The rules multiplied with the automaton of levels, and the new start rule."""
    special = {names.line, names.indent, names.dedent}
    flat = _flat(rules, special)
    reach = _reach(rules, flat, names)
    out: Expansions = {origin: expansions for origin, expansions in rules.items() if origin in flat}
    first: State = ("at", 0, 0)
    finals = [state for state in (first, ("end", 0, 0)) if state in reach.get((start, first), ())]
    todo: list[tuple[str, State, State]] = [(start, first, final) for final in finals]
    seen = set(todo)
    while todo:
        origin, before, after = todo.pop()
        copies = out.setdefault(_copy(origin, before, after), [])
        for expansion in rules[origin]:
            for path in _paths(expansion, before, after, reach, flat, names):
                copy = []
                for symbol, (p, q) in zip(expansion, path, strict=True):
                    if symbol == names.line:
                        copy.append(names.line_to(q[2]))
                    elif symbol in (names.indent, names.dedent):
                        continue
                    elif symbol in rules and symbol not in flat:
                        copy.append(_copy(symbol, p, q))
                        if (symbol, p, q) not in seen:
                            seen.add((symbol, p, q))
                            todo.append((symbol, p, q))
                    else:
                        copy.append(symbol)
                if tuple(copy) not in copies:
                    copies.append(tuple(copy))
    top = f"{start}@"
    out[top] = [(_copy(start, first, final),) for final in finals]
    return out, top


def _copy(origin: str, before: State, after: State) -> str:
    return f"{origin}@{'.'.join(map(str, (*before, *after)))}"


def _steps(symbol: str, state: State, names: Indentation) -> Iterator[State]:
    """Where a terminal leads from a state."""
    kind, level, target = state
    if symbol == names.line:
        if kind == "at":
            for to in range(min(level + 1, LEVELS) + 1):
                yield ("at" if to == level else "to", level, to)
    elif symbol == names.indent:
        if kind == "to" and target == level + 1:
            yield ("at", target, target)
    elif symbol == names.dedent:
        if kind == "to" and target < level:
            yield ("at" if target == level - 1 else "to", level - 1, target)
        elif kind != "to" and level > 0:  # at the end of the text all levels end
            yield ("end", level - 1, 0)
    elif kind == "at":
        yield state


def _flat(rules: Expansions, special: set[str]) -> set[str]:
    """The rules that never come to a line break: one copy of them does for all levels."""
    touched = {origin for origin, expansions in rules.items() if any(special & set(x) for x in expansions)}
    while more := {o for o, e in rules.items() if o not in touched and any(touched & set(x) for x in e)}:
        touched |= more
    return set(rules) - touched


def _reach(rules: Expansions, flat: set[str], names: Indentation) -> dict[tuple[str, State], set[State]]:
    """(nonterminal, state before) -> the states after it."""
    levels = range(LEVELS + 1)
    states: list[State] = [("at", level, level) for level in levels] + [("end", level, 0) for level in levels]
    states += [("to", level, to) for level in levels for to in levels if to != level and to <= level + 1]
    found: dict[tuple[str, State], set[State]] = {(o, s): set() for o in rules if o not in flat for s in states}
    changed = True
    while changed:
        changed = False
        for (origin, state), after in found.items():
            for expansion in rules[origin]:
                front = {state}
                for symbol in expansion:
                    front = {q for p in front for q in _after(symbol, p, found, flat, names)}
                changed |= not front <= after
                after |= front
    return found


def _after(symbol: str, state: State, reach: dict, flat: set[str], names: Indentation) -> set[State]:
    if symbol in flat:
        return {state} if state[0] == "at" else set()
    known = reach.get((symbol, state))
    return set(_steps(symbol, state, names)) if known is None else known


def _paths(
    expansion: tuple[str, ...], before: State, after: State, reach: dict, flat: set[str], names: Indentation
) -> Iterator[list[tuple[State, State]]]:
    """The states between the symbols of an expansion, on each way from `before` to `after`."""
    if not expansion:
        if before == after:
            yield []
        return
    for state in sorted(_after(expansion[0], before, reach, flat, names)):
        for rest in _paths(expansion[1:], state, after, reach, flat, names):
            yield [(before, state), *rest]


def supported(loaded: larklib.Lark) -> Indentation | None:
    """The indentation of a Lark object; None if it has another kind of postlex."""
    postlex = loaded.options.postlex
    return Indentation.of(postlex) if isinstance(postlex, Indenter) else None
