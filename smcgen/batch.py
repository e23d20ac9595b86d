"""Items (a prompt and a run) take the places of groups as they fall free, until all are done."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from smcgen.lm.batch import Reader
from smcgen.lm.memory import Memory
from smcgen.plan import Plan
from smcgen.potentials.base import Prompt
from smcgen.progress import Progress
from smcgen.proposals.base import World
from smcgen.proposals.draft import DraftProposal
from smcgen.proposals.rivals import Rivals
from smcgen.record import ITEM_FIELDS, Round
from smcgen.smc.graph import Report, Rounds
from smcgen.smc.particles import Particles, RoundInfo
from smcgen.smc.round import Algorithm


@dataclass
class Done:
    """What the items of a batch have left.

    Attributes:
        fields: those of ITEM_FIELDS, [items, N, ...].
        stop_state: int64 [items, N], of the stop automaton at the end.
        log_evidence: float64 [items].
        ran: int64 [items], rounds of each item.
        rounds_of: item -> its rounds.
        rounds, seconds: of the batch; of each of its rounds.
        memory: K/V pages (see `lm.memory`).
        graphs: the CUDA graphs that a round was, 0 if it was launched kernel by kernel.
    """

    fields: dict[str, torch.Tensor]
    stop_state: torch.Tensor
    log_evidence: torch.Tensor
    ran: torch.Tensor
    rounds_of: Callable[[int], list[Round]]
    rounds: int
    seconds: list[float]
    memory: dict[str, Any]
    graphs: int


@dataclass
class Starts:
    """Texts that are begun already, for a batch of one particle a group: what `Particles` holds of them, [items, 1, ...] and
    [items], and the items that there are."""

    items: list[int]
    state: dict[str, torch.Tensor]

    def tokens(self, item: int) -> list[int]:
        """What is written of an item."""
        return self.state["tokens"][item, 0, : self.state["length"][item, 0]].tolist()


class Batch:
    """Items (a prompt and a run) take the places of groups as they fall free.

    Args:
        plan, world, algorithm: of the run.
        prompts, encoded, for_draft: of each prompt; the token ids that each factor reads of it; those that the draft reads.
        keys: the item key of each prompt.
        shape: (groups, particles).
        starts: texts to go on with, in place of empty ones.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        algorithm: Algorithm,
        prompts: list[Prompt],
        encoded: list[list[tuple[int, ...]]],
        for_draft: list[tuple[int, ...]],
        keys: list[int],
        shape: tuple[int, int],
        starts: Starts | None = None,
    ):
        self.plan, self.world, self.algorithm = plan, world, algorithm
        self.prompts, self.encoded, self.for_draft = prompts, encoded, for_draft
        self.keys, self.shape, self.starts = keys, shape, starts
        items, device = len(prompts) * plan.runs, world.keys.item.device
        factors = len(plan.target.lms)
        self.particles = Particles.empty(*shape, plan.max_tokens, factors, device)
        blank = Particles.empty(1, shape[1], plan.max_tokens, factors, torch.device("cpu"))
        self.fields = {}
        for name in ITEM_FIELDS:
            value = getattr(blank, name)
            dtype = torch.int32 if value.dtype == torch.int64 else value.dtype
            self.fields[name] = torch.zeros(items, *value.shape[1:], dtype=dtype)
        self.stop_state = torch.zeros(items, shape[1], dtype=torch.int64)
        self.log_evidence = torch.zeros(items, dtype=torch.float64)
        self.memory = Memory(self._plain_readers())
        self.reports: deque[Report] = deque()  # of rounds that were launched and not read yet
        world.potentials.host.meanwhile = self.meanwhile
        self.history: list[RoundInfo] = []
        self.seconds: list[float] = []  # of each round of the batch
        self.launched = 0  # rounds
        self.place = np.zeros((items, 3), np.int64)  # of each item: its group, first round and end in the history

    def run(self, progress: bool | None) -> Done:
        """Runs all items to their end. Recorded rounds are read one late, so that the device has work meanwhile."""
        queue = deque(range(len(self.log_evidence)) if self.starts is None else self.starts.items)
        free, busy = list(range(self.shape[0])), {}
        tokens, budget = 0, len(queue) * self.plan.max_tokens
        rounds = Rounds(self.particles, self.world, self.algorithm, self._flags, self._tables)
        reports = self.reports
        self.began = time.perf_counter()
        with Progress("sampling", budget, progress) as bar:
            while queue or busy:
                if queue and free:
                    taken = {free.pop(0): queue.popleft() for _ in range(min(len(queue), len(free)))}
                    self.admit(taken)
                    busy.update(taken)
                reports.append(rounds())
                self.particles, self.launched = rounds.particles, self.launched + 1
                while reports and not (len(reports) == 1 and rounds.wanted and self._may_go_on(busy.values())):
                    ended, length = self.read(reports.popleft(), busy)
                    # A group that collapses still moves: what is kept of it, and drawn from, is the state after the last round
                    # that was launched, so that round counts too. Which one that is follows from what the rounds before have
                    # shown, and any round that the past alone decides on may be the last one with N particles (`collapse`).
                    while ended and self.plan.collapse and reports:
                        more, length = self.read(reports.popleft(), busy)
                        ended |= more
                    if ended:
                        self.collect(ended)
                        for group in ended:
                            del busy[group]
                        free.extend(ended)
                        tokens += len(ended) * self.plan.max_tokens
                    bar.update(tokens + int(length[list(busy)].sum()))
            self.world.potentials.join()
        return Done(
            fields=self.fields,
            stop_state=self.stop_state,
            log_evidence=self.log_evidence,
            ran=torch.from_numpy(self.place[:, 2] - self.place[:, 1]),
            rounds_of=functools.partial(_rounds_of, self.history, self.place),
            rounds=len(self.history),
            seconds=self.seconds,
            memory=self.memory.summary(),
            graphs=rounds.graphs,
        )

    def meanwhile(self) -> None:
        """While the thread would only wait for the device: what else would keep the device waiting, between two rounds."""
        self.memory.count()
        for report in self.reports:
            _ = report.found

    def read(self, report: Report, busy: dict[int, int]) -> tuple[dict[int, int], torch.Tensor]:
        """Keeps what a round says; which groups of `busy` have ended with it, {group: item}, and the longest sample of every
        group, int64 [G]. With `collapse` a group ends when its first particle has."""
        info, done, length, broken = report.read()
        if broken:
            for reader in self._readers():
                reader.verify()
            self.world.scorer.verify()
        self.history.append(info)
        tables = list(report.tables)
        over = done | tables.pop() if self.plan.collapse else done
        self.memory.note(tables)
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now
        # An item that came after the round that was read is not meant.
        return {g: item for g, item in busy.items() if over[g] and self.place[item, 1] < len(self.history)}, length

    def _flags(self) -> list[torch.Tensor]:
        """bool [], what must not have happened."""
        return [reader.broken for reader in self._readers()] + [self.world.scorer.infinite]

    def _tables(self, particles: Particles) -> list[torch.Tensor]:
        """The page tables and, if that is of interest, the groups in which some particle has finished, bool [G]."""
        finished = [particles.finished.any(-1)] if self.plan.collapse else []
        return [*self.memory.tables(), *finished]

    def _may_go_on(self, items: Iterable[int]) -> bool:
        """Whether some item may have room for another round after those launched, as far as is known without reading."""
        least = self.algorithm.proposal.least
        return any((self.launched - self.place[item, 1]) * least < self.plan.max_tokens for item in items)

    def admit(self, taken: dict[int, int]) -> None:
        """Groups begin anew with these items: {group: item}."""
        groups = list(taken)
        which = [item // self.plan.runs for item in taken.values()]
        begun = [[] if self.starts is None else self.starts.tokens(item) for item in taken.values()]
        ids = [[(*factor[p], *text) for p, text in zip(which, begun, strict=True)] for factor in self.encoded]
        self.world.scorer.admit(groups, ids)
        self.algorithm.proposal.admit(groups, [(*self.for_draft[p], *text) for p, text in zip(which, begun, strict=True)])
        self.world.potentials.restart(groups, [self.prompts[p] for p in which])
        self.particles.restart(groups)
        keys = self.world.keys
        where = torch.tensor(groups, device=keys.item.device)
        if self.starts is not None:
            for reader in self._plain_readers():
                reader.count(groups, [len(text) for text in begun])
            for name, values in self.starts.state.items():
                field = getattr(self.particles, name)
                field[where] = values[list(taken.values())].to(field.device, field.dtype)
        keys.item[where] = torch.tensor([self.keys[p] for p in which], device=where.device)
        keys.run[where] = torch.tensor([item % self.plan.runs for item in taken.values()], device=where.device)
        for group, item in taken.items():
            self.place[item] = group, self.launched, 0

    def collect(self, ended: dict[int, int]) -> None:
        """Keeps the results of groups, in which nothing moves any more afterwards."""
        groups, items = torch.tensor(list(ended)), torch.tensor(list(ended.values()))
        where = groups.to(self.particles.length.device)
        for name, kept in self.fields.items():
            kept[items] = getattr(self.particles, name)[where].to("cpu", kept.dtype)
        self.stop_state[items] = self.particles.stop_state[where].cpu()
        self.log_evidence[items] = self.history[-1].log_evidence[groups]
        self.place[items, 2] = len(self.history)
        if self.plan.collapse:
            self.particles.retire(list(ended))

    def _plain_readers(self) -> list[Reader]:
        """Of every model, in the order of `info["models"]`."""
        return [r for reader in self._readers() for r in (reader.readers if isinstance(reader, Rivals) else [reader])]

    def _readers(self) -> Sequence[Reader | Rivals]:
        proposal = self.algorithm.proposal
        return [*self.world.scorer.readers] + ([proposal.reader] if isinstance(proposal, DraftProposal) else [])


def _rounds_of(history: list[RoundInfo], place: np.ndarray, item: int) -> list[Round]:
    """What happened to an item, round by round."""
    group, first, end = place[item]
    return [
        Round(
            ess=float(info.ess[group]),
            resampled=bool(info.resampled[group]),
            log_evidence=float(info.log_evidence[group]),
            chi_square=float(info.chi_square[group]),
            deaths=int(info.deaths[group]),
            log_weight=info.log_weight[group].tolist(),
            log_left=info.log_left[group].tolist(),
            ancestors=info.ancestors[group].tolist(),
            tokens=[row[:n] for row, n in zip(info.tokens[group].tolist(), info.counts[group].tolist(), strict=True)],
            counts=info.counts[group].tolist(),
            judged=int(info.judged[group]),
            accepted=int(info.accepted[group]),
        )
        for info in history[first:end]
    ]
