"""A call from outside: arguments that are refused, prompts in all their shapes, places that are refilled, extremes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import smcgen as sg
from tests.statistics import evidence_z, many
from tests.tables import END, T, TableLM, enumerate_target, tables, vocabulary

BASE, DRAFT = tables()
lm, small = sg.LM(BASE), sg.LM(DRAFT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"particles": 0}, "particles=0"),
        ({"particles": 2.5}, "integer"),
        ({"particles": True}, "integer"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"block": 0, "draft": small}, "block=0"),
        ({"block": 2}, "without a draft"),
        ({"draft_temperature": 0.5}, "without a draft"),
        ({"draft_temperature": 0.0, "draft": small}, "positive"),
        ({"draft": 3}, "give an LM"),
        ({"runs": 0}, "runs=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "non-empty"),
        ({"stop": ["a", ""]}, "non-empty"),
        ({"stop": ["a", None]}, "non-empty"),
        ({"stop": 5}, "give a non-empty string, a list of them, or None"),
        ({"on_budget": "wait"}, "truncate"),
        ({"resampling": "best"}, "multinomial, residual"),
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"groups": 0}, "groups=0"),
        ({"anneal": sg.Ramp(0.5, 2, of="potentials")}, "anneal has no effect"),
        ({"keys": [1, 2]}, "one integer"),
        ({"keys": [-1]}, "2\\*\\*32"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(sg.UsageError, match=message) as caught:
        sg.sample(lm, "ca", **options)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(None, "no prompt"), ("", "empty"), ([], "at least one"), (3.5, "give text"), ([17], "17"), ("xyz", "x")],
)
def test_prompts_are_checked(prompt, message):
    with pytest.raises(sg.UsageError, match=message):
        sg.sample(lm, prompt, max_tokens=3)


def test_prompts_in_all_their_shapes():
    options = {"particles": 4, "max_tokens": T, "seed": 0}
    text, ids = sg.sample(lm, "ca", **options), sg.sample(lm, [2, 0], **options)
    assert text.text == ids.text
    several = sg.sample(lm, ["ca", [2, 0], "b"], **options)
    assert len(several) == 3
    assert several[0].table() == text.table()
    own = sg.sample(lm.given("ca"), **options)
    assert own.table() == text.table()


@pytest.mark.parametrize("groups", [1, 3, 7, 40])
def test_places_are_refilled(groups):
    """However few groups run at a time, every prompt gets its own result: its randomness is keyed by its index."""
    prompts = ["ca", "b", "ab", "cc"] * 10
    posts = sg.sample(lm**2, prompts, draft=small, block=2, particles=4, max_tokens=T, seed=6, groups=groups)
    whole = sg.sample(lm**2, prompts, draft=small, block=2, particles=4, max_tokens=T, seed=6, groups=40)
    assert [p.table() for p in posts] == [p.table() for p in whole]
    assert np.array_equal(posts.log_evidence, whole.log_evidence)


def test_no_stop_strings():
    options = {"particles": 4, "max_tokens": T, "seed": 0}
    assert sg.sample(lm, "ca", stop=None, **options).to_dict() == sg.sample(lm, "ca", **options).to_dict()


@pytest.mark.parametrize("options", [{"threshold": 0.5}, {"resampling": "ssp"}])
def test_one_particle_is_not_resampled(options):
    with pytest.raises(sg.UsageError, match="has no place in mode='exact'"):
        sg.sample(lm, "ca", mode="exact", max_tokens=T, **options)


def test_keys_name_the_randomness():
    options = {"particles": 4, "max_tokens": T, "seed": 6}
    posts = sg.sample(lm, ["ca", "ca", "ca"], keys=[5, 9, 5], **options)
    assert posts[0].table() == posts[2].table()
    assert [s.token_ids for s in posts[0].particles] != [s.token_ids for s in posts[1].particles]


def test_a_fresh_seed_is_kept():
    one, two = (sg.sample(lm, "ca", particles=16, max_tokens=T) for _ in range(2))
    assert one.settings["seed"] != two.settings["seed"]
    assert sg.sample(lm, "ca", particles=16, max_tokens=T, seed=one.settings["seed"]).table() == one.table()


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 1e-4])
def test_temperatures_near_zero(temperature):
    cold = many(lm.at(temperature=temperature), groups=20, draft=small, block=2)
    greedy = []
    while len(greedy) < T and (not greedy or greedy[-1] != END):
        greedy.append(int(BASE.probabilities((2, 0), greedy).argmax()))
    assert not np.isnan(cold.log_evidence).any()
    for post in many(lm.at(temperature=temperature), groups=20):
        assert post.sample.token_ids == greedy
        assert math.isclose(post.log_evidence, 0, abs_tol=1e-6)


def test_a_huge_exponent_finds_the_mode():
    exact = enumerate_target([(BASE, 1, (2, 0))])
    mode = max(exact.gamma, key=lambda x: exact.gamma[x])
    posts = many(lm**1000, groups=20, particles=256)
    for post in posts:
        assert not math.isnan(post.log_evidence)
        assert all(math.isfinite(s.weight) for s in post.particles)
    # Token by token a power this high is greedy: N particles are one, whose weight tells that it is not the mode.
    drawn = {tuple(post.sample.token_ids) for post in posts}
    assert len(drawn) == 1
    assert posts[0].log_evidence <= 1000 * math.log(exact.gamma[mode]) + 1e-6
    # A draft at the model's own temperature explores, and finds it.
    posts = many(lm**1000, groups=20, particles=256, draft=small, draft_temperature=1.0, block=4)
    assert all(tuple(post.sample.token_ids) == mode for post in posts)


@pytest.mark.parametrize("budget", [1, 2])
def test_small_budgets(budget):
    truth = enumerate_target([(BASE, 2, (2, 0))], max_tokens=budget)
    for options in ({}, {"draft": small, "block": 4}):
        assert abs(evidence_z(many(lm**2, max_tokens=budget, **options), truth)) < 4


def test_conditioning_needs_something_to_end_with():
    endless = TableLM(BASE.table)
    endless.vocabulary = type(vocabulary())("endless", (b"a", b"b", b"c", b"d"), frozenset(), (), None)
    with pytest.raises(sg.UsageError, match="no end token"):
        sg.sample(sg.LM(endless), "ca", on_budget="condition")
    post = sg.sample(sg.LM(endless), "ca", on_budget="condition", stop="d", max_tokens=4, particles=16, seed=0)
    assert {s.reason for s in post.particles} == {"stop"}
    assert all("d" not in s.text for s in post.particles)


@pytest.mark.parametrize(
    "options", [{}, {"draft": small}, {"draft": small, "chains": 2}, {"draft": small, "leniency": math.inf}]
)
def test_a_condition_that_bars_the_end_is_named_at_the_budget(options):
    posts = sg.sample(lm * sg.contains("bbb"), ["ca"] * 40, on_budget="condition", max_tokens=4, particles=2, seed=0, **options)
    failed = [post.failure() for post in posts if post.failed]
    assert len(failed) > 10
    assert {error.cause for error in failed} == {"contains('bbb')"}


def test_a_draft_with_other_tokens_is_refused():
    other = TableLM(DRAFT.table, "other")
    other.vocabulary = type(vocabulary())("other", (b"a", b"c", b"b", b""), frozenset({END}), (END,), None)
    with pytest.raises(sg.UsageError, match="'base' and 'other'"):
        sg.sample(lm, "ca", draft=sg.LM(other))


def test_nan_names_the_model():
    broken = TableLM(BASE.table.clone(), "broken")
    broken.table[0, 1] = torch.nan
    with pytest.raises(sg.ModelError, match="broken"):
        many(sg.LM(broken), groups=50)
    with pytest.raises(sg.ModelError, match="broken"):
        many(lm, groups=50, draft=sg.LM(broken))


def test_a_bias_acts_at_every_position():
    """A potential that favours one token changes all positions alike, drafted and bonus tokens."""

    @sg.potential(prefix=lambda text: 3.0 * text.count("b"))
    def more_b(text: str) -> float:
        return 3.0 * text.count("b")

    truth = enumerate_target([(BASE, 1, (2, 0))], phi=lambda t: math.exp(3.0 * t.count("b")))
    for options in ({}, {"draft": small, "block": 2}):
        posts = many(lm * more_b, groups=5000, particles=16, **options)
        assert abs(evidence_z(posts, truth)) < 4


def test_settings_tell_every_argument():
    options = {
        "particles": 3, "max_tokens": 4, "seed": 5, "runs": 2, "stop": ("ab",), "on_budget": "condition",
        "resampling": "ssp", "threshold": 0.4, "draft_temperature": 0.6, "block": 2, "deterministic": True, "chat": False,
    }  # fmt: skip
    post = sg.sample(lm**2 * sg.regex("[abc]*"), "ca", draft=small, anneal=sg.Ramp(0.5, 2), **options)
    expected = {**options, "stop": ["ab"], "draft": "draft", "anneal": [0.5, 2, "models"], "potentials": ["regex('[abc]*')"]}
    assert {key: post.settings[key] for key in expected} == expected
    assert post.settings["target"] == "LM('base')**2 * regex('[abc]*')"


@pytest.mark.parametrize(
    "prompt", [[True], [1.5], ["a", 5], [{"role": "user"}], [{"role": "user", "content": "a"}, "b"], b"ca", "\ud800", [[]]]
)
def test_prompts_of_other_types_are_refused(prompt):
    with pytest.raises(sg.UsageError):
        sg.sample(lm, prompt, max_tokens=3)


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": "0.5"}, {"threshold": None}, {"groups": "2"}, {"groups": 1.5}, {"keys": 5}, {"keys": [True]}, {"stop": 5},
        {"stop": "\ud800"}, {"resampling": ["x"]}, {"anneal": 3}, {"deterministic": "no"}, {"progress": "x"},
        {"draft": small, "draft_temperature": "1"}, {"max_tokens": 1 << 30},
    ],
)  # fmt: skip
def test_options_of_other_types_are_refused(options):
    with pytest.raises(sg.UsageError):
        sg.sample(lm, "ca", **options)


@pytest.mark.parametrize(
    "ramp", [(True, 2), (0.5, True), ("x",), (0.5, "2"), (0.5, float("nan")), (0.5, 1.5), (0.0,), (0.5, 0)]
)
def test_ramps_are_checked(ramp):
    with pytest.raises(sg.UsageError):
        sg.Ramp(*ramp)


def test_a_draft_with_its_own_prompt_and_temperature():
    truth = enumerate_target([(BASE, 2, (2, 0))])
    posts = many(lm**2, draft=small.given("bb").at(temperature=0.9), block=2)
    assert posts.settings["draft_temperature"] == 0.9
    assert abs(evidence_z(posts, truth)) < 4
    other = many(lm**2, draft=small.at(temperature=0.9), block=2, groups=50)
    assert not np.array_equal(posts.arrays()["tokens"][:50], other.arrays()["tokens"])


def test_a_draft_may_end_elsewhere():
    """Where a sample ends is the target's affair: a draft that names other end tokens serves all the same."""
    other = TableLM(DRAFT.table, "chatty")
    other.vocabulary = type(vocabulary())("chatty", (b"a", b"b", b"c", b""), frozenset({END}), (), None)
    truth = enumerate_target([(BASE, 2, (2, 0))])
    assert abs(evidence_z(many(lm**2, draft=sg.LM(other), block=2), truth)) < 4


def test_a_token_without_probability_kills_by_name():
    barred = TableLM(BASE.table.clone(), "barred")
    barred.table[:, :, 1] = -torch.inf
    truth = enumerate_target([(barred, 1, (2, 0))], accept=lambda x: 1 not in x)
    posts = many(sg.LM(barred), draft=small, block=2, on_budget="truncate")
    assert abs(evidence_z(posts, truth)) < 4
    assert sum(post.dead for post in posts[:200]) > 0
    shut, blind = TableLM(BASE.table.clone(), "shut"), TableLM(BASE.table.clone(), "blind")
    shut.table[:, :, :END] = -torch.inf
    blind.table[:, :, 1:] = -torch.inf
    with pytest.raises(sg.NoSurvivors, match="language models"):
        sg.sample(sg.LM(shut), "ca", draft=sg.LM(blind), leniency=math.inf, particles=4, max_tokens=3, seed=0)
    assert sg.sample(sg.LM(shut), "ca", draft=sg.LM(blind), particles=4, max_tokens=3, seed=0).text == ""


def test_chi_square_is_of_the_living():
    @sg.potential(prefix=lambda text: 0.0 if not text.startswith("c") else -math.inf)
    def no_c(text: str) -> bool:
        return not text.startswith("c")

    post = sg.sample(lm * no_c, "ca", draft=small, block=1, particles=64, max_tokens=5, seed=0, threshold=0.0)
    rounds = post.rounds[0]
    assert rounds[0].deaths > 0
    assert all(r.chi_square > 1e-6 for r in rounds[:2])
