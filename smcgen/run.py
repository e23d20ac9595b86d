"""A plan becomes a run: models and potentials are loaded and bound, prompts encoded, and a batch of them is run."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from smcgen.batch import Batch, Done, Starts
from smcgen.collapse import collapse
from smcgen.drafts.bandits import Policy
from smcgen.drafts.hedge import POLICIES
from smcgen.errors import UsageError
from smcgen.lm.base import LanguageModel
from smcgen.lm.batch import Reader
from smcgen.lm.int8 import is_int8
from smcgen.lm.memory import Demand, groups_that_fit
from smcgen.lm.paged import PagedLM, one_thread
from smcgen.lm.vocabulary import Vocabulary
from smcgen.plan import Plan
from smcgen.potentials.base import STOP, Potential, Prompt
from smcgen.potentials.joint import require_text
from smcgen.proposals.base import Proposal, World
from smcgen.proposals.block import BlockJudgement
from smcgen.proposals.draft import DraftProposal
from smcgen.proposals.lenient import LenientProposal
from smcgen.proposals.rejection import RejectionProposal
from smcgen.proposals.rivals import RivalProposal, Rivals
from smcgen.proposals.target import TargetProposal
from smcgen.record import Record, as_given
from smcgen.smc.ending import Ending, cut_at_stop, stop_table
from smcgen.smc.factors import Potentials, Scorer
from smcgen.smc.keys import Keys
from smcgen.smc.round import Algorithm
from smcgen.target import LM, Factor

DEFAULT_ROWS = 256  # sequences that are read at a time, all groups together


@dataclass(frozen=True)
class Loaded:
    """What a run is made of.

    Attributes:
        models: of each factor.
        drafts: the first draft and its rivals, if there are any.
        vocabulary, potentials: of the models; bound to it.
        prompts: as potentials see them.
        encoded, for_draft: the token ids that each factor, and the draft, reads for each prompt.
        keys: of each prompt.
        text_of: tokens, lengths and reasons of some rows -> their texts.
    """

    models: list[LanguageModel]
    drafts: list[LanguageModel]
    vocabulary: Vocabulary
    potentials: list[Potential]
    prompts: list[Prompt]
    encoded: list[list[tuple[int, ...]]]
    for_draft: list[tuple[int, ...]]
    keys: list[int]
    text_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[str]]


@dataclass
class Stage:
    """What came out of a batch: how many groups ran at a time, what potentials took, and how often each arm was used, int64
    [arms], with a policy that has learned from all rounds of all items, if there was one."""

    done: Done
    groups: int
    potential_seconds: float
    uses: np.ndarray | int = 0
    policy: Policy | None = None


def run(
    plan: Plan, prompts: list[Any], chat: bool | None, keys: list[int], groups: int | None, progress: bool | None
) -> Record:
    """Runs all items of a plan.

    Args:
        prompts: text, chat messages or token ids each, or None where every model has its own.
        chat, groups, progress: as in `smcgen.sample`.
        keys: the item key of each prompt.
    """
    began = time.perf_counter()
    loaded = _load(plan, prompts, chat, keys)
    models, drafts, vocabulary, text_of = loaded.models, loaded.drafts, loaded.vocabulary, loaded.text_of
    with torch.inference_mode(), one_thread(plan.deterministic or _small([*models, *drafts])):
        first = stage = _stage(plan, loaded, groups, progress)
        done = first.done
        if plan.collapse:

            def finish(starts: Starts) -> Done:
                nonlocal stage
                stage = _stage(plan.alone(), loaded, groups, progress, starts, first.policy)
                stage.uses = stage.uses + first.uses
                return stage.done

            done = collapse(done, plan.seed, keys, plan.runs, finish)
    info: dict[str, Any] = {
        "rounds": done.rounds,
        "tokens": int(done.fields["length"].sum()),
        "tokens_per_second": float(done.fields["length"].amax(-1).sum()) / max(sum(done.seconds), 1e-9),
        "step_seconds": {f"p{p}": float(np.percentile(done.seconds, p)) for p in (50, 95)},
    }
    if plan.collapse:
        info["collapsed"] = first.done.ran.tolist()
    if stage.policy is not None:
        uses = np.asarray(stage.uses).reshape(len(drafts), -1)
        info["draft_rounds"] = uses.sum(1).tolist()
        info["block_rounds"] = dict(zip(plan.blocks, uses.sum(0).tolist(), strict=True))
        info["policy_state"] = stage.policy.state()
    info.update(
        seconds=time.perf_counter() - began,
        potentials=[potential.runs_on for potential in loaded.potentials],
        potential_seconds=first.potential_seconds,
        memory=done.memory,
        cuda_graph=done.graphs > 0,
        graphs_a_round=done.graphs,
        layers={m.name: _layers(m) for m in [*models, *drafts] if isinstance(m, PagedLM)},
        models=[model.name for model in [*{id(model): model for model in models}.values(), *drafts]],
        ignored_defaults={model.name: getattr(model, "ignored", {}) for model in [*models, *drafts]},
    )
    device, dtypes = str(models[0].device), _dtypes(models, drafts[0] if drafts else None)
    return Record(
        fields=done.fields,
        log_evidence=done.log_evidence,
        prompts=[prompt.text for prompt in loaded.prompts],
        runs=plan.runs,
        settings={**plan.settings(), "chat": chat, "groups": first.groups, "device": device, "dtype": dtypes},
        info=info,
        texts_of=lambda item: text_of(*(done.fields[name][item] for name in ("tokens", "length", "reason"))),
        piece_of=vocabulary.tokens.__getitem__,
        rounds_of=done.rounds_of,
        keys=keys,
        given=[as_given(prompt) for prompt in prompts],
    )


def _load(plan: Plan, prompts: list[Any], chat: bool | None, keys: list[int]) -> Loaded:
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
    require_text(potentials, plan.max_tokens)

    shown, encoded = _encode(lms, models, prompts, chat)
    # The draft reads the first factor's prompt unless it has its own.
    own = None if plan.draft is None else plan.draft.prompt
    for_draft = encoded[0] if own is None else [vocabulary.encode(own, chat).ids] * len(prompts)
    drafts = [*([draft] if draft else []), *rivals]
    text_of = functools.partial(_texts, vocabulary, plan.stop)
    loaded = Loaded(models, drafts, vocabulary, potentials, shown, encoded, for_draft, keys, text_of)
    longest = _longest(loaded)
    for model in [*models, *drafts]:
        if model.max_tokens is not None and longest + plan.max_tokens > model.max_tokens:
            raise UsageError(
                f"{model.name!r} reads at most {model.max_tokens} tokens: a prompt of {longest} and max_tokens="
                f"{plan.max_tokens} do not fit; shorten one of them"
            )
    return loaded


def _longest(loaded: Loaded) -> int:
    """Tokens of the longest prompt that a model reads."""
    return max(len(ids) for factor in [*loaded.encoded, loaded.for_draft] for ids in factor)


def _stage(
    plan: Plan,
    loaded: Loaded,
    groups: int | None,
    progress: bool | None,
    starts: Starts | None = None,
    policy: Policy | None = None,
) -> Stage:
    """Runs all items of a plan, or goes on with those of `starts`; `policy` learns from what happens."""
    models, drafts, vocabulary = loaded.models, loaded.drafts, loaded.vocabulary
    device = models[0].device
    items, longest, new_tokens = len(loaded.prompts) * plan.runs, _longest(loaded), plan.max_tokens + 1
    if starts is not None:
        lengths = [len(starts.tokens(item)) for item in starts.items]
        items, longest, new_tokens = len(lengths), longest + max(lengths), new_tokens - min(lengths)
    width = min(items, groups or max(1, DEFAULT_ROWS // plan.rows))
    width = groups_that_fit(_demands(plan, models, drafts), width, longest, new_tokens, device)
    shape = (width, plan.particles)
    room = (longest, new_tokens, plan.deterministic)
    laws = [lm.law for lm, _ in plan.target.lms]
    scorer = Scorer(models, [a for _, a in plan.target.lms], laws, shape, *room, plan.chains)
    proposal = _proposal(plan, drafts, (1, width, plan.rows), room)
    if isinstance(proposal, RivalProposal) and policy is not None:
        proposal.together = policy
    exponents = [b for _, b in plan.target.potentials]
    world = World(
        scorer=scorer,
        potentials=Potentials(loaded.potentials, exponents, shape, len(vocabulary), loaded.text_of, device, plan.chains),
        ending=_ending(plan, vocabulary, device),
        keys=Keys(plan.seed, *(torch.zeros(width, dtype=torch.int64, device=device) for _ in range(2))),
        # The standard error from one run's genealogy assumes independent draws.
        stratify=plan.resampling != "multinomial",
    )
    algorithm = Algorithm(proposal, plan.resampling, plan.threshold, plan.anneal)
    batch = Batch(plan, world, algorithm, loaded.prompts, loaded.encoded, loaded.for_draft, loaded.keys, shape, starts)
    stage = Stage(batch.run(progress), width, world.potentials.seconds)
    if isinstance(proposal, RivalProposal):
        stage.uses, stage.policy = proposal.rounds, proposal.together
    return stage


def _proposal(plan: Plan, drafts: list[LanguageModel], shape: tuple[int, int, int], room: tuple[int, int, bool]) -> Proposal:
    """`shape` and `room` are those of a draft's reader."""
    if not drafts:
        return TargetProposal() if plan.candidates is None else RejectionProposal(plan.candidates)
    reader, *others = (Reader(draft, shape, *room) for draft in drafts)
    judgement = BlockJudgement if plan.verification == "block" else None
    if len(plan.arms) > 1:
        options = (plan.arms, plan.arm_costs, functools.partial(_policy, plan), plan.reward, judgement)
        return RivalProposal(Rivals([reader, *others]), *plan.draft_law, plan.leniency, plan.chains, *options)
    if plan.leniency == math.inf:
        return DraftProposal(reader, plan.block, *plan.draft_law)
    return LenientProposal(reader, plan.block, *plan.draft_law, plan.leniency, plan.chains, judgement)


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
    """Whether the layers of a model are fused or compiled, and why not."""
    if not isinstance(lm.fusion, str):
        return "fused, int8 weights" if is_int8(lm.model) else "fused"
    if lm.compiled is True:
        return f"compiled; not fused: {lm.fusion}"
    return f"as transformers has them: {lm.fusion}" + (f"; not compiled: {lm.compiled}" if lm.compiled else "")


def _dtypes(models: list[LanguageModel], draft: LanguageModel | None) -> list[str]:
    """Of the K/V cache of each model, the draft last; a model that keeps none has none."""
    shapes = [getattr(model, "shape", None) for model in [*models, *([draft] if draft else [])]]
    return [str(shape.dtype).removeprefix("torch.") for shape in shapes if shape is not None]


def _small(models: list[LanguageModel]) -> bool:
    """Whether products of these models are too small to be shared out among threads."""
    paged = [model for model in models if isinstance(model, PagedLM)]
    return bool(paged) and all(model.small for model in paged)


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
    if any(prompt is None for prompt in prompts) and any(lm.prompt is None for lm in lms):
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
