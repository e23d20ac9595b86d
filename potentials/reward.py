"""Rewards: phi(text) = exp(beta * r(text)), r being a reward model or a function of the text.

On the way the prefixes may be judged too. Those values steer the particles early and telescope: each replaces the one
before, and at the end the reward of the whole text stands alone, however wrong they were.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from smcgen.errors import PotentialError, UsageError
from smcgen.options import called
from smcgen.potentials.base import Potential, Prompt
from smcgen.potentials.calls import REMEMBERED, Caller, shortened
from smcgen.potentials.history import ROOT, History, shown
from smcgen.potentials.reward_model import RewardModel
from smcgen.smc.schedule import Ramp
from smcgen.values import is_number

Judge = Callable[[Sequence[Prompt], Sequence[str]], Sequence[float]]


@called
def reward(
    model: str | RewardModel | Callable[[list[str]], Sequence[float]],
    beta: float = 1.0,
    *,
    at: str | re.Pattern[str] = "end",
    early: float | Ramp = 1.0,
    timeout: float | None = None,
    name: str | None = None,
) -> RewardPotential:
    """A reward as a soft factor, exp(beta * r): the larger beta, the more the reward counts against the model's own law.

    Args:
        model: the name of a reward model, a `RewardModel` with all its choices, or a function: list of texts -> one finite
            number each (may be `async def`).
        beta: any finite number but 0; a negative one seeks what is judged badly.
        at: when prefixes are judged. "end": never, so that all that the reward says comes at the last resampling; "block":
            after every round; "line": at the last line break so far; a compiled pattern: at the end of its last match so far.
        early: scores of prefixes are often too sure of themselves, and particles die of it. A number in (0, 1] weakens them;
            a `Ramp` weakens them by how many tokens the text has, e.g. `Ramp(first=0.1, rounds=200)`: a tenth at the
            beginning, all from 200 tokens on. The reward of the whole text always counts in full.
        timeout: seconds that a call of the function may take before the run stops.
        name: how messages call it.

    Each distinct text is judged once per run, in batches over all particles of all prompts. To begin with a small beta and
    let it grow, anneal: `sample(..., anneal=Ramp(first=0.1, rounds=8, of="potentials"))`.
    """
    if not is_number(beta) or not math.isfinite(beta) or beta == 0:
        raise UsageError(f"reward: beta={beta!r}: give a finite number other than 0")
    if isinstance(model, str):
        model = RewardModel(model)
    if not callable(model):
        raise UsageError(f"reward: {model!r} is no reward: give a model's name, a RewardModel or a function of a list of texts")
    if not isinstance(at, re.Pattern) and at not in ("end", "block", "line"):
        compiled = f", re.compile({at!r})" if isinstance(at, str) else ""
        raise UsageError(f"reward: at={at!r}: give 'end', 'block', 'line' or a pattern{compiled}")
    if not isinstance(early, Ramp) and not (is_number(early) and 0 < early <= 1):
        raise UsageError(f"reward: early={early!r}: give a number in (0, 1] or a Ramp")
    if at == "end" and early != 1.0:
        raise UsageError("reward: early has no effect at='end': no prefix is judged; give at='block', 'line' or a pattern")
    timed = is_number(timeout) and 0 < timeout < math.inf
    if timeout is not None and (isinstance(model, RewardModel) or not timed):
        raise UsageError(f"reward: timeout={timeout!r}: give a positive number of seconds, and a function to be timed")
    name = name or (model.name if isinstance(model, RewardModel) else str(getattr(model, "__name__", type(model).__name__)))
    return RewardPotential(model, float(beta), at, early, timeout, name)


@dataclass
class Judged:
    """The state.

    Attributes:
        nodes: int64 [rows], of `history`.
        value: float64 [rows], log phi of the prefix that the row was charged with; NaN: to be found again.
        prompts: of each group.
    """

    history: History
    nodes: np.ndarray
    value: np.ndarray
    prompts: list[Prompt]
    particles: int


class RewardPotential(Potential):
    """What `reward` returns."""

    kills = False
    judge: Judge
    known: dict[tuple, float]

    def __init__(
        self,
        model: RewardModel | Callable[[list[str]], Sequence[float]],
        beta: float,
        at: str | re.Pattern[str],
        early: float | Ramp,
        timeout: float | None,
        name: str,
    ):
        self.model, self.beta, self.at, self.early, self.timeout, self.name = model, beta, at, early, timeout, name
        self.ends = re.compile(r"\n") if at == "line" else at if isinstance(at, re.Pattern) else None

    def __repr__(self) -> str:
        parts = [self.name] + [f"beta={self.beta:g}"] * (self.beta != 1)
        if self.at != "end":
            parts += [f"at={self.at!r}"] + [f"early={self.early!r}"] * (self.early != 1.0)
        return f"reward({', '.join(parts)})"

    def bind(self, vocabulary, stops: Sequence[str], device: torch.device) -> RewardPotential:
        bound = super().bind(vocabulary, stops, device)
        assert isinstance(bound, RewardPotential)
        bound.known = {}
        if isinstance(self.model, RewardModel):
            self.model.load(device)
            bound.judge = self.model
        else:
            caller = Caller(self.model, self.name, batch=True, timeout=self.timeout)
            bound.judge = lambda prompts, texts: caller(texts).tolist()
        return bound

    def start(self, prompts: Sequence[Prompt], particles: int) -> Judged:
        rows = len(prompts) * particles
        return Judged(History(self.vocabulary.tokens), np.zeros(rows, np.int64), np.zeros(rows), list(prompts), particles)

    def restart(self, state: Judged, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        for group, prompt in zip(groups, prompts, strict=True):
            state.prompts[group] = prompt
        rows = (np.asarray(groups)[:, None] * state.particles + np.arange(state.particles)).reshape(-1)
        state.nodes[rows], state.value[rows] = ROOT, 0.0

    def extend(self, state: Judged, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ids, lengths = tokens.numpy(), counts.numpy()
        moved = np.flatnonzero(lengths > 0)
        if self.at == "end" or not len(moved):
            return torch.zeros(len(lengths), dtype=torch.float64)
        before = self._charged(state, moved)
        for column in range(int(lengths.max())):
            rows = np.flatnonzero(lengths > column)
            state.nodes[rows], _ = state.history.children(state.nodes[rows], ids[rows, column])
        state.value[moved] = self._prefixes(state, moved)
        change = np.zeros(len(lengths))
        change[moved] = state.value[moved] - before
        self._forget(state)
        return torch.from_numpy(change)

    def rollback(self, state: Judged, counts: torch.Tensor) -> None:
        back = counts.numpy()
        if self.at != "end":
            state.nodes = state.history.ancestors(state.nodes, back)
            state.value[back > 0] = np.nan

    def fork(self, state: Judged, ancestors: torch.Tensor) -> None:
        chosen = ancestors.numpy()
        state.nodes, state.value = state.nodes[chosen], state.value[chosen]
        self._forget(state)

    def finish(self, state: Judged, rows: torch.Tensor, texts: Sequence[str], reasons: Sequence[int]) -> torch.Tensor:
        places = rows.numpy()
        whole = self.beta * self._scores([state.prompts[row // state.particles] for row in places], texts)
        return torch.from_numpy(whole - self._charged(state, places))

    def _charged(self, state: Judged, rows: np.ndarray) -> np.ndarray:
        """The prefix values of these rows, float64 [n]."""
        unknown = rows[np.isnan(state.value[rows])]
        if len(unknown):
            state.value[unknown] = self._prefixes(state, unknown)
        return state.value[rows]

    def _prefixes(self, state: Judged, rows: np.ndarray) -> np.ndarray:
        """log phi of the prefixes that these rows hold, float64 [n]; 0 where there is nothing to judge yet."""
        nodes, history = state.nodes[rows], state.history
        values = np.zeros(len(rows))
        distinct, place = np.unique(nodes, return_inverse=True)
        parts = [self._part(history.text(node)) if node != ROOT else None for node in distinct.tolist()]
        some = np.flatnonzero([parts[i] is not None for i in place])
        prompts = [state.prompts[rows[i] // state.particles] for i in some]
        values[some] = self._scores(prompts, [parts[place[i]] or "" for i in some])
        depth = torch.from_numpy(history.depth[nodes])
        early = self.early.line(depth).numpy() if isinstance(self.early, Ramp) else self.early
        return self.beta * early * values

    def _part(self, data: bytes) -> str | None:
        """What is judged of an unfinished text, None if no step of it is complete."""
        text = shown(data)
        if self.ends is None:
            return text
        end = max((match.end() for match in self.ends.finditer(text)), default=None)
        return None if end is None else text[:end]

    def _scores(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> np.ndarray:
        """r of texts, float64 [n]."""
        keys = [(prompt.ids, prompt.text, text) for prompt, text in zip(prompts, texts, strict=True)]
        fresh = {key: i for i, key in enumerate(keys) if key not in self.known}
        if fresh and len(self.known) + len(fresh) > REMEMBERED:
            self.known.clear()
            fresh = {key: i for i, key in enumerate(keys)}
        if fresh:
            places = list(fresh.values())
            scores = self.judge([prompts[i] for i in places], [texts[i] for i in places])
            for key, score in zip(fresh, scores, strict=True):
                if not math.isfinite(score):
                    raise PotentialError(
                        f"reward {self.name} gave {score} to the text {shortened(key[-1])}: a reward is a finite number"
                    )
                self.known[key] = score
        return np.array([self.known[key] for key in keys], np.float64)

    def _forget(self, state: Judged) -> None:
        if (ids := state.history.compact(state.nodes)) is not None:
            state.nodes = ids[state.nodes]
