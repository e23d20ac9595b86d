"""Cost of masks on a real vocabulary: ours beside raw llguidance in the same run.

    python benchmarks/masks.py MODEL [-o benchmarks/results/masks.json]

MODEL is a folder, a .gguf file or a hub id; only its tokenizer is used. Each constraint is walked along texts it accepts, in
the tokens that fit longest, once to warm up and then timed. "ours" is `Constraint.mask` and `extend`
per row, on 1 row and on 32 rows with different histories, the mask cache dropped at every step; "raw" is llguidance alone
on the same grammar, forced tokens off. Times are CPU time of
the process, on one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import llguidance
import numpy as np
import torch

from smcgen.lm.load import load
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import Prompt
from smcgen.potentials.constraint import Constraint, Rows
from smcgen.potentials.history import ROOT
from smcgen.potentials.json_schema import json_schema
from smcgen.potentials.lark import lark
from smcgen.potentials.regex import regex

CPU = torch.device("cpu")
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
    "regex": (lambda: regex(r"\w+@\w+\.(com|org)"), ["ada.lovelace@example.com".replace(".", "_", 1)]),
}


def ours(bound: Constraint, ids: list[int], rows: int) -> list[tuple[float, float]]:
    """Times of mask and extend per distinct history along `ids`: row r follows row 0 at a distance of r tokens."""
    state: Rows = bound.start([Prompt((), "")], rows)
    words = torch.zeros(rows, (len(bound.vocabulary) + 31) // 32, dtype=torch.int32)
    times = []
    for step in range(len(ids) + rows - 1):
        at = step - torch.arange(rows)
        active = (at >= 0) & (at < len(ids))
        tokens = torch.tensor(ids)[at.clamp(0, len(ids) - 1)][:, None]
        # Every mask is computed anew, by matchers that have not computed it before (llguidance keeps the last one).
        state.history["slot"][:] = -1
        state.matchers = {ROOT: bound.engine.matcher()}
        for node in set(state.nodes[active.numpy()].tolist()):
            bound._matcher(state, node)
        before = time.process_time()
        bound.mask(state, words, active)
        middle = time.process_time()
        values = bound.extend(state, tokens, active.long())
        after = time.process_time()
        assert not values.any(), f"{bound.name} bars a token of its own text"
        count = int(active.sum())
        times += [((middle - before) / count, (after - middle) / count)]
    return times


def raw(grammar: str, vocabulary: Vocabulary, ids: list[int]) -> list[float]:
    """Times of llguidance's own mask along `ids`."""
    tokenizer = vocabulary.llguidance()
    header = '%llguidance {"no_forcing": true, "allow_initial_skip": true}\n'
    prototype = llguidance.LLMatcher(tokenizer, header + grammar)
    words = torch.zeros(1, (tokenizer.vocab_size + 31) // 32, dtype=torch.int32)
    for _ in range(2):
        matcher, times = prototype.deep_copy(), []
        for token in ids:
            before = time.process_time()
            matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * 4)
            times.append(time.process_time() - before)
            assert matcher.try_consume_tokens([token]) == 1
        prototype = matcher.deep_copy()  # warm
        prototype.reset()
    return times


def resampling(bound: Constraint, ids: list[int], rows: int = 256) -> float:
    """Microseconds to resample `rows` rows that stand at different places of a text."""
    state = bound.start([Prompt((), "")], rows)
    counts = torch.arange(rows) % (len(ids) + 1)
    bound.extend(state, torch.tensor([ids] * rows), counts)
    ancestors = torch.randint(0, rows, (rows,), generator=torch.Generator().manual_seed(0))
    before = time.process_time()
    bound.fork(state, ancestors)
    return 1e6 * (time.process_time() - before)


def clone(bound: Constraint, ids: list[int]) -> float:
    """Microseconds of one clone of a matcher that has read `ids`."""
    matcher = bound.engine.matcher()
    matcher.try_consume_tokens(ids)
    before = time.process_time()
    kept = [matcher.deep_copy() for _ in range(200)]
    return 1e6 * (time.process_time() - before) / len(kept)


def measure(name: str, vocabulary: Vocabulary) -> dict:
    make, texts = CASES[name]
    before = time.process_time()
    constraint = make()
    loaded = time.process_time()
    bound = constraint.bind(vocabulary, (), CPU)
    result = {"verdict": getattr(bound, "verdict", "exact"), "load_ms": 1e3 * (loaded - before)}
    result["bind_ms"] = 1e3 * (time.process_time() - loaded)
    ids = [list(vocabulary.llguidance().greedy_tokenize(text)) for text in texts]
    result["tokens"] = sum(map(len, ids))
    for rows in (1, 32):
        for line in ids:
            ours(bound, line, rows)
        masks, extends = 1e6 * np.concatenate([ours(bound, line, rows) for line in ids for _ in range(3)]).T
        suffix = "" if rows == 1 else f"_{rows}"
        result |= {f"mask{suffix}": masks.mean(), f"p95{suffix}": np.percentile(masks, 95)}
        result[f"extend{suffix}"] = extends.mean()
    grammar = getattr(bound.engine, "grammar", None)
    if grammar is not None:
        plain = 1e6 * np.concatenate([raw(grammar, vocabulary, line) for line in ids])
        result |= {"raw": plain.mean(), "raw_p95": np.percentile(plain, 95)}
    result |= {"clone": clone(bound, ids[0]), "resample_256": resampling(bound, ids[0])}
    return {key: round(float(value), 1) if isinstance(value, float) else value for key, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model folder, .gguf file or hub id")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "masks.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vocabulary = load(arguments.model).vocabulary
    results = {}
    columns = ("raw", "raw_p95", "mask", "p95", "extend", "mask_32", "p95_32", "extend_32", "clone", "resample_256")
    print(f"{len(vocabulary)} tokens, llguidance {llguidance.get_version().split()[0]}, microseconds unless said")
    print(f"{'':16s}" + "".join(f"{column:>13s}" for column in columns) + "  verdict")
    for name in CASES:
        results[name] = found = measure(name, vocabulary)
        print(f"{name:16s}" + "".join(f"{found.get(column, '-'):>13}" for column in columns) + f"  {found['verdict']}")
    arguments.output.parent.mkdir(exist_ok=True)
    where = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    arguments.output.write_text(json.dumps({**where, "vocabulary": len(vocabulary), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
