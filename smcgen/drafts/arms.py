"""What a call names to draft with: one or several drafts and block lengths, what they cost, and the policy that chooses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smcgen.drafts.hedge import POLICIES
from smcgen.drafts.ngram import NGram
from smcgen.errors import UsageError
from smcgen.target import LM, Handle
from smcgen.values import is_number

DEFAULT_POLICY = "restarting"


def look_ups(draft: Any, base: LM) -> Any:
    """`draft` with "ngram" and every `NGram` in it made a language model beside `base`."""
    if isinstance(draft, Sequence) and not isinstance(draft, str):
        return [look_ups(one, base) for one in draft]
    if draft == "ngram":
        draft = NGram()
    return LM(Handle(draft, source=base.handle)) if isinstance(draft, NGram) else draft


def rivals_of(
    drafts: Sequence[Any], leniency: float | None, policy: str | None, costs: Sequence[float] | None, reward: str | None
) -> tuple[LM, tuple[LM, ...]]:
    """The first of several drafts, and the others."""
    if not drafts or not all(isinstance(draft, LM | str) for draft in drafts):
        raise UsageError(f"draft={drafts!r}: give LMs or names of models, at least one")
    first, *others = [LM(draft) if isinstance(draft, str) else draft for draft in drafts]
    if others and leniency == math.inf:
        raise UsageError("several drafts need mode='exact' or a finite leniency: what is accepted tells them apart")
    if any((d.temperature, d.truncation, d.prompt) != (first.temperature, first.truncation, first.prompt) for d in others):
        raise UsageError("several drafts must share their temperature, truncation and prompt: use draft_temperature")
    check_policy(policy, costs, drafts, reward)
    return first, tuple(others)


def check_policy(policy: str | None, costs: Sequence[float] | None, drafts: Any, reward: str | None = None) -> None:
    """Raises UsageError unless there is such a policy and such a reward, and costs of these drafts."""
    if reward not in (None, "speed", "acceptance"):
        raise UsageError(f"reward={reward!r}: give 'speed' or 'acceptance'")
    if policy is not None and policy not in POLICIES:
        raise UsageError(f"policy={policy!r}: give one of {', '.join(POLICIES)}")
    check_costs(costs, drafts)


def check_costs(costs: Any, drafts: Any) -> None:
    """Raises UsageError unless `costs` is None or has a number for each of `drafts` (one, or a list)."""
    count = len(drafts) if isinstance(drafts, Sequence) and not isinstance(drafts, str) else 1
    numbers: Sequence[Any] = [] if isinstance(costs, str) or not isinstance(costs, Sequence) else costs
    if costs is not None and (len(numbers) != count or not all(is_number(c) and 0 <= c < math.inf for c in numbers)):
        raise UsageError(f"draft_costs={costs!r}: give a number for each draft, the cost of a token in forwards of the target")


def read_state(state: Any) -> dict[str, Any] | None:
    """What a policy has learned: `info["policy_state"]` of another run, or the path of a JSON file that holds it."""
    if isinstance(state, str | Path):
        try:
            state = json.loads(Path(state).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"policy_state {str(state)!r}: cannot be read ({error})") from None
    if state is not None and not (isinstance(state, dict) and isinstance(state.get("arrays"), dict)):
        raise UsageError("policy_state: give info['policy_state'] of another run, or the path of a JSON file that holds it")
    return state
