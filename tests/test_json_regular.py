"""JSON Schemas on tables: the same language as llguidance's, state by state and token by token."""

import json
import os

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import smcgen as sg
from smcgen.lm.load import load
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials import json_schema as module
from smcgen.potentials.agreement import agrees
from smcgen.potentials.base import BUDGET, END, STOP, Prompt
from smcgen.potentials.check import check
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.json_regular import regular
from smcgen.potentials.json_schema import json_schema
from smcgen.potentials.regex import Regular
from smcgen.potentials.tabled import Tabled
from smcgen.potentials.tables import PATIENT
from tests.statistics import many
from tests.stops import cut

CPU = torch.device("cpu")
PIECES = ['{"', '": ', '", "', '"}', "true", "12", "}]", "\n  ", '":"', "null", "e1", "-0.", '\\"', "\\u00", "漢é", "a b", "ab"]
HALVES = [b"\xc3", b"\xa9a", b"\xe6\xbc", b"\xa2", b"\xf0\x9f", b"\x98\x80"]
TOKENS = [*(bytes([i]) for i in range(256)), *(p.encode() for p in PIECES), *HALVES, b"<end>"]
VOCABULARY = Vocabulary("pieces", TOKENS, special=(len(TOKENS) - 1,), end_ids=(len(TOKENS) - 1,))
STOPS = [(), ("\n\n",), ("}",), ("1", "b12"), ('": ', "a")]


def closed(properties, required=None, others=False):
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": others}


INTEGER, TEXT, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
POINT = closed({"x": {"type": "number"}, "y": {"type": "number"}})
SCHEMAS = {
    "integer": INTEGER,
    "number": {"type": "number"},
    "string": TEXT,
    "boolean": {"type": "boolean"},
    "bounds": {"type": "number", "minimum": -1.25, "exclusiveMaximum": 30},
    "digits": {"type": "integer", "minimum": -17, "maximum": 1005},
    "enum": {"enum": ["a", 'b\n"é', 1, None, True, 1.5, [1], {"k": "v"}]},
    "typed enum": {"type": ["integer", "string"], "enum": [1, "a", None]},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
    "search": {"type": "string", "pattern": "a.b|c$", "maxLength": 6},
    "quotes": {"type": "string", "pattern": '^["\\\\\\n\\x01é]*$'},
    "date-time": {"type": "string", "format": "date-time"},
    "email": {"type": "string", "format": "email"},
    "list": {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [INTEGER, TEXT], "items": NULL, "minItems": 1, "maxItems": 4},
    "object": closed({"name": TEXT, "age": {"type": "integer", "minimum": 0}}, ["name"]),
    "optional": closed({"a": INTEGER, "ab": NULL, "b": {"type": "boolean"}}, []),
    "map": closed({}, [], NULL),
    "any of": {"anyOf": [closed({"a": INTEGER}), {"type": "array", "items": NULL}, TEXT]},
    "one of": {"oneOf": [closed({"t": {"const": "a"}, "x": INTEGER}), closed({"t": {"const": "b"}, "y": TEXT})]},
    "reference": {"$defs": {"p": POINT}, "type": "array", "items": {"$ref": "#/$defs/p"}},
    "all of": {"allOf": [closed({"a": INTEGER, "b": TEXT}, []), {"type": "object", "required": ["b"]}]},
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """As on a GPU: schemas that a CPU would leave to llguidance run on tables."""
    monkeypatch.setattr(module, "HASTY", PATIENT)


def row_of(bound, state):
    out = torch.zeros(1, (len(bound.vocabulary) + 31) // 32, dtype=torch.int32)
    bound.mask(state, out, torch.ones(1, dtype=torch.bool))
    return out


def read(bound, state, token):
    return bound.extend(state, torch.tensor([[token]]), torch.ones(1, dtype=torch.int64))


def walk(bound, schema, folded, random, steps=60):
    """Masks, steps and verdicts of tables and llguidance along one random text; the text if it ended.

    schema: the same schema on llguidance. With stop strings its masks may let tokens pass after which only a dead end is left;
    `folded` is llguidance on the expression with the stop strings in it, which foresees that."""
    others = [schema, folded] if bound.stops else [schema]
    states, tokens = [x.start([Prompt((), "")], 1) for x in (bound, *others)], []
    end = bound.vocabulary.end_ids[0]
    for _ in range(steps):
        rows = [row_of(x, state) for x, state in zip((bound, *others), states, strict=True)]
        text = bound.vocabulary.decode(tokens)
        assert torch.equal(rows[0], rows[-1]), (bound.stops, text)
        assert not (rows[0] & ~rows[1]).any(), (bound.stops, text)
        for reason in (END, BUDGET, *([STOP] if bound.stops else [])):
            values = [x.finish(y, torch.tensor([0]), [text], [reason]) for x, y in zip((bound, schema), states, strict=False)]
            assert torch.equal(*values), (bound.stops, text, reason)
        allowed = np.flatnonzero(np.unpackbits(rows[0].numpy().view(np.uint8), bitorder="little"))
        if end in allowed and random.random() < 0.5:
            return text
        allowed = allowed[allowed != end]
        if not len(allowed):
            return None
        # Tokens that do the same are one choice, so that a text does not stay in a string.
        after = bound.host.next[int(states[0].now), bound.host.classes[allowed].long()]
        token = int(random.choice(allowed[(after == random.choice(np.unique(after))).numpy()]))
        if random.random() < 0.01:
            token = int(random.integers(end))
        tokens.append(token)
        values = [read(x, state, token) for x, state in zip((bound, *others), states, strict=True)]
        assert torch.equal(values[0], values[-1]), (bound.stops, bound.vocabulary.decode(tokens))
        if values[0] == -np.inf or cut(bound.vocabulary.decode(tokens), bound.stops) is not None:  # the sample is over
            return None
    return None


def walks(constraint, vocabulary, stops, count, seed):
    """How many of so many random texts ended, and whether all of them are valid."""
    try:
        folded = Constraint.bind(Regular("folded", constraint.expression), vocabulary, stops, CPU)
    except sg.Impossible:
        with pytest.raises(sg.Impossible):
            constraint.bind(vocabulary, stops, CPU)
        return 0
    bound, host = constraint.bind(vocabulary, stops, CPU), Constraint.bind(constraint, vocabulary, stops, CPU)
    assert isinstance(bound, Tabled)
    random, ended = np.random.default_rng(seed), 0
    for _ in range(count):
        text = walk(bound, host, folded, random)
        if text is not None and not stops:
            ended += 1
            jsonschema.validate(json.loads(text), constraint.schema)
    return ended


@pytest.mark.parametrize("blanks", [0, 2, None])
@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_are_those_of_llguidance(name, blanks):
    constraint = json_schema(SCHEMAS[name], blanks)
    assert walks(constraint, VOCABULARY, (), 12, 1) > 0
    for stops in STOPS[1:]:
        if blanks == 0:
            walks(constraint, VOCABULARY, stops, 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_are_those_of_llguidance_on_many_texts(name, stops):
    walks(json_schema(SCHEMAS[name], 2), VOCABULARY, stops, 200, 2)


@pytest.mark.parametrize("blanks", [0, 20, None])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_state_agrees(name, blanks):
    constraint = json_schema(SCHEMAS[name], blanks)
    assert constraint.expression is not None
    assert agrees(constraint.expression, constraint.translation, 2000)


BOUND = st.one_of(st.none(), st.integers(-2000, 2000), st.integers(-3000, 3000).map(lambda n: n / 100))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["integer", "number"]), BOUND, BOUND, st.booleans(), st.booleans())
def test_numbers_between_bounds(kind, low, high, above, below):
    schema = {"type": kind}
    if low is not None:
        schema["exclusiveMinimum" if above else "minimum"] = low
    if high is not None:
        schema["exclusiveMaximum" if below else "maximum"] = high
    try:
        constraint = json_schema(schema, 0)
    except sg.SmcgenError:
        return
    assert agrees(constraint.expression, constraint.translation, 2000)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "array"},
        {"type": "array", "items": INTEGER, "uniqueItems": True},
        {"type": "integer", "multipleOf": 3},
        {"type": "string", "format": "uri"},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": False},
        {"type": "object", "properties": {"a": INTEGER}},
        closed({"a": INTEGER}, ["a"], NULL),  # an undeclared key may be a declared one in escapes
        closed({f"{chr(97 + i)}{i}": TEXT for i in range(200)}, []),
        {"type": "string", "maxLength": 3000},
        {"properties": {"n": {"type": "integer", "maximum": 10**17}}},
    ],
)
def test_the_others_stay_with_llguidance(schema):
    bound = json_schema(schema).bind(VOCABULARY, (), CPU)
    assert isinstance(bound, Constraint)
    assert bound.runs_on == "llguidance"


def test_a_language_that_is_not_llguidances_is_not_used(monkeypatch):
    right = regular(SCHEMAS["object"], 0)
    for wrong in (right.replace("[1-9]", "[2-9]"), right.replace("a", "b"), f"{right} /x?/", f"({right} | /null/)"):
        monkeypatch.setattr(module, "regular", lambda *_, wrong=wrong: wrong)
        assert not isinstance(json_schema(SCHEMAS["object"], 0).bind(VOCABULARY, (), CPU), Tabled)
    monkeypatch.setattr(module, "regular", lambda *_: right)
    assert isinstance(json_schema(SCHEMAS["object"], 0).bind(VOCABULARY, (), CPU), Tabled)


def test_a_cpu_takes_tables_for_small_schemas_only(monkeypatch):
    monkeypatch.undo()
    assert isinstance(json_schema(SCHEMAS["enum"], 0).bind(VOCABULARY, (), CPU), Tabled)
    assert isinstance(json_schema(SCHEMAS["optional"], 20).bind(VOCABULARY, (), CPU), Constraint)


@pytest.mark.parametrize("stops", [(), ("12",)])
@pytest.mark.parametrize("name", ["object", "tuple"])
def test_laws_hold(name, stops):
    texts = ['{"name": "é", "age": 12}', '[1, "a", null]', "{}"]
    check(json_schema(SCHEMAS[name], 2), VOCABULARY, texts, stops=stops, histories=4)


def test_a_run_is_the_same_on_tables_and_on_llguidance(monkeypatch):
    small, large = (sg.LM(name, device="cpu") for name in ("tiny-draft", "tiny"))  # on a GPU tables are made at any length
    target = large * json_schema(closed({"a": INTEGER, "b": {"enum": ["x", "y"]}}), 1)
    found = []
    for steps in (PATIENT, 0):
        monkeypatch.setattr(module, "HASTY", steps)
        posts = many(target, groups=4, max_tokens=30, draft=small, block=3)
        found.append((posts.log_evidence, posts.arrays()["tokens"], posts.arrays()["log_weight"]))
        runs_on = posts.info["potentials"] if hasattr(posts, "info") else posts[0].info["potentials"]
        assert runs_on[0].startswith("tables" if steps else "llguidance")
    for one, other in zip(*found, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow
@pytest.mark.skipif("SMCGEN_SMOLLM2" not in os.environ, reason="SMCGEN_SMOLLM2 names no GGUF file")
@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_on_a_real_vocabulary(name):
    vocabulary = load(os.environ["SMCGEN_SMOLLM2"]).vocabulary
    for stops in STOPS:
        walks(json_schema(SCHEMAS[name], 20), vocabulary, stops, 5, 3)
