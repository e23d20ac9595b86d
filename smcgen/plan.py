"""The arguments of a call, checked, with every default filled in."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smcgen.errors import UsageError
from smcgen.smc.keys import MAX_SLOTS, MAX_STEPS
from smcgen.smc.resampling import SCHEMES
from smcgen.smc.schedule import Ramp
from smcgen.target import LM, Factor, Target

DEFAULT_BLOCK = 4


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
            "anneal": [self.anneal.first, self.anneal.rounds, self.anneal.of],
            "deterministic": self.deterministic,
        }


def make_plan(
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
    """Checks a call's arguments (see `smcgen.sample`); raises UsageError."""
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
    if anneal is not None and anneal.of == "potentials" and all(factor.hard for factor, _ in target.potentials):
        raise UsageError("anneal has no effect: of='potentials' needs a soft potential in the target, such as a reward")
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
