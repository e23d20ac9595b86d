"""Policies that choose among drafts: known regrets, nothing but the past, state through JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import smcgen as sg
from smcgen.drafts.bandits import UCB1, Policy, Restarting, SlidingUCB, Thompson, UCBTuned
from smcgen.drafts.hedge import POLICIES, Hedge

_spec = importlib.util.spec_from_file_location("bandits_benchmark", Path(__file__).parent.parent / "benchmarks" / "bandits.py")
assert _spec is not None
assert _spec.loader is not None
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)


@pytest.mark.parametrize(
    ("policy", "low", "high"),
    [(UCB1, 50, 75), (UCBTuned, 5, 16), (Thompson, 8, 18), (Hedge, 0.2, 2), (Policy, 799, 801)],
)
def test_regret_on_arms_that_stay(policy, low, high):
    assert low < bench.regret(policy(3, 100), bench.STATIONARY, 2000).mean() < high


def test_a_change_is_noticed():
    """The likeliest arm becomes the worst: policies that forget recover, the ones that average do not."""
    moving = [[0.3, 0.7, 0.5], [0.7, 0.3, 0.5]]
    lost = {p: bench.regret(p(3, 60), moving, 4000).mean() for p in (UCBTuned, Thompson, Restarting, SlidingUCB)}
    hedge = bench.regret(Hedge(3, 60, rate=0.3, share=1e-3), moving, 4000).mean()
    assert hedge < lost[Restarting] < 0.6 * lost[UCBTuned]
    assert lost[SlidingUCB] < lost[Thompson]


@pytest.mark.slow
def test_bars_of_the_benchmark():
    """400 paired seeds, 10,000 rounds."""
    still = {p: bench.regret(p(3, 400), bench.STATIONARY, 10_000).mean() for p in (UCB1, UCBTuned, Restarting, Hedge)}
    assert 94 < still[UCB1] < 105
    assert still[UCBTuned] <= 16.5
    assert still[Hedge] <= 2
    assert still[Restarting] <= 27
    assert bench.regret(Restarting(3, 400), bench.ROTATING, 10_000).mean() <= 100


@pytest.mark.parametrize("name", POLICIES)
def test_state_goes_through_json(name):
    """A policy restored in the middle goes on as if it had never stopped."""
    generator = np.random.default_rng(0)
    one, two = POLICIES[name](3, 4), POLICIES[name](3, 4)
    for t in range(200):
        uniform, reward = generator.random((4, 3)), generator.random(4)
        if t == 120:
            two.load(json.loads(json.dumps(one.state())))
        arm = one.choose(uniform)
        if t >= 120:
            assert (two.choose(uniform) == arm).all()
            two.learn(arm, reward)
        one.learn(arm, reward)


def test_state_of_another_policy_is_refused():
    with pytest.raises(sg.UsageError, match="ucb1"):
        UCBTuned(3).load(UCB1(3).state())
    with pytest.raises(sg.UsageError, match="3 arms"):
        UCB1(2).load(UCB1(3).state())
    with pytest.raises(sg.UsageError, match="one of them"):
        Policy(2, arm=2)


@pytest.mark.parametrize("damage", [{"pulls": "x"}, {"pulls": [[1.0]]}, {"pulls": [[np.nan, 1.0, 1.0]]}, {"pulls": None}])
def test_damaged_state_is_refused(damage):
    state = UCB1(3).state()
    state["arrays"] |= damage
    policy = UCB1(3)
    with pytest.raises(sg.UsageError, match="damaged"):
        policy.load(state)
    assert policy.pulls.shape == (1, 3)
    del state["arrays"]["pulls"]
    with pytest.raises(sg.UsageError, match="damaged"):
        policy.load(state)


@pytest.mark.parametrize("name", POLICIES)
def test_every_arm_is_tried_and_runs_are_independent(name):
    policy = POLICIES[name](3, 5)
    for t in range(300):
        arm = policy.choose(np.full((5, 3), (t % 97 + 0.5) / 97))
        assert arm.shape == (5,)
        if name == "hedge":  # it learns what every arm would have earned
            policy.learn_all(np.eye(3)[np.where(np.arange(5) == 0, 2, 1)])
            continue
        policy.learn(arm, np.where(np.arange(5) == 0, arm == 2, arm == 1).astype(float))
    if name == "hedge":
        assert policy.choose(np.zeros((5, 3))).tolist() == [2, 1, 1, 1, 1]
    elif name != "fixed":
        assert policy.pulls[0].argmax() == 2
        assert (policy.pulls[1:].argmax(-1) == 1).all()
