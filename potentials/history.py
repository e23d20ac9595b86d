"""The tree of token histories that all rows of a run share: the state of a row is one node id.

Rows with equal histories have equal nodes, so forking rows is a gather of ids, rolling back is stepping to parents, and
whatever a potential knows about a history (a mask, a value) is computed once and kept in a column of the tree.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ROOT = 0
SLACK = 4096  # nodes that may be dead before a compaction is worth its time
FEW = 64  # rows that are looked up one by one
INDEXED = 1 << 18  # children findable by (parent, token); an older node that is read again only gets a twin


class History:
    """Nodes are numbered so that a parent precedes its children; node 0 is the empty history.

    Args:
        tokens: the bytes of each token id.
        columns: what the owner keeps for every node: name -> (dtype, value of a new node). `history[name]` is an array
            of at least `size` entries; it is replaced when the tree grows or shrinks.

    Attributes, replaced likewise:
        parent: int64, -1 for the root.
        token: int64, the last token.
        depth: int64, the number of tokens.
    """

    def __init__(self, tokens: Sequence[bytes], columns: Mapping[str, tuple[Any, Any]] | None = None):
        self.tokens = tokens
        self.size = 1
        self._fills = {"parent": (np.int64, -1), "token": (np.int64, -1), "depth": (np.int64, 0), **(columns or {})}
        self._columns = {name: np.zeros(0, dtype) for name, (dtype, _) in self._fills.items()}
        self._resize(256, np.arange(0))
        self._index: dict[int, int] = {}
        self._texts: dict[int, bytes] = {ROOT: b""}
        self._kept = 1

    def __getitem__(self, column: str) -> np.ndarray:
        return self._columns[column]

    def child(self, node: int, token: int) -> int:
        """The history `node` prolonged by `token`. It is new if `size` has grown, and then the last node."""
        pair = node * len(self.tokens) + token
        child = self._index.get(pair)
        if child is None:
            child = self._index[pair] = self.size
            self._grow(child + 1)
            self.parent[child], self.token[child], self.depth[child] = node, token, self.depth[node] + 1
        return child

    def children(self, nodes: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The histories `nodes` prolonged by one token each (int64 [n] both).

        Returns int64 [n], and the sorted ids of those that are new (int64 [k])."""
        if len(nodes) <= FEW:
            before, ids = self.size, list(map(self.child, nodes.tolist(), tokens.tolist()))
            return np.array(ids, np.int64), np.arange(before, self.size)
        pairs, inverse = np.unique(nodes * len(self.tokens) + tokens, return_inverse=True)
        ids = np.fromiter((self._index.get(pair, -1) for pair in pairs.tolist()), np.int64, len(pairs))
        unknown = np.flatnonzero(ids < 0)
        fresh = np.arange(self.size, self.size + len(unknown))
        if len(unknown):
            self._grow(self.size + len(unknown))
            ids[unknown] = fresh
            self.parent[fresh], self.token[fresh] = np.divmod(pairs[unknown], len(self.tokens))
            self.depth[fresh] = self.depth[self.parent[fresh]] + 1
            self._index.update(zip(pairs[unknown].tolist(), fresh.tolist(), strict=True))
        return ids[inverse], fresh

    def ancestors(self, nodes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """`nodes` without their last `counts` tokens (int64 [n] both)."""
        if (counts > self.depth[nodes]).any():
            raise AssertionError("a rollback beyond the beginning of the text")
        nodes, left = nodes.copy(), counts.copy()
        while (moving := left > 0).any():
            nodes[moving] = self.parent[nodes[moving]]
            left[moving] -= 1
        return nodes

    def path(self, ancestor: int, node: int) -> list[int]:
        """The tokens that lead from `ancestor` to `node`."""
        tokens = []
        while node != ancestor:
            tokens.append(int(self.token[node]))
            node = int(self.parent[node])
        return tokens[::-1]

    def text(self, node: int) -> bytes:
        """The bytes of a history."""
        above = node
        while above not in self._texts:
            above = int(self.parent[above])
        text = self._texts[above] + b"".join(map(self.tokens.__getitem__, self.path(above, node)))
        if len(self._texts) > SLACK:
            self._texts = {ROOT: b""}
        self._texts[node] = text
        return text

    def compact(self, live: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """Forgets all nodes but `live` (int64 [n]) and their ancestors, once there are many more than that.

        Returns the new id of every old node (int64, -1 for a forgotten one), None if nothing was done."""
        if self.size <= SLACK + 2 * self._kept:
            return None
        keep = np.zeros(self.size, bool)
        keep[ROOT] = True
        front = np.unique(live)
        while len(front := front[~keep[front]]):
            keep[front] = True
            front = np.unique(self.parent[front])
        ids = np.where(keep, np.cumsum(keep) - 1, -1)
        self._kept = self.size = int(keep.sum())
        self._resize(max(256, 2 * self.size), np.flatnonzero(keep))
        self.parent[1 : self.size] = ids[self.parent[1 : self.size]]
        recent = np.arange(max(1, self.size - INDEXED), self.size)
        keys = self.parent[recent] * len(self.tokens) + self.token[recent]
        self._index = dict(zip(keys.tolist(), recent.tolist(), strict=True))
        self._texts = {ROOT: b""}
        return ids

    def _grow(self, size: int) -> None:
        if size > len(self.parent):
            self._resize(2 * size, np.arange(self.size))
        self.size = size

    def _resize(self, room: int, kept: np.ndarray) -> None:
        """Columns with room for so many nodes, the first of which are the nodes `kept` of the old ones."""
        for name, (dtype, fill) in self._fills.items():
            column = np.full(room, fill, dtype)
            column[: len(kept)] = self[name][kept]
            self._columns[name] = column
        self.parent, self.token, self.depth = self["parent"], self["token"], self["depth"]


def shown(data: bytes) -> str:
    """The text of an unfinished history, without the bytes of a character that is not complete."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)
