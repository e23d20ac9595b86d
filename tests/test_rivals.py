"""Several drafts in one decoding: the law stays, whoever chooses, and the better draft is found."""

from __future__ import annotations

import numpy as np
import pytest

import smcgen as sg
from smcgen.drafts.bandits import POLICIES, Policy
from smcgen.proposals.rivals import RivalProposal
from tests.statistics import evidence_z, law_p_value, many
from tests.tables import Exact, tables
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
    ],
)
def test_what_means_nothing_is_refused(options, message):
    with pytest.raises(sg.UsageError, match=message):
        sg.sample(LM, "ca", **{"max_tokens": 3, **options})


def test_one_draft_in_a_list_is_that_draft():
    options = {"max_tokens": 5, "seed": 2, "mode": "exact"}
    assert sg.sample(LM, "ca", draft=[GOOD], **options).to_dict() == sg.sample(LM, "ca", draft=GOOD, **options).to_dict()
