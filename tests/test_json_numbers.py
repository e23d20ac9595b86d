"""Numbers between bounds, against comparison of decimals."""

import itertools
import json
import re
import time
from decimal import Decimal
from fractions import Fraction

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smcgen.potentials.base import END, Prompt
from smcgen.potentials.derivative import dfa
from smcgen.potentials.engine import Recognizer, bytes_vocabulary
from smcgen.potentials.json_bounds import mended
from smcgen.potentials.json_exact import exact, loads
from smcgen.potentials.json_numbers import integers, numbers, whole
from smcgen.potentials.json_schema import json_schema
from smcgen.potentials.tables import over_bytes

DIGITS = "01259"
WHOLES = ["0", *"1259", *("".join(two) for two in itertools.product("1259", DIGITS)), "100", "101"]
FRACTIONS = ["", *("." + "".join(some) for size in (1, 2, 3) for some in itertools.product(DIGITS, repeat=size))]
SPELLINGS = [sign + one + other for sign in ("", "-") for one in WHOLES for other in FRACTIONS]
VALUES = [(text, Decimal(text), text.startswith("-")) for text in SPELLINGS]
BOUNDS = [None, -101, -10.5, -2.5, -2, -0.95, -0.5, -0.0, 0, 0.1, 0.15, 0.5, 0.95, 0.952, 1, 1.25, 2, 9.99, 10, 10.01, 100]


def decimal(bound):
    return Decimal(repr(bound))


def between(value, low, high, with_low, with_high):
    above = low is None or value > decimal(low) or (with_low and value == decimal(low))
    return above and (high is None or value < decimal(high) or (with_high and value == decimal(high)))


def empty(low, high, with_low, with_high):
    if low is None or high is None:
        return False
    return low > high or (low == high and not (with_low and with_high))


@pytest.mark.parametrize("low", BOUNDS)
def test_numbers_are_those_between_the_bounds(low):
    for high, with_low, with_high in itertools.product(BOUNDS, (True, False), (True, False)):
        if (low is None and high is None) or empty(low, high, with_low, with_high):
            continue
        found = re.compile(numbers(low, high, with_low, with_high)).fullmatch
        for text, value, minus in VALUES:
            expected = between(value, low, high, with_low, with_high) and not (minus and value == 0)
            assert (found(text) is not None) == expected, (low, high, with_low, with_high, text)


@pytest.mark.parametrize(
    ("low", "high", "inside", "outside"),
    [
        (1e-7, None, ["0.0000001", "0.00000010", "0.0000002", "1"], ["0", "0.0", "0.00000009", "0.00000001"]),
        (None, 1e-7, ["0", "0.0000001", "0.00000009", "-0.10", "-3"], ["0.00000011", "1"]),
        (-1e-7, 2.5e-7, ["-0.0000001", "0.00000025", "0.000000250"], ["-0.00000011", "0.000000251", "-1"]),
        (1e22, None, ["1" + "0" * 22, "1" + "0" * 22 + ".5"], ["9" * 22]),
        (
            2**53 + 1,
            2**64 - 1,
            ["9007199254740993", "18446744073709551615.0"],
            ["9007199254740992.9", "18446744073709551615.01"],
        ),
    ],
)
def test_bounds_with_exponents_and_many_digits(low, high, inside, outside):
    found = re.compile(numbers(low, high, True, True)).fullmatch
    assert all(found(text) for text in inside)
    assert not any(found(text) for text in outside)


def test_no_exponents_no_leading_zeros():
    found = re.compile(numbers(0, 20, True, True)).fullmatch
    assert not any(found(text) for text in ("1e0", "1E1", "01", "00", ".5", "1.", "+1", "", "-"))


@pytest.mark.parametrize("low", [None, -1005, -17, -9.5, -1, 0, 0.5, 3, 99, 2**53 - 1, 2**53 + 1])
def test_integers_are_those_between_the_bounds(low):
    for high in (None, -16, -1, 0, 7.5, 10, 1004, 2**53 + 2, 2**64 - 1):
        for flags in itertools.product((True, False), repeat=2):
            first, last = whole(low, high, *flags)
            if first is not None and last is not None and first > last:
                continue
            found = re.compile(integers(first, last)).fullmatch
            near = {n + d for n in (first, last, 0, 10, 100) if n is not None for d in range(-12, 13)}
            for n in near:
                assert (found(str(n)) is not None) == between(Decimal(n), low, high, *flags), (low, high, flags, n)


def test_automata_read_the_expressions_as_python_does():
    for low, high in ((0, 0.95), (-273.15, None), (-2.5, 0.15), (0.1, 0.15)):
        expression = numbers(low, high, False, True)
        automaton = over_bytes(dfa(f"/{expression}/", 1000))
        found = re.compile(expression).fullmatch
        assert all(automaton.reads(text.encode()) == (found(text) is not None) for text in SPELLINGS)


# --- masks and judge ------------------------------------------------------------------------------------------------


def schema_of(low, high, with_low, with_high, kind="number"):
    bounds = {"minimum" if with_low else "exclusiveMinimum": low, "maximum" if with_high else "exclusiveMaximum": high}
    return {"type": kind} | {key: bound for key, bound in bounds.items() if bound is not None}


def both(schema):
    """The schema on our own expression, and inside one that has none."""
    return json_schema(schema, 0), json_schema({"properties": {"n": schema}, "required": ["n"]}, 0)


def admits(constraint, text):
    """Whether a run takes it, which the masks decide byte by byte."""
    state = constraint.start([Prompt((), "")], 1)
    data = text.encode()
    value = constraint.extend(state, torch.tensor([list(data)]), torch.tensor([len(data)]))
    return bool(value[0] == 0 and constraint.finish(state, torch.tensor([0]), [text], [END])[0] == 0)


def bound(constraint):
    return constraint.bind(bytes_vocabulary(), (), torch.device("cpu"))


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"minimum": 0, "maximum": 0.95}, ["0.9", "0.95", "0.950", "0", "0.0", "0.09"], ["0.951", "1", "-0.1", "0.96"]),
        ({"maximum": 1.25}, ["1.2", "1.25", "1.250", "-0.50", "-7"], ["1.251", "1.3", "2"]),
        ({"minimum": 0, "maximum": 99.99}, ["99.9", "99.99", "99", "99.0"], ["99.991", "100"]),
        ({"minimum": 0.1, "maximum": 0.15}, ["0.1", "0.10", "0.15", "0.12"], ["0.09", "0.151", "0"]),
        ({"minimum": -273.15}, ["-273.1", "-273.15", "-0.50", "3"], ["-273.16", "-274"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.50", "0.01", "0.10"], ["0", "0.0", "0.51", "-0.1"]),
        ({"exclusiveMinimum": 2, "maximum": 2.5}, ["2.5", "2.01", "2.10"], ["2", "2.0", "2.51"]),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, ["-2.5", "-2.50", "-2.1"], ["-2", "-2.0", "-2.51"]),
        ({"minimum": -2.5, "maximum": 0, "exclusiveMaximum": -2}, ["-2.5", "-2.01"], ["-2", "-1", "0"]),
        ({"exclusiveMinimum": 0}, ["0.50", "1.0", "0.000001"], ["0", "0.0", "-1"]),
        ({"minimum": 4.5, "maximum": 5}, ["5", "5.0", "4.5", "4.9"], ["4.4", "5.01"]),
        ({"minimum": 1e-7, "maximum": 1}, ["0.0000001", "0.1"], ["0", "0.00000009"]),
    ],
)
def test_masks_keep_within_bounds(schema, inside, outside):
    for constraint, around in zip(both({"type": "number", **schema}), ("%s", '{"n":%s}'), strict=True):
        run = bound(constraint)
        assert constraint.verdict == "exact"
        for text in inside + outside:
            assert admits(run, around % text) == constraint.accepts(around % text) == (text in inside), (around, text)


@pytest.mark.parametrize("low", BOUNDS[::3])
def test_the_engine_is_given_ranges_that_it_gets_right(low):
    for high, with_low, with_high in itertools.product(BOUNDS[::2], (True, False), (True, False)):
        if (low is None and high is None) or low == high or empty(low, high, with_low, with_high):
            continue
        given = mended(schema_of(low, high, with_low, with_high))
        takes = Recognizer(f"start: %json {json.dumps(given.schema)}\n", "ranges")
        assert not given.doubts
        for text, value, minus in VALUES[::7]:
            expected = between(value, low, high, with_low, with_high) and not (minus and value == 0)
            assert takes(text) == expected, (low, high, with_low, with_high, text)


NUMBER = st.integers(-30000, 30000).flatmap(lambda n: st.sampled_from([n, n / 10, n / 1000, n / 100000]))


@settings(max_examples=60, deadline=None)
@given(NUMBER, NUMBER, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_ranges_of_any_digits(low, high, with_low, with_high, random):
    low, high = min(low, high), max(low, high)
    if low == high:
        return
    given_ = mended(schema_of(low, high, with_low, with_high))
    takes = Recognizer(f"start: %json {json.dumps(given_.schema)}\n", "ranges")
    own = re.compile(numbers(low, high, with_low, with_high)).fullmatch
    for _ in range(60):
        near = decimal(random.choice([low, high, (low + high) / 2])).quantize(Decimal("1e-6"))
        value = near + Decimal(random.choice([0, 0, 1, -1])).scaleb(-random.randint(0, 6))
        text = format(value, "f")
        text = text[: len(text) - random.randint(0, 4)] if random.random() < 0.5 else text.rstrip("0").rstrip(".")
        if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", text) and not re.fullmatch(r"-0(\.0*)?", text):
            expected = between(Decimal(text), low, high, with_low, with_high)
            assert takes(text) == expected, (low, high, text)
            assert (own(text) is not None) == expected, (low, high, text)


@pytest.mark.parametrize(
    ("step", "inside", "outside"),
    [
        (0.01, ["19.99", "19.9", "0.07", "-3.14", "5", "5.0", "1.10"], ["19.995", "0.001"]),
        (0.25, ["0.5", "0.50", "0.25", "1", "1.0", "2.75"], ["0.3", "0.26", "0.51"]),
        (0.125, ["0.5", "0.25", "0.125", "0.50", "0.250", "3"], ["0.13", "0.126"]),
        (1.5, ["3", "1.5", "4.5", "3.0"], ["1", "2.5"]),
        (7, ["14", "-7", "0"], ["15"]),
    ],
)
def test_multiples(step, inside, outside):
    for constraint, around in zip(both({"type": "number", "multipleOf": step}), ("%s", '{"n":%s}'), strict=True):
        run = bound(constraint)
        assert constraint.verdict == "exact"
        for text in inside + outside:
            assert admits(run, around % text) == constraint.accepts(around % text) == (text in inside), text


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (
            {"multipleOf": 0.01, "exclusiveMinimum": 0, "maximum": 9.99},
            ["9.99", "0.01", "0.10", "5", "5.0"],
            ["0", "10", "9.995"],
        ),
        ({"multipleOf": 0.1, "exclusiveMaximum": 85.1038}, ["85.1", "85", "85.0", "-0.1"], ["85.2", "85.05", "86"]),
        ({"multipleOf": 0.1, "minimum": -7.65421, "maximum": -1}, ["-7.6", "-1", "-1.0"], ["-7.7", "-0.9"]),
        ({"multipleOf": 0.1, "minimum": 0.5, "maximum": 1.99658}, ["0.5", "1.9"], ["0.4", "2", "2.0"]),
        ({"multipleOf": 0.001, "minimum": 1e-7, "exclusiveMaximum": 1.3920664606198265}, ["1.392", "0.001"], ["0", "1.393"]),
        ({"multipleOf": 0.01, "minimum": -273.15, "maximum": -273.15}, ["-273.15"], ["-273.14", "-273.16"]),
        ({"multipleOf": 0.25, "enum": [0.5, 0.3, 16.25]}, ["0.5", "16.25"], ["0.3"]),
        ({"multipleOf": 0.1, "enum": [16.1, 85.1, 0.25]}, ["16.1", "85.1"], ["0.25"]),
    ],
)
def test_multiples_within_bounds(schema, inside, outside):
    for constraint, around in zip(both({"type": "number", **schema}), ("%s", '{"n":%s}'), strict=True):
        run = bound(constraint)
        assert constraint.exact or "the engine would round" in constraint.doubts[0]
        for text in inside + outside:
            assert admits(run, around % text) == (text in inside), text


def test_integers_that_are_multiples_of_a_fraction():
    run = bound(json_schema({"type": "integer", "multipleOf": 0.07, "minimum": 3}))
    assert [n for n in range(30) if admits(run, str(n))] == [7, 14, 21, 28]


def test_multiples_that_meet_are_bounded_together():
    began = time.perf_counter()
    constraint = json_schema({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]})
    run = bound(constraint)
    assert time.perf_counter() - began < 2
    assert admits(run, str(9973 * 9967))
    assert not admits(run, "9973")
    assert not admits(run, "9967")


def test_an_excluded_bound_of_many_digits_is_judged_at_the_end():
    constraint = json_schema({"properties": {"n": {"type": "number", "exclusiveMinimum": 12345678901.25}}})
    run = bound(constraint)
    assert constraint.verdict == "checked at the end"
    assert admits(run, '{"n":12345678901.2500001}')
    assert not admits(run, '{"n":12345678901.25}')


@pytest.mark.parametrize("step", [1_000_003, 10_000_019, 2**61 - 1, 0.07, 1e-9, 123.4567891])
def test_multiples_beyond_the_engine_are_judged_at_the_end(step):
    began = time.perf_counter()
    constraint = json_schema({"type": "number", "multipleOf": step})
    run = bound(constraint)
    assert time.perf_counter() - began < 1
    assert constraint.verdict == "checked at the end"
    assert f"multipleOf {step}" in " ".join(constraint.doubts)
    three = format(decimal(step) * 3, "f")
    assert admits(run, three)
    assert not admits(run, three + "1" if "." in three else str(int(three) + 1))


@pytest.mark.parametrize("n", [2**53 + 1, 2**60 + 1, 2**63, 2**64 - 1])
def test_large_integers(n):
    for schema, good, bad in (
        ({"type": "integer", "minimum": n}, n, n - 1),
        ({"type": "integer", "minimum": 0, "maximum": n}, n, n + 1),
        ({"type": "integer", "exclusiveMinimum": -n}, 1 - n, -n),
        ({"const": n}, n, n + 1),
        ({"enum": [n, "a"]}, n, n - 1),
        ({"type": "number", "maximum": n}, n, n + 1),
    ):
        for constraint, around in zip(both(schema), ("%s", '{"n":%s}'), strict=True):
            run = bound(constraint)
            assert admits(run, around % good)
            assert not admits(run, around % bad)
            assert constraint.accepts(around % good)
            assert not constraint.accepts(around % bad)
        assert json_schema(schema).verdict == "exact"


def test_small_integers_stay_as_they_are():
    for schema in (
        {"type": "integer", "minimum": -5, "maximum": 10**9},
        {"type": "integer", "exclusiveMinimum": 0.5},
        {"const": 0.5},
    ):
        assert mended(schema).schema == schema


def test_numbers_are_judged_by_their_digits():
    judge = exact(jsonschema.Draft202012Validator)
    steps, values = ["0.01", "0.25", "3", "1e2", "2.5e-3"], ["0", "19.99", "-0.75", "1e3", "300", "0.0025", "7e-3", "12.5"]
    for step, text in itertools.product(steps, values):
        expected = (Fraction(text) / Fraction(step)).denominator == 1
        assert judge({"multipleOf": json.loads(step)}).is_valid(loads(text)) == expected, (step, text)
    assert not judge({"multipleOf": 0.01}).is_valid(loads("1e-999999999"))  # at once
    assert judge({"multipleOf": 3}).is_valid(loads("3e999999999"))
    assert not judge({"maximum": 0.5}).is_valid(loads("0.50000000000000000001"))
    assert judge({"maximum": 0.5, "multipleOf": 2}).is_valid("a string")
    old = exact(jsonschema.Draft4Validator)({"minimum": 0, "exclusiveMinimum": True})
    assert not old.is_valid(loads("0.0"))
    assert old.is_valid(loads("0.1"))
