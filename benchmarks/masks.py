"""Cost of masks on a real vocabulary: ours beside raw llguidance in the same run.

    python -m benchmarks.masks MODEL [-o benchmarks/results/masks.json]

MODEL is a folder, a .gguf file or a hub id; only its tokenizer is used. Each constraint is walked along texts it accepts, in
the tokens that fit longest, several times; the time of a step is the least of all passes, so that other work on the machine
does not count. "mask" and "extend" are `Constraint.mask` and `extend` per row, on 1 row and on 32 rows with different
histories, every mask computed anew; "raw" is llguidance alone on the same grammar, forced tokens off. All on one thread,
nothing filled ahead. A constraint that runs on tables has no engine to compare: its masks are look-ups.
"""

from __future__ import annotations

import argparse
import json
import os
import time
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
from smcgen.potentials.history import ROOT
from smcgen.potentials.json_schema import json_schema
from smcgen.potentials.lark import lark
from smcgen.potentials.pattern import terminal
from smcgen.potentials.regex import regex
from smcgen.potentials.tables import token_table

CPU = torch.device("cpu")
PASSES = 7
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
        ['{"name": "Ada Lovelace", "age": 36, "tags": ["mathematics", "poetry"], "role": "admin"}'],
    ),
    "json": (lambda: lark(JSON), ['{"name": ["Ada", 1.5e3, true], "more": {"x": null, "why": "a \\"quoted\\" word"}}']),
    "arithmetic": (lambda: lark(ARITHMETIC), ["alpha * (12.5 + beta) - 3 / (x + 41) * -gamma + 1000"]),
    "sql": (
        lambda: lark(SQL),
        ["SELECT name, age FROM people WHERE age >= 30 AND city = 'New York' OR rank <> other LIMIT 10"],
    ),
    "python": (
        lambda: lark(PYTHON, parser="lalr"),
        ["total = 0\nfor x in values:\n    total = total + x * 2\n    if total > 10:\n        print(total)\n"],
    ),
    "python (earley)": (lambda: lark(PYTHON), ["total = 0\nfor x in values:\n    total = total + x * 2\n"]),
    "answer": (lambda: regex(r"The answer is -?[0-9]+\."), ["The answer is -1234."]),
    "regex": (lambda: regex(r"\w+@\w+\.(com|org)"), ["ada.lovelace@example.com".replace(".", "_", 1)]),
}


def ours(bound: Potential, ids: list[int], rows: int) -> np.ndarray:
    """Seconds of mask and extend per row along `ids`, float64 [steps, 2]: row r follows row 0 at a distance of r tokens."""
    state: Any = bound.start([Prompt((), "")], rows)
    words = torch.zeros(rows, (len(bound.vocabulary) + 31) // 32, dtype=torch.int32)
    times = []
    for step in range(len(ids) + rows - 1):
        at = step - torch.arange(rows)
        active = (at >= 0) & (at < len(ids))
        tokens, counts = torch.tensor(ids)[at.clamp(0, len(ids) - 1)][:, None], active.long()
        if isinstance(bound, Constraint):
            # Every mask is computed anew, by matchers that have not computed it before (llguidance keeps the last one).
            state.history["slot"][:] = -1
            state.matchers = {ROOT: bound.engine.matcher()}
            for node in set(state.nodes[active.numpy()].tolist()):
                bound._matcher(state, node)
        before = time.perf_counter()
        bound.mask(state, words, active)
        middle = time.perf_counter()
        values = bound.extend(state, tokens, counts)
        after = time.perf_counter()
        assert not values.any(), f"{bound.name} bars a token of its own text"
        count = int(active.sum())
        times.append(((middle - before) / count, (after - middle) / count))
    return np.array(times)


def raw(grammar: str, vocabulary: Vocabulary, ids: list[int]) -> np.ndarray:
    """Seconds of llguidance's own mask along `ids`, float64 [steps]."""
    tokenizer = vocabulary.llguidance()
    header = '%llguidance {"no_forcing": true, "allow_initial_skip": true}\n'
    prototype = llguidance.LLMatcher(tokenizer, header + grammar)
    words = torch.zeros(1, (tokenizer.vocab_size + 31) // 32, dtype=torch.int32)
    passes = []
    for _ in range(PASSES):
        matcher, times = prototype.deep_copy(), []
        for token in ids:
            before = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * 4)
            times.append(time.perf_counter() - before)
            assert matcher.try_consume_tokens([token]) == 1
        passes.append(times)
        prototype = matcher.deep_copy()  # warm
        prototype.reset()
    return np.min(passes, axis=0)


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


def measure(name: str, vocabulary: Vocabulary) -> dict:
    make, texts = CASES[name]
    before = time.perf_counter()
    constraint = make()
    loaded = time.perf_counter()
    bound = constraint.bind(vocabulary, (), CPU)
    result = {"runs_on": bound.runs_on, "verdict": getattr(bound, "verdict", "exact"), "load_ms": 1e3 * (loaded - before)}
    result["bind_ms"] = 1e3 * (time.perf_counter() - loaded)
    ids = [list(vocabulary.llguidance().greedy_tokenize(text)) for text in texts]
    result["tokens"] = sum(map(len, ids))
    for rows in (1, 32):
        found = [np.min([ours(bound, line, rows) for _ in range(PASSES)], axis=0) for line in ids]
        masks, extends = 1e6 * np.concatenate(found).T
        suffix = "" if rows == 1 else f"_{rows}"
        result |= {f"mask{suffix}": masks.mean(), f"p95{suffix}": np.percentile(masks, 95)}
        result[f"extend{suffix}"] = extends.mean()
    if isinstance(bound, Constraint):
        grammar = getattr(bound.engine, "grammar", None)
        if grammar is not None:
            plain = 1e6 * np.concatenate([raw(grammar, vocabulary, line) for line in ids])
            result |= {"raw": plain.mean(), "raw_p95": np.percentile(plain, 95)}
        result["clone"] = clone(bound, ids[0])
    result["resample_256"] = resampling(bound, ids[0])
    return {key: round(float(value), 1) if isinstance(value, float) else value for key, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model folder, .gguf file or hub id")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "masks.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    constraints.WORTH = float("inf")
    vocabulary = load(arguments.model).vocabulary
    vocabulary.llguidance()  # what all constraints share is not a part of binding
    token_table(terminal("."), vocabulary)
    results = {}
    columns = ("raw", "raw_p95", "mask", "p95", "extend", "mask_32", "p95_32", "extend_32", "clone", "resample_256")
    print(f"{len(vocabulary)} tokens, llguidance {llguidance.get_version().split()[0]}, microseconds unless said")
    print(f"{'':16s}" + "".join(f"{column:>13s}" for column in columns) + "  verdict")
    for name in CASES:
        results[name] = found = measure(name, vocabulary)
        print(
            f"{name:16s}"
            + "".join(f"{found.get(column, '-'):>13}" for column in columns)
            + f"  {found['verdict']}, {found['runs_on']}"
        )
    arguments.output.parent.mkdir(exist_ok=True)
    where = about("cpu")
    where["versions"]["llguidance"] = llguidance.get_version().split()[0].split("@")[1]
    if hasattr(os, "getloadavg"):
        where["load_average"] = round(os.getloadavg()[0], 1)  # what else the machine was doing
    arguments.output.write_text(json.dumps({**where, "vocabulary": len(vocabulary), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
