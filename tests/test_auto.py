"""mode="auto": what is measured is right, what is chosen follows from it and is said, and no law moves."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.drafts.auto import Acceptance, acceptance
from smcgen.drafts.costs import Costs, measure
from smcgen.target import WHOLE
from tests.statistics import evidence_z, law_p_value
from tests.tables import START, TableLM, V, tables
from tests.test_evidence import exact
from tests.test_exact import DRAWS, LM, SMALL, TOKENS, truth
from tests.test_paged_engine import tiny, tokenizer

BASE, DRAFT = tables()


def auto(target=LM, count=DRAWS, **options):
    defaults = {"draft": SMALL, "mode": "auto", "max_tokens": TOKENS, "seed": 1, "groups": count, "draft_costs": [0.1]}
    return sg.sample(target, ["ca"] * count, **{**defaults, **options})


def test_plain_text_is_lossless():
    posts = auto()
    assert posts.settings["mode"] == "exact"
    assert posts.info["auto"]["chosen"]["block"] >= 1
    assert "lossless" in posts.info["auto"]["why"]
    assert "accepted at" in posts.info["auto"]["why"]
    assert law_p_value(posts, truth()) > 1e-4


def test_law_while_the_block_is_learned():
    posts = auto(max_tokens=2000, count=1, draft_costs=[0.02])
    assert len(posts.info["auto"]["chosen"]["block"]) > 1
    chosen = {k: v for k, v in posts.info["auto"]["chosen"].items() if k in ("chains", "block")}
    again = sg.sample(
        LM, ["ca"] * DRAWS, draft=SMALL, mode="exact", max_tokens=TOKENS, seed=1, groups=DRAWS, policy="thompson", **chosen
    )
    assert law_p_value(again, truth()) > 1e-4


def test_a_draft_that_does_not_pay_is_left_out():
    with pytest.warns(UserWarning, match="no draft pays"):
        posts = auto(draft_costs=[3.0], count=20)
    assert posts.settings["draft"] is None
    assert posts.info["auto"]["speedup"] < 1


def test_the_better_draft_is_taken():
    bad = sg.LM(tables(noise=3.0)[1])
    chosen = auto(draft=[bad, SMALL], draft_costs=[0.1, 0.1], count=4, max_tokens=60).info["auto"]["chosen"]
    assert chosen["draft"] == repr(SMALL)
    chosen = auto(draft=[bad, SMALL], draft_costs=[0.01, 2.0], count=4, max_tokens=60).info["auto"]["chosen"]
    assert chosen["draft"] == repr(bad)


def test_powers_and_conditions_get_particles():
    posts = auto(LM**2, max_tokens=5)
    assert (posts.settings["mode"], posts.settings["leniency"]) == ("smc", 2.0)
    assert "power" in posts.info["auto"]["why"]
    assert abs(evidence_z(posts, exact(2))) < 4
    masked = auto(LM * sg.regex("(a|b)*c?"), count=4)
    assert (masked.settings["leniency"], masked.settings["block"]) == (1.5, 4)
    assert "conditions" in masked.info["auto"]["why"]


def test_what_is_given_is_kept():
    info = auto(count=4, chains=2, block=3).info["auto"]["chosen"]
    assert (info["chains"], info["block"]) == (2, 3)
    posts = auto(LM**2, count=4, particles=5, leniency=3.0, block=1)
    assert [posts.settings[k] for k in ("particles", "leniency", "block")] == [5, 3.0, 1]
    assert auto(draft=None, draft_costs=None, count=2).settings["mode"] == "exact"


def constant(p) -> TableLM:
    return TableLM(torch.tensor(p).log().expand(START + 1, START + 1, V).clone())


def test_what_is_measured():
    """The acceptance of one and of several candidates, and the tokens of a round, against runs."""
    p, q = [0.5, 0.3, 0.2, 0.0], [0.2, 0.5, 0.3, 0.0]
    one, two = constant(p), constant(q)
    found = acceptance(one, two, [((2, 0), (0, 1, 2))], (1.0, WHOLE), (1.0, WHOLE))
    assert math.isclose(found.of[1], np.minimum(p, q).sum(), abs_tol=1e-6)
    for chains in (1, 2, 4):
        posts = sg.sample(
            sg.LM(one), ["ca"] * 4000, draft=sg.LM(two), mode="exact", verification="token" if chains == 1 else None,
            chains=chains, block=4, max_tokens=30, seed=3, groups=4000,
        )  # fmt: skip
        first = [post.rounds[0][0] for post in posts]
        if chains == 1:
            share = np.mean([r.counts[0] > 1 for r in first])
        else:
            share = np.mean([r.accepted > 0 for r in first])
        assert abs(share - found.of[chains]) < 4 * math.sqrt(0.25 / 4000)
        made = np.mean([r.counts[0] for r in first])
        assert abs(found.tokens(chains, 4) / made - 1) < 0.06


def test_power_in_the_acceptance():
    found = acceptance(BASE, BASE, [((2, 0), (0, 1))], (1.0, WHOLE), (0.5, WHOLE), alpha=2.0)
    assert math.isclose(found.of[1], 1.0, abs_tol=1e-6)


def test_tokens_between_what_was_measured():
    steady = Acceptance({1: 0.5, 2: 0.7, 4: 0.9}, 0.0, 10)
    assert math.isclose(steady.tokens(1, 2), 1.75)
    assert math.isclose(steady.tokens(4, 2), 1 + 0.9 + 0.45)
    assert steady.tokens(3, 1) == pytest.approx(1.8)


def test_costs():
    costs = Costs({(1, 1): 1.0, (1, 5): 1.4, (1, 9): 2.0}, [{1: 0.1}])
    assert costs.round(0, 1, 4) == pytest.approx(1.8)
    assert costs.round(0, 1, 2) == pytest.approx(1.4)
    assert costs.round(0, 1, 12) == pytest.approx(1.2 + 2.6)
    lm = sg.LM(tiny(seed=1), tokenizer()).load()
    table = measure(lm, [lm], [1, 3], [1, 5])
    assert min(table.target.values()) > 0
    assert json.loads(json.dumps(table.to_dict()))["drafts"][0]["3"] > 0


def test_measured_costs_are_kept():
    base, draft = (sg.LM(tiny(seed=s), tokenizer()) for s in (1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may pay or not
        post = sg.sample(base, [0, 3, 1], draft=draft, mode="auto", max_tokens=12, seed=1)
    assert post.info["auto"]["costs"]["target"]["1x5"] > 0


def test_baseline():
    slow = sg.sample(LM, "ca", draft=SMALL, mode="exact", max_tokens=30, baseline=True, seed=1).info["baseline"]
    assert slow["tokens_per_second"] > 0
    assert slow["speedup"] > 0
    with pytest.raises(sg.UsageError, match="without a draft"):
        sg.sample(LM, "ca", baseline=True, max_tokens=3)
    with pytest.raises(sg.NoSurvivors):  # not a division by the speed of nothing
        sg.sample(LM * sg.regex("a+"), "ca", draft=SMALL, max_tokens=1, on_budget="condition", baseline=True, seed=1)


def test_a_draft_slower_than_the_model_is_warned_of(monkeypatch):
    """Many tokens of a draft that costs as much as the model and is never accepted."""
    base, draft = (sg.LM(tiny(seed=s), tokenizer()) for s in (1, 2))
    monkeypatch.setattr("smcgen.sampling.LONG", 0.0)
    with pytest.warns(UserWarning, match="hardly pays: .* tokens per second"):
        sg.sample(base, [[0, 3, 1]] * 2, draft=draft, mode="exact", block=12, max_tokens=40, seed=1)


@pytest.mark.parametrize(
    "options", [{"anneal": sg.Ramp(0.5, 2)}, {"collapse": True}, {"threshold": 0.5}, {"resampling": "ssp"}], ids=str
)
def test_what_asks_for_weights_gets_them(options):
    posts = auto(count=4, **options)
    assert posts.settings["mode"] == "smc"
    assert "what was given" in posts.info["auto"]["why"]


def test_baseline_of_a_choice():
    with pytest.raises(sg.UsageError, match="baseline has no effect without a draft"):
        auto(draft=None, draft_costs=None, baseline=True)
    with pytest.warns(UserWarning, match="no draft pays"):
        posts = auto(draft_costs=[3.0], count=2, baseline=True)
    assert posts.info["baseline"]["speedup"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may pay or not
        assert auto(count=2, baseline=True).info["baseline"]["tokens_per_second"] > 0


def test_a_policy_that_has_nothing_left_to_choose():
    assert auto(LM**2, count=2, policy="ucb1", reward="acceptance").settings["policy"] is None
    posts = auto(LM**2, count=2, policy="ucb1", block=[1, 2])
    assert posts.settings["policy"] == "ucb1"


def test_generate_stays_lossless():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = sg.generate(LM, "ca", draft=SMALL, mode="auto", draft_costs=[0.1], max_tokens=8, seed=1)
    assert isinstance(text, str)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_costs": [0.1, 0.2]}, "draft_costs"),
        ({"draft_costs": [-1.0]}, "draft_costs"),
        ({"draft_costs": "x"}, "draft_costs"),
        ({"block": "x"}, "block"),
        ({"block": []}, "block"),
        ({"chains": 0}, "chains"),
        ({"particles": 0}, "particles"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"runs": 0}, "runs"),
        ({"groups": 0}, "groups"),
        ({"draft": 5}, "draft 5"),
        ({"draft": [5]}, "draft 5"),
        ({"draft_temperature": -1.0}, "draft_temperature"),
        ({"policy": "none of these"}, "policy"),
        ({"reward": "fame"}, "reward"),
        ({"anneal": 3}, "anneal=3"),
        ({"policy_state": {"arrays": {}}}, "policy_state"),
        ({"target": "tiny"}, "target 'tiny'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(options, message, monkeypatch):
    monkeypatch.setattr("smcgen.drafts.auto._pilot", None)
    with pytest.raises(sg.UsageError, match=message):
        auto(**{"count": 2, **options})


def test_a_look_up_is_no_draft_for_weights():
    posts = auto(LM**2, draft=["ngram", SMALL], draft_costs=[0.0, 0.1], count=2)
    assert posts.settings["draft"] == "draft"
    with pytest.raises(sg.UsageError, match="ngram"):
        auto(LM**2, draft="ngram", draft_costs=[0.0], count=2)


def test_block_verification_keeps_one_chain():
    posts = auto(verification="block", count=2)
    assert posts.settings["chains"] == 1
    assert posts.settings["verification"] == "block"
    with pytest.warns(UserWarning, match="no draft pays"):
        auto(verification="block", draft_costs=[3.0], count=2)


def test_the_reason_for_weights_is_the_true_one():
    assert "several models" in auto(LM.given("a") * LM.given("b"), count=2).info["auto"]["why"]
    assert "what was given" in auto(particles=3, count=2).info["auto"]["why"]
