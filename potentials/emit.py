"""A context-free grammar re-written for llguidance.

llguidance reads texts through a lexer that never goes back: a terminal ends where no expected terminal can read on. lark
(Earley, dynamic lexer) tries each terminal by itself. Where the two could differ (`cfg.clash`), the terminals concerned are
written out as rules over single characters, so that the engine's parser follows every split. It then also follows splits
inside what Python's greedy matching would have taken whole; if these can occur, lark must judge the finished text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from smcgen.potentials.automaton import Automaton
from smcgen.potentials.cfg import Cfg, Terminal, clash, inside, overlap, prolonged
from smcgen.potentials.pattern import MAX_CODE, Inexpressible, common, ranges_to_class, terminal

ELIMINATED = 60  # states of an automaton that may be turned back into a regular expression
ASCII, BEYOND = [(0, 0x7F)], [(0x80, MAX_CODE)]
LONGEST = 50_000  # characters of such an expression


@dataclass
class Emission:
    """`text`: the grammar for the engine. `doubts`: why it may admit texts that lark does not; empty if it is exact.
    `spelled`: the terminals that were written out in single characters, with the reason."""

    text: str
    doubts: list[str] = field(default_factory=list)
    spelled: dict[str, str] = field(default_factory=dict)


def emit(cfg: Cfg, lalr: bool = False) -> Emission:
    """The grammar of the engine. `lalr`: lark's LALR parser is the judge, whose lexer takes the terminal that it prefers
    and never goes back either."""
    spelled = _spelled(cfg, lalr)
    return _Writer(cfg, spelled).write()


def _spelled(cfg: Cfg, lalr: bool) -> dict[str, str]:
    """The terminals to be written out in single characters, each with the reason."""
    out: dict[str, str] = {}
    ignored = [cfg.terminals[name] for name in cfg.ignored]
    pairs = [(a, b) for a, b in cfg.together() if a.first & b.first]
    for a, b in pairs:
        if (text := clash(a, b, cfg.followers(a.name), preferred=lalr and b.rank < a.rank)) is not None:
            reason = f"{text!r} may be {a.name} and more, or the beginning of {b.name}"
            out.setdefault(a.name, reason)
            out.setdefault(b.name, reason)
    for a, b in pairs:
        if a in ignored and a is not b and (text := overlap(a, b)) is not None:
            out.setdefault(a.name, f"{text!r} is ignored and also {b.name}")
            out.setdefault(b.name, out[a.name])
    for name in cfg.ignored:
        if any(name in nexts for nexts in cfg.nexts.values()):
            out.setdefault(name, "it is ignored and also used in rules")
    for name, t in cfg.terminals.items():
        if name not in out and _expression(t, cfg) is None:
            out[name] = "it is too large for one regular expression"
    # A single character is a lexeme of its own: nothing that is expected beside it may begin like it and read on.
    count = 0
    while count < len(out):
        count = len(out)
        for a, b in pairs:
            if a.name in out:
                out.setdefault(b.name, f"it can stand where {a.name} can, and begin like it")
        for name in list(out):
            for other in inside(cfg, name, out):
                out.setdefault(other, f"it can begin inside {name}, where another terminal has ended")
    return out


class _Writer:
    def __init__(self, cfg: Cfg, spelled: dict[str, str]):
        self.cfg, self.spelled = cfg, spelled
        self.lines: list[str] = []
        self.doubts: list[str] = []
        self.rule_names = {origin: f"r{i}" for i, origin in enumerate(cfg.rules)}
        self.terminal_names = {name: f"t{i}" for i, name in enumerate(cfg.terminals)}
        self.classes: dict[str, str] = {}

    def write(self) -> Emission:
        cfg = self.cfg
        start = self.rule_names[cfg.start]
        ignored = [self.symbol(name) for name in cfg.ignored]
        if self.spelled:
            self.lines.append(f"start: ign {start}" if ignored else f"start: {start}")
            if ignored:
                self.lines.append(f'ign: "" | ign ({" | ".join(ignored)})')
        else:
            # The engine ignores before terminals only, so what follows the last one is a rule.
            self.lines.append(f"start: {start} tail*" if ignored else f"start: {start}")
            if ignored:
                self.lines.append(f"tail: {' | '.join(ignored)}")
                self.lines.extend(f"%ignore {name}" for name in ignored)
        for origin, expansions in cfg.rules.items():
            self.lines.append(f"{self.rule_names[origin]}: {self.alternatives(origin, expansions)}")
        for name in cfg.terminals:
            self.doubt(cfg.terminals[name])
            self.spell(name) if name in self.spelled else self.lexeme(name)
        self.lines.extend(f"{name}: /{ranges}/" for ranges, name in self.classes.items())
        return Emission("\n".join(self.lines) + "\n", self.doubts, self.spelled)

    def symbol(self, name: str) -> str:
        """A rule, or a terminal without what is ignored after it."""
        if name in self.rule_names:
            return self.rule_names[name]
        return self.terminal_names[name] if name in self.spelled else self.terminal_names[name].upper()

    def placed(self, name: str) -> str:
        """A symbol as rules name it: with what is ignored after it, if rules must say so."""
        if name in self.cfg.terminals and self.spelled and self.cfg.ignored:
            return f"{self.terminal_names[name]}i"
        return self.symbol(name)

    def alternatives(self, origin: str, expansions: list[tuple[str, ...]]) -> str:
        """Expansions of a rule, with lark's own rules for `*` and `+` and its copies for what is optional put back."""
        loops = [x[1:] for x in expansions if len(x) > 1 and x[0] == origin]
        once = [x for x in expansions if origin not in x]
        if origin.startswith("__") and loops and set(loops) == set(once):
            return f"({' | '.join(' '.join(map(self.placed, x)) for x in once)})+"
        left = dict.fromkeys(expansions)
        merged = []
        for expansion in sorted(expansions, key=len, reverse=True):
            if expansion not in left:
                continue
            del left[expansion]
            parts = [self.placed(s) for s in expansion]
            for i in range(len(expansion)):
                without = expansion[:i] + expansion[i + 1 :]
                if without in left:
                    del left[without]
                    parts[i] += "?"
                    break
            merged.append(" ".join(parts) or '""')
        return " | ".join(merged)

    def lexeme(self, name: str) -> None:
        upper = self.terminal_names[name].upper()
        self.lines.append(f"{upper}: {_expression(self.cfg.terminals[name], self.cfg)}")
        if self.spelled and self.cfg.ignored:
            self.lines.append(f"{self.terminal_names[name]}i: {upper} ign")

    def spell(self, name: str) -> None:
        """A terminal as rules: one for each state of its automaton, which derives the texts that lead there."""
        automaton, base = self.cfg.terminals[name].automaton, self.terminal_names[name]
        into: dict[int, list[str]] = {}
        states, classes = range(len(automaton.states)), range(automaton.classes)
        again = any(automaton.step(state, cls) == 0 for state in states for cls in classes)
        for state in states:
            for target, bits in automaton.moves(state).items():
                character, ways = self.character(automaton, bits), into.setdefault(target, [])
                if state == 0:
                    ways.append(character)
                if state or again:
                    ways.append(f"{base}s{state} {character}")
        self.lines.extend(f"{base}s{state}: {' | '.join(ways)}" for state, ways in into.items())
        ends = [s for s in _accepting(self.cfg.terminals[name], self.cfg) if s in into]
        self.lines.append(f"{base}: {' | '.join(f'{base}s{s}' for s in ends)}")
        if self.cfg.ignored:
            self.lines.append(f"{base}i: {base} ign")

    def character(self, automaton: Automaton, bits: int) -> str:
        """A rule for one character of some classes; characters outside ASCII apart, where classes often agree."""
        ranges = automaton.alphabet.ranges(bits)
        parts = [ranges_to_class(part) for part in (common(ranges, ASCII), common(ranges, BEYOND)) if part]
        names = [self.classes.setdefault(part, f"C{len(self.classes)}") for part in parts]
        return names[0] if len(names) == 1 else f"({' | '.join(names)})"

    def doubt(self, t: Terminal) -> None:
        """Notes how a terminal may match more in the engine than in lark."""
        automaton, followers = t.automaton, self.cfg.followers(t.name)
        for state in _accepting(t, self.cfg):
            bits = automaton.accepts(state)
            ends = [cls for cls in range(automaton.classes) if followers >> cls & 1]
            out = [cls for cls in ends if automaton.step(state, cls) < 0]
            if any(not bits >> cls & 1 for cls in out) or not bits & automaton.end:
                self.doubts.append(f"where {t.name} ends depends on what follows it")
                return
            if any((state, cls) in automaton.unsure for cls in (ends if t.name in self.spelled else out)):
                self.doubts.append(f"where {t.name} ends depends on more than one character after it")
                return
            if t.name in self.spelled and (other := prolonged(t, state, self.cfg)) is not None:
                self.doubts.append(f"{t.name} may end although it could read on, if {other} follows")
                return


def _accepting(t: Terminal, cfg: Cfg) -> list[int]:
    """The states in which a terminal ends before some possible follower."""
    relevant = cfg.followers(t.name) | t.automaton.end
    return [state for state in range(len(t.automaton.states)) if t.automaton.accepts(state) & relevant]


def _expression(t: Terminal, cfg: Cfg) -> str | None:
    """A terminal as an expression of the engine's lexer; None if it becomes too large."""
    automaton = t.automaton
    if not automaton.looks:
        try:
            if _equal(automaton, Automaton(t.program, automaton.alphabet, every=True)):
                return terminal(t.program.pattern, t.program.flags)
        except Inexpressible:
            pass
    return _eliminated(automaton, _accepting(t, cfg))


def _equal(a: Automaton, b: Automaton) -> bool:
    """Whether two automata of one pattern accept the same texts (their classes are the same)."""
    seen, queue = {(0, 0)}, [(0, 0)]
    for state, other in queue:
        if bool(a.accepts(state)) != bool(b.accepts(other)):
            return False
        for cls in range(a.classes):
            pair = a.step(state, cls), b.step(other, cls)
            if (pair[0] < 0) != (pair[1] < 0):
                return False
            if pair[0] >= 0 and pair not in seen:
                seen.add(pair)
                queue.append(pair)
    return True


def _eliminated(automaton: Automaton, accepting: list[int]) -> str | None:
    """The automaton as one regular expression, by elimination of states."""
    count = len(automaton.states)
    if count > ELIMINATED:
        return None
    edges: dict[tuple[int, int], str] = {}
    final = count
    for state in range(count):
        for target, bits in automaton.moves(state).items():
            edges[state, target] = ranges_to_class(automaton.alphabet.ranges(bits))
    edges.update({(state, final): "" for state in accepting})
    start = count + 1
    edges[start, 0] = ""
    left = set(range(count))
    while left:
        gone = min(left, key=lambda s: sum(s in pair for pair in edges))
        left.remove(gone)
        loop = edges.pop((gone, gone), None)
        ways_in = {a: e for (a, b), e in edges.items() if b == gone}
        ways_out = {b: e for (a, b), e in edges.items() if a == gone}
        edges = {pair: e for pair, e in edges.items() if gone not in pair}
        middle = f"(?:{loop})*" if loop is not None else ""
        for a, before in ways_in.items():
            for b, after in ways_out.items():
                path = before + middle + after
                known = edges.get((a, b))
                edges[a, b] = path if known is None or known == path else f"(?:{known}|{path})"
        if sum(map(len, edges.values())) > LONGEST:
            return None
    return f"/{edges[start, final]}/" if (start, final) in edges else "/[a&&b]/"
