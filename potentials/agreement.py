"""Whether the grammar engine and our own automata mean the same language."""

from __future__ import annotations

import functools

import numpy as np

from smcgen.errors import PotentialError
from smcgen.potentials.derivative import TooLarge, dfa
from smcgen.potentials.engine import Engine, bytes_vocabulary
from smcgen.potentials.tables import Bytes, over_bytes


@functools.lru_cache(maxsize=64)
def agrees(expression: str, grammar: str, states: int) -> bool | None:
    """Whether an expression and llguidance's grammar admit the same bytes after one text to every state of the expression's
    automaton, and after each further byte. None if it has more than so many states."""
    try:
        automaton = over_bytes(dfa(expression, states))
    except TooLarge:
        return None
    try:
        return _agree(automaton, Engine(grammar, bytes_vocabulary(), "agrees"))
    except PotentialError:  # a limit of the engine
        return False


def _agree(automaton: Bytes, engine: Engine) -> bool:
    step, accepts = automaton.step, automaton.accepts
    matcher, row = engine.matcher(), np.zeros((1, engine.width), np.int32)
    seen = np.zeros(len(step), bool)
    seen[0] = True
    rollback, stack = -1, [(0, -1)]  # states with the byte that leads to them, -1 for none
    while stack:
        state, byte = stack.pop()
        if state == rollback:
            matcher.rollback(1)
            continue
        if byte >= 0:
            if matcher.try_consume_tokens([byte]) != 1:
                return False
            stack.append((rollback, 0))
        accepted = engine.fill([matcher], row, [0])[0]
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[:256].astype(bool)
        if accepted != accepts[state] or not np.array_equal(allowed, step[state] >= 0):
            return False
        if byte >= 0 and seen[state]:
            continue
        seen[state] = True
        ascii_, (_, others) = np.flatnonzero(allowed[:128]), np.unique(step[state, 128:], return_index=True)
        further = np.append(ascii_, others + 128)
        stack.extend((int(after), int(b)) for after, b in zip(step[state, further], further, strict=True) if after >= 0)
    return True
