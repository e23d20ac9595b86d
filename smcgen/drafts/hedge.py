"""Full information: every draft is scored on the tokens that were verified, so that each round teaches about all of them.

Where the losses of all arms are seen, following the leader suffers a regret that does not grow with time if the arms stay as
they are; weights that fall exponentially in the loss (Hedge: Freund & Schapire 1997) and a share given back to all arms
(fixed share: Herbster & Warmuth 1998) follow arms that change.
"""

from __future__ import annotations

import numpy as np

from smcgen.drafts.bandits import UCB1, Policy, Restarting, SlidingUCB, Thompson, UCBTuned


class Hedge(Policy):
    """The arm of the greatest weight, with weights proportional to exp(rate * reward), round by round.

    Args:
        arms, runs: as in `Policy`.
        rate: how fast weights move; infinity is following the leader, in which case `share` must be 0.
        share: of the weight that is spread over all arms after each round.
    """

    name = "hedge"

    def __init__(self, arms: int, runs: int = 1, rate: float = np.inf, share: float = 0.0):
        super().__init__(arms, runs)
        self.rate, self.share = rate, share
        self.log_weight = np.zeros((runs, arms))

    def choose(self, uniform: np.ndarray) -> np.ndarray:
        return self.log_weight.argmax(-1)

    def learn_all(self, reward: np.ndarray) -> None:
        """What every arm would have earned, float64 [runs, arms]."""
        self.pulls += 1
        self.total += reward
        self.square += reward**2
        self.log_weight += reward if np.isinf(self.rate) else self.rate * reward
        if self.share > 0:
            top = self.log_weight.max(-1, keepdims=True)
            weight = np.exp(self.log_weight - top)
            weight /= weight.sum(-1, keepdims=True)
            self.log_weight = np.log((1 - self.share) * weight + self.share / self.arms)


class DraftHedge(Hedge):
    """`Hedge` as the choice among drafts uses it: it follows drafts whose worth changes with the text."""

    def __init__(self, arms: int, runs: int = 1):
        super().__init__(arms, runs, rate=1.0, share=1e-3)


POLICIES: dict[str, type[Policy]] = {p.name: p for p in (Policy, UCB1, UCBTuned, Thompson, SlidingUCB, Restarting, DraftHedge)}
