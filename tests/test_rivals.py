"""Several drafts in one decoding: the law stays, whoever chooses, and the better draft is found."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.drafts.bandits import Policy
from smcgen.drafts.hedge import POLICIES, Hedge
from smcgen.proposals.rivals import RivalProposal
from tests.statistics import evidence_z, law_p_value, many
from tests.tables import Exact, TableLM, tables
from tests.test_evidence import exact
from tests.test_exact import DRAWS, TOKENS, truth
from tests.test_paged_engine import enumerate_samples, tiny, tokenizer
from tests.test_paged_engine import run as run_tiny

BASE, DRAFT = tables()
LM, GOOD, BAD = sg.LM(BASE), sg.LM(DRAFT), sg.LM(tables(noise=3.0)[1])
EXACT = {"mode": "exact", "particles": 1, "max_tokens": TOKENS, "groups": DRAWS, "block": 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_law_of_lossless_decoding(policy):
    posts = many(LM, draft=[BAD, GOOD], policy=policy, chains=2 if policy == "thompson" else 1, **EXACT)
    assert law_p_value(posts, truth()) > 1e-4
    used = posts.info["draft_rounds"]
    assert used[0] > 0
    assert (used[1] > 0) == (policy != "fixed")


def test_law_under_an_adversary(monkeypatch):
    """The draft is chosen by the tokens committed so far, so as to do most harm if choosing could do any."""
    original = RivalProposal.extend

    class Adversary(Policy):
        def choose(self, uniform):
            return np.array([self.next])

    def extend(self, particles, world):
        last = particles.tokens.gather(-1, (particles.length[..., None] - 1).clamp(min=0))[:, 0, 0]
        for group, policy in enumerate(self.policies):
            policy.next = int(last[group] % 2)
        return original(self, particles, world)

    monkeypatch.setitem(POLICIES, "fixed", Adversary)
    monkeypatch.setattr(RivalProposal, "extend", extend)
    posts = many(LM, draft=[BAD, GOOD], policy="fixed", **{**EXACT, "block": 1})
    assert min(posts.info["draft_rounds"]) > DRAWS / 20
    assert law_p_value(posts, truth()) > 1e-4


def test_evidence_is_unbiased():
    posts = many(LM**2, draft=[BAD, GOOD], policy="thompson", block=2, leniency=1.5, groups=10_000)
    assert abs(evidence_z(posts, exact(2))) < 4


def test_through_the_pages():
    """A draft that was not chosen for some rounds catches up, whatever it has missed."""
    base, drafts = tiny(seed=1), [sg.LM(tiny(seed=s), tokenizer()) for s in (1, 2)]
    lm = sg.LM(base, tokenizer())
    posts = run_tiny(lm, [[0, 3, 1]] * 2000, draft=drafts, mode="exact", particles=1, block=1, policy="thompson", groups=500)
    assert law_p_value(posts, Exact(enumerate_samples(base, [0, 3, 1], 1.0))) > 1e-4
    long = run_tiny(
        lm.at(temperature=0), [[2], [1, 1]], draft=drafts, mode="exact", particles=1, block=2, policy="thompson", max_tokens=40
    )
    plain = run_tiny(lm.at(temperature=0), [[2], [1, 1]], mode="exact", particles=1, max_tokens=40)
    assert [p.sample.token_ids for p in long] == [p.sample.token_ids for p in plain]
    assert min(long.info["draft_rounds"]) > 0


def test_the_better_draft_is_found_and_costs_count():
    flat = sg.LM(type(BASE)(BASE.table[..., :].masked_fill(BASE.table == BASE.table, 0.0), "flat"))
    endless = BASE.table.clone()
    endless[..., 3] = -30.0
    lm = sg.LM(type(BASE)(endless, "endless"))
    options = {"mode": "exact", "max_tokens": 400, "block": 4, "policy": "ucb-tuned", "seed": 1}
    used = sg.sample(lm, "ca", draft=[flat, lm], **options).info["draft_rounds"]
    assert used[1] > 3 * used[0]
    used = sg.sample(lm, "ca", draft=[flat, lm], draft_costs=[0.0, 5.0], **options).info["draft_rounds"]
    assert used[0] > 3 * used[1]


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("policy", ["thompson", "hedge"])
def test_law_with_blocks_of_several_lengths(policy, chains):
    posts = many(LM, draft=[BAD, GOOD], policy=policy, chains=chains, **{**EXACT, "block": [1, 3]})
    assert law_p_value(posts, truth()) > 1e-4
    if policy == "thompson":
        assert min(posts.info["block_rounds"].values()) > 0


@pytest.mark.parametrize("policy", ["thompson", "hedge"])
def test_law_where_blocks_are_judged_in_one_go(monkeypatch, policy):
    """As on a CUDA device."""
    monkeypatch.setattr("smcgen.proposals.judged.DEVICES", ("cpu",))
    for chains in (1, 2):
        posts = many(LM, draft=[BAD, GOOD], policy=policy, chains=chains, **{**EXACT, "block": [1, 3]})
        assert law_p_value(posts, truth()) > 1e-4


def test_evidence_is_unbiased_with_blocks_of_several_lengths():
    for policy in ("thompson", "hedge"):
        posts = many(LM**2, draft=GOOD, policy=policy, block=[1, 2, 3], leniency=1.5, groups=10_000)
        assert abs(evidence_z(posts, exact(2))) < 4


def endless(lm):
    """The table without an end token."""
    table = lm.table.clone()
    table[..., 3] = -30.0
    return type(lm)(table, lm.name)


def test_full_information_finds_the_better_draft_at_once():
    lm, good, bad = (sg.LM(endless(x)) for x in (BASE, DRAFT, tables(noise=3.0)[1]))
    options = {"mode": "exact", "max_tokens": 400, "block": 4, "seed": 1, "draft": [bad, good]}
    used = sg.sample(lm, "ca", policy="hedge", **options).info["draft_rounds"]
    tried = sg.sample(lm, "ca", policy="ucb-tuned", **options).info["draft_rounds"]
    assert used[0] <= 5
    assert used[0] < tried[0]


def test_what_full_information_scores_is_the_overlap(monkeypatch):
    """Each draft's mean of sum min(p, q) over the committed tokens, against the tables; chosen or not, after forks too."""
    seen = []
    original = Hedge.learn_all
    monkeypatch.setattr(Hedge, "learn_all", lambda self, reward: (seen.append(reward.copy()), original(self, reward)))
    post = sg.sample(
        LM, "ca", draft=[BAD, GOOD], policy="hedge", reward="acceptance", mode="exact", block=2, max_tokens=40, seed=3, chains=2
    )
    read, want = [2, 0], []
    for r in post.rounds[0]:
        overlap = []
        for d in (BAD, GOOD):
            table = d.handle.spec
            values = [
                np.minimum(BASE.probabilities(read, t[:i]), table.probabilities(read, t[:i])).sum()
                for t in r.tokens
                for i in range(min(len(t), 2))
            ]
            overlap.append(np.mean(values))
        want.append(overlap)
        read = [*read, *r.tokens[0]]
    assert np.allclose(np.concatenate(seen), want, atol=1e-6)


def test_costs_decide_the_block():
    lm, draft = sg.LM(endless(BASE)), sg.LM(endless(DRAFT))
    options = {"mode": "exact", "max_tokens": 600, "block": [1, 6], "policy": "hedge", "seed": 2, "draft": draft}
    free = sg.sample(lm, "ca", draft_costs=[0.0], **options).info["block_rounds"]
    dear = sg.sample(lm, "ca", draft_costs=[0.6], **options).info["block_rounds"]
    assert free[6] > 3 * free[1]
    assert dear[1] > 3 * dear[6]


def test_what_a_policy_has_learned_is_kept(tmp_path):
    options = {"draft": [BAD, GOOD], "policy": "thompson", "mode": "exact", "max_tokens": 60}
    first = sg.sample(LM, "ca", seed=1, **options)
    state = first.info["policy_state"]
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    second = sg.sample(LM, "ca", seed=2, policy_state=path, **options)
    pulls = [np.sum(p.info["policy_state"]["arrays"]["pulls"]) for p in (first, second)]
    assert pulls[1] - pulls[0] == sum(second.info["draft_rounds"])
    with pytest.raises(sg.UsageError, match="policy 'thompson'"):
        sg.sample(LM, "ca", policy_state=path, **{**options, "policy": "ucb1"})
    path.write_text("[]")
    with pytest.raises(sg.UsageError, match="policy_state"):
        sg.sample(LM, "ca", policy_state=path, **options)


@pytest.mark.parametrize("policy", ["thompson", "sliding-ucb", "restarting", "hedge"])
def test_all_prompts_together_are_kept(policy, tmp_path):
    """One state of all prompts, each round of each of them counting once; another run begins with it."""
    options = {"draft": [BAD, GOOD], "policy": policy, "mode": "exact", "max_tokens": 40, "groups": 3}
    first = sg.sample(LM, ["ca"] * 7, seed=1, **options)
    state = first.info["policy_state"]
    pulls = [np.sum(state["arrays"]["pulls"])]
    rounds = sum(len(post.rounds[0]) for post in first)
    assert sum(first.info["draft_rounds"]) == rounds
    each = len(options["draft"]) if policy == "hedge" else 1  # full information: every round teaches about every draft
    assert pulls[0] == each * rounds
    assert np.array(state["arrays"]["pulls"]).shape == (1, 2)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    second = sg.sample(LM, ["b", "ca"], seed=2, policy_state=path, **options)
    pulls.append(np.sum(second.info["policy_state"]["arrays"]["pulls"]))
    assert pulls[1] - pulls[0] == each * sum(second.info["draft_rounds"])
    again = sg.sample(LM, ["b", "ca"], seed=2, policy_state=second.info["policy_state"], **options)
    assert sum(again.info["draft_rounds"]) > 0


def test_steps_are_timed():
    info = sg.sample(LM, "ca", draft=GOOD, mode="exact", max_tokens=20).info
    assert 0 < info["step_seconds"]["p50"] <= info["step_seconds"]["p95"]
    assert info["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": [GOOD, BAD], "leniency": float("inf")}, "finite leniency"),
        ({"draft": []}, "at least one"),
        ({"draft": [GOOD, 3], "mode": "exact"}, "give LMs"),
        ({"draft": [GOOD, BAD], "mode": "exact", "policy": "best"}, "restarting"),
        ({"draft": [GOOD, BAD], "mode": "exact", "draft_costs": [1.0]}, "for each draft"),
        ({"draft": [GOOD, BAD.at(top_k=2)], "mode": "exact"}, "share"),
        ({"draft": GOOD, "draft_costs": [1.0]}, "without several"),
        ({"draft": GOOD, "block": [2, 2], "mode": "exact"}, "once"),
        ({"draft": GOOD, "block": [1, 0], "mode": "exact"}, "block=0"),
        ({"draft": GOOD, "block": [1, 2], "leniency": float("inf")}, "finite leniency"),
        ({"draft": [GOOD, BAD], "mode": "exact", "reward": "fame"}, "'speed' or"),
        ({"draft": GOOD, "mode": "exact", "policy_state": {"arrays": {}}}, "without several"),
        ({"draft": GOOD, "mode": "exact", "policy": "ucb1"}, "policy has no effect without several"),
        ({"draft": [GOOD], "policy": "ucb1"}, "policy has no effect without several"),
        ({"policy": "ucb1"}, "policy has no effect without several"),
        ({"draft": GOOD, "reward": "acceptance"}, "reward has no effect without several"),
        ({"draft": [GOOD, BAD], "mode": "exact", "policy_state": "no such file"}, "cannot be read"),
    ],
)
def test_what_means_nothing_is_refused(options, message):
    with pytest.raises(sg.UsageError, match=message):
        sg.sample(LM, "ca", **{"max_tokens": 3, **options})


def test_a_broken_draft_is_named_though_it_was_not_chosen():
    broken = sg.LM(endless(TableLM(torch.full_like(BASE.table, torch.nan), "broken")))
    options = {"draft": [sg.LM(endless(DRAFT)), broken], "mode": "exact", "policy": "hedge", "max_tokens": 40, "seed": 1}
    with pytest.raises(sg.ModelError, match="'broken' returned NaN"):
        sg.sample(sg.LM(endless(BASE)), "ca", **options)


def test_one_draft_in_a_list_is_that_draft():
    options = {"max_tokens": 5, "seed": 2, "mode": "exact"}
    assert sg.sample(LM, "ca", draft=[GOOD], **options).to_dict() == sg.sample(LM, "ca", draft=GOOD, **options).to_dict()
