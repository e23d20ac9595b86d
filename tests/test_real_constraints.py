"""Ten grammars and ten schemas on SmolLM2-135M-Instruct: what is reported as finished is valid, and most of it finishes.

Slow; SMCGEN_SMOLLM2 names the GGUF file (see the README).
"""

from __future__ import annotations

import json
import os

import jsonschema
import lark
import pytest

import smcgen as sg

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SMCGEN_SMOLLM2" not in os.environ, reason="SMCGEN_SMOLLM2 names no GGUF file"),
]
RUNS = 15
WS = "%import common.WS\n%ignore WS\n"
WORD = "WORD: /[a-z]{1,8}/\n"

# Name: prompt, grammar.
GRAMMARS = {
    "calc": (
        "Write a short sum.",
        'start: sum\nsum: product (("+" | "-") product)*\nproduct: atom (("*" | "/") atom)*\n'
        'atom: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/\n%ignore " "\n',
    ),
    "json": (
        "Give a small JSON object with a name and an age.",
        'start: object\nobject: "{" [pair ("," pair)*] "}"\npair: STRING ":" value\nvalue: STRING | NUMBER | object\n'
        'STRING: /"[a-zA-Z ]{0,12}"/\nNUMBER: /[0-9]{1,3}/\n' + WS,
    ),
    "sql": (
        "Write an SQL query that selects the name of all users.",
        'start: "SELECT " columns " FROM " NAME [" WHERE " NAME " = " NUMBER] ";"\n'
        'columns: "*" | NAME (", " NAME)*\nNAME: /[a-z_]{1,10}/\nNUMBER: /[0-9]{1,4}/\n',
    ),
    "list": ("Name three fruits, separated by commas.", 'start: WORD ("," " " WORD)+ "."\n' + WORD),
    "date": (
        "On which day did the war end?",
        'start: DAY " " MONTH " " YEAR\nDAY: /[1-9]|[12][0-9]|3[01]/\n'
        'MONTH: "January" | "May" | "June" | "August" | "November"\nYEAR: /1[89][0-9]{2}/\n',
    ),
    "assignments": (
        "Set x and y to numbers.",
        'start: line~2..3\nline: NAME " = " NUMBER "\\n"\nNAME: /[a-z]/\nNUMBER: /[0-9]{1,2}/\n',
    ),
    "ambiguous": ("Say something about fruit.", 'start: noun " " verb " " noun\nnoun: WORD [" " WORD]\nverb: WORD\n' + WORD),
    "dialogue": (
        "Write a dialogue of two lines.",
        'start: said said\nsaid: ("A: " | "B: ") WORD (" " WORD)~1..4 /[.?!]/ "\\n"\n' + WORD,
    ),
    "markup": ("Write a short heading in HTML.", 'start: "<h1>" WORD (" " WORD)* "</h1>"\n' + WORD),
    "balanced": ("Write brackets.", 'start: pair+\npair: "(" pair* ")" | "[" pair* "]"\n'),
}

# Name: prompt, schema.
SCHEMAS = {
    "person": ("Describe a person.", {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
               "age": {"type": "integer", "minimum": 0, "maximum": 120}}, "required": ["name", "age"],
               "additionalProperties": False}),
    "numbers": ("Give three numbers.", {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "minItems": 3, "maxItems": 3}),
    "enum": ("Is the sky blue?", {"enum": ["yes", "no", "perhaps"]}),
    "boolean": ("Is two more than one?", {"type": "boolean"}),
    "nested": ("Where is Rome?", {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10},
               "at": {"type": "object", "properties": {"lat": {"type": "integer", "minimum": -90, "maximum": 90}},
               "required": ["lat"], "additionalProperties": False}}, "required": ["city", "at"],
               "additionalProperties": False}),
    "pattern": ("Give a product code.", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "either": ("Give a number or a word.", {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9},
               {"type": "string", "maxLength": 8}]}),
    "unique": ("Give two different digits.", {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
               "minItems": 2, "maxItems": 2, "uniqueItems": True}),
    "optional": ("Describe a book.", {"type": "object", "properties": {"title": {"type": "string", "maxLength": 20},
                 "pages": {"type": "integer", "minimum": 1, "maximum": 999}}, "required": ["title"],
                 "additionalProperties": False}),
    "constant": ("Say hello.", {"type": "object", "properties": {"say": {"const": "hello"}}, "required": ["say"],
                 "additionalProperties": False}),
}  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> sg.LM:
    return sg.LM(os.environ["SMCGEN_SMOLLM2"], dtype="bfloat16")


def finished(lm: sg.LM, prompt: str, constraint: sg.Potential) -> list[str]:
    """The drawn texts of the runs that have one that ended."""
    options = {"particles": 8, "max_tokens": 48, "on_budget": "condition", "seed": 0, "groups": RUNS}
    posts = sg.sample(lm * constraint, [prompt] * RUNS, **options)
    texts = [post.text for post in posts if not post.failed and post.sample.reason == "end"]
    print(f"{constraint!r}: {len(texts)} of {RUNS} ended, e.g. {texts[:1]}, {posts.info['seconds']:.0f} s")
    return texts


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(lm, name):
    prompt, grammar = GRAMMARS[name]
    parser = lark.Lark(grammar, parser="earley", lexer="dynamic")
    texts = finished(lm, prompt, sg.lark(grammar))
    for text in texts:
        parser.parse(text)
    assert len(texts) >= 0.9 * RUNS


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(lm, name):
    prompt, schema = SCHEMAS[name]
    texts = finished(lm, prompt, sg.json_schema(schema))
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(texts) >= 0.9 * RUNS
