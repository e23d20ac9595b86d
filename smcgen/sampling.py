"""From a call to a run: checks the arguments, loads what they name, fills groups with prompts and collects their results."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from smcgen.errors import UsageError
from smcgen.lm.base import LanguageModel
from smcgen.lm.batch import Reader
from smcgen.lm.vocabulary import Vocabulary
from smcgen.posterior import ITEM_FIELDS, Posterior, Posteriors, Record, Round
from smcgen.potentials.base import STOP, Potential, Prompt
from smcgen.progress import Progress
from smcgen.proposals.base import World
from smcgen.proposals.draft import DraftProposal
from smcgen.proposals.target import TargetProposal
from smcgen.smc.ending import Ending, cut_at_stop, stop_table
from smcgen.smc.factors import Potentials, Scorer
from smcgen.smc.keys import MAX_SLOTS, MAX_STEPS, Keys
from smcgen.smc.particles import Particles, RoundInfo
from smcgen.smc.resampling import SCHEMES
from smcgen.smc.round import Algorithm, step
from smcgen.smc.schedule import Ramp
from smcgen.target import LM, Factor, Target

DEFAULT_BLOCK = 4
DEFAULT_ROWS = 256  # particles that run at a time, all groups together


@dataclass(frozen=True)
class Plan:
    """A call to `sample` with every argument checked and every default filled in."""

    target: Target
    draft: LM | None
    particles: int
    block: int
    max_tokens: int
    seed: int
    runs: int
    stop: tuple[str, ...]
    on_budget: str
    resampling: str
    threshold: float
    anneal: Ramp
    draft_temperature: float | None
    deterministic: bool

    def settings(self) -> dict[str, Any]:
        """What decides the run, JSON-ready."""
        return {
            "target": repr(self.target),
            "potentials": [repr(p) for p, _ in self.target.potentials],
            "draft": None if self.draft is None else self.draft.name,
            "draft_temperature": self.draft_temperature,
            "particles": self.particles,
            "block": self.block if self.draft is not None else None,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "runs": self.runs,
            "stop": list(self.stop),
            "on_budget": self.on_budget,
            "resampling": self.resampling,
            "threshold": self.threshold,
            "anneal": [self.anneal.first, self.anneal.rounds],
            "deterministic": self.deterministic,
        }


@overload
def sample(target: Factor, prompt: str | None = None, **options: Any) -> Posterior: ...
@overload
def sample(target: Factor, prompt: Sequence[str], **options: Any) -> Posteriors: ...
@overload
def sample(target: Factor, prompt: Sequence[Any], **options: Any) -> Posterior | Posteriors: ...
def sample(
    target: Factor,
    prompt: Any = None,
    *,
    draft: LM | str | None = None,
    particles: int = 8,
    block: int | None = None,
    max_tokens: int = 128,
    seed: int | None = None,
    runs: int = 1,
    stop: str | Sequence[str] = (),
    on_budget: str = "truncate",
    resampling: str = "systematic",
    threshold: float = 0.9,
    anneal: Ramp | None = None,
    draft_temperature: float | None = None,
    chat: bool | None = None,
    groups: int | None = None,
    keys: Sequence[int] | None = None,
    deterministic: bool = False,
    progress: bool | None = None,
) -> Posterior | Posteriors:
    """Draws from a target by Sequential Monte Carlo.

    Args:
        target: language models and potentials, e.g. `LM("tiny")**2 * regex("[0-9]+")`.
        prompt: text, chat messages (list of dicts) or token ids (list of ints); a list of these runs many prompts at once and
            returns `Posteriors`. None if every language model has its own (`lm.given`).
        draft: a model with the same tokenizer that proposes blocks; without it the target proposes token by token.
        particles: N of each group.
        block: K, tokens drafted per round (default 4; only with a draft).
        max_tokens: budget of generated tokens, the end token included.
        seed: of all randomness, in [0, 2**64); None takes a fresh one, kept in `settings`.
        runs: independent groups per prompt, combined by their evidence; gives `log_evidence_se`.
        stop: strings that end a sample; the text stops before them.
        on_budget: "truncate" (a sample cut by the budget is a sample) or "condition" (the target conditioned on having ended).
        resampling: multinomial, residual, stratified, systematic, ssp or killing.
        threshold: resample a group when its ESS is below threshold * particles; 0 never, 1 always.
        anneal: a `Ramp` of the exponents.
        draft_temperature: default: the first model's temperature / sum of positive exponents.
        chat: apply the chat template to a text prompt; None: if there is one and the text has no special tokens of its own.
        groups: groups that run at a time (default: as many as make 256 particles).
        keys: an integer in [0, 2**32) per prompt that keys its randomness; default: its index.
        deterministic: bits of a prompt's result do not depend on which other prompts run beside it (slower).
        progress: a progress bar on stderr; None: on a terminal, after two seconds.

    Returns:
        `Posterior` for one prompt, `Posteriors` for a list.

    Raises:
        UsageError, ModelError, PotentialError, Impossible; NoSurvivors for one prompt whose particles all died (in a list that
        item is returned as failed, with log evidence -inf).
    """
    plan = _plan(
        target, draft, particles, block, max_tokens, seed, runs, stop, on_budget, resampling, threshold, anneal,
        draft_temperature, deterministic,
    )  # fmt: skip
    many = _is_many(prompt)
    prompts = list(prompt) if many else [prompt]
    if keys is None:
        keys = range(len(prompts))
    if len(keys) != len(prompts) or not all(isinstance(k, int) and 0 <= k < 1 << 32 for k in keys):
        raise UsageError(f"keys: give one integer in [0, 2**32) per prompt ({len(prompts)} prompts)")
    if groups is not None and groups < 1:
        raise UsageError(f"groups={groups}: give at least 1")
    record = _run(plan, prompts, chat, list(keys), groups, progress)
    if many:
        return Posteriors(record)
    posterior = Posterior(record, 0)
    if posterior.failed:
        raise posterior.failure()
    return posterior


async def asample(target: Factor, prompt: Any = None, **options: Any) -> Posterior | Posteriors:
    """`sample` on a thread, for services with an event loop of their own; arguments and result as there."""
    return await asyncio.to_thread(functools.partial(sample, target, prompt, **options))


def _is_many(prompt: Any) -> bool:
    """A list of prompts, as against one prompt that is itself a list (of messages or token ids)."""
    if prompt is None or isinstance(prompt, str):
        return False
    if not isinstance(prompt, Sequence):
        raise UsageError(f"prompt {prompt!r}: give text, a list of messages, a list of token ids, or a list of prompts")
    if not prompt:
        raise UsageError("no prompts: give at least one")
    return not isinstance(prompt[0], int | dict | np.integer)


def _plan(
    target: Factor,
    draft: LM | str | None,
    particles: int,
    block: int | None,
    max_tokens: int,
    seed: int | None,
    runs: int,
    stop: str | Sequence[str],
    on_budget: str,
    resampling: str,
    threshold: float,
    anneal: Ramp | None,
    draft_temperature: float | None,
    deterministic: bool,
) -> Plan:
    if not isinstance(target, Factor):
        raise UsageError(f"target {target!r}: give a language model, or a product of language models and potentials")
    target = Target.product(*target.factors())
    if not target.lms:
        raise UsageError(f"target {target!r} has no language model: multiply by one, e.g. LM('tiny') * {target!r}")
    positive = sum(power for _, power in target.lms if power > 0)
    if positive == 0:
        raise UsageError(f"target {target!r} has only negative exponents: multiply by a model with a positive one")
    for name, value, least, most in (
        ("particles", particles, 1, MAX_SLOTS // 2),
        ("max_tokens", max_tokens, 1, None),
        ("runs", runs, 1, 1 << 32),
        ("block", 1 if block is None else block, 1, MAX_STEPS - 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
            raise UsageError(f"{name}={value!r}: give an integer of at least {least}" + (f", at most {most}" * bool(most)))
    if block is not None and draft is None:
        raise UsageError("block has no effect without a draft: name a draft model, or leave block out")
    if draft_temperature is not None:
        if draft is None:
            raise UsageError("draft_temperature has no effect without a draft: name a draft model, or leave it out")
        if not 0 < draft_temperature < float("inf"):
            raise UsageError(f"draft_temperature={draft_temperature}: give a positive number")
    if seed is None:
        seed = secrets.randbits(32)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise UsageError(f"seed={seed!r}: give an integer in [0, 2**64)")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(s, str) and s for s in stops):
        raise UsageError(f"stop={stop!r}: give non-empty strings")
    if on_budget not in ("truncate", "condition"):
        raise UsageError(f"on_budget={on_budget!r}: give 'truncate' or 'condition'")
    if resampling not in SCHEMES:
        raise UsageError(f"resampling={resampling!r}: give one of {', '.join(SCHEMES)}")
    if not 0 <= threshold <= 1:
        raise UsageError(f"threshold={threshold!r}: give a number from 0 (never resample) to 1 (always)")
    first = target.lms[0][0]
    if draft is not None:
        draft = LM(draft) if isinstance(draft, str) else draft
        if not isinstance(draft, LM):
            raise UsageError(f"draft {draft!r}: give an LM or the name of a model")
        if draft_temperature is None:
            draft_temperature = (draft.temperature if draft.temperature != 1 else first.temperature) / positive
    return Plan(
        target, draft, particles, block or DEFAULT_BLOCK, max_tokens, seed, runs, stops, on_budget, resampling,
        threshold, anneal or Ramp(), draft_temperature, deterministic,
    )  # fmt: skip


def _run(
    plan: Plan, prompts: list[Any], chat: bool | None, keys: list[int], groups: int | None, progress: bool | None
) -> Record:
    began = time.perf_counter()
    lms = [lm for lm, _ in plan.target.lms]
    models = [lm.load() for lm in lms]
    draft = None if plan.draft is None else plan.draft.load()
    base = models[0]
    vocabulary = base.vocabulary
    for other in [*models[1:], *([draft] if draft else [])]:
        _same_vocabulary(base, other)
    potentials = [_bind(potential, vocabulary, plan.stop, base.device) for potential, _ in plan.target.potentials]

    shown, encoded = _encode(lms, models, prompts, chat)
    items = len(prompts) * plan.runs
    width = min(items, groups or max(1, DEFAULT_ROWS // plan.particles))
    shape = (width, plan.particles)
    longest = max(len(ids) for factor in encoded for ids in factor)
    for model in [*models, *([draft] if draft else [])]:
        if model.max_tokens is not None and longest + plan.max_tokens > model.max_tokens:
            raise UsageError(
                f"{model.name!r} reads at most {model.max_tokens} tokens: a prompt of {longest} and max_tokens="
                f"{plan.max_tokens} do not fit; shorten one of them"
            )
    room = (longest, plan.max_tokens + 1, plan.deterministic)
    scorer = Scorer(models, [a for _, a in plan.target.lms], [lm.temperature for lm in lms], shape, *room)
    if draft is None:
        proposal = TargetProposal()
    else:
        assert plan.draft_temperature is not None
        proposal = DraftProposal(Reader(draft, (1, *shape), *room), plan.block, plan.draft_temperature)
    text_of = functools.partial(_texts, vocabulary, plan.stop)
    world = World(
        scorer=scorer,
        potentials=Potentials(potentials, [b for _, b in plan.target.potentials], shape, len(vocabulary), text_of, base.device),
        ending=_ending(plan, vocabulary, base.device),
        keys=Keys(plan.seed, *(torch.zeros(width, dtype=torch.int64, device=base.device) for _ in range(2))),
        # The standard error from one run's genealogy assumes independent draws.
        stratify=plan.resampling != "multinomial",
    )
    algorithm = Algorithm(proposal, SCHEMES[plan.resampling], plan.threshold, plan.anneal)
    batch = Batch(plan, world, algorithm, shown, encoded, keys, shape)
    with torch.inference_mode():
        batch.run(progress)
    readers = scorer.readers + ([proposal.reader] if isinstance(proposal, DraftProposal) else [])
    record = batch.record(text_of)
    record.settings.update(chat=chat, groups=width, device=str(base.device), dtype=_dtypes(models, draft))
    record.info.update(
        seconds=time.perf_counter() - began,
        potential_seconds=world.potentials.seconds,
        models=[reader.lm.name for reader in readers],
        ignored_defaults={lm.name: lm.ignored for lm in {*models, *([draft] if draft else [])} if getattr(lm, "ignored", None)},
    )
    return record


def _dtypes(models: list[LanguageModel], draft: LanguageModel | None) -> list[str]:
    """Of the K/V cache of each model, the draft last; a model that keeps none has none."""
    shapes = [getattr(model, "shape", None) for model in [*models, *([draft] if draft else [])]]
    return [str(shape.dtype).removeprefix("torch.") for shape in shapes if shape is not None]


class Batch:
    """Items (a prompt and a run) take the places of groups as they fall free."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        algorithm: Algorithm,
        prompts: list[Prompt],
        encoded: list[list[tuple[int, ...]]],
        keys: list[int],
        shape: tuple[int, int],
    ):
        self.plan, self.world, self.algorithm = plan, world, algorithm
        self.prompts, self.encoded, self.keys, self.shape = prompts, encoded, keys, shape
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
        self.history: list[RoundInfo] = []
        self.place = np.zeros((items, 3), np.int64)  # of each item: its group, first round and end in the history

    def run(self, progress: bool | None) -> None:
        """Runs all items to their end."""
        items = len(self.prompts) * self.plan.runs
        queue, free, busy = deque(range(items)), list(range(self.shape[0])), {}
        tokens, budget = 0, items * self.plan.max_tokens
        with Progress("sampling", budget, progress) as bar:
            while queue or busy:
                if queue and free:
                    taken = {free.pop(0): queue.popleft() for _ in range(min(len(queue), len(free)))}
                    self.admit(taken)
                    busy.update(taken)
                self.particles, info = step(self.particles, self.world, self.algorithm)
                self.history.append(_to_host(info))
                done = self.particles.done.cpu()
                for reader in self._readers():
                    reader.verify()
                ended = {group: item for group, item in busy.items() if done[group]}
                if ended:
                    self.collect(ended)
                    for group in ended:
                        del busy[group]
                    free.extend(ended)
                    tokens += len(ended) * self.plan.max_tokens
                going = int(self.particles.length.amax(-1).cpu()[list(busy)].sum()) if busy else 0
                bar.update(tokens + going)

    def admit(self, taken: dict[int, int]) -> None:
        """Groups begin anew with these items: {group: item}."""
        groups = list(taken)
        which = [item // self.plan.runs for item in taken.values()]
        ids = [[factor[p] for p in which] for factor in self.encoded]
        self.world.scorer.admit(groups, ids)
        self.algorithm.proposal.admit(groups, ids[0])
        self.world.potentials.restart(groups, [self.prompts[p] for p in which])
        first = self.plan.anneal.scale(torch.zeros(1)).item()
        self.particles.restart(groups, first)
        keys = self.world.keys
        where = torch.tensor(groups, device=keys.item.device)
        keys.item[where] = torch.tensor([self.keys[p] for p in which], device=where.device)
        keys.run[where] = torch.tensor([item % self.plan.runs for item in taken.values()], device=where.device)
        for group, item in taken.items():
            self.place[item] = group, len(self.history), 0

    def collect(self, ended: dict[int, int]) -> None:
        """Keeps the results of finished groups."""
        groups, items = torch.tensor(list(ended)), torch.tensor(list(ended.values()))
        where = groups.to(self.particles.length.device)
        for name, kept in self.fields.items():
            kept[items] = getattr(self.particles, name)[where].to("cpu", kept.dtype)
        self.log_evidence[items] = self.history[-1].log_evidence[groups]
        self.place[items, 2] = len(self.history)

    def _readers(self) -> list[Reader]:
        proposal = self.algorithm.proposal
        return self.world.scorer.readers + ([proposal.reader] if isinstance(proposal, DraftProposal) else [])

    def record(self, text_of: Any) -> Record:
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
                    ancestors=info.ancestors[group].tolist(),
                    counts=info.counts[group].tolist(),
                )
                for info in history[first:end]
            ]

        return Record(
            fields=fields,
            log_evidence=self.log_evidence,
            prompts=[prompt.text for prompt in self.prompts],
            runs=self.plan.runs,
            settings=self.plan.settings(),
            info={"rounds": len(history), "tokens": int(fields["length"].sum())},
            texts_of=texts_of,
            rounds_of=rounds_of,
            keys=self.keys,
        )


def _to_host(info: RoundInfo) -> RoundInfo:
    values = vars(info)
    small = {"ancestors": torch.int32, "counts": torch.int32}
    return RoundInfo(**{name: v.to("cpu", small.get(name, v.dtype)) for name, v in values.items()})


def _same_vocabulary(base: LanguageModel, other: LanguageModel) -> None:
    if other is base:
        return
    difference = base.vocabulary.difference(other.vocabulary)
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
    encoded: list[list[Prompt]] = []
    for lm, model in zip(lms, models, strict=True):
        texts = [lm.prompt if lm.prompt is not None else prompt for prompt in prompts]
        if lm.prompt is not None:
            encoded.append([model.vocabulary.encode(lm.prompt, chat)] * len(texts))
        else:
            encoded.append([model.vocabulary.encode(text, chat) for text in texts])
    own = [None if prompt is None else models[0].vocabulary.encode(prompt, chat) for prompt in prompts]
    shown = [first if call is None else call for call, first in zip(own, encoded[0], strict=True)]
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
