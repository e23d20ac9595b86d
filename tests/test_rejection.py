"""Adaptive weighted rejection: E[W 1{token = v}] = P(v) m(v) for every token, and whole runs against enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.lm.vocabulary import Vocabulary
from smcgen.proposals import rejection
from tests.statistics import evidence_z, many, measure, z_score
from tests.tables import TableLM, enumerate_target, tables
from tests.test_mutations import worst_z

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
LETTERS = "abcdefghi"
RUNS = 200_000


def one_token(probabilities) -> sg.LM:
    """A model whose first token has these probabilities: letters, the end token last."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log()
    size = len(logits)
    lm = TableLM(logits.expand(size + 1, size + 1, size), "one token")
    tokens = [*(letter.encode() for letter in LETTERS[: size - 1]), b"<end>"]
    lm.vocabulary = Vocabulary("one token", tokens, special=(size - 1,), end_ids=(size - 1,))
    return sg.LM(lm)


def weights_of(probabilities, accepted: str, candidates: int, power: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Weight [RUNS] and token [RUNS] of independent particles; texts in `accepted` live ("" is the end token alone)."""
    size = len(probabilities)
    allowed = [*accepted.replace(".", ""), *([""] if "." in accepted else [])]
    judge = sg.potential(lambda text: text in allowed, prefix=lambda text: text in allowed, name="judge")
    options = {"particles": 25_000, "max_tokens": 1, "threshold": 0, "resampling": "multinomial", "candidates": candidates}
    posts = many(one_token(probabilities) ** power * judge, groups=RUNS // 25_000, prompt=[size - 1], **options)
    arrays = posts.arrays()
    return np.exp(arrays["log_weight"]).ravel(), arrays["tokens"][..., 0].ravel()


SPREAD = np.array([0.3, 0.22, 0.15, 0.11, 0.08, 0.06, 0.04, 0.02, 0.012, 0.008])
RARE = np.array([0.5, 0.3, 0.2 - 1e-6, 1e-6])
CASES = {
    "half of them": (SPREAD, "bdfh.", 9),
    "few tries": (SPREAD, "cfi.", 3),
    "one try": (SPREAD, "ae", 1),
    "all good": (SPREAD, LETTERS + ".", 4),
    "end token alone": (SPREAD, ".", 5),
    "single token of mass 1e-6": (RARE[[3, 0, 1, 2]], "a", 4),
    "mass 1e-6 beside much": (RARE[[3, 0, 1, 2]], "ab", 2),
}


@pytest.mark.parametrize("power", [1.0, 1.5])
@pytest.mark.parametrize("name", CASES)
def test_every_token_has_its_weight(name, power):
    probabilities, accepted, candidates = CASES[name]
    weight, token = weights_of(probabilities, accepted, candidates, power)
    names = [*LETTERS[: len(probabilities) - 1], "."]
    for v, letter in enumerate(names):
        truth = probabilities[v] ** power if letter in accepted else 0.0
        values = weight * (token == v)
        if truth == 0:
            assert not values.any()
        elif values.any():
            # The masses are float32: where the estimate is certain, its rounding shows.
            assert abs(z_score(values, truth)) < 4.5 or math.isclose(values.mean(), truth, rel_tol=2e-6), letter
        else:  # 200,000 draws of 1e-6 may well hold none
            assert truth * RUNS < 5, letter


def test_a_single_good_token_is_found_with_certainty():
    weight, token = weights_of(RARE[[3, 0, 1, 2]], "a", 4)
    assert (token == 0).all()
    assert np.allclose(weight, 1e-6, rtol=1e-4)


def test_nothing_good_kills_with_its_cause():
    judge = sg.potential(lambda text: False, prefix=lambda text: False, name="judge")
    with pytest.raises(sg.NoSurvivors, match="judge"):
        sg.sample(LM * judge, "ca", max_tokens=3, candidates=4)


def no_c_after_b(text: str) -> bool:
    return "bc" not in text and "aa" not in text


def some(text: str) -> float:
    return 0.5 * text.count("b") if no_c_after_b(text) else -math.inf


RUN_CASES = {
    "conditions": (LM, no_c_after_b, 1.0, {}),
    "power and weights": (LM**2, some, 2.0, {}),
    "few candidates": (LM**0.5, some, 0.5, {"candidates": 2}),
    "multinomial": (LM, some, 1.0, {"resampling": "multinomial"}),
}


@pytest.mark.parametrize("name", RUN_CASES)
def test_evidence_and_expectations_are_unbiased(name):
    lm, judge, alpha, options = RUN_CASES[name]
    truth = enumerate_target([(BASE, alpha, (2, 0))], phi=lambda text: math.exp(value_of(judge, text)))
    target = lm * sg.potential(judge, prefix=judge)
    assert worst_z(target, truth, {"candidates": 4, **options}) < 4.2


def value_of(judge, text: str) -> float:
    value = judge(text)
    return (0.0 if value else -math.inf) if isinstance(value, bool) else value


def test_with_a_mask_a_stop_string_and_a_potential_without_prefix():
    """The end is judged too: whoever is about to end with a text that is refused tries another token."""
    odd = sg.potential(lambda text: len(text) % 2 == 1, name="odd")
    short = sg.potential(lambda text: "cb" not in text, prefix=lambda text: "cb" not in text)
    target = LM * sg.regex("[ab]*c?[ab]*") * odd * short

    def phi(text):
        return float(text.count("c") < 2 and len(text) % 2 == 1 and "cb" not in text)

    posts = many(target, candidates=4)
    truth = enumerate_target([(BASE, 1.0, (2, 0))], phi=phi)
    assert abs(evidence_z(posts, truth)) < 4
    weights = measure(posts, list(truth.gamma)).mean(0)
    assert 0.5 * np.abs(weights / weights.sum() - np.array(list(truth.gamma.values())) / truth.z).sum() < 0.03
    stopped = sg.sample(target, "ca", stop=["ab"], candidates=4, seed=1, particles=64, max_tokens=5)
    assert all(len(text) % 2 == 1 and "ab" not in text for text in stopped.texts(20))


def test_a_reward_is_not_asked_about_candidates():
    asked = []

    def counting(texts):
        asked.extend(texts)
        return [0.3 * len(text) for text in texts]

    judge = sg.potential(no_c_after_b, prefix=no_c_after_b)
    posts = many(LM * judge * sg.reward(counting), groups=4000, candidates=4)
    truth = enumerate_target([(BASE, 1.0, (2, 0))], phi=lambda text: math.exp(0.3 * len(text)) * no_c_after_b(text))
    assert abs(evidence_z(posts, truth)) < 4
    assert all(map(no_c_after_b, asked))


def test_fewer_particles_die():
    judge = sg.potential(no_c_after_b, prefix=no_c_after_b)
    plain, rejecting = (many(LM * judge, groups=500, **options) for options in ({}, {"candidates": 4}))
    deaths = [sum(r.deaths for post in posts for run in post.rounds for r in run) for posts in (plain, rejecting)]
    assert deaths[0] > 100
    assert deaths[1] == 0


def forget_the_estimate(patch):
    original = rejection.commit_local

    def commit_local(drawing, world, rows, active, token, log_q, log_weight, cause):
        original(drawing, world, rows, active, token, log_q, torch.where(log_q > -torch.inf, 0.0, log_weight), cause)

    patch.setattr(rejection, "commit_local", commit_local)


def test_forgetting_the_estimate_is_seen(monkeypatch):
    forget_the_estimate(monkeypatch)
    truth = enumerate_target([(BASE, 1.0, (2, 0))], phi=lambda text: float(no_c_after_b(text)))
    assert worst_z(LM * sg.potential(no_c_after_b, prefix=no_c_after_b), truth, {"candidates": 4}) > 6


def test_where_it_has_no_effect():
    with pytest.raises(sg.UsageError, match="with a draft"):
        sg.sample(LM * sg.potential(no_c_after_b), "ca", draft=SMALL, candidates=4)
    with pytest.raises(sg.UsageError, match="without a potential"):
        sg.sample(LM, "ca", candidates=4)
    with pytest.raises(sg.UsageError, match="that can kill"):
        sg.sample(LM * sg.reward(lambda texts: [0.0] * len(texts)), "ca", candidates=4)
    with pytest.raises(sg.UsageError, match="candidates=0"):
        sg.sample(LM * sg.potential(no_c_after_b), "ca", candidates=0)
