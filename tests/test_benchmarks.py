"""What the benchmarks compute by themselves: how answers are judged, means with their errors, the laws of a set acceptance."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import exact, frontier, round, tasks

QUESTIONS = Path(tasks.ROOT) / "reasoning_gym.jsonl"


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(tasks.ROOT).glob("*.py")))
def test_what_they_import_is_there(name):
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize(
    ("text", "gold", "is_right"),
    [
        ("It is 12, no, 13.", 13, True),
        ("13", "13", True),
        ("-7", "7", False),
        ("12 or 13?", 12, False),
        ("none", 7, False),
        ("so 12 = 2 × 2 × 3.", "2 × 2 × 3", True),
        ("2 × 2 × 3 × 5", "2 × 2 × 3", False),
        ("Yes. No?", "Yes", True),
        ("nothing", "No", False),
        ("It is Paris!", "Paris", True),
        ("Parisians", "Paris", False),
        ('{"name": "Ann", "age": 40}', ["Ann", 40], True),
        ('{"name": "Ann"}', ["Ann", 40], False),
    ],
)
def test_answers_are_judged(text, gold, is_right):
    assert tasks.right(text, gold) is is_right


def test_questions_are_answered_by_their_answers():
    items = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    assert len(items) == 400
    kinds = {item["task"] for item in items}
    assert len(kinds) == 10
    assert all(tasks.right(f"The answer is {item['gold']}.", item["gold"]) for item in items)
    assert all(tasks.answer_in(item["gold"], item["gold"]) == item["gold"] for item in items)
    first = tasks.choose(QUESTIONS, 10)
    assert {item["task"] for item in first} == kinds  # in turn


def test_errors_of_means():
    rng = np.random.default_rng(0)
    prompts, repeats, runs = 8, 4, 4000
    level = rng.normal(0, 3, (1, prompts, 1))  # what the prompts are is no error of the mean over them
    found = np.array([frontier.mean(x.ravel(), repeats) for x in level + rng.normal(0, 1, (runs, prompts, repeats))])
    assert found[:, 0].std() == pytest.approx(1 / math.sqrt(prompts * repeats), rel=0.05)
    assert np.square(found[:, 1]).mean() == pytest.approx(1 / (prompts * repeats), rel=0.05)
    # Items are a sample: their spread counts, and the repeats of one are no more items.
    found = np.array([tasks.mean(rng.normal(0, 3, (50, 1)) + rng.normal(0, 1, (50, repeats))) for _ in range(runs)])
    assert found[:, 0].std() == pytest.approx(math.sqrt((9 + 1 / repeats) / 50), rel=0.05)
    assert np.square(found[:, 1]).mean() == pytest.approx((9 + 1 / repeats) / 50, rel=0.05)


def test_laws_of_a_set_acceptance():
    p, q = exact.laws(300, 0.75)
    for law in (p, q):
        assert float(law.sum()) == pytest.approx(1)
    assert float(torch.minimum(p, q).sum()) == pytest.approx(0.75)


def test_rounds_beside_plain_decoding():
    """Rounds that cost what the formula says, 3 ms a token and one plain forward of 10, agree with it."""
    plain = round.BASE | {"what": "plain decoding, one row", "particles": 1, "milliseconds": 10, "tokens_per_second": 100}
    rows = [round.BASE | {"what": "round", "block": block, "milliseconds": 10 + 3 * block} for block in (8, 16, 4)]
    for row in rows:
        row["tokens_per_second"] = 1000 * (row["block"] + 1) / row["milliseconds"]
    others = [rows[0] | {"groups": 4}, rows[0] | {"particles": 16}, rows[0] | {"failed": "out of memory"}]
    round.compare(rows)
    assert not any("times_plain" in row for row in rows)
    round.compare([*rows, *others, plain])
    assert all(row["formula"] == pytest.approx(row["times_plain"]) for row in rows)
    assert rows[0]["formula"] == pytest.approx(9 / 3.4)
    assert ["times_plain" in row for row in others] == [False, True, False]
    assert not any("formula" in row for row in others)
