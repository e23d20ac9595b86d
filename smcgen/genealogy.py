"""The ancestry of the particles at the end as a tree: branches along which nothing forks, with what was written on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from smcgen.record import Round

END = "∎".encode()


@dataclass(frozen=True)
class Branch:
    """Rounds `begin` ... `end - 1` of one lineage.

    Attributes:
        y: height, the mean place of its leaves.
        parent_y: height of the branch it forks from, None for a first particle.
        share: of the answer that descends from it.
        text: what was written along it; ∎ is an end token.
        ends: it leads to the end of the run (to several particles, if the last round made copies).
    """

    begin: int
    end: int
    y: float
    parent_y: float | None
    share: float
    text: str
    ends: bool


def branches(rounds: list[Round], weights: np.ndarray, piece_of: Callable[[int], bytes]) -> list[Branch]:
    """The tree of one run, planar: its ends have the heights 0, 1, ... `weights` float64 [N] are shares of the answer."""
    count, last = len(weights), len(rounds) - 1
    path = np.empty((last + 1, count), int)  # [round, leaf]: the leaf's ancestor among the particles before resampling
    path[last] = rounds[last].ancestors
    for t in range(last - 1, -1, -1):
        path[t] = np.array(rounds[t].ancestors)[path[t + 1]]
    leaves = np.lexsort(path[::-1])  # equal beginnings lie side by side
    path = path[:, leaves]
    place = np.r_[0, np.cumsum((np.diff(path, axis=1) != 0).any(0))]
    found = []

    def grow(begin: int, among: np.ndarray, parent_y: float | None) -> None:
        end = begin + 1
        while end <= last and len(np.unique(path[end, among])) == 1:
            end += 1
        drawn = b"".join(piece_of(token) or END for t in range(begin, end) for token in rounds[t].tokens[path[t, among[0]]])
        y, share = float(place[among[[0, -1]]].mean()), float(weights[leaves[among]].sum())
        found.append(Branch(begin, end, y, parent_y, share, drawn.decode("utf-8", "replace"), end > last))
        if end <= last:
            for node in dict.fromkeys(path[end, among].tolist()):  # in order
                grow(end, among[path[end, among] == node], y)

    for node in dict.fromkeys(path[0].tolist()):
        grow(0, np.flatnonzero(path[0] == node), None)
    return found


def lost(rounds: list[Round]) -> list[int]:
    """Per round, how many particles its resampling left without offspring."""
    return [len(r.counts) - len(set(r.ancestors)) for r in rounds]
