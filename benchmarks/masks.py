"""Cost of masks on a real vocabulary: ours beside raw llguidance in the same run.

    python -m benchmarks.masks MODEL [-o benchmarks/results/masks.json]

MODEL is a folder, a .gguf file or a hub id; only its tokenizer is used. Texts that each constraint accepts are walked along,
token by token, as a run does: masks, then one more token for every row. One row reads the tokens that fit longest; 8 and 32
rows read a text in spellings of their own, and what counts is steps at which all their histories differ. llguidance alone
walks along the same tokens with a matcher per row, forced tokens off, in turn with ours. The time of a step is that of
the processor, the least of all passes, so that other work on the machine counts little. All on one thread, nothing filled
ahead; microseconds:

    mask, extend        `Constraint.mask` and `Constraint.extend`, per row; mask_32 and extend_32 with 32 rows
    raw, raw_extend     llguidance's own mask, and its reading of a token, per row; raw_32 and raw_extend_32 with 32 rows
    ratio, ratio_32     mask / raw
    step_8, raw_step_8  one step of 8 rows, masks and extend together; what llguidance alone takes for it
    engine, engine_8    a step of 1 row and of 8 with all that the engine does about it on the host (`smc.factors.Potentials`)
    clone               one copy of a matcher after the whole text
    resample_256        256 rows at different places become copies of others

A constraint that runs on tables has no engine to compare: its masks are look-ups.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import torch

from benchmarks.about import about
from smcgen.lm.load import load
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials import constraint as constraints
from smcgen.potentials.base import Potential, Prompt
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.engine import HEADER
from smcgen.potentials.json_schema import json_schema
from smcgen.potentials.lark import lark
from smcgen.potentials.pattern import terminal
from smcgen.potentials.regex import regex
from smcgen.potentials.tables import token_table
from smcgen.smc.factors import Potentials

CPU = torch.device("cpu")
PASSES = 7
LONG = 5.0  # seconds after which two passes are enough
APART = 6  # tokens after which all rows differ
KEPT = {
    1: ("raw", "raw_p95", "mask", "p95", "ratio", "raw_extend", "extend", "engine"),
    8: ("raw_step", "step", "engine"),
    32: ("raw", "mask", "p95", "ratio", "raw_extend", "extend"),
}
JSON = """
start: value
?value: object | array | ESCAPED_STRING | SIGNED_NUMBER | "true" | "false" | "null"
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: ESCAPED_STRING ":" value
%import common (ESCAPED_STRING, SIGNED_NUMBER, WS)
%ignore WS
"""
ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "-" atom | CNAME | "(" sum ")"
%import common (NUMBER, CNAME, WS)
%ignore WS
"""
SQL = r"""
start: "SELECT" columns "FROM" NAME ["WHERE" condition] ["LIMIT" INT]
columns: "*" | NAME ("," NAME)*
condition: test (("AND" | "OR") test)*
test: NAME OPERATOR (INT | STRING | NAME)
OPERATOR: "<=" | ">=" | "<>" | "=" | "<" | ">"
NAME: /[a-z_][a-z0-9_]*/
STRING: /'[^'\n]*'/
%import common (INT, WS)
%ignore WS
"""
PYTHON = r"""
start: statement+
statement: simple _NL0 | head ":" block4
block4: (_NL4 simple | _NL4 head ":" block8)+ _NL0
block8: (_NL8 simple)+
head: "if" test | "for" NAME "in" test | "while" test
simple: NAME "=" test | "return" test | NAME "(" [test ("," test)*] ")"
test: sum (COMPARE sum)?
sum: atom (("+" | "-" | "*") atom)*
atom: NAME | INT | STRING | "(" test ")" | "[" [test ("," test)*] "]"
COMPARE: "==" | "<" | ">"
NAME: /[a-z_][a-z0-9_]*/
STRING: /"[^"\n]*"/
_NL0: /\n(?! )/
_NL4: /\n {4}(?! )/
_NL8: /\n {8}(?! )/
%import common.INT
%ignore / +/
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "role": {"enum": ["admin", "user", "guest"]},
    },
    "required": ["name", "age", "tags", "role"],
    "additionalProperties": False,
}
CASES = {
    "schema": (
        lambda: json_schema(PERSON),
        '{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "poetry"], "role": "admin"}',
    ),
    "json": (lambda: lark(JSON), '{"name": ["Ada", 1.5e3, true], "more": {"x": null, "why": "a \\"quoted\\" word"}}'),
    "arithmetic": (lambda: lark(ARITHMETIC), "alpha * (12.5 + beta) - 3 / (x + 41) * -gamma + 1000"),
    "sql": (
        lambda: lark(SQL),
        "SELECT name, age FROM people WHERE age >= 30 AND city = 'New York' OR rank <> other LIMIT 10",
    ),
    "python": (
        lambda: lark(PYTHON, parser="lalr"),
        "total = 0\nfor x in values:\n    total = total + x * 2\n    if total > 10:\n        print(total)\n",
    ),
    "python (earley)": (lambda: lark(PYTHON), "total = 0\nfor x in values:\n    total = total + x * 2\n"),
    "answer": (lambda: regex(r"The answer is -?[0-9]+\."), "The answer is -1234."),
    "regex": (lambda: regex(r"\w+@\w+\.(com|org)"), "ada_lovelace@example.com"),
}


def spellings(text: str, vocabulary: Vocabulary, rows: int) -> list[list[int]]:
    """`text` in the tokens that fit longest for one row; for more, the beginnings of as many random spellings, equally long,
    that differ in the first tokens."""
    if rows == 1:
        return [list(vocabulary.llguidance().greedy_tokenize(text))]
    numbers = {token: i for i, token in enumerate(vocabulary.tokens) if token}
    longest, data, choice = max(map(len, numbers)), text.encode(), random.Random(rows)
    found: dict[tuple[int, ...], list[int]] = {}
    while len(found) < rows:
        tokens, at = [], 0
        while at < len(data):
            fitting = [n for n in range(1, min(longest, len(data) - at) + 1) if data[at : at + n] in numbers]
            size = max(fitting) if choice.random() < 0.3 else choice.choice(fitting)
            tokens.append(numbers[data[at : at + size]])
            at += size
        found.setdefault(tuple(tokens[:APART]), tokens)
    return [tokens[: min(map(len, found.values()))] for tokens in found.values()]


def ours(bound: Potential, lines: list[list[int]]) -> np.ndarray:
    """Seconds of mask and extend, float64 [steps, 2], of all rows together; row r reads `lines[r]`."""
    state: Any = bound.start([Prompt((), "")], len(lines))
    words = torch.zeros(len(lines), (len(bound.vocabulary) + 31) // 32, dtype=torch.int32)
    active, counts = torch.ones(len(lines), dtype=torch.bool), torch.ones(len(lines), dtype=torch.int64)
    times = []
    for tokens in torch.tensor(lines).T[..., None]:
        before = time.thread_time()
        bound.mask(state, words, active)
        middle = time.thread_time()
        values = bound.extend(state, tokens, counts)
        after = time.thread_time()
        assert not values.any(), f"{bound.name} bars a token of its own text"
        times.append((middle - before, after - middle))
    return np.array(times)


def raw(grammar: str, vocabulary: Vocabulary, lines: list[list[int]]) -> Callable[[], np.ndarray]:
    """What does the same as `ours` by llguidance alone, with a matcher per row."""
    prototype = llguidance.LLMatcher(vocabulary.llguidance(), HEADER + grammar)
    words = torch.zeros(len(lines), (vocabulary.llguidance().vocab_size + 31) // 32, dtype=torch.int32)

    def walk() -> np.ndarray:
        matchers, times = [prototype.deep_copy() for _ in lines], []
        places, size = [row.data_ptr() for row in words], 4 * words.shape[1]
        for tokens in zip(*lines, strict=True):
            before = time.thread_time()
            for matcher, place in zip(matchers, places, strict=True):
                matcher.unsafe_compute_mask_ptr(place, size)
            middle = time.thread_time()
            read = [matcher.try_consume_tokens([token]) for matcher, token in zip(matchers, tokens, strict=True)]
            after = time.thread_time()
            assert all(read), "llguidance refuses a token of its own text"
            times.append((middle - before, after - middle))
        return np.array(times)

    return walk


def engine(bound: Potential, lines: list[list[int]]) -> np.ndarray:
    """Seconds of a step, float64 [steps], of masks and extend as the engine calls them."""
    potentials = Potentials([bound], [1.0], (1, len(lines)), len(bound.vocabulary), lambda *_: [], CPU)
    active, counts = torch.ones(1, len(lines), dtype=torch.bool), torch.ones(1, len(lines), dtype=torch.int64)
    times = []
    for tokens in torch.tensor(lines).T[:, None, :, None]:
        before = time.thread_time()
        potentials.bits(active)
        potentials.extend(potentials.hard, tokens, counts)
        times.append(time.thread_time() - before)
    return np.array(times)


def resampling(bound: Potential, ids: list[int], rows: int = 256) -> float:
    """Microseconds to resample `rows` rows that stand at different places of a text."""
    state = bound.start([Prompt((), "")], rows)
    counts = torch.arange(rows) % (len(ids) + 1)
    bound.extend(state, torch.tensor([ids] * rows), counts)
    ancestors = torch.randint(0, rows, (rows,), generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(PASSES):
        before = time.perf_counter()
        bound.fork(state, ancestors)
        times.append(time.perf_counter() - before)
    return 1e6 * min(times)


def clone(bound: Constraint, ids: list[int]) -> float:
    """Microseconds of one clone of a matcher that has read `ids`."""
    matcher = bound.engine.matcher()
    matcher.try_consume_tokens(ids)
    times = []
    for _ in range(PASSES):
        before = time.perf_counter()
        kept = [matcher.deep_copy() for _ in range(50)]
        times.append((time.perf_counter() - before) / len(kept))
    return 1e6 * min(times)


def figures(bound: Potential, lines: list[list[int]]) -> dict[str, float]:
    """Microseconds of the steps along `lines`, ours and llguidance's."""
    walks = {"ours": lambda: ours(bound, lines)}
    if "engine" in KEPT[len(lines)]:
        walks["engine"] = lambda: engine(bound, lines)
    if (grammar := getattr(getattr(bound, "engine", None), "grammar", None)) is not None:
        walks["raw"] = raw(grammar, bound.vocabulary, lines)
    passes, began = [], time.perf_counter()
    while len(passes) < PASSES and (len(passes) < 2 or time.perf_counter() - began < LONG):
        passes.append({kind: 1e6 * walk() for kind, walk in walks.items()})
    least = {kind: np.min([each[kind] for each in passes], axis=0) for kind in walks}
    if len(lines) > 1:  # rows with the same history share a mask
        least = {kind: times[APART:] for kind, times in least.items()}
    found = {kind: least[kind].mean() for kind in walks if kind == "engine"} | {"step": least["ours"].sum(-1).mean()}
    masks, extends = least["ours"].T / len(lines)
    found |= {"mask": masks.mean(), "p95": np.percentile(masks, 95), "extend": extends.mean()}
    if grammar is not None:
        plain, reads = least["raw"].T / len(lines)
        found |= {"raw": plain.mean(), "raw_p95": np.percentile(plain, 95), "raw_extend": reads.mean()}
        found |= {"raw_step": least["raw"].sum(-1).mean(), "ratio": masks.mean() / plain.mean()}
    return found


def measure(name: str, vocabulary: Vocabulary) -> dict:
    make, text = CASES[name]
    before = time.perf_counter()
    constraint = make()
    loaded = time.perf_counter()
    bound = constraint.bind(vocabulary, (), CPU)
    result = {"runs_on": bound.runs_on, "verdict": getattr(bound, "verdict", "exact"), "load_ms": 1e3 * (loaded - before)}
    result["bind_ms"] = 1e3 * (time.perf_counter() - loaded)
    for rows, kept in KEPT.items():
        found = figures(bound, spellings(text, vocabulary, rows))
        result |= {column if rows == 1 else f"{column}_{rows}": found[column] for column in kept if column in found}
    ids = spellings(text, vocabulary, 1)[0]
    result["tokens"] = len(ids)
    if isinstance(bound, Constraint):
        result["clone"] = clone(bound, ids)
    result["resample_256"] = resampling(bound, ids)
    return {key: _short(value, 2 if "ratio" in key else 1) for key, value in result.items()}


def _short(value: Any, digits: int) -> Any:
    return round(float(value), digits) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="model folder, .gguf file or hub id")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "masks.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    constraints.WORTH = float("inf")
    vocabulary = load(arguments.model).vocabulary
    vocabulary.llguidance()  # what all constraints share is not a part of binding
    token_table(terminal("."), vocabulary)
    results = {}
    print(f"{len(vocabulary)} tokens, llguidance {llguidance.get_version().split()[0].split('@')[1]}, microseconds unless said")
    for name in CASES:
        results[name] = found = measure(name, vocabulary)
        print(f"{name}: {found['verdict']}, {found['runs_on']}")
        print("   " + ", ".join(f"{column} {value}" for column, value in found.items() if isinstance(value, float)))
    arguments.output.parent.mkdir(exist_ok=True)
    where = about("cpu")
    where["versions"]["llguidance"] = llguidance.get_version().split()[0].split("@")[1]
    if hasattr(os, "getloadavg"):
        where["load_average"] = round(os.getloadavg()[0], 1)  # what else the machine was doing
    arguments.output.write_text(json.dumps({**where, "vocabulary": len(vocabulary), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
