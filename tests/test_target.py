"""The algebra: products and powers are values, print themselves, and refuse what means nothing."""

from __future__ import annotations

import pytest

import smcgen as sg
from tests.tables import tables

BASE, DRAFT = tables()
lm, small = sg.LM(BASE), sg.LM(DRAFT)


@sg.potential
def short(text: str) -> float:
    return -len(text)


def test_repr():
    target = lm.given("ab").at(temperature=0.7) ** 2 * small**0.5 * sg.regex("a+") * short**3
    assert repr(target) == ("LM('base').given('ab').at(temperature=0.7)**2 * LM('draft')**0.5 * regex('a+') * short**3")
    assert repr(sg.LM("some/model").quantized(4)) == "LM('some/model:int4')"
    assert len(repr(lm.given("x" * 1000))) < 80


def test_powers_distribute_and_equal_models_merge():
    target = (lm * small**2 * short) ** 0.5
    assert [p for _, p in target.factors()] == [0.5, 1, 0.5]
    assert (lm * lm).factors() == ((lm, 2.0),)
    assert (lm**3 / lm).factors() == ((lm, 2.0),)
    assert (lm / lm).factors() == ()
    assert len((lm * lm.given("a")).factors()) == 2
    assert len((lm * lm.at(temperature=2)).factors()) == 2


def test_values_do_not_change():
    given = lm.given([1, 2])
    assert lm.prompt is None
    assert given.prompt == (1, 2)
    assert given == lm.given([1, 2])
    assert given != lm
    assert hash(given) == hash(lm.given([1, 2]))
    assert given.at(temperature=2.0).prompt == (1, 2)
    with pytest.raises(AttributeError):
        lm.temperature = 2.0
    with pytest.raises(AttributeError):
        (lm * short).terms = ()
    assert lm.given([{"role": "user", "content": "a"}]).prompt == ({"role": "user", "content": "a"},)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sg.regex("a") ** 2, "hard constraint"),
        (lambda: (lm * sg.regex("a")) ** 2, "write the power on the other factors"),
        (lambda: short**-1, "returns -log phi"),
        (lambda: lm / short, "returns -log phi"),
        (lambda: lm / sg.regex("a"), "opposite condition"),
        (lambda: lm**0, "leave it out"),
        (lambda: lm ** float("nan"), "finite"),
        (lambda: lm ** float("inf"), "finite"),
        (lambda: lm**1e31, "up to 1e\\+30"),
        (lambda: lm**10**400, "up to 1e\\+30"),
        (lambda: lm.at(temperature=1e-300), "at least 1e-30"),
        (lambda: sg.sample(lm, "a", draft=small, draft_temperature=1e-300), "at least 1e-30"),
        (lambda: sg.sample(lm.at(temperature=0), "a"), "positive number"),
        (lambda: lm.at(temperature=-1), "positive number"),
        (lambda: lm.at(temperature=float("nan")), "positive number"),
        (lambda: sg.sample(sg.regex("a"), "a"), "no language model"),
        (lambda: sg.sample(small**-1, "a"), "negative"),
        (lambda: sg.sample(lm / lm, "a"), "no language model"),
        (lambda: sg.sample("tiny", "a"), "give a language model"),
        (lambda: lm * test_other_types_do_not_multiply, "plain function: .*smcgen.potential"),
    ],
)
def test_what_means_nothing_is_refused(make, message):
    with pytest.raises(sg.UsageError, match=message):
        make()


def test_other_types_do_not_multiply():
    with pytest.raises(TypeError):
        lm * 2
    with pytest.raises(TypeError):
        lm ** "2"
