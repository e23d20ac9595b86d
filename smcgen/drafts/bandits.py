"""Which arm to pull: policies for the choice among drafts while decoding.

An arm is a draft, or a draft with a block length. After each round the policy learns what its arm earned: a reward in [0, 1]
(a share of what was drafted, or tokens per unit of cost divided by the most possible). `Policy.choose` uses past rewards
only, so that evidence stays unbiased and lossless decoding lossless, whichever policy is used.

    UCB1, UCB-tuned      Auer, Cesa-Bianchi & Fischer, "Finite-time analysis of the multiarmed bandit problem" (2002)
    Thompson             Thompson (1933), with a Beta(1, 1) prior; a reward in (0, 1) counts as that share of a success
    sliding window       Garivier & Moulines, "On upper-confidence bound policies for switching bandit problems" (2011)
    restarts             a change detector on each arm's mean, in the manner of Liu, Lee & Shroff (2018)

All state is in arrays [runs, arms]: one policy object follows many independent decisions at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from smcgen.errors import UsageError


class Policy:
    """Base class: always the first arm of `order`, that is, a fixed choice.

    Args:
        arms: how many.
        runs: independent decisions that are followed at a time.
        arm: the arm of the fixed policy.
    """

    name = "fixed"

    def __init__(self, arms: int, runs: int = 1, arm: int = 0):
        if arms < 1 or not 0 <= arm < arms:
            raise UsageError(f"{arms} arms, arm {arm}: give at least one arm, and the number of one of them")
        self.arms, self.runs, self.arm = arms, runs, arm
        self.pulls = np.zeros((runs, arms))
        self.total = np.zeros((runs, arms))
        self.square = np.zeros((runs, arms))

    def choose(self, uniform: np.ndarray) -> np.ndarray:
        """The arm of each run, int64 [runs]; `uniform` float64 [runs, arms] in (0, 1) is all the chance it may use."""
        return np.full(self.runs, self.arm)

    def learn(self, arm: np.ndarray, reward: np.ndarray) -> None:
        """Arms int64 [runs] earned rewards float64 [runs] in [0, 1]."""
        row = np.arange(self.runs)
        self.pulls[row, arm] += 1
        self.total[row, arm] += reward
        self.square[row, arm] += reward**2

    def state(self) -> dict[str, Any]:
        """JSON-ready; `load` restores it."""
        arrays = {k: v.tolist() for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return {"policy": self.name, "arms": self.arms, "runs": self.runs, "arrays": arrays}

    def load(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned. Raises UsageError if it belongs to another policy or other arms."""
        if any(state.get(k) != v for k, v in (("policy", self.name), ("arms", self.arms), ("runs", self.runs))):
            raise UsageError(
                f"this state is of policy {state.get('policy')!r} with {state.get('arms')} arms and {state.get('runs')} runs, "
                f"not of {self.name!r} with {self.arms} and {self.runs}"
            )
        own = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        try:
            found = {name: np.array(state["arrays"][name], dtype=value.dtype) for name, value in own.items()}
            whole = all(np.isfinite(found[name]).all() and found[name].shape == value.shape for name, value in own.items())
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise UsageError(f"this state of policy {self.name!r} is damaged: its arrays are not those of a policy; start anew")
        for name, value in found.items():
            setattr(self, name, value)

    @property
    def mean(self) -> np.ndarray:
        return self.total / np.maximum(self.pulls, 1)


def _greatest(index: np.ndarray, pulls: np.ndarray) -> np.ndarray:
    """The arm of the greatest index; arms never pulled come first, in order."""
    return np.where(pulls == 0, np.inf, index).argmax(-1)


class UCB1(Policy):
    """mean + sqrt(2 log t / n)."""

    name = "ucb1"

    def choose(self, uniform: np.ndarray) -> np.ndarray:
        time = np.maximum(self.pulls.sum(-1, keepdims=True), 1)
        return _greatest(self.mean + np.sqrt(2 * np.log(time) / np.maximum(self.pulls, 1)), self.pulls)


class UCBTuned(Policy):
    """mean + sqrt(log t / n * min(1/4, variance + sqrt(2 log t / n)))."""

    name = "ucb-tuned"

    def choose(self, uniform: np.ndarray) -> np.ndarray:
        n = np.maximum(self.pulls, 1)
        pace = np.log(np.maximum(self.pulls.sum(-1, keepdims=True), 1)) / n
        variance = np.maximum(self.square / n - self.mean**2, 0) + np.sqrt(2 * pace)
        return _greatest(self.mean + np.sqrt(pace * np.minimum(0.25, variance)), self.pulls)


class Thompson(Policy):
    """The greatest of one draw per arm from Beta(1 + successes, 1 + failures)."""

    name = "thompson"

    def choose(self, uniform: np.ndarray) -> np.ndarray:
        from scipy.special import betaincinv

        return betaincinv(1 + self.total, 1 + self.pulls - self.total, uniform).argmax(-1)


class SlidingUCB(Policy):
    """UCB of the last `window` rounds: mean + sqrt(log min(t, window) / n), both inside the window."""

    name = "sliding-ucb"

    def __init__(self, arms: int, runs: int = 1, window: int = 500):
        super().__init__(arms, runs)
        self.window = window
        self.recent_arm = np.full((window, runs), -1)
        self.recent = np.zeros((window, runs))
        self.time = np.zeros(1, dtype=np.int64)

    def choose(self, uniform: np.ndarray) -> np.ndarray:
        pace = np.log(np.maximum(self.pulls.sum(-1, keepdims=True), 1)) / np.maximum(self.pulls, 1)
        return _greatest(self.mean + np.sqrt(pace), self.pulls)

    def learn(self, arm: np.ndarray, reward: np.ndarray) -> None:
        place, row = int(self.time[0]) % self.window, np.arange(self.runs)
        if self.recent_arm[place, 0] >= 0:  # what falls out of the window
            self.pulls[row, self.recent_arm[place]] -= 1
            self.total[row, self.recent_arm[place]] -= self.recent[place]
        self.recent_arm[place], self.recent[place] = arm, reward
        self.time += 1
        super().learn(arm, reward)


class Restarting(UCBTuned):
    """UCB-tuned that forgets everything when an arm's last `recent` rewards differ from those before by more than
    `threshold`; with probability `explore` an arm is drawn at random, so that a change in a resting arm is noticed."""

    name = "restarting"

    def __init__(
        self, arms: int, runs: int = 1, recent: int = 50, threshold: float = 0.28, least: int = 100, explore: float = 0.005
    ):
        super().__init__(arms, runs)
        self.recent, self.threshold, self.least, self.explore = recent, threshold, least, explore
        self.last = np.zeros((runs, arms, recent))  # a ring of each arm's last rewards

    def choose(self, uniform: np.ndarray) -> np.ndarray:
        best = super().choose(uniform)
        drawn = np.minimum((uniform[:, 0] / self.explore * self.arms).astype(np.int64), self.arms - 1)
        return np.where(uniform[:, 0] < self.explore, drawn, best)

    def learn(self, arm: np.ndarray, reward: np.ndarray) -> None:
        row = np.arange(self.runs)
        place = (self.pulls[row, arm] % self.recent).astype(np.int64)
        self.last[row, arm, place] = reward
        super().learn(arm, reward)
        pulls, window = self.pulls[row, arm], self.last[row, arm].sum(-1)
        before = (self.total[row, arm] - window) / np.maximum(pulls - self.recent, 1)
        changed = (pulls >= self.least) & (np.abs(window / self.recent - before) > self.threshold)
        for array in (self.pulls, self.total, self.square, self.last):
            array[changed] = 0
