"""Whether hard potentials leave any text at all: the product of their automata over tokens, searched breadth first.

Only potentials that run on tables have such automata. What the search cannot settle within its bound is left to sampling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from smcgen.errors import Impossible
from smcgen.potentials.base import Potential
from smcgen.potentials.tabled import Tabled
from smcgen.potentials.tables import TokenTable
from smcgen.potentials.text import TokenCount

CELLS = 1 << 22  # states times kinds of tokens looked at in a search; about 20 ns each
CHUNK = 1 << 18  # of these at a time


def require_text(potentials: Sequence[Potential], max_tokens: int) -> None:
    """Raises Impossible if it is found that no text of at most `max_tokens` tokens satisfies all potentials, which it names."""
    for potential in potentials:
        if isinstance(potential, TokenCount):
            _require_length([potential.name], potential.minimum, max_tokens)
    found = [potential for potential in potentials if isinstance(potential, Tabled)]
    for potential in found:
        _require_length([potential.name], _shortest((potential.host,)), max_tokens)
    if len(found) < 2 or _shortest(tuple(p.host for p in found)) <= max_tokens:
        return
    for potential in list(found):  # those that are not needed for it are not named
        fewer = [other for other in found if other is not potential]
        if len(fewer) > 1 and _shortest(tuple(p.host for p in fewer)) > max_tokens:
            found = fewer
    length = _shortest(tuple(p.host for p in found))
    names = [potential.name for potential in found]
    if length == math.inf:
        stopped = f" before one of the stop strings {list(found[0].stops)}" if found[0].stops else ""
        raise Impossible(
            f"{' * '.join(names)}: no text can satisfy all of them{stopped}, or none that the tokens of "
            f"{found[0].vocabulary.name} can spell: leave one out"
        )
    _require_length(names, length, max_tokens)


def _require_length(names: Sequence[str], length: float, max_tokens: int) -> None:
    if length > max_tokens:
        raise Impossible(
            f"{' * '.join(names)}: a text for this has at least {length} tokens, and max_tokens={max_tokens} is less: give "
            "more, and one for the token that ends it"
        )


@functools.lru_cache(maxsize=16)
def _shortest(tables: tuple[TokenTable, ...]) -> float:
    """At least so many tokens has a text that all tables accept; inf if there is none.

    A search that reaches its bound returns the number of tokens up to which it is certain."""
    sizes = [table.states for table in tables]
    if math.prod(sizes) >= 1 << 62:
        return 0
    kinds = _kinds(tables)
    following = [table.next.numpy()[:, kind] for table, kind in zip(tables, kinds, strict=True)]
    finals = [table.final.numpy() for table in tables]
    seen, front, cells = np.zeros(1, np.int64), np.zeros(1, np.int64), 0
    rows = max(1, CHUNK // len(kinds[0]))
    for length in range(1 << 30):
        states = np.unravel_index(front, sizes)
        if np.logical_and.reduce([final[state] for final, state in zip(finals, states, strict=True)]).any():
            return length
        cells += len(front) * len(kinds[0])
        if cells > CELLS:
            return length + 1
        after = [_after([state[i : i + rows] for state in states], following, sizes) for i in range(0, len(front), rows)]
        front = np.setdiff1d(np.concatenate(after), seen)
        if not len(front):
            return math.inf
        seen = np.union1d(seen, front)
    raise AssertionError("there are only so many states")


def _after(states: Sequence[np.ndarray], following: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """The numbers of the product's states after one token from `states`."""
    columns = [table[state] for table, state in zip(following, states, strict=True)]
    alive = np.logical_and.reduce([column != size - 1 for column, size in zip(columns, sizes, strict=True)])
    return np.unique(np.ravel_multi_index([column[alive] for column in columns], sizes))


def _kinds(tables: Sequence[TokenTable]) -> list[np.ndarray]:
    """Tokens in kinds of which all members do the same in every table: for each table, the class of each kind."""
    kind = np.zeros(len(tables[0].classes), np.int64)
    columns: list[np.ndarray] = []
    count = 1
    for table in tables:
        classes = table.next.shape[1]
        code = kind * classes + table.classes.numpy()
        if count * classes > CELLS:
            kept, kind = np.unique(code, return_inverse=True)
        else:
            number = np.bincount(code, minlength=count * classes) > 0
            kept, kind = np.flatnonzero(number), (np.cumsum(number) - 1)[code]
        columns = [*(column[kept // classes] for column in columns), kept % classes]
        count = len(kept)
    return columns
