"""What all hard potentials share: one mask per distinct history, and matchers that follow the rows.

A matcher is large (hundreds of kilobytes after thousands of tokens), so there is not one per node: it moves to a child
when no row stays at the parent, is cloned only where rows part, and is made again from the nearest ancestor's where one
is missing.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from smcgen.errors import PotentialError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import STOP, Potential, Prompt
from smcgen.potentials.charengine import CharEngine
from smcgen.potentials.engine import Engine, Matcher, read
from smcgen.potentials.history import ROOT, History
from smcgen.potentials.stopping import StopEngine

MASK_BYTES = 1 << 23  # masks kept for histories that may come again: no more than a processor's cache holds
REMEMBERED = 1 << 16  # verdicts on finished texts kept
WORTH = 3e-4  # seconds of masks from which another thread fills them ahead

UNKNOWN, NO, YES = -1, 0, 1


@dataclass
class Rows:
    """The state of a `Constraint`: a node of `history` per row, and what is known about nodes.

    Columns of `history`: `barred` (the text cannot be completed), `accepted` (UNKNOWN, NO or YES: it is complete),
    `slot` (its row in `masks`, or -1). Few rows are the rule, so that rows are lists: starting numpy costs more than a loop."""

    history: History
    nodes: list[int]
    done: list[bool]  # finished: will not be prolonged
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

    def going(self) -> list[int]:
        """The nodes of the rows that are not finished."""
        return [node for node, done in zip(self.nodes, self.done, strict=True) if not done]


class Constraint(Potential):
    """A hard potential: masks from a grammar for the engine, and a verdict on whole texts where that is too wide.

    Subclasses implement `_compile` and `accepts`, and set `exact` to False if the grammar admits more."""

    hard = sure = any_thread = True
    engine: Engine | CharEngine | StopEngine
    _ends: frozenset[int]
    _verdicts: dict[str, bool]
    _seconds: float  # what a mask has cost of late

    def bind(self, vocabulary: Vocabulary, stops: Sequence[str], device: torch.device) -> Constraint:
        bound = super().bind(vocabulary, stops, device)
        assert isinstance(bound, Constraint)
        bound.engine = self._compile(vocabulary, tuple(stops))
        bound.runs_on = bound.engine.kind
        bound._verdicts, bound._seconds = {}, 0.0
        bound._ends = frozenset(vocabulary.end_ids)
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
            nodes=[ROOT] * rows,
            done=[False] * rows,
            particles=particles,
            matchers={ROOT: self.engine.matcher()},
            masks=np.zeros((max(2 * rows, MASK_BYTES // (4 * self.engine.width)), self.engine.width), np.int32),
        )

    def restart(self, state: Rows, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        state.join()
        for group in groups:
            for row in range(group * state.particles, (group + 1) * state.particles):
                state.nodes[row], state.done[row] = ROOT, False

    def mask(self, state: Rows, out: torch.Tensor, active: torch.Tensor) -> None:
        state.join()
        wanted = [(row, state.nodes[row]) for row, asked in enumerate(active.tolist()) if asked]
        self._fill(state, [node for _, node in wanted])
        words = out.numpy()
        slots, masks = state.history["slot"], state.masks[:, : words.shape[1]]
        for row, node in wanted:
            words[row] = masks[slots[node]]

    def extend(self, state: Rows, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        state.join()
        ids, lengths = tokens.tolist(), counts.tolist()
        history, nodes = state.history, state.nodes
        for column in range(max(lengths, default=0)):
            known, fresh = history.size, {}
            for row, length in enumerate(lengths):
                if length > column:
                    parent, token = nodes[row], ids[row][column]
                    nodes[row] = node = history.child(parent, token)
                    if node >= known:
                        fresh[node] = parent, token
            self._admit(state, fresh)
        change, barred = np.zeros(len(nodes)), history["barred"]
        for row, length in enumerate(lengths):
            if length and barred[nodes[row]]:
                change[row] = -np.inf
        self._forget(state)
        self._fill_ahead(state)
        return torch.from_numpy(change)

    def rollback(self, state: Rows, counts: torch.Tensor) -> None:
        state.join()
        history, old = state.history, state.nodes
        state.nodes = history.ancestors(np.array(old), counts.numpy()).tolist()
        staying = set(state.nodes)
        for before, after in set(zip(old, state.nodes, strict=True)):
            if before != after and after not in state.matchers and before in state.matchers:
                matcher = state.matchers[before].deep_copy() if before in staying else state.matchers.pop(before)
                if not matcher.rollback(int(history.depth[before] - history.depth[after])):
                    raise PotentialError(f"{self.name}: the grammar engine cannot take tokens back")
                state.matchers[after] = matcher

    def fork(self, state: Rows, ancestors: torch.Tensor) -> None:
        state.join()
        rows = ancestors.tolist()
        state.nodes, state.done = [state.nodes[row] for row in rows], [state.done[row] for row in rows]
        self._forget(state)

    def finish(self, state: Rows, rows: torch.Tensor, texts: Sequence[str], reasons: Sequence[int]) -> torch.Tensor:
        state.join()
        change = np.full(len(reasons), -np.inf)
        for i, (row, text, reason) in enumerate(zip(rows.tolist(), texts, reasons, strict=True)):
            state.done[row] = True
            node = state.nodes[row]
            if reason == STOP:
                accepted = not state.history["barred"][node] and self._verdict(text)
            else:
                accepted = self._is_accepted(state, node) and (self._settled(text) or self._verdict(text))
            if accepted:
                change[i] = 0.0
        return torch.from_numpy(change)

    def _settled(self, text: str) -> bool:
        """Whether the masks alone decide about a text that they let through to its end."""
        return self.exact

    def _verdict(self, text: str) -> bool:
        if text not in self._verdicts:
            if len(self._verdicts) >= REMEMBERED:
                self._verdicts.clear()
            self._verdicts[text] = self.accepts(text)
        return self._verdicts[text]

    def _fill(self, state: Rows, nodes: Sequence[int]) -> None:
        """Every one of `nodes` gets its mask."""
        history = state.history
        wanted = [node for node in dict.fromkeys(nodes) if history["slot"][node] < 0]
        if not wanted:
            return
        if state.used + len(wanted) > len(state.masks):
            history["slot"][: history.size], state.used = -1, 0
            wanted = list(dict.fromkeys(nodes))
        slots, barred, accepted = history["slot"], history["barred"], history["accepted"]
        alive, rows = [], []
        for node in wanted:
            slots[node] = row = state.used
            state.used += 1
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

        It changes when they are computed, never what they are. Beside a GPU all this runs while the models do."""
        if self.device.type == "cuda":
            return
        slots, nodes = state.history["slot"], state.going()
        missing = sum(slots[node] < 0 for node in nodes)
        if missing * self._seconds > WORTH and (worker := _worker()) is not None:
            state.filling = worker.submit(self._fill, state, nodes)

    def _is_accepted(self, state: Rows, node: int) -> bool:
        """Whether the text of `node` is complete."""
        accepted = state.history["accepted"]
        if accepted[node] == UNKNOWN:
            alive = not state.history["barred"][node]
            accepted[node] = YES if alive and self._matcher(state, node).is_accepting() else NO
        return accepted[node] == YES

    def _admit(self, state: Rows, fresh: dict[int, tuple[int, int]]) -> None:
        """Decides which of the new nodes, given with parent and token, are barred; the others get matchers."""
        barred, occupied = state.history["barred"], {ROOT, *state.nodes}
        last = {parent: node for node, (parent, _) in fresh.items()}  # the child that may have its parent's matcher
        for node, (parent, token) in fresh.items():
            if barred[parent] or not self._allows(state, parent, token):
                barred[node] = True
                continue
            matcher = self._matcher(state, parent)
            if node != last[parent] or parent in occupied:
                matcher = matcher.deep_copy()
            else:
                del state.matchers[parent]
            read(matcher, [token], self.name)
            state.matchers[node] = matcher

    def _allows(self, state: Rows, node: int, token: int) -> bool:
        """Whether `token` may follow the history `node`."""
        if token in self._ends:
            return False
        if (slot := state.history["slot"][node]) >= 0:
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
            live = {ROOT, *state.going()}
            state.matchers = {node: matcher for node, matcher in state.matchers.items() if node in live}
            state.kept = len(state.matchers)
        if (ids := state.history.compact(state.nodes)) is not None:
            state.nodes = ids[state.nodes].tolist()
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
