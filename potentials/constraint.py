"""What all hard potentials share: one mask per distinct history, and matchers that follow the rows.

A matcher is large (hundreds of kilobytes after thousands of tokens), so there is not one per node: it moves to a child
when no row stays at the parent, is cloned only where rows part, and is made again from the nearest ancestor's where one
is missing.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from smcgen.errors import PotentialError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import STOP, Potential, Prompt
from smcgen.potentials.charengine import CharEngine
from smcgen.potentials.engine import Engine, Matcher, read
from smcgen.potentials.history import ROOT, History
from smcgen.potentials.stopping import StopEngine

MASK_BYTES = 1 << 26  # masks kept for histories that may come again
REMEMBERED = 1 << 16  # verdicts on finished texts kept
WORTH = 3e-4  # seconds of masks from which another thread fills them ahead

UNKNOWN, NO, YES = -1, 0, 1


@dataclass
class Rows:
    """The state of a `Constraint`: a node of `history` per row, and what is known about nodes.

    Columns of `history`: `barred` (the text cannot be completed), `accepted` (UNKNOWN, NO or YES: it is complete),
    `slot` (its row in `masks`, or -1)."""

    history: History
    nodes: np.ndarray  # int64 [rows]
    done: np.ndarray  # bool [rows], finished: will not be prolonged
    particles: int
    matchers: dict[int, Matcher]
    masks: np.ndarray  # int32 [slots, width]
    used: int = 0
    kept: int = 0
    filling: Future[None] | None = None  # masks of the next step, under way on another thread; nothing else may be touched

    def join(self) -> None:
        """Waits for the masks that are under way."""
        if self.filling is not None:
            filling, self.filling = self.filling, None
            filling.result()


class Constraint(Potential):
    """A hard potential: masks from a grammar for the engine, and a verdict on whole texts where that is too wide.

    Subclasses implement `_compile` and `accepts`, and set `exact` to False if the grammar admits more."""

    hard = True
    engine: Engine | CharEngine | StopEngine
    _ends: np.ndarray  # bool [V]
    _verdicts: dict[str, bool]
    _seconds: float  # what a mask has cost of late

    def bind(self, vocabulary: Vocabulary, stops: Sequence[str], device: torch.device) -> Constraint:
        bound = super().bind(vocabulary, stops, device)
        assert isinstance(bound, Constraint)
        bound.engine = self._compile(vocabulary, tuple(stops))
        bound.runs_on = bound.engine.kind
        bound._verdicts, bound._seconds = {}, 0.0
        bound._ends = np.zeros(len(vocabulary), bool)
        bound._ends[list(vocabulary.end_ids)] = True
        return bound

    def _compile(self, vocabulary: Vocabulary, stops: tuple[str, ...]) -> Engine | CharEngine | StopEngine:
        """The engine whose masks are those of this potential under these stop strings."""
        raise NotImplementedError

    def accepts(self, text: str) -> bool:
        """Whether phi(text) = 1."""
        raise NotImplementedError

    def start(self, prompts: Sequence[Prompt], particles: int) -> Rows:
        columns = {"barred": (np.bool_, False), "accepted": (np.int8, UNKNOWN), "slot": (np.int64, -1)}
        rows = len(prompts) * particles
        return Rows(
            history=History(self.vocabulary.tokens, columns),
            nodes=np.zeros(rows, np.int64),
            done=np.zeros(rows, bool),
            particles=particles,
            matchers={ROOT: self.engine.matcher()},
            masks=np.zeros((0, self.engine.width), np.int32),
        )

    def restart(self, state: Rows, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        state.join()
        rows = (np.asarray(groups)[:, None] * state.particles + np.arange(state.particles)).reshape(-1)
        state.nodes[rows], state.done[rows] = ROOT, False

    def mask(self, state: Rows, out: torch.Tensor, active: torch.Tensor) -> None:
        state.join()
        rows = np.flatnonzero(active.numpy())
        nodes = state.nodes[rows]
        self._fill(state, nodes)
        words = out.numpy()
        words[rows] = state.masks[state.history["slot"][nodes], : words.shape[1]]

    def extend(self, state: Rows, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        state.join()
        ids, lengths = tokens.numpy(), counts.numpy()
        for column in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > column)
            state.nodes[rows], fresh = state.history.children(state.nodes[rows], ids[rows, column])
            self._admit(state, fresh)
        self._forget(state)
        self._fill_ahead(state)
        barred = (lengths > 0) & state.history["barred"][state.nodes]
        return torch.from_numpy(np.where(barred, -np.inf, 0.0))

    def rollback(self, state: Rows, counts: torch.Tensor) -> None:
        state.join()
        old = state.nodes
        state.nodes = state.history.ancestors(old, counts.numpy())
        for before, after in set(zip(old.tolist(), state.nodes.tolist(), strict=True)):
            if before != after and after not in state.matchers and before in state.matchers:
                matcher = state.matchers[before]
                matcher = matcher.deep_copy() if (state.nodes == before).any() else state.matchers.pop(before)
                if not matcher.rollback(int(state.history.depth[before] - state.history.depth[after])):
                    raise PotentialError(f"{self.name}: the grammar engine cannot take tokens back")
                state.matchers[after] = matcher

    def fork(self, state: Rows, ancestors: torch.Tensor) -> None:
        state.join()
        state.nodes, state.done = state.nodes[ancestors.numpy()], state.done[ancestors.numpy()]
        self._forget(state)

    def finish(self, state: Rows, rows: torch.Tensor, texts: Sequence[str], reasons: Sequence[int]) -> torch.Tensor:
        state.join()
        index = rows.numpy()
        stopped = np.asarray(reasons) == STOP
        nodes = state.nodes[index]
        accepted = np.zeros(len(index), bool)
        self._know(state, nodes[~stopped])
        accepted[~stopped] = state.history["accepted"][nodes[~stopped]] == YES
        for i in np.flatnonzero(stopped & ~state.history["barred"][nodes]).tolist():
            accepted[i] = self._verdict(texts[i])
        if not self.exact:
            for i in np.flatnonzero(accepted & ~stopped).tolist():
                accepted[i] = self._verdict(texts[i])
        state.done[index] = True
        return torch.from_numpy(np.where(accepted, 0.0, -np.inf))

    def _verdict(self, text: str) -> bool:
        if text not in self._verdicts:
            if len(self._verdicts) >= REMEMBERED:
                self._verdicts.clear()
            self._verdicts[text] = self.accepts(text)
        return self._verdicts[text]

    def _fill(self, state: Rows, nodes: np.ndarray) -> None:
        """Every one of `nodes` gets its mask."""
        slots = state.history["slot"]
        missing = nodes[slots[nodes] < 0]
        if not len(missing):
            return
        wanted = sorted(set(missing.tolist()))
        capacity = max(len(state.nodes), MASK_BYTES // (4 * self.engine.width))
        if state.used + len(wanted) > capacity:
            slots[: state.history.size], state.used = -1, 0
            wanted = sorted(set(nodes.tolist()))
        first = state.used
        state.used += len(wanted)
        if state.used > len(state.masks):
            larger = np.zeros((min(capacity, 2 * state.used), self.engine.width), np.int32)
            larger[: len(state.masks)] = state.masks
            state.masks = larger
        barred, accepted = state.history["barred"], state.history["accepted"]
        alive, rows = [], []
        for row, node in enumerate(wanted, first):
            slots[node] = row
            if barred[node]:
                state.masks[row], accepted[node] = 0, NO
            else:
                alive.append(node)
                rows.append(row)
        matchers = [self._matcher(state, node) for node in alive]
        began = time.perf_counter()
        found = self.engine.fill(matchers, state.masks, rows)
        self._seconds += 0.2 * ((time.perf_counter() - began) / max(len(alive), 1) - self._seconds)
        for node, matcher, yes in zip(alive, matchers, found, strict=True):
            accepted[node] = yes
            if matcher.is_error():  # a dead end: its mask is known, the matcher is of no more use
                del state.matchers[node]

    def _fill_ahead(self, state: Rows) -> None:
        """Masks that the next step will ask for are computed while the models run, if that is worth a thread.

        It changes when they are computed, never what they are."""
        nodes = state.nodes[~state.done]
        missing = int((state.history["slot"][nodes] < 0).sum())
        if missing * self._seconds > WORTH and (worker := _worker()) is not None:
            state.filling = worker.submit(self._fill, state, nodes)

    def _know(self, state: Rows, nodes: np.ndarray) -> None:
        """Acceptance of every one of `nodes` becomes known."""
        accepted = state.history["accepted"]
        for node in np.unique(nodes[accepted[nodes] == UNKNOWN]).tolist():
            alive = not state.history["barred"][node]
            accepted[node] = alive and self._matcher(state, node).is_accepting()

    def _admit(self, state: Rows, fresh: np.ndarray) -> None:
        """Decides which of the new nodes are barred; the others get matchers."""
        history = state.history
        parents = history.parent[fresh].tolist()
        waiting = Counter(parents)  # children that have not had their matcher yet
        if len(state.nodes) > 256:
            occupied: Any = np.bincount(state.nodes, minlength=history.size) > 0
        else:
            occupied = dict.fromkeys(parents, False) | dict.fromkeys(state.nodes.tolist(), True)
        for node, parent, token in zip(fresh.tolist(), parents, history.token[fresh].tolist(), strict=True):
            waiting[parent] -= 1
            if history["barred"][parent] or not self._allows(state, parent, token):
                history["barred"][node] = True
                continue
            if parent == ROOT or waiting[parent] or occupied[parent]:
                matcher = self._matcher(state, parent).deep_copy()
            else:
                self._matcher(state, parent)
                matcher = state.matchers.pop(parent)
            read(matcher, [token], self.name)
            state.matchers[node] = matcher

    def _allows(self, state: Rows, node: int, token: int) -> bool:
        """Whether `token` may follow the history `node`."""
        slot = state.history["slot"][node]
        if self._ends[token]:
            return False
        if slot >= 0:
            return bool(int(state.masks[slot, token // 32]) >> token % 32 & 1)
        return self._matcher(state, node).validate_tokens([token]) == 1

    def _matcher(self, state: Rows, node: int) -> Matcher:
        """The matcher that has read the history `node`, made from the nearest ancestor's if there is none."""
        above = node
        while above not in state.matchers:
            above = int(state.history.parent[above])
        if above != node:
            matcher = state.matchers[above].deep_copy()
            read(matcher, state.history.path(above, node), self.name)
            state.matchers[node] = matcher
        return state.matchers[node]

    def _forget(self, state: Rows) -> None:
        """Drops the matchers of histories that no unfinished row has, and the histories that no row came through."""
        if len(state.matchers) > 64 + 2 * state.kept:
            live = set(state.nodes[~state.done].tolist()) | {ROOT}
            state.matchers = {node: matcher for node, matcher in state.matchers.items() if node in live}
            state.kept = len(state.matchers)
        if (ids := state.history.compact(state.nodes)) is not None:
            state.nodes = ids[state.nodes]
            state.matchers = {int(ids[n]): matcher for n, matcher in state.matchers.items() if ids[n] >= 0}
            self._move_masks(state)

    def _move_masks(self, state: Rows) -> None:
        """The masks that remain after a compaction move to the first slots."""
        slots = state.history["slot"][: state.history.size]
        holders = np.flatnonzero(slots >= 0)
        state.masks[: len(holders)] = state.masks[slots[holders]]
        slots[holders] = np.arange(len(holders))
        state.used = len(holders)


@functools.cache
def _worker() -> ThreadPoolExecutor | None:
    """The thread that fills masks ahead; None on one processor."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(1, "masks") if processors > 1 else None
