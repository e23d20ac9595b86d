"""The posterior under constraints, through the public call and against enumeration of all texts."""

import math

import numpy as np
import pytest

import smcgen as sg
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
