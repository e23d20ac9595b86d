"""Regret of the policies that choose among drafts, on Bernoulli arms: 400 paired seeds, 10,000 rounds.

    python -m benchmarks.bandits

Every policy sees the same rewards: arm a pays in round t of seed i iff u[i, t] < mean[a], one uniform for all arms. Regret is
the sum of (best mean - mean of the arm taken). "rotating": the means move on at one third and two thirds of the time.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from smcgen.drafts.bandits import UCB1, Policy, Restarting, SlidingUCB, Thompson, UCBTuned
from smcgen.drafts.hedge import Hedge

STATIONARY = [[0.3, 0.7, 0.5]]
ROTATING = [[0.3, 0.7, 0.5], [0.7, 0.3, 0.5], [0.5, 0.3, 0.7]]


def regret(policy: Policy, means: list[list[float]], rounds: int, seed: int = 0) -> np.ndarray:
    """Regret of each run, float64 [runs]."""
    pays, chance = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    total = np.zeros(policy.runs)
    for t in range(rounds):
        mean = np.array(means[t * len(means) // rounds])
        arm = policy.choose(chance.random((policy.runs, policy.arms)))
        paid = pays.random((policy.runs, 1)) < mean
        total += mean.max() - mean[arm]
        if isinstance(policy, Hedge):
            policy.learn_all(paid.astype(float))
        else:
            policy.learn(arm, paid[np.arange(policy.runs), arm].astype(float))
    return total


def policies(runs: int) -> dict[str, Policy]:
    """By name, for three arms."""
    return {
        "fixed (first)": Policy(3, runs),
        "UCB1": UCB1(3, runs),
        "Thompson": Thompson(3, runs),
        "UCB-tuned": UCBTuned(3, runs),
        "sliding UCB (500)": SlidingUCB(3, runs),
        "UCB-tuned with restarts": Restarting(3, runs),
        "full information, leader": Hedge(3, runs),
        "full information, Hedge": Hedge(3, runs, rate=0.3, share=1e-3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table = {}
    for name in policies(1):
        began = time.perf_counter()
        row = {}
        for label, means in (("stationary", STATIONARY), ("rotating", ROTATING)):
            values = regret(policies(options.seeds)[name], means, options.rounds)
            row[label] = [float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))), float(values.max())]
        table[name] = row
        if not options.json:
            cells = "   ".join(f"{label} {m:7.1f} ± {e:.1f} (worst {w:.0f})" for label, (m, e, w) in row.items())
            print(f"{name:26s} {cells}   {time.perf_counter() - began:.1f} s", flush=True)
    if options.json:
        print(json.dumps({"seeds": options.seeds, "rounds": options.rounds, "regret": table}))


if __name__ == "__main__":
    main()
