"""Collapse at the first finish: one text for each run, with the right law and an evidence that stays unbiased.

By enumeration, through the public call, as in `test_evidence.py`; the two ways to get it wrong are seen.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen import collapse
from smcgen.potentials.base import ALIVE, DEAD
from smcgen.smc.graph import Rounds
from tests.statistics import FUNCTIONS, evidence_z, law_p_value, many, measure, z_score
from tests.tables import Exact, log_p, tables
from tests.test_evidence import STOPS, exact, stop_samples
from tests.test_paged_engine import tiny, tokenizer

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
TRUTH = exact(1)
SUPPORT = list(TRUTH.gamma)
P = np.array([TRUTH.gamma[x] for x in SUPPORT])


def runs(**options) -> sg.Posteriors:
    return many(LM, **{"draft": SMALL, "block": 2, "collapse": True, **options})


def worst_z(posts: sg.Posteriors, truth: Exact = TRUTH) -> float:
    """The largest |z| among the evidence and the eight expectations, each draw counting with its evidence."""
    support = list(truth.gamma)
    weights, scores = measure(posts, support), [evidence_z(posts, truth)]
    for f in FUNCTIONS.values():
        values = np.array([float(f(x)) for x in support])
        scores.append(z_score(weights @ values, truth.z * truth.expectation(f)))
    return max(map(abs, scores))


def law(posts: sg.Posteriors) -> np.ndarray:
    """The share of the draws that each sample has, [samples]."""
    return (measure(posts, SUPPORT) > 0).mean(0)


def total_variation(posts: sg.Posteriors) -> float:
    return float(0.5 * np.abs(law(posts) - P).sum())


NOISE = 0.035  # total variation of 20,000 draws from the law itself, at most


@pytest.mark.parametrize(
    "options",
    [{}, {"leniency": 2.0}, {"block": 1, "leniency": 1.5, "chains": 2}, {"draft": [SMALL, LM], "leniency": 2.0}],
    ids=["smc", "lenient", "chains", "drafts"],
)
def test_law_and_evidence(options):
    posts = runs(**options)
    assert worst_z(posts) < 4.2
    missing = np.maximum(1 - np.exp(posts.log_evidence[:, 0]), 0)
    assert total_variation(posts) < missing.mean() + NOISE
    assert posts.arrays()["length"].shape == (len(posts), 1)
    assert len({len(post.rounds[0]) for post in posts[:200]}) > 1  # some went on, others did not


def test_exact_particles_keep_the_law():
    posts = runs(leniency=1.0)
    assert law_p_value(posts, TRUTH) > 1e-4
    assert np.abs(posts.log_evidence).max() < 1e-6


def first_finisher(fields, uniform):
    """Some particle that has finished."""
    reason = fields["reason"]
    return ((reason != ALIVE) & (reason != DEAD)).long().argmax(-1)


def whoever(fields, uniform):
    """A particle whatever its weight."""
    return (uniform * fields["log_weight"].shape[1]).long()


def test_to_return_the_first_finisher_is_seen(monkeypatch):
    monkeypatch.setattr(collapse, "choose", first_finisher)
    posts = runs(leniency=1.0)
    assert 0.15 < total_variation(posts) < 0.4
    assert law_p_value(posts, TRUTH) < 1e-12


def test_to_choose_without_weights_is_seen(monkeypatch):
    options = {"threshold": 0.0}  # weights that resampling has made equal would hide it
    assert worst_z(runs(**options)) < 4.2
    monkeypatch.setattr(collapse, "choose", whoever)
    posts = runs(**options)
    assert worst_z(posts) > 6
    assert total_variation(posts) > np.maximum(1 - np.exp(posts.log_evidence[:, 0]), 0).mean() + NOISE


def test_rounds_that_are_read_one_late(monkeypatch):
    """As on a GPU: the group has moved on by a round when its first finish is known."""
    monkeypatch.setattr("smcgen.smc.graph.recordable", lambda world, proposal: True)
    monkeypatch.setattr(Rounds, "_record", lambda self: None)
    late = runs(block=1, leniency=2.0)
    assert worst_z(late) < 4.2
    monkeypatch.undo()
    soon = runs(block=1, leniency=2.0, groups=4000)
    assert np.mean(late.info["collapsed"]) > np.mean(soon.info["collapsed"])


def test_stop_strings_across_the_collapse():
    truth = Exact({x: math.exp(log_p(BASE, (2, 0), x)) for x in stop_samples()})
    posts = runs(block=1, leniency=2.0, stop=STOPS)
    assert worst_z(posts, truth) < 4.2
    whole = [i for i, r in enumerate(posts.arrays()["reason"][:, 0]) if r == 2][:200]
    assert whole
    assert all(s not in posts[i].text for i in whole for s in STOPS)


def test_the_weights_are_drawn_from():
    weight = torch.tensor([[0.1, 0.0, 0.6, 0.3, 0.0]]).log().expand(40_000, -1)
    uniform = (torch.arange(40_000, dtype=torch.float64) + 0.5) / 40_000
    counts = torch.bincount(collapse.choose({"log_weight": weight}, uniform), minlength=5) / 40_000
    assert torch.allclose(counts, torch.tensor([0.1, 0.0, 0.6, 0.3, 0.0]), atol=1e-4)
    dead = {"log_weight": torch.full((1, 3), -math.inf)}
    assert collapse.choose(dead, torch.tensor([0.9])).tolist() == [0]
    last = {"log_weight": torch.tensor([[0.0, -math.inf]])}
    assert collapse.choose(last, torch.tensor([1.0])).tolist() == [0]


# --- what the result says ---------------------------------------------------------------------------------------------


def test_the_result_says_what_it_holds(tmp_path):
    options = {"draft": SMALL, "block": 1, "max_tokens": 40, "particles": 6, "leniency": 2.0, "seed": 3, "collapse": True}
    post = sg.sample(LM, "ca", runs=3, **options)
    assert post.collapsed == post.info["collapsed"]
    assert len(post.particles) == 3
    assert post.settings["collapse"]
    for run, rounds in enumerate(post.rounds):
        at = post.collapsed[run]
        assert [len(r.counts) for r in rounds] == [6] * at + [1] * (len(rounds) - at)
        assert len(rounds[at - 1].ancestors) == 1
        # The evidence stays as it was, and the tokens of the lineage are those of the text.
        assert rounds[at - 1].log_evidence == post.run_log_evidence[run]
        assert np.allclose([r.log_evidence for r in rounds[at:]], post.run_log_evidence[run], atol=1e-6)
        n, tokens = 0, []
        for r in reversed(rounds):
            n = r.ancestors[n]
            tokens = r.tokens[n] + tokens
        assert tokens == post.particles[run].token_ids
        root = np.arange(6)
        for ancestors in post.ancestors[run]:
            assert ancestors.shape == (6,)
            root = root[ancestors]
        assert set(root) == {post.particles[run].root}
        for sample in [s for s in post.particles if s.run == run]:
            assert math.isclose(sum(x[0] for x in sample.token_log_p), log_p(BASE, (2, 0), sample.token_ids), abs_tol=1e-3)
            assert math.isclose(sample.log_p[0], log_p(BASE, (2, 0), sample.token_ids), abs_tol=1e-4)
    assert len(post.rounds[0]) > post.collapsed[0]
    assert post.divergence_bound is not None
    assert post.log_evidence_se is not None
    assert post.diagnostics().particles == 6
    assert post.diagnostics().summary()["smallest_ess"] > 1
    assert not any("first particle" in line for line in post.advice())
    again = sg.Posterior.from_json(post.to_json())
    assert again.collapsed == post.collapsed
    assert repr(again) == repr(post)
    assert "log evidence" in post._repr_html_()
    steps = json.loads(post.to_genlm_json())
    assert [len(s["particles"]) for s in steps][-1] == 1
    one = sg.sample(LM, "ca", resampling="multinomial", **options)
    assert one.log_evidence_se is None
    assert "collapsed" in one.log_evidence_note
    assert sg.sample(LM, "ca", **{**options, "collapse": False}).collapsed is None


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    post = sg.sample(LM, "ca", draft=SMALL, block=1, max_tokens=40, particles=6, leniency=2.0, seed=3, collapse=True)
    post.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_a_run_that_dies():
    """A draft of which the target truncates everything away."""
    blind = sg.LM(type(BASE)(torch.where(torch.arange(4) == 0, 0.0, -60.0).expand(5, 5, 4).clone(), "blind"))
    posts = many(LM.at(top_k=1), draft=blind, groups=50, block=2, collapse=True)
    died = posts.log_evidence[:, 0] == -math.inf
    assert died.any()
    assert all(post.failed for post, dead in zip(posts, died, strict=True) if dead)


@pytest.mark.parametrize("groups", [1, 7])
def test_places_are_refilled(groups):
    prompts = ["ca", "b", "ab", "cc"] * 10
    options = {"draft": SMALL, "block": 1, "particles": 4, "max_tokens": 12, "seed": 6, "leniency": 2.0, "collapse": True}
    posts = sg.sample(LM, prompts, groups=groups, **options)
    whole = sg.sample(LM, prompts, groups=40, **options)
    assert [p.text for p in posts] == [p.text for p in whole]
    assert np.array_equal(posts.log_evidence, whole.log_evidence)


def test_models_with_a_cache():
    """Each token's log probability, across the collapse, is that of the model on the whole text."""
    model = tiny(seed=1)
    lm, draft = sg.LM(model, tokenizer()), sg.LM(tiny(seed=2), tokenizer())
    options = {"particles": 5, "block": 2, "max_tokens": 20, "leniency": 3.0, "seed": 1, "collapse": True}
    posts = sg.sample(lm, [[0, 3, 1], [2], [1, 1, 4, 5]] * 4, draft=draft, **options)
    assert any(len(post.rounds[0]) > post.collapsed[0] for post in posts)
    for post, prompt in zip(posts, [[0, 3, 1], [2], [1, 1, 4, 5]] * 4, strict=True):
        ids = post.sample.token_ids
        with torch.no_grad():
            rows = model(torch.tensor([prompt + ids])).logits[0, :, : len(tokenizer())].log_softmax(-1)
        want = [float(rows[len(prompt) + i - 1, t]) for i, t in enumerate(ids)]
        assert np.allclose([x[0] for x in post.sample.token_log_p], want, atol=1e-4)
    assert sg.sample(lm, [[0, 3, 1]], draft=draft.given([5, 2]), **options)[0].sample.token_ids


def test_a_prompt_by_itself_gives_the_same():
    lm, draft = (sg.LM(tiny(seed=s), tokenizer()) for s in (1, 2))
    prompts = [[0, 3, 1], [2], [1, 1, 4, 5], [3, 2]]
    options = {"draft": draft, "particles": 4, "block": 2, "max_tokens": 16, "leniency": 3.0, "seed": 2, "deterministic": True}
    posts = sg.sample(lm, prompts, collapse=True, **options)
    for key, (post, prompt) in enumerate(zip(posts, prompts, strict=True)):
        alone = sg.sample(lm, [prompt], keys=[key], collapse=True, **options)[0]
        assert alone.sample == post.sample
        assert alone.log_evidence == post.log_evidence


# --- where it is allowed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (LM**2, {}, "plain text"),
        (LM * sg.length(min=2), {}, "plain text"),
        (LM.given("a") * LM.given("b"), {}, "plain text"),
        (LM, {"on_budget": "condition"}, "on_budget='condition'"),
        (LM, {"anneal": sg.Ramp(0.5, 2)}, "anneal"),
        (LM, {"particles": 1}, "no effect"),
        (LM, {"mode": "exact"}, "mode='exact'"),
        (LM, {"collapse": "yes"}, "give True, False"),
    ],
)
def test_where_it_is_refused(target, options, message):
    with pytest.raises(sg.UsageError, match=message):
        sg.sample(target, "ca", **{"draft": SMALL, "max_tokens": 4, "collapse": True, **options})
    if message != "give True, False":
        post = sg.sample(target, "ca", **{"draft": SMALL, "max_tokens": 4, "collapse": None, "seed": 1, **options})
        assert not post.settings["collapse"]


def test_generate_collapses_where_it_can(monkeypatch):
    seen = {}
    original = sg.sample

    def sample(*arguments, **options):
        seen["post"] = original(*arguments, **options)
        return seen["post"]

    monkeypatch.setattr("smcgen.sampling.sample", sample)
    options = {"draft": SMALL, "max_tokens": 8, "seed": 1}
    with pytest.warns(UserWarning, match="bound on the divergence"):
        sg.generate(LM, "ca", mode="smc", **options)
    assert seen["post"].settings["collapse"]
    with pytest.warns(UserWarning, match="bound on the divergence"):
        sg.generate(LM, "ca", mode="smc", collapse=False, **options)
    assert not seen["post"].settings["collapse"]
    sg.generate(LM, "ca", **options)
    assert not seen["post"].settings["collapse"]
