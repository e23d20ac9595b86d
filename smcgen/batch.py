"""Items (a prompt and a run) take the places of groups as they fall free, until all are done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
from smcgen.record import ITEM_FIELDS, Record, Round
from smcgen.smc.graph import Report, Rounds
from smcgen.smc.particles import Particles, RoundInfo
from smcgen.smc.round import Algorithm


class Batch:
    """Items (a prompt and a run) take the places of groups as they fall free."""

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
    ):
        self.plan, self.world, self.algorithm = plan, world, algorithm
        self.prompts, self.encoded, self.for_draft = prompts, encoded, for_draft
        self.keys, self.shape = keys, shape
        items, device = len(prompts) * plan.runs, world.keys.item.device
        factors = len(plan.target.lms)
        self.particles = Particles.empty(*shape, plan.max_tokens, factors, device)
        blank = Particles.empty(1, shape[1], plan.max_tokens, factors, torch.device("cpu"))
        self.fields = {}
        for name in ITEM_FIELDS:
            value = getattr(blank, name)
            dtype = torch.int32 if value.dtype == torch.int64 else value.dtype
            self.fields[name] = torch.zeros(items, *value.shape[1:], dtype=dtype)
        self.log_evidence = torch.zeros(items, dtype=torch.float64)
        self.memory = Memory(self._plain_readers())
        self.history: list[RoundInfo] = []
        self.seconds: list[float] = []  # of each round of the batch
        self.launched, self.recorded = 0, False  # rounds, and whether they came from a recording
        self.place = np.zeros((items, 3), np.int64)  # of each item: its group, first round and end in the history

    def run(self, progress: bool | None) -> None:
        """Runs all items to their end. Recorded rounds are read one late, so that the device has work meanwhile."""
        items = len(self.prompts) * self.plan.runs
        queue, free, busy = deque(range(items)), list(range(self.shape[0])), {}
        tokens, budget = 0, items * self.plan.max_tokens
        rounds = Rounds(self.particles, self.world, self.algorithm)
        reports: deque[Report] = deque()
        began = time.perf_counter()
        with Progress("sampling", budget, progress) as bar:
            while queue or busy:
                if queue and free:
                    taken = {free.pop(0): queue.popleft() for _ in range(min(len(queue), len(free)))}
                    self.admit(taken)
                    busy.update(taken)
                info = rounds()
                self.particles, self.launched = rounds.particles, self.launched + 1
                reports.append(Report(info, self.particles, self._flags(), self.memory.tables()))
                while reports and not (len(reports) == 1 and rounds.wanted and self._may_go_on(busy.values())):
                    done, length = self.read(reports.popleft())
                    now = time.perf_counter()
                    self.seconds.append(now - began)
                    began = now
                    # An item that came after the round that was read is not meant.
                    ended = {g: item for g, item in busy.items() if done[g] and self.place[item, 1] < len(self.history)}
                    if ended:
                        self.collect(ended)
                        for group in ended:
                            del busy[group]
                        free.extend(ended)
                        tokens += len(ended) * self.plan.max_tokens
                    bar.update(tokens + int(length[list(busy)].sum()))
        self.recorded = rounds.recorded is not None

    def read(self, report: Report) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps what a round says; which groups are done, bool [G], and their longest samples, int64 [G]."""
        info, done, length, broken = report.read()
        if broken:
            for reader in self._readers():
                reader.verify()
            self.world.scorer.verify()
        self.history.append(info)
        self.memory.note(report.tables)
        return done, length

    def _flags(self) -> list[torch.Tensor]:
        """bool [], what must not have happened."""
        return [reader.broken for reader in self._readers()] + [self.world.scorer.infinite]

    def _may_go_on(self, items: Iterable[int]) -> bool:
        """Whether some item may have room for another round after those launched, as far as is known without reading."""
        least = self.algorithm.proposal.least
        return any((self.launched - self.place[item, 1]) * least < self.plan.max_tokens for item in items)

    def admit(self, taken: dict[int, int]) -> None:
        """Groups begin anew with these items: {group: item}."""
        groups = list(taken)
        which = [item // self.plan.runs for item in taken.values()]
        ids = [[factor[p] for p in which] for factor in self.encoded]
        self.world.scorer.admit(groups, ids)
        self.algorithm.proposal.admit(groups, [self.for_draft[p] for p in which])
        self.world.potentials.restart(groups, [self.prompts[p] for p in which])
        self.particles.restart(groups)
        keys = self.world.keys
        where = torch.tensor(groups, device=keys.item.device)
        keys.item[where] = torch.tensor([self.keys[p] for p in which], device=where.device)
        keys.run[where] = torch.tensor([item % self.plan.runs for item in taken.values()], device=where.device)
        for group, item in taken.items():
            self.place[item] = group, self.launched, 0

    def collect(self, ended: dict[int, int]) -> None:
        """Keeps the results of finished groups."""
        groups, items = torch.tensor(list(ended)), torch.tensor(list(ended.values()))
        where = groups.to(self.particles.length.device)
        for name, kept in self.fields.items():
            kept[items] = getattr(self.particles, name)[where].to("cpu", kept.dtype)
        self.log_evidence[items] = self.history[-1].log_evidence[groups]
        self.place[items, 2] = len(self.history)

    def _plain_readers(self) -> list[Reader]:
        """Of every model, in the order of `info["models"]`."""
        return [r for reader in self._readers() for r in (reader.readers if isinstance(reader, Rivals) else [reader])]

    def _readers(self) -> Sequence[Reader | Rivals]:
        proposal = self.algorithm.proposal
        return [*self.world.scorer.readers] + ([proposal.reader] if isinstance(proposal, DraftProposal) else [])

    def record(self, text_of: Any, piece_of: Callable[[int], bytes]) -> Record:
        """The results of all items."""
        fields, history, place = self.fields, self.history, self.place

        def texts_of(item: int) -> list[str]:
            return text_of(fields["tokens"][item], fields["length"][item], fields["reason"][item])

        def rounds_of(item: int) -> list[Round]:
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

        return Record(
            fields=fields,
            log_evidence=self.log_evidence,
            prompts=[prompt.text for prompt in self.prompts],
            runs=self.plan.runs,
            settings=self.plan.settings(),
            info={
                "rounds": len(history),
                "tokens": int(fields["length"].sum()),
                "tokens_per_second": float(fields["length"].amax(-1).sum()) / max(sum(self.seconds), 1e-9),
                "step_seconds": {f"p{p}": float(np.percentile(self.seconds, p)) for p in (50, 95)},
            },
            texts_of=texts_of,
            piece_of=piece_of,
            rounds_of=rounds_of,
            keys=self.keys,
        )
