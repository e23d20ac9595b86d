"""Python functions as factors."""

import math
import warnings

import numpy as np
import pytest
import torch

from smcgen.errors import PotentialError, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import END, Prompt
from smcgen.potentials.check import check
from smcgen.potentials.function import potential

VOCABULARY = Vocabulary("small", [b"a", b"b", b"ab", b"\xc3", b"\xa9", b"<end>"], special=(5,), end_ids=(5,))
PROMPT = Prompt((), "")


def bind(factor):
    return factor.bind(VOCABULARY, (), torch.device("cpu"))


def read(bound, state, sequences):
    counts = torch.tensor([len(s) for s in sequences])
    tokens = torch.zeros(len(sequences), int(counts.max()), dtype=torch.int64)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return bound.extend(state, tokens, counts)


def test_laws_hold():
    check(potential(lambda text: -float(len(text))), VOCABULARY, ["ab", "aé", ""])
    check(potential(lambda text: "aa" not in text), VOCABULARY, ["ab", "baa"])
    check(potential(lambda text: -(len(text) ** 1.5), prefix=lambda text: -len(text) / 3), VOCABULARY, ["ab", "aé", ""])
    check(potential(lambda text: "aa" not in text, prefix=lambda text: "aa" not in text), VOCABULARY, ["ab", "baa"])


def test_guesses_telescope_to_the_function():
    @potential(prefix=lambda text: 0.5 * len(text))
    def counted(text):
        return -2.0 * text.count("b")

    bound = bind(counted)
    state = bound.start([PROMPT], 2)
    first = read(bound, state, [[0, 1], [2]])
    assert first.tolist() == [1.0, 1.0]
    end = bound.finish(state, torch.tensor([0, 1]), ["ab", "ab"], [END, END])
    assert (first + end).tolist() == [-2.0, -2.0]
    assert counted("bb") == -4.0
    assert repr(counted) == "counted"


def test_each_distinct_text_is_evaluated_once():
    asked = []

    def whole(text):
        asked.append(text)
        return 0.0

    guessed = []

    def prefix(text):
        guessed.append(text)
        return 0.0

    bound = bind(potential(whole, prefix=prefix))
    state = bound.start([PROMPT] * 500, 2)
    tokens = torch.tensor([[0, 1], [2, 0]] * 500)
    bound.extend(state, tokens, torch.tensor([2, 1] * 500))
    bound.finish(state, torch.arange(1000), ["ab"] * 1000, [END] * 1000)
    assert asked == ["ab"]
    assert sorted(guessed) == ["a", "ab"]


def test_an_incomplete_character_is_not_shown():
    seen = []
    bound = bind(potential(lambda text: 0.0, prefix=lambda text: seen.append(text) or 0.0))
    read(bound, bound.start([PROMPT], 1), [[0, 3, 4]])
    assert seen == ["a", "aé"]


def test_a_killed_prefix_stays_dead():
    bound = bind(potential(lambda text: 0.0, prefix=lambda text: not text.endswith("b")))
    state = bound.start([PROMPT], 3)
    assert read(bound, state, [[1, 0], [0, 0], [1]]).tolist() == [-math.inf, 0.0, -math.inf]
    assert bound.finish(state, torch.arange(3), ["ba", "aa", "b"], [END] * 3).tolist() == [-math.inf, 0.0, -math.inf]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, 0.0), (False, -math.inf), (2, 2.0), (np.float32(0.5), 0.5), (torch.tensor([-1.0]), -1.0), (np.True_, 0.0)],
)
def test_kinds_of_values(value, expected):
    bound = bind(potential(lambda text: value))
    state = bound.start([PROMPT], 1)
    assert bound.finish(state, torch.tensor([0]), [""], [END]).tolist() == [expected]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: 1 / 0, r"raised ZeroDivisionError \(division by zero\): make it return"),
        (lambda text: None, "returned NoneType: return log phi"),
        (lambda text: "no", "returned str"),
        (lambda text: math.inf, r"returned \+inf"),
        (lambda text: math.nan, 'returned NaN: return a number, or let nan="kill"'),
    ],
)
def test_bad_functions_are_named_with_their_text(function, message):
    bound = bind(potential(function, name="mine"))
    state = bound.start([PROMPT], 1)
    with pytest.raises(PotentialError, match=message) as error:
        bound.finish(state, torch.tensor([0]), ["x" * 1000], [END])
    assert "potential mine on the text 'xxx" in str(error.value)
    assert len(str(error.value)) < 250
    assert "\n" not in str(error.value)


def test_nan_kills_one_particle_and_warns_once():
    bound = bind(potential(lambda text: math.nan if "b" in text else 1.0, nan="kill"))
    state = bound.start([PROMPT], 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = bound.finish(state, torch.arange(3), ["a", "ab", "bb"], [END] * 3)
    assert values.tolist() == [1.0, -math.inf, -math.inf]
    assert len(caught) == 1


def test_bad_declarations():
    with pytest.raises(UsageError, match="expected a function"):
        potential("module:name")
    with pytest.raises(UsageError, match="nan="):
        potential(lambda text: 0.0, nan="ignore")
    for timeout in (0, math.inf, "5", True):
        with pytest.raises(UsageError, match="timeout="):
            potential(lambda text: 0.0, timeout=timeout)
