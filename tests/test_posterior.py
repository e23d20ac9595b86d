"""The result: draws, tables, evidence with its error, JSON out and in, and what it costs to look."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

import smcgen as sg
from tests.statistics import many
from tests.tables import T, enumerate_target, tables

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)


@pytest.fixture(scope="module")
def post() -> sg.Posterior:
    return sg.sample(LM**1.5, "ca", draft=SMALL, block=2, particles=64, runs=8, max_tokens=T, seed=4)


def test_table_and_draws_agree(post):
    rows = post.table()
    assert math.isclose(sum(row.probability for row in rows), 1)
    assert sum(row.particles for row in rows) == 64 * 8
    assert [row.probability for row in rows] == sorted((row.probability for row in rows), reverse=True)
    draws = post.texts(4000)
    assert draws[0] == post.text == post.texts(1)[0]
    for row in rows[:5]:
        share = draws.count(row.text) / 4000
        assert abs(share - row.probability) < 5 * math.sqrt(row.probability / 4000)
    assert math.isclose(post.expectation(len), sum(row.probability * len(row.text) for row in rows), rel_tol=1e-9)


def test_runs_combine_by_their_evidence(post):
    exact = enumerate_target([(BASE, 1.5, (2, 0))])
    assert abs(post.log_evidence - math.log(exact.z)) < 4 * post.log_evidence_se
    assert post.log_evidence_note == "spread of 8 runs, few: itself uncertain by 27% or more"
    truth = exact.texts()
    estimate = {row.text: row.probability for row in post.table()}
    assert 0.5 * sum(abs(p - estimate.get(t, 0)) for t, p in truth.items()) < 0.12
    shares = np.array([sum(s.weight for s in post.particles if s.run == r) for r in range(8)])
    z = np.exp(post.run_log_evidence)
    assert np.allclose(shares, z / z.sum())


def test_the_standard_error_covers():
    """Two standard errors around log Z-hat cover log Z about 19 times of 20, from runs and from one run's genealogy."""
    truth = math.log(enumerate_target([(BASE, 2, (2, 0))]).z)
    options = {"draft": SMALL, "block": 2, "max_tokens": T, "seed": 9, "groups": 4800}
    several = sg.sample(LM**2, ["ca"] * 300, runs=16, particles=8, **options)
    single = sg.sample(LM**2, ["ca"] * 400, particles=64, resampling="multinomial", **options)
    for posts in (several, single):
        known = [post for post in posts if post.log_evidence_se is not None]
        assert len(known) > 0.6 * len(posts)
        hits = [abs(post.log_evidence - truth) < 2 * post.log_evidence_se for post in known]
        assert 0.88 < np.mean(hits) < 0.99


def test_one_run_says_why_it_has_no_error():
    post = sg.sample(LM, "ca", particles=4, max_tokens=T, seed=1)
    assert post.log_evidence_se is None
    assert "runs=R" in post.log_evidence_note
    post = sg.sample(LM, "ca", particles=2, max_tokens=T, seed=1, resampling="multinomial")
    assert post.log_evidence_se is None
    assert "survive" in post.log_evidence_note


def test_rounds_and_genealogy(post):
    for run, rounds in enumerate(post.rounds):
        assert len(post.ess[run]) == len(rounds) == len(post.ancestors[run])
        assert all(0 < r.ess <= 64 + 1e-9 for r in rounds)
        assert all(r.chi_square >= -1e-9 for r in rounds)
        root = np.arange(64)
        for r in rounds:
            assert r.resampled or r.ancestors == list(range(64))
            root = root[r.ancestors]
        assert root.tolist() == [s.root for s in post.particles if s.run == run]
        assert math.isclose(rounds[-1].log_evidence, post.run_log_evidence[run], rel_tol=1e-12)


def test_json_out_and_in(post, tmp_path):
    text = post.to_json(tmp_path / "run.json")
    for source in (text, tmp_path / "run.json", str(tmp_path / "run.json")):
        again = sg.Posterior.from_json(source)
        assert again.to_json() == text
        assert again.table() == post.table()
        assert again.text == post.text
        assert again.log_evidence_se == post.log_evidence_se
    data = json.loads(text)
    assert data["text"] == post.text
    assert len(data["token_ids"]) == len(data["token_log_p"])
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "bad",
    ["{}", '{"format": "other"}', "{nonsense", "/nowhere/at/all.json", '{"format": "smcgen-posterior-1"}', "\0", 5, b"{}"],
)
def test_json_that_is_none(bad):
    with pytest.raises(sg.UsageError):
        sg.Posterior.from_json(bad)


def test_ten_thousand_results_cost_little():
    posts = many(LM, groups=10_000, draft=SMALL, block=2)
    began = time.process_time()
    assert len(posts) == 10_000
    assert posts.log_evidence.shape == (10_000, 1)
    assert posts[9_999].text == posts[-1].text
    assert len([post.text for post in posts[:2000]]) == 2000
    assert len(posts[:3]) == 3
    with pytest.raises(IndexError):
        posts[10_000]
    assert time.process_time() - began < 3.0  # 2,000 texts among it
    assert "10000 prompts" in repr(posts)


def test_cut_and_dead_are_counted():
    post = sg.sample(LM, "ca", particles=64, max_tokens=2, seed=0)
    assert post.cut == sum(s.reason == "budget" for s in post.particles)
    assert 0 < post.cut_probability < 1
    hard = sg.sample(LM * sg.regex("a*b"), "ca", particles=64, max_tokens=3, seed=0)
    assert hard.dead > 0
    assert {s.text for s in hard.particles if s.weight > 0} <= {"b", "ab", "aab"}


def test_no_survivors():
    @sg.potential
    def never(text: str) -> bool:
        return False

    with pytest.raises(sg.NoSurvivors, match="never") as caught:
        sg.sample(LM * never, "ca", particles=4, max_tokens=3, seed=0)
    assert caught.value.exit_code == 3
    assert caught.value.round >= 0
    posts = sg.sample(LM * never, ["ca", "a"], particles=4, max_tokens=3, seed=0)
    assert [post.failed for post in posts] == [True, True]
    assert (posts.log_evidence == -math.inf).all()
    with pytest.raises(sg.NoSurvivors):
        _ = posts[0].text
    data = json.loads(posts[0].to_json())
    assert data["text"] is None
    assert data["log_evidence"] is None
    assert sg.Posterior.from_json(json.dumps(data)).failed
    assert "no survivors" in repr(posts[0])


def test_json_that_cannot_be_written(post, tmp_path):
    for path in (tmp_path, tmp_path / "no" / "run.json"):
        with pytest.raises(sg.UsageError, match="cannot write"):
            post.to_json(path)
    assert not list(tmp_path.parent.glob("*.part"))


@pytest.mark.parametrize("count", ["3", 1.5, 0, True, 1 << 20])
def test_numbers_of_draws_are_checked(post, count):
    with pytest.raises(sg.UsageError):
        post.samples(count)


def test_repr_helps(post):
    lines = repr(post).splitlines()
    assert "log evidence" in lines[0]
    assert "±" in lines[0]
    assert repr(post.table()[0].text) in lines[1]


def test_prompts_are_kept_as_they_were_given():
    tiny = sg.LM("tiny")
    question = [{"role": "user", "content": "Why?"}]
    for prompt, text in ((question, None), ("Once", "Once"), (np.array([5, 6]).tolist(), None), ([np.int64(5)], None)):
        post = sg.sample(tiny, prompt, particles=2, max_tokens=2, seed=0)
        data = json.loads(post.to_json())
        assert data["given"] == post.given == prompt
        assert sg.Posterior.from_json(json.dumps(data)).given == prompt
        assert text is None or text in data["prompt"]
        del data["given"]  # as files of before
        assert sg.Posterior.from_json(json.dumps(data)).given is None
    assert sg.sample(tiny.given("Once"), particles=2, max_tokens=2, seed=0).given is None
