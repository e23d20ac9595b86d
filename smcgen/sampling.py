"""`sample`, `asample` and `generate`: what the user calls."""

from __future__ import annotations

import asyncio
import functools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from smcgen.drafts.arms import check_policy
from smcgen.drafts.costs import time_forward
from smcgen.drafts.ngram import NGram
from smcgen.errors import UsageError
from smcgen.options import called
from smcgen.plan import DEFAULT_RESAMPLING, DEFAULT_THRESHOLD, Plan, make_plan
from smcgen.posterior import Posterior
from smcgen.posteriors import Posteriors
from smcgen.record import Record
from smcgen.run import run
from smcgen.smc.schedule import Ramp
from smcgen.target import LM, Factor, check_prompt
from smcgen.values import is_whole


@overload
def sample(target: Factor, prompt: str | None = None, **options: Any) -> Posterior: ...
@overload
def sample(target: Factor, prompt: Sequence[str], **options: Any) -> Posteriors: ...
@overload
def sample(target: Factor, prompt: Sequence[Any], **options: Any) -> Posterior | Posteriors: ...
@called
def sample(  # pyright: ignore[reportInconsistentOverload] the overloads leave the options to this signature
    target: Factor,
    prompt: Any = None,
    *,
    draft: LM | NGram | str | Sequence[LM | NGram | str] | None = None,
    particles: int | None = None,
    block: int | Sequence[int] | None = None,
    max_tokens: int = 128,
    seed: int | None = None,
    runs: int = 1,
    stop: str | Sequence[str] | None = (),
    on_budget: str = "truncate",
    resampling: str = DEFAULT_RESAMPLING,
    threshold: float = DEFAULT_THRESHOLD,
    anneal: Ramp | None = None,
    draft_temperature: float | None = None,
    leniency: float | None = None,
    chains: int | None = None,
    mode: str = "smc",
    policy: str | None = None,
    draft_costs: Sequence[float] | None = None,
    verification: str | None = None,
    reward: str | None = None,
    policy_state: dict[str, Any] | str | Path | None = None,
    baseline: bool = False,
    candidates: int | None = None,
    collapse: bool | None = False,
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
        draft: a model with the same tokenizer that proposes blocks; without it the target proposes token by token. It reads
            the first model's prompt, or its own (`draft.given`). "ngram" (or `NGram(...)`) looks up what followed the last
            tokens before, without a model; for mode="exact". Of a list of drafts (with mode="exact" or a finite
            leniency) a policy chooses one for each round; `info["draft_rounds"]` counts how often, in their order.
        particles: N of each group (default 8).
        block: K, tokens drafted per round (default 4; only with a draft). Of a list of lengths the policy chooses too.
        max_tokens: budget of generated tokens, the end token included.
        seed: of all randomness, in [0, 2**64); None takes a fresh one, kept in `settings`.
        runs: independent groups per prompt, combined by their evidence; gives `log_evidence_se`.
        stop: strings that end a sample; the text stops before them.
        on_budget: "truncate" (a sample cut by the budget is a sample) or "condition" (the target conditioned on having ended).
        resampling: multinomial, residual, stratified, systematic, ssp or killing.
        threshold: resample a group when its ESS is below threshold * particles; 0 never, 1 whenever weights differ.
        anneal: a `Ramp` of the exponents.
        draft_temperature: default: the draft's own, `draft.at(temperature=)`, if it has one, else the first model's
            temperature / sum of positive exponents.
        leniency: s >= 1: a drafted token is kept with probability min(1, s * target / draft). 1 is lossless speculative
            decoding; infinity keeps all of them and leaves the rest to the weights: fastest, and far off where the draft
            misses what the target wants. Default 2.
        chains: M, candidate continuations that each particle drafts (default 1; only with a finite leniency).
        mode: "smc"; "exact": one particle at leniency 1, the law of the language model itself; or "auto": a short pilot and a
            table of forward times, both before the run, choose among these, and the draft, particles, chains, block and
            leniency where they are not given. `info["auto"]` says what was chosen and why. The times are measured, so the
            choice can differ from call to call: to repeat a run, give the options that it names.
        policy: chooses among several drafts and block lengths: restarting (the default), ucb-tuned, ucb1, thompson,
            sliding-ucb, fixed (the first), or hedge, for which all drafts read the verified tokens, so that each round teaches
            about all of them.
        draft_costs: what a token of each draft costs in forwards of the target, measured beforehand; default: nothing, so that
            the most accepted draft (and the longest block) wins.
        reward: what a policy maximises, "speed" (the default: tokens per unit of cost, times the share of particles that the
            weights of a block leave effective) or "acceptance".
        policy_state: what a policy has learned in another run, its `info["policy_state"]`, or the JSON file that holds it. The
            policy of each prompt starts from it; what is kept is the state of one more, which sees the rounds of all prompts.
        verification: in mode="exact" with one chain, "block" (drafted tokens are judged together, so that more are kept; the
            default there) or "token" (one after the other).
        baseline: run the same without a draft afterwards; `info["baseline"]` has its tokens per second and the speed-up. Warns
            if the draft does not pay.
        candidates: without a draft: judge up to this many candidates for each token with all potentials, so that no particle
            takes a token that kills it (adaptive weighted rejection). For functions that can only judge, and kill often.
        collapse: for plain text in mode="smc": once a particle has finished, one is drawn by weight, finished or not, and goes
            on alone in exact mode, so that nobody waits for the slowest; the result then holds one text of each run. None:
            where that is possible.
        chat: apply the chat template to a text prompt; None: if there is one and the text has no special tokens of its own.
        groups: groups that run at a time (default: as many as make 256 particles); fewer where memory is short.
        keys: an integer in [0, 2**32) per prompt that keys its randomness (equal keys: equal numbers); default: its index.
        deterministic: bits of a prompt's result do not depend on which other prompts run beside it (slower).
        progress: a progress bar on stderr; None: on a terminal, after two seconds.

    Returns:
        `Posterior` for one prompt, `Posteriors` for a list.

    Raises:
        UsageError, ModelError, PotentialError, Impossible; NoSurvivors for one prompt whose particles all died (in a list that
        item is returned as failed, with log evidence -inf).
    """
    many = _is_many(prompt)
    prompts = list(prompt) if many else [prompt]
    for one in prompts:
        if one is not None:
            check_prompt(one)
    choice, arm_costs = None, None

    def planned(draft: Any, mode: str, **policy: Any) -> Plan:
        """With the options as they are by then, some of which mode="auto" chooses."""
        return make_plan(
            target,
            draft,
            particles=particles,
            block=block,
            max_tokens=max_tokens,
            seed=seed,
            runs=runs,
            stop=stop,
            on_budget=on_budget,
            resampling=resampling,
            threshold=threshold,
            anneal=anneal,
            draft_temperature=draft_temperature,
            deterministic=deterministic,
            leniency=leniency,
            chains=1 if chains is None else chains,
            mode=mode,
            candidates=candidates,
            verification=verification,
            collapse=collapse,
            **policy,
        )

    if mode == "auto":
        from smcgen.drafts.auto import candidates_of, lossless, resolve

        # What is wrong with the call is said before anything is measured, whatever the choice would be.
        if policy_state is not None:
            raise UsageError("policy_state has no place in mode='auto', which chooses the arms anew: leave it out")
        _check_baseline(baseline, draft)
        weights = bool(anneal is not None or collapse or resampling != DEFAULT_RESAMPLING or threshold != DEFAULT_THRESHOLD)
        exact = isinstance(target, Factor) and lossless(target, particles, leniency, on_budget, weights)
        check_policy(policy, draft_costs, draft, reward)
        for one in [one for _, one in candidates_of(draft, exact, leniency)] or [None]:
            planned(one, "exact" if exact else "smc")
        _check_groups(groups)
        if verification == "block":
            chains = 1
        choice = resolve(
            target, draft, prompts, chat=chat, particles=particles, chains=chains, block=block, leniency=leniency,
            draft_temperature=draft_temperature, draft_costs=draft_costs, exact=exact, max_tokens=max_tokens,
            runs=runs, groups=groups, seed=seed,
        )  # fmt: skip
        draft, mode = choice.options.get("draft"), choice.options["mode"]
        particles, chains = choice.options.get("particles", particles), choice.options.get("chains", chains)
        block, leniency = choice.options.get("block", block), choice.options.get("leniency", leniency)
        draft_costs, arm_costs = None, choice.options.get("arm_costs")
        if draft is None:
            block = chains = draft_temperature = verification = None
        if draft is None or not isinstance(block, list | tuple) or len(block) < 2:
            policy = reward = None  # nothing is left to choose
    learning = {"policy": policy, "draft_costs": draft_costs, "reward": reward, "policy_state": policy_state}
    plan = planned(draft, mode, arm_costs=arm_costs, **learning)
    if choice is None:
        _check_baseline(baseline, draft)
    if keys is None:
        keys = range(len(prompts))
    whole = isinstance(keys, Sequence) and len(keys) == len(prompts) and all(is_whole(k) and 0 <= k < 1 << 32 for k in keys)
    if not whole:
        raise UsageError(f"keys: give one integer in [0, 2**32) per prompt ({len(prompts)} prompts)")
    _check_groups(groups)
    if progress not in (None, True, False) or chat not in (None, True, False):
        raise UsageError(f"progress={progress!r}, chat={chat!r}: give True, False or None")
    record = run(plan, prompts, chat, list(keys), groups, progress)
    if choice is not None:
        chosen = {name: repr(value) if isinstance(value, LM) else value for name, value in choice.options.items()}
        record.info["auto"] = {"why": choice.why, "chosen": chosen, **choice.details}
        if draft is None and "speedup" in choice.details:
            warnings.warn(choice.why, stacklevel=3)
    if baseline and plan.draft is None:
        _compare(record.info, record.info)  # mode="auto" has left the draft out: this run is its own baseline
    elif baseline:
        plain = run(plan.without_draft(), prompts, chat, list(keys), groups, progress)
        _compare(record.info, plain.info)
    elif plan.draft is not None and plan.mode == "exact" and choice is None:
        _check_speed(plan, record)
    if many:
        return Posteriors(record)
    posterior = Posterior(record, 0)
    if posterior.failed:
        raise posterior.failure()
    return posterior


def _compare(info: dict[str, Any], plain: dict[str, Any]) -> None:
    """Notes the baseline in `info`, and warns of a draft that does not pay."""
    # Where every particle died at once there is nothing to compare.
    speedup = info["tokens_per_second"] / plain["tokens_per_second"] if plain["tokens_per_second"] else math.nan
    info["baseline"] = {
        "tokens_per_second": plain["tokens_per_second"],
        "step_seconds": plain["step_seconds"],
        "speedup": speedup,
    }
    if speedup < 1:
        warnings.warn(
            f"the draft does not pay: {info['tokens_per_second']:.1f} tokens per second with it, "
            f"{plain['tokens_per_second']:.1f} without; try a smaller block, a cheaper draft, or none",
            stacklevel=4,
        )


LONG = 5.0  # seconds, from which on a run is worth two forwards that tell whether its draft pays
WIDE = 16  # prompts at a time beyond which they would take long themselves


def _check_speed(plan: Plan, record: Record) -> None:
    """Warns of a draft that makes lossless decoding slower, with figures: plain decoding takes a forward for each token."""
    info, width = record.info, record.settings["groups"]
    if info["rounds"] * info["step_seconds"]["p50"] < LONG or width > WIDE:
        return
    plain = width / time_forward(plan.target.lms[0][0].load(), width, 1, repeats=1)
    made = info["step_seconds"]["p50"] * info["rounds"]
    drafted = info["tokens"] / made
    info["plain_tokens_per_second"] = plain
    if plain > 1.25 * drafted:
        warnings.warn(
            f"the draft hardly pays: {drafted:.1f} tokens per second with it, about {plain:.1f} by one forward a token; try a "
            "smaller block, a cheaper draft, or none (baseline=True measures, mode='auto' chooses)",
            stacklevel=4,
        )


async def asample(target: Factor, prompt: Any = None, **options: Any) -> Posterior | Posteriors:
    """`sample` on a thread, for services with an event loop of their own; arguments and result as there."""
    return await asyncio.to_thread(functools.partial(sample, target, prompt, **options))


@overload
def generate(lm: LM, prompt: str, **options: Any) -> str: ...
@overload
def generate(lm: LM, prompt: Sequence[str], **options: Any) -> list[str]: ...
@overload
def generate(lm: LM, prompt: Any = None, **options: Any) -> str | list[str]: ...
def generate(lm: LM, prompt: Any = None, *, mode: str = "exact", **options: Any) -> str | list[str]:
    """Plain text from a language model: one text for one prompt, a list for a list of prompts.

    Args:
        lm: the model; its law is `lm.at(temperature=, top_k=, top_p=, min_p=)`, temperature 0 being greedy decoding.
        prompt, options: as in `sample`; a draft makes it faster and changes nothing else.
        mode: "exact" draws from the law of `lm` itself, and so does "auto", at the speed it finds. "smc" is an approximation,
            with `collapse` where that is possible; how far it can be off is said in a warning (see
            `Posterior.divergence_bound`).
    """
    if not isinstance(lm, LM):
        raise UsageError(f"generate draws from a language model alone, not from {lm!r}: use sample for powers and potentials")
    result = sample(lm, prompt, mode=mode, **{"collapse": None, **options})
    if result.settings["mode"] != "exact":
        first = result[0] if isinstance(result, Posteriors) else result
        warnings.warn(f"{first.divergence_note}; mode='exact' is exact", stacklevel=2)
    return [post.text for post in result] if isinstance(result, Posteriors) else result.text


def _is_many(prompt: Any) -> bool:
    """A list of prompts, as against one prompt that is itself a list (of messages or token ids)."""
    if prompt is None or isinstance(prompt, str):
        return False
    if not isinstance(prompt, Sequence):
        raise UsageError(f"prompt {prompt!r}: give text, a list of messages, a list of token ids, or a list of prompts")
    if not prompt:
        raise UsageError("no prompts: give at least one")
    return isinstance(prompt[0], str | Sequence) or prompt[0] is None


def _check_baseline(baseline: bool, draft: Any) -> None:
    """Raises UsageError if there is no draft to compare with."""
    if baseline and (draft is None or (isinstance(draft, list | tuple) and not draft)):
        raise UsageError("baseline has no effect without a draft: name a draft model, or leave it out")


def _check_groups(groups: Any) -> None:
    """Raises UsageError unless `groups` is a number of groups, or None."""
    if groups is not None and (not is_whole(groups) or groups < 1):
        raise UsageError(f"groups={groups!r}: give an integer of at least 1")
