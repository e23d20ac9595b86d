"""mode="auto": N particles, M chains, K drafted tokens and leniency s from what is measured before the run.

A pilot draws a short text from the language model and scores it with every draft: the probability that one of n candidates is
accepted, a_n, and the probability that a candidate repeats an accepted token, which is what keeps later chains alive. A table
of forward times (`drafts.costs`) gives the cost of a round. For a language model as it is, lossless decoding is fastest at

    argmax over drafts, M, K of  E[tokens] / cost,    E[tokens] = 1 + sum_k prod_{j<=k} a_{n_j},   n_1 = M,

or without a draft, if none pays. With powers and constraints nothing is lossless: s and K are those that had the least error at
a given speed where it was measured (`benchmarks/frontier.py` has the measurements for plain text).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smcgen.drafts.arms import look_ups
from smcgen.drafts.costs import Costs, measure
from smcgen.drafts.ngram import NGram
from smcgen.kernels.categorical import log_softmax
from smcgen.kernels.truncate import truncate
from smcgen.kernels.verify import levels
from smcgen.lm.base import LanguageModel
from smcgen.plan import DEFAULT_PARTICLES, is_plain
from smcgen.target import LM, WHOLE, Factor, Target, Truncation

CHAINS = (1, 2, 4, 8)
BLOCKS = (1, 2, 3, 4, 6, 8, 12)
WIDTHS = (1, 5, 9)  # tokens per row at which the target is timed
MOST_GROUPS = 16  # prompts at a time for which forwards are timed
MOST_ROWS = 64  # beyond, more chains are not considered
PILOT = (16, 64)  # least and most tokens of the pilot's text, else an eighth of the budget, for each of PROMPTS prompts
PROMPTS = 4
ROUNDS_TO_LEARN = 60  # expected rounds of an item from which on the policy may try block lengths


@dataclass(frozen=True)
class Acceptance:
    """Of one draft against the target.

    Attributes:
        of: n -> a_n, the probability that one of n candidates is accepted.
        repeat: probability that a further candidate equals the token accepted.
        positions: at how many positions it was measured.
    """

    of: dict[int, float]
    repeat: float
    positions: int

    def tokens(self, chains: int, block: int) -> float:
        """E[tokens] of a round of lossless decoding."""
        total, reach, live = 1.0, 1.0, float(chains)
        for _ in range(block):
            reach *= self._at(live)
            total += reach
            live = 1 + (live - 1) * self.repeat
        return total

    def _at(self, live: float) -> float:
        """a_n between the whole numbers of candidates that were measured."""
        below = max(n for n in self.of if n <= live)
        above = min((n for n in self.of if n >= live), default=below)
        share = 0.0 if above == below else (live - below) / (above - below)
        return (1 - share) * self.of[below] + share * self.of[above]


@dataclass(frozen=True)
class Choice:
    """What was chosen, as options of `sample`, and why."""

    options: dict[str, Any]
    why: str
    details: dict[str, Any] = field(default_factory=dict)


@torch.inference_mode()
def acceptance(
    target: LanguageModel,
    draft: LanguageModel,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    law: tuple[float, Truncation],
    draft_law: tuple[float, Truncation],
    alpha: float = 1.0,
) -> Acceptance:
    """Scores texts, (prompt, tokens), under p**alpha, normalised, and the draft; a law is a temperature and a truncation."""
    rejected = {n: 0.0 for n in CHAINS}
    repeat = weight = 0.0
    positions = 0
    for prompt, tokens in texts:
        read = [*prompt, *tokens][:-1]
        log_p, log_q = (
            log_softmax(truncate(_rows(lm, read, len(prompt) - 1), temperature, *truncation), temperature)
            for lm, (temperature, truncation) in ((target, law), (draft, draft_law))
        )
        size = min(log_p.shape[-1], log_q.shape[-1])
        log_p, log_q = (alpha * log_p[:, :size]).log_softmax(-1), log_q[:, :size]
        positions += len(log_p)
        left = _rejection(log_p, log_q, max(CHAINS))
        for n in CHAINS:
            rejected[n] += float(left[:, n].sum())
        overlap = torch.minimum(log_p, log_q).exp()
        repeat += float((overlap * log_q.exp()).sum())
        weight += float(overlap.sum())
    return Acceptance({n: 1 - r / positions for n, r in rejected.items()}, repeat / max(weight, 1e-12), positions)


def _rejection(log_p: torch.Tensor, log_q: torch.Tensor, chains: int) -> torch.Tensor:
    """Probability that the first n of independent candidates are all rejected: float64 [T, chains + 1]."""
    level = levels(log_p, log_q, torch.ones(len(log_p), chains, dtype=torch.bool, device=log_p.device), 1.0)
    out = [torch.ones(len(log_p), dtype=torch.float64, device=log_p.device)]
    for i in range(chains):
        density = (log_p.exp() - level.cost[:, i, None] * log_q.exp()).clamp(min=0) / level.mass[:, i, None]
        out.append(out[-1] * (1 - torch.minimum(density, log_q.exp()).sum(-1)).clamp(0, 1))
    return torch.stack(out, -1)


def _rows(lm: LanguageModel, read: Sequence[int], start: int) -> torch.Tensor:
    """Logits [T, V] after each token of `read` from place `start` on."""
    context = lm.open(1, 1, max(start, 1), len(read) - start)
    lm.prefill(context, [0], [list(read[:start])])
    tokens = torch.tensor([list(read[start:])], device=lm.device)
    return lm.extend(context, tokens, torch.tensor([tokens.shape[1]], device=lm.device))[0]


def choose_exact(
    accepted: Sequence[Acceptance], names: Sequence[str], costs: Costs | None, draft_costs: Sequence[float] | None,
    groups: int, max_tokens: int, chains: int | None, block: Any,
) -> Choice:  # fmt: skip
    """The fastest lossless decoding. `costs` or `draft_costs` (forwards of the target, rows being free) say what a round
    costs; chains and block are kept if given."""

    def cost(draft: int, m: int, k: int) -> float:
        if costs is not None:
            return costs.round(draft, groups * m, k) / costs.plain(groups)
        assert draft_costs is not None
        return 1 + k * draft_costs[draft]

    def speed(draft: int, m: int, k: int) -> float:
        return accepted[draft].tokens(m, k) / cost(draft, m, k)

    many = [m for m in CHAINS if m == 1 or groups * m <= MOST_ROWS] if chains is None else [chains]
    lengths = [k for k in BLOCKS if k < max_tokens] or [1]
    given = [block] if isinstance(block, int) else list(block) if block is not None else lengths
    best = max(((d, m, k) for d in range(len(names)) for m in many for k in given), key=lambda arm: speed(*arm))
    d, m, k = best
    rate = accepted[d].of[1]
    found = (
        f"{names[d]} is accepted at {rate:.2f} ({accepted[d].positions} positions); a round of K={k}, M={m} makes "
        f"{accepted[d].tokens(m, k):.2f} tokens at the cost of {cost(d, m, k):.2f} forwards"
    )
    details = {"acceptance": {name: a.of for name, a in zip(names, accepted, strict=True)}, "speedup": speed(*best)}
    if speed(*best) < 1:
        why = f"no draft pays: {found}, {speed(*best):.2f} times plain decoding"
        return Choice({"mode": "exact", "draft": None}, why, details)
    ks = [k]
    if block is None and max_tokens / accepted[d].tokens(m, k) >= ROUNDS_TO_LEARN:
        at = lengths.index(k)
        ks = lengths[max(at - 1, 0) : at + 2]
    why = f"lossless, because the target is the model itself: {found}, {speed(*best):.2f} times plain decoding"
    if len(ks) > 1:
        why += f"; the block may become one of {ks} by what past rounds accept"
    options: dict[str, Any] = {"mode": "exact", "draft_index": d, "chains": m, "block": ks if len(ks) > 1 else k}
    if len(ks) > 1:
        options["arm_costs"] = tuple(cost(d, m, one) for one in ks)
    return Choice(options, why, details)


def choose_weighted(
    accepted: Sequence[Acceptance], names: Sequence[str], alpha: float, hard: bool, costs: Costs | None,
    groups: int, particles: int | None, block: Any, leniency: float | None, reason: str,
) -> Choice:  # fmt: skip
    """Particles for powers and potentials; `reason` says why there must be weights."""
    best = max(range(len(names)), key=lambda d: accepted[d].of[1])
    rate = accepted[best].of[1]
    n, why_n = particles or DEFAULT_PARTICLES, "given" if particles else "the default"
    if particles is None and costs is not None and (groups * 2 * n, 1) in costs.target:
        ratio = costs.round(best, groups * 2 * n, 4) / costs.round(best, groups * n, 4)
        if ratio < 1.25:
            n, why_n = 2 * n, f"twice {n} costs {ratio:.2f} times as much"
    s = leniency if leniency is not None else 2.0 if alpha != 1 or not hard else 1.5
    k = block if block is not None else 4 if (hard and alpha == 1) or rate >= 0.9 else 2
    why = (
        f"{reason} weights: N={n} ({why_n}), leniency {s:g}, "
        f"K={k} because {names[best]} is accepted at {rate:.2f} ({accepted[best].positions} positions, conditions aside)"
    )
    options = {"mode": "smc", "draft_index": best, "particles": n, "block": k, "leniency": s}
    return Choice(options, why, {"acceptance": {name: a.of for name, a in zip(names, accepted, strict=True)}})


def lossless(target: Factor, particles: int | None, leniency: float | None, on_budget: str, weights: bool = False) -> bool:
    """Whether the target is one language model as it is, and nothing that was given asks for weights (`weights`: something
    else does)."""
    plain = is_plain(Target.product(*target.factors()), on_budget)
    return plain and particles in (None, 1) and leniency in (None, 1) and not weights


def candidates_of(draft: Any, exact: bool, leniency: float | None) -> list[tuple[int, Any]]:
    """The drafts named, with their places; above leniency 1 without those that leave out tokens, if others are left."""
    listed = draft if isinstance(draft, list | tuple) else [] if draft is None else [draft]
    named = list(enumerate(listed))
    if exact or leniency == 1:
        return named
    return [(i, one) for i, one in named if not _leaves_out(one)] or named


def _reason(target: Target) -> str:
    """What needs weights, with the verb."""
    if len(target.lms) > 1:
        return "the target has several models or prompts, which need"
    if target.lms[0][1] != 1:
        return "the target has a power, which needs"
    if target.potentials:
        return "the target has conditions, which need"
    return "what was given (particles, leniency, on_budget, anneal, collapse, resampling or threshold) asks for"


def _leaves_out(draft: Any) -> bool:
    """Whether a draft gives tokens that the target has no probability, which weights cannot make up for."""
    if isinstance(draft, LM):
        return draft.truncation != WHOLE
    return draft == "ngram" or (isinstance(draft, NGram) and draft.model is None)


def resolve(
    target: Factor,
    draft: Any,
    prompts: Sequence[Any],
    *,
    chat: bool | None,
    particles: int | None,
    chains: int | None,
    block: Any,
    leniency: float | None,
    draft_temperature: float | None,
    draft_costs: Sequence[float] | None,
    exact: bool,
    max_tokens: int,
    runs: int,
    groups: int | None,
    seed: int | None,
) -> Choice:
    """Chooses for a call of `sample`; what the caller gave is kept. `exact` says that it can be lossless. Takes a pilot's time,
    and the table's unless `draft_costs` are given."""
    whole = Target.product(*target.factors())
    base = whole.lms[0][0]
    named = candidates_of(draft, exact, leniency)
    if not named:
        return Choice({"mode": "exact" if exact else "smc"}, "no draft is named, so the model proposes token by token")
    if draft_costs is not None:
        draft_costs = [draft_costs[i] for i, _ in named]
    drafts = [LM(one) if isinstance(one, str) else one for one in look_ups([one for _, one in named], base)]
    models = [one.load() for one in drafts]
    positive = sum(power for _, power in whole.lms if power > 0)
    law = base.law
    texts = _pilot(
        base, drafts[0], list(prompts)[:PROMPTS], chat, min(max(PILOT[0], min(PILOT[1], max_tokens // 8)), max_tokens), seed
    )
    accepted = []
    for one, model in zip(drafts, models, strict=True):
        temperature = draft_temperature or (one.temperature if one.temperature != 1 else law[0] / positive)
        truncation = base.law[1] if exact and one.truncation == WHOLE else one.truncation
        accepted.append(acceptance(base.load(), model, texts, law, (temperature, truncation), positive))
    names = [one.name for one in drafts]
    width = min(len(prompts) * runs, groups or MOST_GROUPS, MOST_GROUPS)
    costs = None if draft_costs is not None else costs_of(base.load(), models, width, exact, chains, particles)
    if exact:
        choice = choose_exact(accepted, names, costs, draft_costs, width, max_tokens, chains, block)
    else:
        hard = any(factor.hard for factor, _ in whole.potentials)
        choice = choose_weighted(accepted, names, positive, hard, costs, width, particles, block, leniency, _reason(whole))
    options = dict(choice.options)
    if "draft_index" in options:
        options["draft"] = drafts[options.pop("draft_index")]
    details = {**choice.details, "costs": None if costs is None else costs.to_dict()}
    return Choice(options, choice.why, details)


def _pilot(
    base: LM, draft: LM, prompts: list[Any], chat: bool | None, tokens: int, seed: int | None
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """(prompt, tokens) of a short text for each prompt, drawn from the model itself with keys that no run uses."""
    from smcgen.sampling import sample

    keys = [(1 << 32) - 1 - i for i in range(len(prompts))]
    options: dict[str, Any] = {"chat": chat, "max_tokens": tokens, "seed": seed or 0, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # whether a draft pays is about to be measured
        posts = sample(base, list(prompts), draft=draft, mode="exact", keys=keys, **options)
    vocabulary = base.load().vocabulary
    read = [vocabulary.encode(prompt if base.prompt is None else base.prompt, chat).ids for prompt in prompts]
    return [(ids, post.sample.token_ids) for ids, post in zip(read, posts, strict=True)]


def costs_of(
    target: LanguageModel, drafts: Sequence[LanguageModel], groups: int, exact: bool, chains: int | None, particles: int | None
) -> Costs:
    """The forward times that a choice needs."""
    if exact:
        many = [m for m in CHAINS if m == 1 or groups * m <= MOST_ROWS] if chains is None else [1, chains]
    else:
        many = [DEFAULT_PARTICLES, 2 * DEFAULT_PARTICLES] if particles is None else [particles]
    rows = sorted({groups * m for m in many} | ({groups} if exact else set()))
    return measure(target, drafts, rows, WIDTHS)
