"""A regular constraint that runs on tables (`tables.TokenTable`): its state is a number per particle, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from smcgen.errors import Impossible
from smcgen.kernels.automaton import walk
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import STOP, Potential, Prompt
from smcgen.potentials.stops import fold
from smcgen.potentials.tables import TokenTable, token_table
from smcgen.smc.host import asks

KEPT = 256  # tokens that can be taken back on a GPU, where asking how many a row has read would wait for it


@dataclass
class Walk:
    """The state: `now` int64 [G, R], the table's state of each row; `depth` int64 [G, R], tokens read; `past` int64 [G, R,
    capacity + 1], the states after so many tokens, modulo capacity (the last column is for what is not kept). On a GPU they
    are written in place, as a captured graph needs it."""

    now: torch.Tensor
    depth: torch.Tensor
    past: torch.Tensor

    @property
    def capacity(self) -> int:
        return self.past.shape[-1] - 1


class Tabled(Potential):
    """A bound constraint. Tensors that its methods take may be on `device`; nothing they do waits for the host there.

    Args:
        name, accepts: of the constraint that was bound; accepts is None for one of tokens, where texts decide nothing.
        table: its automaton, with the stop strings in it; `host` keeps it as it was given, `table` is on the device."""

    hard = sure = True
    on_device = True

    def __init__(
        self,
        name: str,
        accepts: Callable[[str], bool] | None,
        table: TokenTable,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        device: torch.device,
    ):
        self.name, self.accepts = name, accepts
        self.host, self.table = table, table.to(device)
        self.vocabulary, self.stops, self.device = vocabulary, tuple(stops), device
        self.of_tokens = accepts is None
        self.runs_on = f"tables on {self.device}: {table.states} states, {table.next.shape[1]} classes, {table.bytes} bytes"

    def __repr__(self) -> str:
        return self.name

    def start(self, prompts: Sequence[Prompt], particles: int) -> Walk:
        now = torch.zeros(len(prompts), particles, dtype=torch.int64, device=self.device)
        capacity = 16 if now.device.type == "cpu" else KEPT
        return Walk(now, torch.zeros_like(now), torch.zeros(*now.shape, capacity + 1, dtype=torch.int64, device=self.device))

    def restart(self, state: Walk, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        where = torch.tensor(list(groups), device=self.device)
        state.now[where] = 0
        state.depth[where] = 0
        state.past[where] = 0

    def bits(self, state: Walk) -> torch.Tensor:
        """int32 [G, R, ceil(V / 32)], the masks of all rows."""
        return self.table.mask(state.now)

    def mask(self, state: Walk, out: torch.Tensor, active: torch.Tensor) -> None:
        out[active] = self.bits(state).flatten(0, 1).to(out.device)[active]

    def extend(self, state: Walk, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        tokens, counts = tokens.to(self.device).view(*state.now.shape, -1), counts.to(self.device).view_as(state.now)
        if asks(state.now) and (longest := int(state.depth.max()) + tokens.shape[-1]) >= state.capacity:
            state.past = torch.cat([state.past, torch.zeros(*state.now.shape, longest, dtype=torch.int64)], -1)
        table = self.table
        return walk(
            state.now, state.depth, state.past, tokens, counts, table.classes, table.next, table.dead
        ).flatten()  # fmt: skip

    def rollback(self, state: Walk, counts: torch.Tensor) -> None:
        counts = counts.to(self.device).view_as(state.now)
        state.depth.sub_(counts)
        before = state.past.gather(-1, (state.depth % state.capacity)[..., None])[..., 0]
        state.now.copy_(torch.where(counts > 0, before, state.now))

    def fork(self, state: Walk, ancestors: torch.Tensor) -> None:
        ancestors = ancestors.to(self.device)
        for value in (state.now, state.depth, state.past):
            value.copy_(value.flatten(0, 1)[ancestors].view_as(value))

    def finish(self, state: Walk, rows: torch.Tensor, texts: Sequence[str], reasons: Sequence[int]) -> torch.Tensor:
        now = state.now.flatten()[rows.to(self.device)].cpu()
        accepted = self.table.final.cpu()[now]
        for i, reason in enumerate(reasons):
            if reason == STOP and self.accepts is not None:
                accepted[i] = bool(now[i] != self.table.dead) and self.accepts(texts[i])
        return log_of(accepted)

    def close(self, state: Walk, last: torch.Tensor, reason: torch.Tensor) -> torch.Tensor:
        """`finish` for all rows, without texts: `last` int64 [G, N], the last token of each particle, and why it ended, int64
        [G, N]; the state has R = N * M rows, of which the first of each particle counts. Returns float64 [G, N]."""
        now = state.now[:, :: state.now.shape[1] // last.shape[1]]
        stopped = self.table.extend(now, last)  # the token that completed a stop string was not read
        return log_of(self.table.final[torch.where(reason == STOP, stopped, now)])


def tabled(
    name: str,
    accepts: Callable[[str], bool],
    expression: str,
    vocabulary: Vocabulary,
    stops: Sequence[str],
    device: torch.device,
    steps: int,
) -> Tabled | None:
    """The constraint that a terminal expression stands for, on tables; None if they would be too large, or take more than
    `steps` to make (see `tables`). Raises Impossible if no text is left."""
    table = token_table(fold(expression, tuple(stops)), vocabulary, steps)
    if table is None:
        return None
    if table.empty:
        stopped = f" before one of the stop strings {list(stops)}" if stops else ""
        raise Impossible(f"{name}: no text can satisfy it{stopped}, or none that the tokens of {vocabulary.name} can spell")
    return Tabled(name, accepts, table, vocabulary, stops, device)


def log_of(holds: torch.Tensor) -> torch.Tensor:
    """float64: 0 where `holds`, else -inf."""
    return torch.zeros(holds.shape, dtype=torch.float64, device=holds.device).masked_fill(~holds, -torch.inf)
