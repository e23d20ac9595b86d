"""A plan becomes a run: models and potentials are loaded and bound, prompts take the places of groups as they fall free."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from smcgen.drafts.bandits import Policy
from smcgen.drafts.hedge import POLICIES
from smcgen.errors import UsageError
from smcgen.lm.base import LanguageModel
from smcgen.lm.batch import Reader
from smcgen.lm.paged import PagedLM
from smcgen.lm.memory import Demand, Memory, groups_that_fit
from smcgen.lm.vocabulary import Vocabulary
from smcgen.plan import Plan
from smcgen.potentials.base import STOP, Potential, Prompt
from smcgen.progress import Progress
from smcgen.proposals.base import World
from smcgen.proposals.block import BlockJudgement
from smcgen.proposals.draft import DraftProposal
from smcgen.proposals.lenient import LenientProposal
from smcgen.proposals.rejection import RejectionProposal
from smcgen.proposals.rivals import RivalProposal, Rivals
from smcgen.proposals.target import TargetProposal
from smcgen.record import ITEM_FIELDS, Record, Round
from smcgen.smc.ending import Ending, cut_at_stop, stop_table
from smcgen.smc.factors import Potentials, Scorer
from smcgen.smc.graph import Report, Rounds
from smcgen.smc.keys import Keys
from smcgen.smc.particles import Particles, RoundInfo
from smcgen.smc.round import Algorithm
from smcgen.target import LM, Factor

SMALL = 30_000_000  # parameters
DEFAULT_ROWS = 256  # sequences that are read at a time, all groups together


def run(
    plan: Plan, prompts: list[Any], chat: bool | None, keys: list[int], groups: int | None, progress: bool | None
) -> Record:
    began = time.perf_counter()
    lms = [lm for lm, _ in plan.target.lms]
    models = [lm.load() for lm in lms]
    draft = None if plan.draft is None else plan.draft.load()
    base = models[0]
    vocabulary = base.vocabulary
    for other in models[1:]:
        _same_vocabulary(base, other)
    if draft is not None:
        _same_vocabulary(base, draft, ends=False)  # where a sample ends is the target's affair
    rivals = [rival.load() for rival in plan.rivals]
    for rival in rivals:
        _same_vocabulary(base, rival, ends=False)
    potentials = [_bind(potential, vocabulary, plan.stop, base.device) for potential, _ in plan.target.potentials]

    shown, encoded = _encode(lms, models, prompts, chat)
    # The draft reads the first factor's prompt unless it has its own.
    own = None if plan.draft is None else plan.draft.prompt
    for_draft = encoded[0] if own is None else [vocabulary.encode(own, chat).ids] * len(prompts)
    items = len(prompts) * plan.runs
    width = min(items, groups or max(1, DEFAULT_ROWS // plan.rows))
    longest = max(len(ids) for factor in [*encoded, for_draft] for ids in factor)
    drafts = [*([draft] if draft else []), *rivals]
    for model in [*models, *drafts]:
        if model.max_tokens is not None and longest + plan.max_tokens > model.max_tokens:
            raise UsageError(
                f"{model.name!r} reads at most {model.max_tokens} tokens: a prompt of {longest} and max_tokens="
                f"{plan.max_tokens} do not fit; shorten one of them"
            )
    width = groups_that_fit(_demands(plan, models, drafts), width, longest, plan.max_tokens + 1, base.device)
    shape = (width, plan.particles)
    room = (longest, plan.max_tokens + 1, plan.deterministic)
    scorer = Scorer(models, [a for _, a in plan.target.lms], [lm.law for lm in lms], shape, *room, plan.chains)
    if draft is None:
        proposal = TargetProposal() if plan.candidates is None else RejectionProposal(plan.candidates)
    else:
        reader = Reader(draft, (1, width, plan.rows), *room)
        if len(plan.arms) > 1:
            readers = Rivals([reader, *(Reader(rival, (1, width, plan.rows), *room) for rival in rivals)])
            options = (plan.arms, plan.arm_costs, functools.partial(_policy, plan), plan.reward)
            proposal = RivalProposal(readers, *plan.draft_law, plan.leniency, plan.chains, *options)
        elif plan.leniency == math.inf:
            proposal = DraftProposal(reader, plan.block, *plan.draft_law)
        else:
            proposal = LenientProposal(reader, plan.block, *plan.draft_law, plan.leniency, plan.chains)
        if isinstance(proposal, LenientProposal) and plan.verification == "block":
            proposal.judgement = BlockJudgement
    text_of = functools.partial(_texts, vocabulary, plan.stop)
    exponents = [b for _, b in plan.target.potentials]
    world = World(
        scorer=scorer,
        potentials=Potentials(potentials, exponents, shape, len(vocabulary), text_of, base.device, plan.chains),
        ending=_ending(plan, vocabulary, base.device),
        keys=Keys(plan.seed, *(torch.zeros(width, dtype=torch.int64, device=base.device) for _ in range(2))),
        # The standard error from one run's genealogy assumes independent draws.
        stratify=plan.resampling != "multinomial",
    )
    algorithm = Algorithm(proposal, plan.resampling, plan.threshold, plan.anneal)
    batch = Batch(plan, world, algorithm, shown, encoded, for_draft, keys, shape)
    with torch.inference_mode(), _one_thread(plan.deterministic or _small([*models, *drafts])):
        batch.run(progress)
    record = batch.record(text_of, vocabulary.tokens.__getitem__)
    record.settings.update(chat=chat, groups=width, device=str(base.device), dtype=_dtypes(models, draft))
    if isinstance(proposal, RivalProposal):
        uses = proposal.rounds.reshape(len(drafts), -1)
        record.info["draft_rounds"] = uses.sum(1).tolist()
        record.info["block_rounds"] = dict(zip(plan.blocks, uses.sum(0).tolist(), strict=True))
        record.info["policy_state"] = proposal.policies[0].state()
    record.info.update(
        seconds=time.perf_counter() - began,
        potentials=[potential.runs_on for potential in potentials],
        potential_seconds=world.potentials.seconds,
        memory=batch.memory.summary(),
        cuda_graph=batch.recorded,
        layers={m.name: _layers(m) for m in [*models, *drafts] if isinstance(m, PagedLM)},
        models=[reader.lm.name for reader in scorer.readers] + [model.name for model in drafts],
        ignored_defaults={model.name: getattr(model, "ignored", {}) for model in [*models, *drafts]},
    )
    return record


def _policy(plan: Plan) -> Policy:
    """The policy of an item, with what it has learned before."""
    policy = POLICIES[plan.policy](len(plan.arms))
    if plan.policy_state is not None:
        policy.load(plan.policy_state)
    return policy


def _demands(plan: Plan, models: list[LanguageModel], drafts: list[LanguageModel]) -> list[Demand]:
    """What the models of a run need: factors of one model are contexts of it."""
    read = 1 if plan.draft is None else max(plan.blocks) + 1
    contexts = Counter(map(id, models))
    known = {id(model): model for model in models}
    factors = [Demand(known[key], count, plan.rows, read) for key, count in contexts.items()]
    return factors + [Demand(draft, 1, plan.rows, 2) for draft in drafts]  # one or two unread tokens


def _layers(lm: PagedLM) -> str:
    """Whether the layers of a model are fused, or why not."""
    return f"as transformers has them: {lm.fusion}" if isinstance(lm.fusion, str) else "fused"


def _dtypes(models: list[LanguageModel], draft: LanguageModel | None) -> list[str]:
    """Of the K/V cache of each model, the draft last; a model that keeps none has none."""
    shapes = [getattr(model, "shape", None) for model in [*models, *([draft] if draft else [])]]
    return [str(shape.dtype).removeprefix("torch.") for shape in shapes if shape is not None]


def _small(models: list[LanguageModel]) -> bool:
    """Whether products of these models are too small to be shared out among threads."""
    nets = [m.model for m in models if isinstance(m, PagedLM)]
    return bool(nets) and all(sum(p.numel() for p in net.parameters()) < SMALL for net in nets)


@contextlib.contextmanager
def _one_thread(needed: bool) -> Iterator[None]:
    """torch shares a lone row's sums out among threads, several rows by row: with one thread both give the same bits. And in
    small models threads wait for each other longer than they work, ten times longer where the CPU is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if needed else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


def _same_vocabulary(base: LanguageModel, other: LanguageModel, ends: bool = True) -> None:
    if other is base:
        return
    difference = base.vocabulary.difference(other.vocabulary, ends)
    if difference:
        raise UsageError(
            f"{base.name!r} and {other.name!r} have different tokenizers ({difference}): "
            "models in one target, and their draft, must share every token"
        )


def _bind(potential: Factor, vocabulary: Vocabulary, stops: tuple[str, ...], device: torch.device) -> Potential:
    if not isinstance(potential, Potential):
        raise UsageError(f"{potential!r} is no potential: derive it from smcgen.Potential, or decorate a function")
    return potential.bind(vocabulary, stops, device)


def _encode(
    lms: list[LM], models: list[LanguageModel], prompts: list[Any], chat: bool | None
) -> tuple[list[Prompt], list[list[tuple[int, ...]]]]:
    """The prompts as potentials see them, and the token ids that each factor reads for each."""
    if any(prompt is None for prompt in prompts):
        if any(lm.prompt is None for lm in lms):
            raise UsageError("no prompt: give one to the call, or to every language model with lm.given(prompt)")
    if any(isinstance(text, str) and not text for text in [*prompts, *(lm.prompt for lm in lms)]):
        begin = models[0].vocabulary.bos_id
        remedy = "" if begin is None else f" (for text from nothing, the token ids [{begin}])"
        raise UsageError(f"empty prompt: give some text{remedy}")
    known: dict[tuple[int, str], Prompt] = {}

    def encode(model: LanguageModel, prompt: Any) -> Prompt:
        key = id(model), repr(prompt)
        if key not in known:
            known[key] = model.vocabulary.encode(prompt, chat)
        return known[key]

    pairs = list(zip(lms, models, strict=True))
    encoded = [[encode(model, prompt if lm.prompt is None else lm.prompt) for prompt in prompts] for lm, model in pairs]
    shown = [first if prompt is None else encode(models[0], prompt) for prompt, first in zip(prompts, encoded[0], strict=True)]
    return shown, [[prompt.ids for prompt in factor] for factor in encoded]


def _ending(plan: Plan, vocabulary: Vocabulary, device: torch.device) -> Ending:
    end = torch.zeros(len(vocabulary), dtype=torch.bool)
    end[list(vocabulary.end_ids)] = True
    table = stop_table(vocabulary.tokens, plan.stop)
    condition = plan.on_budget == "condition"
    if condition and table is None and not vocabulary.end_ids:
        raise UsageError("on_budget='condition' needs an end token or a stop string: this model names no end token")
    states = None if table is None else torch.from_numpy(table).to(device)
    return Ending(end.to(device), states, plan.max_tokens, condition)


def _texts(
    vocabulary: Vocabulary, stops: tuple[str, ...], tokens: torch.Tensor, lengths: torch.Tensor, reasons: torch.Tensor
) -> list[str]:
    """Texts of rows: tokens [n, L], lengths [n], reasons [n]. A text that a stop string ended is cut before it."""
    names = vocabulary.tokens
    texts = []
    for row, length, reason in zip(tokens.tolist(), lengths.tolist(), reasons.tolist(), strict=True):
        text = b"".join([names[token] for token in row[:length]])
        texts.append((cut_at_stop(text, stops) if reason == STOP else text).decode("utf-8", "replace"))
    return texts
