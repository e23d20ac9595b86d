"""Functions of many texts, coroutines, time limits and states that are carried along."""

import asyncio
import math
import time

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.errors import PotentialError, UsageError
from smcgen.potentials.base import END
from smcgen.potentials.check import check
from smcgen.potentials.function import potential
from tests.statistics import evidence_z, many
from tests.tables import enumerate_target, tables
from tests.test_potential_function import PROMPT, VOCABULARY, bind, read

BASE, _ = tables()
LM = sg.LM(BASE)


def finish(factor, texts):
    bound = bind(factor)
    state = bound.start([PROMPT], len(texts))
    return bound.finish(state, torch.arange(len(texts)), texts, [END] * len(texts)).tolist()


def test_a_batched_function_gets_each_distinct_text_once():
    asked = []

    @potential(batch=True, prefix=lambda texts: [0.1 * len(text) for text in texts])
    def lengths(texts):
        asked.append(texts)
        return [-float(len(text)) for text in texts]

    assert finish(lengths, ["ab", "a", "ab", ""]) == [-2, -1, -2, 0]
    assert asked == [["ab", "a", ""]]
    check(lengths, VOCABULARY, ["ab", "aé", ""])


def test_the_prefixes_of_a_whole_block_are_asked_together():
    asked = []

    def guess(texts):
        asked.append(texts)
        return [0] * len(texts)

    bound = bind(potential(lambda texts: [0] * len(texts), batch=True, prefix=guess))
    read(bound, bound.start([PROMPT], 2), [[0, 1, 0], [1]])
    assert [sorted(texts) for texts in asked] == [["a", "ab", "aba", "b"]]


@pytest.mark.parametrize("values", [np.array([-1.0, -2.0]), torch.tensor([[-1.0], [-2.0]]), (-1, -2), [torch.tensor(-1), -2.0]])
def test_kinds_of_batches(values):
    assert finish(potential(lambda texts: values, batch=True), ["a", "b"]) == [-1, -2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda texts: [0.0], "on the text 'aa' and 1 more returned 1 values"),
        (lambda texts: 0.5, "returned float: return a list"),
        (lambda texts: [0.0, math.nan], "on the text 'bb' returned NaN"),
        (lambda texts: [0.0, math.inf], r"on the text 'bb' returned \+inf"),
        (lambda texts: [1 / ("b" not in text) for text in texts], "on the text 'bb' raised ZeroDivisionError"),
        (lambda texts: [0.0, None], "on the text 'bb' returned NoneType"),
    ],
)
def test_bad_batches_name_the_text(function, message):
    with pytest.raises(PotentialError, match=message):
        finish(potential(function, batch=True), ["aa", "bb"])


def test_coroutines_overlap():
    running, most = 0, 0

    @potential
    async def slow(text):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return float(len(text))

    began = time.perf_counter()
    assert finish(slow, ["a" * n for n in range(20)]) == list(range(20))
    assert time.perf_counter() - began < 1
    assert most == 20


def test_coroutines_inside_a_running_loop():
    @potential
    async def likes_b(text):
        await asyncio.sleep(0)
        return 0.5 * text.count("b")

    async def call():
        return sg.sample(LM * likes_b, "ca", max_tokens=3, seed=1)

    assert asyncio.run(call()).log_evidence == sg.sample(LM * likes_b, "ca", max_tokens=3, seed=1).log_evidence


def test_a_coroutine_of_a_batch():
    @potential(batch=True)
    async def lengths(texts):
        await asyncio.sleep(0)
        return [len(text) for text in texts]

    assert finish(lengths, ["a", "ab"]) == [1, 2]


def test_a_coroutine_that_fails_names_its_text():
    @potential(name="judge")
    async def broken(text):
        await asyncio.sleep(0)
        return 1 / ("b" not in text)

    with pytest.raises(PotentialError, match="potential judge on the text 'ab' raised ZeroDivisionError"):
        finish(broken, ["a", "ab", "aa"])


async def sleeps(text):
    await asyncio.sleep(3 if "b" in text else 0)
    return 0.0


async def blocks(text):
    time.sleep(3 if "b" in text else 0)  # a coroutine that never yields
    return 0.0


def hangs(text):
    time.sleep(3 if "b" in text else 0)
    return 0.0


@pytest.mark.parametrize("function", [sleeps, hangs])
def test_a_call_that_hangs_stops_the_run(function):
    with pytest.raises(PotentialError, match=rf"potential {function.__name__} on the text 'ab' did not return within 0.1 s"):
        finish(potential(function, timeout=0.1), ["a", "ab"])
    assert finish(potential(function, timeout=0.5), ["a", "aa"]) == [0.0, 0.0]


def test_a_coroutine_that_blocks_its_loop_stops_the_run(monkeypatch):
    monkeypatch.setattr("smcgen.potentials.calls.GRACE", 0.1)
    with pytest.raises(PotentialError, match=r"did not return within 0\.1 s"):
        finish(potential(blocks, timeout=0.1), ["b"])
    assert finish(potential(sleeps, timeout=0.5), ["a"]) == [0.0]  # others have a loop that works


def test_a_batch_that_hangs_stops_the_run():
    with pytest.raises(PotentialError, match=r"on the text 'ab' and 1 more did not return within 0\.1 s"):
        finish(potential(lambda texts: time.sleep(3), batch=True, timeout=0.1), ["ab", "b"])


def test_a_time_limit_that_is_not_reached_changes_nothing():
    def likes_b(text):
        return 0.5 * text.count("b")

    results = [sg.sample(LM * potential(likes_b, timeout=t), "ca", max_tokens=3, seed=1).log_evidence for t in (None, 60)]
    assert results[0] == results[1]


def test_a_state_is_carried_along():
    pieces = []

    def step(stack, piece):
        pieces.append(piece)
        stack.append(piece)  # the state is this particle's own
        return 0.1 * len("".join(stack)), stack

    joined = potential(lambda stack: -float(len("".join(stack))), prefix=step, state=[], name="joined")
    check(joined, VOCABULARY, ["ab", "aé", "", "aab"])
    pieces.clear()
    bound = bind(joined)
    state = bound.start([PROMPT], 2)
    assert read(bound, state, [[0, 1], [2]]).tolist() == pytest.approx([0.2, 0.2])
    bound.fork(state, torch.tensor([1, 1]))
    assert read(bound, state, [[0], [1]]).tolist() == pytest.approx([0.1, 0.1])
    assert pieces == ["a", "ab", "b", "a", "b"]
    assert bound.finish(state, torch.tensor([0, 1]), ["aba", "ab"], [END, END]).tolist() == pytest.approx([-3.3, -2.3])


def test_a_state_that_kills():
    def step(depth, piece):
        for character in piece:
            depth += 1 if character == "a" else -1
            if depth < 0:
                return False, depth
        return True, depth

    closed = potential(lambda depth: depth == 0, prefix=step, state=0, name="closed")
    check(closed, VOCABULARY, ["ab", "aabb", "a", "ba"])

    def balanced(text):
        depths = np.cumsum([1 if c == "a" else -1 for c in text])
        return len(text) == 0 or bool(depths.min() >= 0 and depths[-1] == 0)

    exact = enumerate_target([(BASE, 1.0, (2, 0))], phi=lambda text: float(balanced(text)))
    assert abs(evidence_z(many(LM * closed, groups=4000), exact)) < 4


def test_bad_states():
    with pytest.raises(UsageError, match="needs prefix="):
        potential(lambda state: 0.0, state=0)
    with pytest.raises(UsageError, match="plain functions only"):
        potential(lambda state: 0.0, state=0, prefix=lambda state, piece: (0, state), batch=True)
    with pytest.raises(UsageError, match="timeout=0"):
        potential(lambda text: 0.0, timeout=0)
    bound = bind(potential(lambda state: 0.0, state=0, prefix=lambda state, piece: 0.0, name="mine"))
    with pytest.raises(PotentialError, match=r"potential mine \(prefix\): return \(guess, new state\), not float"):
        read(bound, bound.start([PROMPT], 1), [[0]])
