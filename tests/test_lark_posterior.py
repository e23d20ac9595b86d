"""The posterior under constraints, through the public call and against enumeration of all texts."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import smcgen as sg
from smcgen.errors import PotentialError
from smcgen.potentials import constraint as constraint_module
from smcgen.potentials.engine import Engine
from tests.statistics import FUNCTIONS, evidence_z, many, measure, z_score
from tests.tables import END, enumerate_target, log_p, tables, text_of

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
IDS = (2, 0)
NESTED = 'start: "a" start "c" | "b"'  # a^n b c^n: no regular expression
WORDS = 'start: (K | W)+\nK: "ab"\nW: /[bc]+/'  # a keyword that runs into words: lark must take W whole


def by(constraint):
    return lambda sample: constraint.accepts(text_of(sample))


CASES = {
    "context-free": sg.lark(NESTED),
    "exact parser": sg.lark(WORDS, exact=True),
    "contains and avoids": sg.contains("b") * sg.avoids("ca", "bb"),
    "length in chars": sg.length(2, 3, "chars"),
    "choice": sg.choice(["a", "ab", "abc", "cc", ""]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("alpha", [1, 2])
def test_evidence_and_expectations(name, alpha):
    parts = [factor for factor, _ in CASES[name].factors()]
    accept = lambda sample: all(by(part)(sample) for part in parts)  # noqa: E731
    truth = enumerate_target([(BASE, alpha, IDS)], accept=accept)
    posts = many(LM**alpha * CASES[name], draft=SMALL, block=2)
    assert abs(evidence_z(posts, truth)) < 4
    support = list(truth.gamma)
    weights = measure(posts, support)
    for label, f in FUNCTIONS.items():
        values = np.array([float(f(x)) for x in support])
        assert abs(z_score(weights @ values, truth.z * truth.expectation(f))) < 4.2, label


def test_masks_alone_are_wrong_and_weights_mend_it():
    constraint = sg.lark(NESTED)
    truth = enumerate_target([(BASE, 1, IDS)], accept=by(constraint))
    viable = {x[:n] for x in truth.gamma for n in range(len(x) + 1)}
    masked = {}
    for sample in truth.gamma:
        masked[sample] = 1.0
        for i, token in enumerate(sample):
            p = BASE.probabilities(IDS, sample[:i])
            allowed = sum(p[t] for t in range(END + 1) if (*sample[:i], t) in viable)
            masked[sample] *= p[token] / allowed
    shares = {x: g / truth.z for x, g in truth.gamma.items()}
    distance = 0.5 * sum(abs(shares[x] - masked[x]) for x in shares)
    assert distance > 0.05
    posts = many(LM * constraint, draft=SMALL, block=2)
    for weights, share in zip(measure(posts, list(shares)).T, shares.values(), strict=True):
        assert abs(z_score(weights, truth.z * share)) < 4.2


def test_a_text_that_cannot_grow_still_pays_for_its_end_token():
    constraint = sg.choice(["a"])
    expected = log_p(BASE, IDS, (0, END))
    for block in (1, 2, 4):
        posts = many(LM * constraint, groups=200, draft=SMALL, block=block)
        assert all(math.isclose(post.log_evidence, expected, abs_tol=1e-5) for post in posts)


def test_a_shorter_text_ends_although_a_longer_one_is_possible():
    constraint = sg.regex("[abc]{1,2}")
    truth = enumerate_target([(BASE, 1, IDS)], accept=by(constraint))
    support = list(truth.gamma)
    weights = measure(many(LM * constraint, draft=SMALL, block=2), support)[:, support.index((1, END))]
    assert abs(z_score(weights, truth.gamma[1, END])) < 4.2


@pytest.mark.parametrize("stops", [(), ("ca",)])
def test_masks_filled_ahead_change_nothing(stops, monkeypatch):
    found, submitted = [], []
    worker = ThreadPoolExecutor(1)
    submit = worker.submit
    monkeypatch.setattr(worker, "submit", lambda *job: submitted.append(job) or submit(*job))
    monkeypatch.setattr(constraint_module, "_worker", lambda: worker)
    for worth in (-1.0, math.inf):
        monkeypatch.setattr(constraint_module, "WORTH", worth)
        for options in ({"draft": SMALL, "block": 2}, {"draft": SMALL, "leniency": 1.5, "chains": 2}, {}):
            posts = many(LM * sg.lark(NESTED), groups=60, stop=stops, **options)
            found.append((posts.log_evidence, posts.arrays()["tokens"], posts.arrays()["log_weight"]))
    assert len(submitted) > 10
    for one, other in zip(found[:3], found[3:], strict=True):
        for a, b in zip(one, other, strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))


def test_an_error_of_the_thread_that_fills_ahead_is_raised(monkeypatch):
    monkeypatch.setattr(constraint_module, "WORTH", -1.0)
    monkeypatch.setattr(constraint_module, "_worker", lambda: ThreadPoolExecutor(1))
    fill, calls = Engine.fill, []

    def fails(*arguments):
        calls.append(threading.current_thread() is threading.main_thread())
        if not calls[-1]:
            raise PotentialError("no more")
        return fill(*arguments)

    monkeypatch.setattr(Engine, "fill", fails)
    with pytest.raises(PotentialError, match="no more"):
        many(LM * sg.lark(NESTED), groups=4)
    assert False in calls
