"""Stop strings as part of a language.

A text ends before the stop string that completes first; among those that complete at the same place the longest
counts. With S the stop strings, the token streams whose text is in a language L are

    L without any of S inside,  or  x s r  with x in L, s the first of S to complete, r whatever its last token carries.
"""

from __future__ import annotations

from collections.abc import Sequence

from smcgen.errors import UsageError
from smcgen.potentials.pattern import ANY, literal, words

SOME = "/(?s:.)+/"


def fold(expression: str, stops: Sequence[str]) -> str:
    """The terminal expression of a language, with stop strings folded in."""
    if not stops:
        return expression
    if "" in stops:
        raise UsageError("a stop string is empty: give one with at least one character")
    stops = list(dict.fromkeys(stops))
    inside = f"({ANY} {words(stops)} {ANY})"
    early = f"({ANY} {words(stops)} {SOME})"
    ended = []
    for stop in stops:
        longer = [other for other in stops if other != stop and other.endswith(stop)]
        barred = early if not longer else f"({early} | ({ANY} {words(longer)}))"
        ended.append(f"((({expression}) /{literal(stop)}/) & ~{barred})")
    return f"((({expression}) & ~{inside}) | (({' | '.join(ended)}) {ANY}))"
