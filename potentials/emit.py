"""A context-free grammar re-written for llguidance.

llguidance reads texts through a lexer that never goes back: a terminal ends where no expected terminal can read on. lark
(Earley, dynamic lexer) tries each terminal by itself. `obstacle` finds where the two differ; where they do not, `emit` gives
the grammar in the engine's dialect.
"""

from __future__ import annotations

from collections.abc import Sequence

from smcgen.potentials.automaton import Automaton
from smcgen.potentials.cfg import Budget, Cfg, Terminal, clash, overlap
from smcgen.potentials.meeting import together
from smcgen.potentials.pattern import Inexpressible, ranges_to_class, terminal

ELIMINATED = 60  # states of an automaton that may be turned back into a regular expression
LONGEST = 50_000  # characters of such an expression


def obstacle(cfg: Cfg, lalr: bool = False) -> str | None:
    """Why the engine would bar texts of the grammar; None if it bars none.

    `lalr`: the grammar is read by lark's LALR parser, whose lexer takes the terminal that it prefers, for good."""
    ignored, budget = set(cfg.ignored), Budget()
    for nexts in cfg.nexts.values():
        if both := sorted(ignored & nexts):
            return f"{both[0]} is ignored and also used in rules"
    same, apart = together(cfg, budget, one_reading=lalr)
    for pair in sorted(same | apart):
        a, b = (cfg.terminals[name] for name in pair)
        if not a.first & b.first:
            continue
        # After different readings of a text lark's LALR parser, which goes on with one, may expect `a` alone.
        preferred = lalr and pair not in apart and b.rank < a.rank
        if (text := clash(a, b, cfg.followers(a.name), budget, preferred)) is not None:
            return f"{text!r} may be {a.name} and something more, or the beginning of {b.name}"
        if a.name not in ignored or a is b:
            continue
        if (text := overlap(a, b, budget, cfg.relevant(a.name), cfg.relevant(b.name))) is not None:
            return f"{text!r} is ignored and also {b.name}"
    large = next((name for name, t in cfg.terminals.items() if _expression(t, cfg) is None), None)
    return None if large is None else f"{large} is too large for one regular expression"


def doubts(cfg: Cfg) -> list[str]:
    """Why the engine may let texts through that the grammar does not derive."""
    found = []
    for t in cfg.terminals.values():
        automaton, followers = t.automaton, cfg.followers(t.name)
        for state in _accepting(t, cfg):
            after = followers & ~t.on(state)  # where the engine ends the terminal
            if (after | automaton.end) & ~automaton.accepts(state):
                found.append(f"where {t.name} ends depends on what follows it")
                break
    return found + unsure(cfg, inside=False)


def unsure(cfg: Cfg, inside: bool = True) -> list[str]:
    """The terminals whose automata are themselves too wide. `inside`: even where they could read on."""
    found = []
    for t in cfg.terminals.values():
        followers = cfg.followers(t.name)
        if any(followers >> cls & 1 and (inside or t.automaton.step(s, cls) < 0) for s, cls in t.automaton.unsure):
            found.append(f"where {t.name} ends depends on more than one character after it")
    return found


def emit(cfg: Cfg) -> str:
    """The grammar in the engine's dialect."""
    rules = {origin: f"r{i}" for i, origin in enumerate(cfg.rules)}
    terminals = {name: f"T{i}" for i, name in enumerate(cfg.terminals)}
    names = rules | terminals
    ignored = [terminals[name] for name in cfg.ignored]
    # The engine ignores before terminals only, so what follows the last one is a rule.
    lines = [f"start: {rules[cfg.start]}{' tail*' if ignored else ''}"]
    if ignored:
        lines += [f"tail: {' | '.join(ignored)}", *(f"%ignore {name}" for name in ignored)]
    lines += [f"{rules[o]}: {_alternatives(o, [[names[s] for s in x] for x in e], rules[o])}" for o, e in cfg.rules.items()]
    lines += [f"{terminals[name]}: {_expression(t, cfg)}" for name, t in cfg.terminals.items()]
    return "\n".join(lines) + "\n"


def _alternatives(origin: str, expansions: Sequence[Sequence[str]], name: str) -> str:
    """Expansions of a rule, with lark's own rules for `*` and `+` and its copies for what is optional put back."""
    loops = [tuple(x[1:]) for x in expansions if len(x) > 1 and x[0] == name]
    once = [tuple(x) for x in expansions if name not in x]
    if origin.startswith("__") and loops and set(loops) == set(once):
        return f"({' | '.join(map(' '.join, once))})+"
    left = dict.fromkeys(map(tuple, expansions))
    merged = []
    for expansion in sorted(left, key=len, reverse=True):
        if expansion not in left:
            continue
        del left[expansion]
        parts = list(expansion)
        for i in range(len(expansion)):
            without = expansion[:i] + expansion[i + 1 :]
            if without in left:
                del left[without]
                parts[i] += "?"
                break
        merged.append(" ".join(parts) or '""')
    return " | ".join(merged)


def _accepting(t: Terminal, cfg: Cfg) -> list[int]:
    """The states in which a terminal ends before some possible follower."""
    relevant = cfg.relevant(t.name)
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
