"""What all hard potentials share: one mask per distinct history, and matchers that follow the rows.

A matcher is large (hundreds of kilobytes after thousands of tokens), so there is not one per node: it moves to a child
when no row stays at the parent, is cloned only where rows part, and is made again from the nearest ancestor's where one
is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
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

MASK_BYTES = 1 << 26  # masks kept for histories that may come again
REMEMBERED = 1 << 16  # verdicts on finished texts kept

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
    masks: torch.Tensor  # int32 [slots, width]
    used: int = 0
    kept: int = 0


class Constraint(Potential):
    """A hard potential: masks from a grammar for the engine, and a verdict on whole texts where that is too wide.

    Subclasses implement `_compile` and `accepts`, and set `exact` to False if the grammar admits more."""

    hard = True
    engine: Engine | CharEngine | StopEngine
    _ends: np.ndarray  # bool [V]
    _verdicts: dict[str, bool]

    def bind(self, vocabulary: Vocabulary, stops: Sequence[str], device: torch.device) -> Constraint:
        bound = super().bind(vocabulary, stops, device)
        assert isinstance(bound, Constraint)
        bound.engine = self._compile(vocabulary, tuple(stops))
        bound._verdicts = {}
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
            masks=torch.zeros(0, self.engine.width, dtype=torch.int32),
        )

    def restart(self, state: Rows, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        rows = (np.asarray(groups)[:, None] * state.particles + np.arange(state.particles)).reshape(-1)
        state.nodes[rows], state.done[rows] = ROOT, False

    def mask(self, state: Rows, out: torch.Tensor, active: torch.Tensor) -> None:
        rows = np.flatnonzero(active.numpy())
        nodes = state.nodes[rows]
        self._fill(state, nodes)
        words = out.numpy()
        words[rows] = state.masks.numpy()[state.history["slot"][nodes], : words.shape[1]]

    def extend(self, state: Rows, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ids, lengths = tokens.numpy(), counts.numpy()
        for column in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > column)
            state.nodes[rows], fresh = state.history.children(state.nodes[rows], ids[rows, column])
            self._admit(state, fresh)
        self._forget(state)
        barred = (lengths > 0) & state.history["barred"][state.nodes]
        return torch.from_numpy(np.where(barred, -np.inf, 0.0))

    def rollback(self, state: Rows, counts: torch.Tensor) -> None:
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
        state.nodes, state.done = state.nodes[ancestors.numpy()], state.done[ancestors.numpy()]
        self._forget(state)

    def finish(self, state: Rows, rows: torch.Tensor, texts: Sequence[str], reasons: Sequence[int]) -> torch.Tensor:
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
        missing = np.unique(nodes[slots[nodes] < 0])
        if not len(missing):
            return
        capacity = max(len(state.nodes), MASK_BYTES // (4 * self.engine.width))
        if state.used + len(missing) > capacity:
            slots[: state.history.size], state.used = -1, 0
            missing = np.unique(nodes)
        new = np.arange(state.used, state.used + len(missing))
        state.used += len(missing)
        if state.used > len(state.masks):
            larger = torch.zeros(min(capacity, 2 * state.used), self.engine.width, dtype=torch.int32)
            larger[: len(state.masks)] = state.masks
            state.masks = larger
        slots[missing] = new
        barred = state.history["barred"][missing]
        state.masks.numpy()[new[barred]] = 0
        state.history["accepted"][missing[barred]] = NO
        alive, rows = missing[~barred], new[~barred].tolist()
        matchers = [self._matcher(state, node) for node in alive.tolist()]
        state.history["accepted"][alive] = self.engine.fill(matchers, state.masks, rows)
        for node, matcher in zip(alive.tolist(), matchers, strict=True):
            if matcher.is_error():  # a dead end: its mask is known, the matcher is of no more use
                del state.matchers[node]

    def _know(self, state: Rows, nodes: np.ndarray) -> None:
        """Acceptance of every one of `nodes` becomes known."""
        accepted = state.history["accepted"]
        for node in np.unique(nodes[accepted[nodes] == UNKNOWN]).tolist():
            alive = not state.history["barred"][node]
            accepted[node] = alive and self._matcher(state, node).is_accepting()

    def _admit(self, state: Rows, fresh: np.ndarray) -> None:
        """Decides which of the new nodes are barred; the others get matchers."""
        history = state.history
        parents = history.parent[fresh]
        waiting = np.bincount(parents, minlength=history.size)
        occupied = np.bincount(state.nodes, minlength=history.size) > 0
        for node, parent, token in zip(fresh.tolist(), parents.tolist(), history.token[fresh].tolist(), strict=True):
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
        state.masks[: len(holders)] = state.masks[torch.from_numpy(slots[holders])]
        slots[holders] = np.arange(len(holders))
        state.used = len(holders)
