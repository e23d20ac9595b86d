"""Phrases with weights, a length to aim at, critics and contrasts: whole runs against enumeration."""

import math

import pytest

import smcgen as sg
from smcgen.potentials.check import check
from smcgen.potentials.soft import phrases, target_length
from tests.statistics import evidence_z, many
from tests.tables import TableLM, enumerate_target, tables
from tests.test_mutations import worst_z
from tests.test_potential_function import PROMPT, VOCABULARY, bind, read

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
IDS = (2, 0)
OPTIONS = {"draft": SMALL, "block": 1}


def test_laws_hold():
    check(phrases({"ab": 1.0, "é": -0.5}), VOCABULARY, ["ab", "aé", "", "abab"])
    check(target_length(2, 1.5), VOCABULARY, ["ab", "aé", "", "aabb"])


def test_evidence_and_expectations_are_unbiased():
    def phi(text):
        return math.exp(0.8 * text.count("ab") - 0.6 * text.count("c") - 0.5 * ((len(text) - 3) / 1.5) ** 2)

    truth = enumerate_target([(BASE, 1.0, IDS)], phi=phi)
    target = LM * phrases({"ab": 0.8, "c": -0.6}) * target_length(3, 1.5)
    assert worst_z(target, truth, OPTIONS) < 4.2


def test_a_power_of_a_soft_factor():
    truth = enumerate_target([(BASE, 1.0, IDS)], phi=lambda text: math.exp(1.2 * text.count("b")))
    assert worst_z(LM * phrases({"b": 0.6}) ** 2, truth, OPTIONS) < 4.2


def test_a_critic_reads_its_own_prompt():
    """lm * lm.given(criticism)**gamma: the same text, judged after another prompt."""
    truth = enumerate_target([(BASE, 1.0, IDS), (BASE, 0.5, (1, 1))])
    assert worst_z(LM * LM.given([1, 1]) ** 0.5, truth, OPTIONS) < 4.2


def test_a_contrast():
    truth = enumerate_target([(BASE, 1.0, IDS), (DRAFT, -0.5, IDS)])
    assert worst_z(LM / SMALL**0.5, truth, OPTIONS) < 4.2


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_a_contrast_without_support(options):
    barred = DRAFT.table.clone()
    barred[..., 1] = -math.inf
    target = LM / sg.LM(TableLM(barred, "barred")) ** 0.5
    with pytest.raises(sg.UsageError, match="negative exponent gives probability 0"):
        sg.sample(target, "ca", particles=64, max_tokens=5, **options)
    both = BASE.table.clone()
    both[..., 1] = -math.inf
    one, other = TableLM(both, "one"), TableLM(barred, "other")
    truth = enumerate_target([(one, 1.0, IDS), (other, -0.5, IDS)], accept=lambda sample: 1 not in sample)
    assert abs(evidence_z(many(sg.LM(one) / sg.LM(other) ** 0.5), truth)) < 4


def test_a_text_that_is_too_long_counts_while_it_is_written():
    bound = bind(target_length(1, 0.5))
    assert read(bound, bound.start([PROMPT], 1), [[0, 1]]).item() == -2.0


def test_units():
    assert target_length(3, 1, "words")("one two three") == 0
    assert target_length(2, 1, "lines")("one\ntwo\nthree") == -0.5
    assert repr(target_length(3, 1, "words")) == "target_length(3, 1, 'words')"
    assert repr(phrases({"a": 1})) == "phrases({'a': 1})"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: phrases({}), "at least one phrase"),
        (lambda: phrases({"": 1.0}), "not empty"),
        (lambda: phrases({"a": -math.inf}), "use avoids"),
        (lambda: phrases({"a": math.nan}), "finite number"),
        (lambda: phrases(["a"]), "give a dict"),
        (lambda: target_length(10, 0), "scale=0"),
        (lambda: target_length(-1, 1), "n=-1"),
        (lambda: target_length(10, 1, "tokens"), "max_tokens"),
    ],
)
def test_bad_declarations(make, message):
    with pytest.raises(sg.UsageError, match=message):
        make()
