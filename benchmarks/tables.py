"""Tables of regular conditions over a real vocabulary: how large they are, how long they take to make, and to refuse.

    python -m benchmarks.tables MODEL [-o benchmarks/results/tables.json]

MODEL is a folder, a .gguf file or a hub id; only its tokenizer is used. "cpu" and "gpu" are what `bind` allows on either
device (the tables are made on the CPU in both cases). Seconds are the least of three, on one thread, nothing in a cache but the
tree of the tokens; megabytes are those of the tables and, as "peak", of all that Python held while they were made. "agrees" is
the trial of a schema's expression against llguidance, "bind" what llguidance takes for the same condition.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.about import about
from benchmarks.masks import PERSON
from smcgen.lm.load import load
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.agreement import agrees
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.json_schema import Schema, json_schema
from smcgen.potentials.regex import regex
from smcgen.potentials.tables import HASTY, PATIENT, STATE, STEPS, token_table
from smcgen.potentials.text import avoids, choice, contains

CPU = torch.device("cpu")
REPEATS = 3
POINTS = {
    "type": "array",
    "maxItems": 5,
    "items": {
        "type": "object",
        "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
}
CASES: dict[str, Callable[[], Any]] = {
    "answer": lambda: regex(r"The answer is -?[0-9]+\."),
    "address": lambda: regex(r"\w+@\w+\.(com|org)"),
    "any 100": lambda: regex("(?s).{0,100}"),
    "fifty words": lambda: regex(r"(\w+ ){0,50}\w+"),
    "letters 1900": lambda: regex("[a-z]{1900}"),
    "exponential": lambda: regex("[ab]*a[ab]{15}"),
    "choice of 1000": lambda: choice([f"option {i * 7919 % 10007} of many" for i in range(1000)]),
    "contains eight": lambda: contains(*"abcdefgh"),
    "avoids": lambda: avoids("kiwi", "plum"),
    "schema": lambda: json_schema(PERSON),
    "schema, no blanks": lambda: json_schema(PERSON, 0),
    "points": lambda: json_schema(POINTS),
}


def least(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and the least seconds it took."""
    seconds = []
    for _ in range(REPEATS):
        before = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - before)
    return found, min(seconds)


def made(expression: str, vocabulary: Vocabulary, steps: int) -> dict:
    """The table of an expression within so many steps, its size and its cost."""
    table, seconds = least(lambda: token_table.__wrapped__(expression, vocabulary, steps))
    found: dict[str, Any] = {"seconds": round(seconds, 3), "states": None}
    if table is not None:
        found |= {"states": table.states, "classes": table.next.shape[1], "megabytes": round(table.bytes / 1e6, 1)}
    tracemalloc.start()
    token_table.__wrapped__(expression, vocabulary, steps)
    found["peak"] = round(tracemalloc.get_traced_memory()[1] / 1e6, 1)
    tracemalloc.stop()
    return found


def measure(name: str, vocabulary: Vocabulary) -> dict:
    constraint = CASES[name]()
    result: dict[str, Any] = {}
    for device, steps in (("cpu", HASTY if isinstance(constraint, Schema) else STEPS), ("gpu", PATIENT)):
        expression = constraint.expression
        assert expression is not None, name
        result[device] = made(expression, vocabulary, steps)
        if isinstance(constraint, Schema):
            question = (expression, constraint.translation, steps // STATE)
            right, seconds = least(lambda question=question: agrees.__wrapped__(*question))
            result[device] |= {"agrees": right, "agrees_seconds": round(seconds, 3)}
    _, seconds = least(lambda: Constraint.bind(constraint, vocabulary, (), CPU))
    return result | {"bind_seconds": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="model folder, .gguf file or hub id")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "tables.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vocabulary = load(arguments.model).vocabulary
    token_table("/a/", vocabulary)  # the tree of the tokens
    results = {}
    for name in CASES:
        results[name] = found = measure(name, vocabulary)
        for device in ("cpu", "gpu"):
            row = found[device]
            size = f"{row['states']} states, {row['classes']} classes, {row['megabytes']} MB" if row["states"] else "too large"
            print(f"{name} ({device}): {size}; {row['seconds']} s, peak {row['peak']} MB", flush=True)
    head = about("cpu")
    if hasattr(os, "getloadavg"):
        head["load_average"] = round(os.getloadavg()[0], 1)  # what else the machine was doing
    arguments.output.write_text(json.dumps({**head, "vocabulary": len(vocabulary), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
