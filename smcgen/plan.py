"""The arguments of a call, checked, with every default filled in."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smcgen.drafts.arms import DEFAULT_POLICY, check_policy, look_ups, read_state, rivals_of
from smcgen.drafts.ngram import NGram
from smcgen.errors import UsageError
from smcgen.smc.keys import MAX_ROUNDS, MAX_SLOTS, MAX_STEPS
from smcgen.smc.resampling import SCHEMES
from smcgen.smc.schedule import Ramp
from smcgen.target import EXTREME, LM, WHOLE, Factor, Target, Truncation, is_text
from smcgen.values import is_number, is_whole

DEFAULT_BLOCK = 4
DEFAULT_PARTICLES = 8
# Where a draft misses what the target wants, weights alone do not find it again; a few rejections do.
DEFAULT_LENIENCY = 2.0
DEFAULT_RESAMPLING = "systematic"
DEFAULT_THRESHOLD = 0.9
MOST_CHAINS = 8  # of the text that is left after a collapse; more are hardly ever needed
MODES = ("smc", "exact")  # and "auto", which becomes one of them before a plan is made


@dataclass(frozen=True)
class Plan:
    """A call to `sample` with every argument checked and every default filled in; fields without a word here are its arguments.

    Attributes:
        draft, rivals: the first draft, and the others that a policy may choose.
        block, blocks: the most tokens drafted in a round, and all lengths that a policy may choose.
        draft_costs, arm_costs: of a token of each draft, and of a round with each of `arms`, in forwards of the target.
        policy_state: what the policy has learned before, as `Policy.state` gives it.
    """

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
    leniency: float
    chains: int
    mode: str
    candidates: int | None
    rivals: tuple[LM, ...]
    policy: str
    draft_costs: tuple[float, ...]
    verification: str
    blocks: tuple[int, ...]
    reward: str
    policy_state: dict[str, Any] | None
    arm_costs: tuple[float, ...]
    collapse: bool

    @property
    def arms(self) -> list[tuple[int, int]]:
        """(draft, tokens drafted) of all that a policy chooses among; one if there is nothing to choose."""
        return [(draft, block) for draft in range(len(self.rivals) + 1) for block in self.blocks]

    @property
    def rows(self) -> int:
        """Sequences that a group reads at a time."""
        return self.particles * self.chains

    @property
    def draft_law(self) -> tuple[float, Truncation]:
        """Temperature and truncation of the draft. At leniency 1 the residual covers what a truncated draft leaves out, so
        that it follows the target's truncation; above, a draft can be accepted for certain without covering the target
        (q <= s p~ everywhere), so that it has to cover it by itself."""
        assert self.draft is not None
        assert self.draft_temperature is not None
        first = self.target.lms[0][0]
        if self.draft_temperature == 0:
            return 1.0, Truncation(top_k=1)
        own = self.draft.truncation
        if own == WHOLE and self.leniency == 1:
            own = first.truncation
        return self.draft_temperature, own

    @property
    def plain(self) -> bool:
        """Whether the target is a language model as it is, so that its evidence is 1."""
        return is_plain(self.target, self.on_budget)

    def without_draft(self) -> Plan:
        """The same run with the target as its own proposal."""
        leniency = 1.0 if self.mode == "exact" else math.inf
        return replace(
            self, draft=None, rivals=(), blocks=(DEFAULT_BLOCK,), block=DEFAULT_BLOCK, chains=1, leniency=leniency,
            draft_temperature=None, verification="token", draft_costs=(), arm_costs=(), policy_state=None,
        )  # fmt: skip

    def alone(self) -> Plan:
        """How the text that is left after a collapse goes on: in exact mode, with the rows of its group as chains."""
        chains = 1 if self.draft is None else min(self.rows, MOST_CHAINS)
        judged = "token" if self.draft is None or chains > 1 else "block"
        return replace(self, particles=1, chains=chains, leniency=1.0, mode="exact", verification=judged, collapse=False)

    def settings(self) -> dict[str, Any]:
        """What decides the run, JSON-ready."""
        return {
            "target": repr(self.target),
            "exponents": [power for _, power in self.target.lms],
            "potentials": [repr(p) for p, _ in self.target.potentials],
            "draft": None if self.draft is None else self.draft.name,
            "draft_temperature": self.draft_temperature,
            "particles": self.particles,
            "block": self.block if self.draft is not None else None,
            "blocks": list(self.blocks) if self.draft is not None else None,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "runs": self.runs,
            "stop": list(self.stop),
            "on_budget": self.on_budget,
            "resampling": self.resampling,
            "threshold": self.threshold,
            "anneal": [self.anneal.first, self.anneal.rounds, self.anneal.of],
            "deterministic": self.deterministic,
            "plain": self.plain,
            "mode": self.mode,
            "rivals": [draft.name for draft in self.rivals],
            "policy": self.policy if len(self.arms) > 1 else None,
            "reward": self.reward if len(self.arms) > 1 else None,
            "draft_costs": list(self.draft_costs) or None,
            "arm_costs": list(self.arm_costs) or None,
            "leniency": self.leniency if math.isfinite(self.leniency) else None,
            "chains": self.chains,
            "verification": self.verification if self.draft is not None else None,
            "candidates": self.candidates,
            "collapse": self.collapse,
        }


def make_plan(
    target: Factor,
    draft: LM | NGram | str | Sequence[LM | NGram | str] | None,
    *,
    particles: int | None,
    block: int | Sequence[int] | None,
    max_tokens: int,
    seed: int | None,
    runs: int,
    stop: str | Sequence[str] | None,
    on_budget: str,
    resampling: str,
    threshold: float,
    anneal: Ramp | None,
    draft_temperature: float | None,
    deterministic: bool,
    leniency: float | None,
    chains: int,
    mode: str,
    candidates: int | None,
    verification: str | None,
    collapse: bool | None,
    policy: str | None = None,
    draft_costs: Sequence[float] | None = None,
    reward: str | None = None,
    policy_state: dict[str, Any] | str | Path | None = None,
    arm_costs: Sequence[float] | None = None,
) -> Plan:
    """Checks a call's arguments (see `smcgen.sample`); raises UsageError."""
    if not isinstance(target, Factor):
        raise UsageError(f"target {target!r}: give a language model, or a product of language models and potentials")
    target = Target.product(*target.factors())
    if not target.lms:
        what = repr(target) or "empty (its factors cancel)"
        raise UsageError(f"the target, {what}, has no language model: multiply by one, e.g. LM('tiny')")
    positive = sum(power for _, power in target.lms if power > 0)
    if positive == 0:
        raise UsageError(f"target {target!r} has only negative exponents: multiply by a model with a positive one")
    if mode not in MODES:
        raise UsageError(f"mode={mode!r}: give one of {', '.join(MODES)}, auto")
    if resampling not in tuple(SCHEMES):
        raise UsageError(f"resampling={resampling!r}: give one of {', '.join(SCHEMES)}")
    if mode == "exact":
        _check_exact(target, particles, leniency, anneal, on_budget, resampling, threshold)
        particles, leniency = 1, 1.0
    particles = DEFAULT_PARTICLES if particles is None else particles
    blocks: tuple[Any, ...] = (
        tuple(block) if isinstance(block, Sequence) and not isinstance(block, str) and len(block) else (block,)
    )
    for name, value, most in (
        ("particles", particles, MAX_SLOTS // 2),
        ("chains", chains, MAX_SLOTS // 2),
        ("max_tokens", max_tokens, MAX_ROUNDS - 1),
        ("runs", runs, 1 << 32),
        ("candidates", 1 if candidates is None else candidates, MAX_STEPS - 1),
        *(("block", 1 if one is None else one, MAX_STEPS - 1) for one in blocks),
    ):
        if not is_whole(value) or not 1 <= value <= most:
            raise UsageError(f"{name}={value!r}: give an integer of at least 1, at most {most}")
    rivals: tuple[LM, ...] = ()
    draft = look_ups(draft, target.lms[0][0])
    if isinstance(draft, Sequence) and not isinstance(draft, str):
        draft, rivals = rivals_of(draft, leniency, policy, draft_costs, reward)
    else:
        check_policy(policy, draft_costs, draft, reward)
        if len(blocks) == 1 and draft_costs is not None:
            raise UsageError("draft_costs has no effect without several drafts or block lengths: leave it out")
    several = bool(rivals) or len(blocks) > 1
    if len(set(blocks)) < len(blocks):
        raise UsageError(f"block={block!r}: give each length once")
    if len(blocks) > 1 and leniency == math.inf:
        raise UsageError("several block lengths need mode='exact' or a finite leniency: what is accepted tells them apart")
    for name, given in (("policy", policy), ("reward", reward), ("policy_state", policy_state)):
        if given is not None and not several:
            raise UsageError(f"{name} has no effect without several drafts or block lengths: leave it out")
    leniency = _check_leniency(leniency, chains, draft is None, mode)
    if particles * chains > MAX_SLOTS // 2:
        raise UsageError(f"particles={particles} times chains={chains}: give at most {MAX_SLOTS // 2} together")
    verification = _check_verification(verification, mode, chains, draft is None)
    greedy = [lm for lm, _ in target.lms if lm.temperature == 0]
    if greedy and mode != "exact":
        raise UsageError(f"{greedy[0]!r} is greedy decoding: give a positive number such as 0.01, or use mode='exact'")
    for lm, power in target.lms:
        if power < 0 and lm.truncation != WHOLE:
            raise UsageError(f"{lm!r} has probabilities 0 and a negative exponent: leave its truncation out")
    judges = any(getattr(factor, "kills", False) for factor, _ in target.potentials)
    if candidates is not None and (draft is not None or not judges):
        reason = "without a potential that can kill" if draft is None else "with a draft, whose blocks are weighed instead"
        raise UsageError(f"candidates has no effect {reason}: leave it out")
    if block is not None and draft is None:
        raise UsageError("block has no effect without a draft: name a draft model, or leave block out")
    if draft_temperature is not None:
        if draft is None:
            raise UsageError("draft_temperature has no effect without a draft: name a draft model, or leave it out")
        if not is_number(draft_temperature) or not 1 / EXTREME <= draft_temperature < float("inf"):
            raise UsageError(f"draft_temperature={draft_temperature}: give a positive number, at least {1 / EXTREME:g}")
    if seed is None:
        seed = secrets.randbits(32)
    if not is_whole(seed) or not 0 <= seed < 1 << 64:
        raise UsageError(f"seed={seed!r}: give an integer in [0, 2**64)")
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else () if stop is None else (stop,)
    if not all(isinstance(s, str) and s and is_text(s) for s in stops):
        raise UsageError(f"stop={stop!r}: give a non-empty string, a list of them, or None")
    if anneal is not None and not isinstance(anneal, Ramp):
        raise UsageError(f"anneal={anneal!r}: give a Ramp, e.g. smcgen.Ramp(first=0.5, rounds=8)")
    if not isinstance(deterministic, bool):
        raise UsageError(f"deterministic={deterministic!r}: give True or False")
    if on_budget not in ("truncate", "condition"):
        raise UsageError(f"on_budget={on_budget!r}: give 'truncate' or 'condition'")
    if not is_number(threshold) or not 0 <= threshold <= 1:
        raise UsageError(f"threshold={threshold!r}: give a number from 0 (never resample) to 1 (whenever weights differ)")
    if anneal is not None and anneal.of == "potentials" and all(factor.hard for factor, _ in target.potentials):
        raise UsageError("anneal has no effect: of='potentials' needs a soft potential in the target, such as a reward")
    first = target.lms[0][0]
    if draft is not None:
        draft = LM(draft) if isinstance(draft, str) else draft
        if not isinstance(draft, LM):
            raise UsageError(f"draft {draft!r}: give an LM or the name of a model")
        for one in (draft, *rivals):
            if isinstance(one.handle.spec, NGram) and one.handle.spec.model is None and leniency > 1:
                raise UsageError(
                    "draft 'ngram' leaves out tokens that the target has, and would bias the weights: give leniency=1 "
                    "(mode='exact'), or mix it with a model, NGram(model=...)"
                )
        if draft.truncation != WHOLE and leniency > 1:
            raise UsageError(
                f"draft {draft!r} leaves out tokens that the target has, and would bias the weights: leave the draft's "
                "truncation out, or give leniency=1 (mode='exact')"
            )
        if draft_temperature is None:
            # A temperature of the draft's own stands as it is. A mixture with look-up is not sharpened: its lesser part, which
            # covers what look-up does not know, would all but vanish.
            mixed = any(isinstance(one.handle.spec, NGram) for one in [draft, *rivals])
            default = first.temperature / (1 if mixed else positive)
            draft_temperature = draft.temperature if draft.temperature != 1 else default
    blocks = tuple(DEFAULT_BLOCK if one is None else one for one in blocks)
    costs = tuple(draft_costs or [0.0] * (len(rivals) + 1)) if several else ()
    arm_costs = tuple(arm_costs or (1 + k * c for c in costs for k in blocks))
    return Plan(
        target=target,
        draft=draft,
        particles=particles,
        block=max(blocks),
        max_tokens=max_tokens,
        seed=seed,
        runs=runs,
        stop=stops,
        on_budget=on_budget,
        resampling=resampling,
        threshold=threshold,
        anneal=anneal or Ramp(),
        draft_temperature=draft_temperature,
        deterministic=deterministic,
        leniency=leniency,
        chains=chains,
        mode=mode,
        candidates=candidates,
        rivals=rivals,
        policy=policy or DEFAULT_POLICY,
        draft_costs=costs,
        verification=verification,
        blocks=blocks,
        reward=reward or "speed",
        policy_state=read_state(policy_state),
        arm_costs=arm_costs,
        collapse=_check_collapse(collapse, target, on_budget, particles, mode, anneal),
    )


def _check_exact(
    target: Target,
    particles: int | None,
    leniency: float | None,
    anneal: Ramp | None,
    on_budget: str,
    resampling: str,
    threshold: float,
) -> None:
    """Raises UsageError unless one lossless sequence can have this law."""
    if not is_plain(target, "truncate"):
        raise UsageError(
            f"mode='exact' draws from one language model alone, not from {target!r}: use mode='smc' for powers, products and "
            "potentials"
        )
    if on_budget == "condition":
        raise UsageError("on_budget='condition' needs weights, which one lossless sequence has not: use mode='smc'")
    for name, given in (
        ("particles", particles not in (None, 1)),
        ("leniency", leniency not in (None, 1)),
        ("anneal", anneal),
        ("resampling", resampling != DEFAULT_RESAMPLING),
        ("threshold", threshold != DEFAULT_THRESHOLD),
    ):
        if given:
            raise UsageError(f"{name} has no place in mode='exact' (one particle, leniency 1): leave it out, or use mode='smc'")


def is_plain(target: Target, on_budget: str) -> bool:
    """Whether a target is a language model as it is, without a power, a potential or a condition on its end."""
    alone = not target.potentials and len(target.lms) == 1 and target.lms[0][1] == 1
    return alone and on_budget == "truncate"


def _check_collapse(
    collapse: bool | None, target: Target, on_budget: str, particles: int, mode: str, anneal: Ramp | None
) -> bool:
    """Whether a run ends at its first finish; None: where that is legal and does something."""
    if collapse not in (None, True, False):
        raise UsageError(f"collapse={collapse!r}: give True, False, or None (where it is possible)")
    alone = mode == "exact" or particles == 1
    plain = is_plain(target, on_budget)
    annealed = anneal is not None and not anneal.steady
    if not collapse:
        return collapse is None and not alone and plain and not annealed
    if alone:
        raise UsageError("collapse has no effect on one particle, which mode='exact' always draws: leave it out")
    if not plain:
        what = f"{target!r}" if on_budget == "truncate" else f"on_budget={on_budget!r}"
        raise UsageError(f"collapse is for plain text, and what goes on alone would have no weight for {what}: leave it out")
    if annealed:
        raise UsageError(
            "collapse has no place beside anneal, which makes particles stand for other laws: leave one of them out"
        )
    return True


def _check_leniency(leniency: float | None, chains: int, without_draft: bool, mode: str) -> float:
    if leniency is None:
        leniency = math.inf if without_draft else DEFAULT_LENIENCY
    if not is_number(leniency) or not leniency >= 1:
        raise UsageError(f"leniency={leniency!r}: give a number from 1 (lossless) to infinity (every drafted token is kept)")
    if without_draft:
        name = "chains" if chains != 1 else "leniency" if leniency < math.inf and mode != "exact" else None
        if name:
            raise UsageError(f"{name} has no effect without a draft: name a draft model, or leave it out")
    elif chains > 1 and leniency == math.inf:
        raise UsageError("chains has no effect at infinite leniency, where the first is always taken: give a finite leniency")
    return float(leniency)


def _check_verification(verification: str | None, mode: str, chains: int, without_draft: bool) -> str:
    """How drafted tokens are judged; by default together where that can be."""
    together = mode == "exact" and chains == 1
    if verification is None:
        return "block" if together else "token"
    if verification not in ("block", "token"):
        raise UsageError(f"verification={verification!r}: give 'block' or 'token'")
    if without_draft:
        raise UsageError("verification has no effect without a draft: name a draft model, or leave it out")
    if verification == "block" and not together:
        raise UsageError("verification='block' judges one chain in mode='exact': leave it out, or set both")
    return verification
