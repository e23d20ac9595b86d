"""Options of other libraries, numbers of numpy, and products with what is no factor."""

import asyncio
import datetime
import inspect
import json
import math
import re

import numpy as np
import pydantic
import pytest

import smcgen as sg
from smcgen.options import ELSEWHERE
from smcgen.run import run
from smcgen.values import plain
from tests.tables import tables

MODEL, DRAFT = tables()
LM = sg.LM(MODEL)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"top_k": 5}, r"lm\.at\(top_k=5\)"),
        ({"temperature": 0.7}, r"lm\.at\(temperature=0\.7\)"),
        ({"max_new_tokens": 5}, "max_tokens=5"),
        ({"n": 4}, r"post\.texts\(4\).*particles"),
        ({"num_beams": 4}, "no beam search"),
        ({"repetition_penalty": 1.2}, "multiply the model by a potential"),
        ({"stop_strings": ["a"]}, r"stop=\['a'\]"),
        ({"alpha": 2}, r"lm\*\*2"),
        ({"regex": "a+"}, r"lm \* sg\.regex"),
        ({"device": "cpu"}, r"sg\.LM\(\.\.\., device='cpu'\)"),
        ({"particels": 4}, "did you mean particles"),
        ({"zzz": 4}, "it has .*particles, .*max_tokens"),
    ],
)
def test_options_that_are_not_there(options, remedy):
    (name,) = options
    for call in (sg.sample, sg.generate, lambda *given, **more: asyncio.run(sg.asample(*given, **more))):
        with pytest.raises(sg.UsageError, match=f"sample has no option '{name}': .*{remedy}"):
            call(LM, "ca", max_tokens=3, **options)
    with pytest.raises(TypeError):
        sg.sample(LM, "ca", **options)


def test_no_name_of_other_libraries_is_one_of_ours():
    assert not set(ELSEWHERE) & set(inspect.signature(sg.sample).parameters)


def test_options_of_models_that_are_not_there():
    with pytest.raises(sg.UsageError, match=r"LM has no option 'temperature': write LM\(\.\.\.\)\.at\(temperature=0\.5\)"):
        sg.LM("tiny", temperature=0.5)
    with pytest.raises(sg.UsageError, match=r"LM\.at has no option 'topk': did you mean top_k"):
        LM.at(topk=5)
    with pytest.raises(sg.UsageError, match=r"LM\.at: 0\.7 has no place: options are named, and here are temperature, top_k"):
        LM.at(0.7)  # pyright: ignore
    with pytest.raises(sg.UsageError, match=r"sample: 5 has no place: options are named, and here are draft, particles"):
        sg.sample(LM, "ca", 5)  # pyright: ignore
    with pytest.raises(sg.UsageError, match=r"target_length has no option 'units': did you mean unit"):
        sg.target_length(5, 1, units="words")


def test_numbers_of_numpy_are_numbers():
    mine = {"particles": 4, "max_tokens": 5, "seed": 3, "runs": 2, "threshold": 0.5, "candidates": 2, "keys": [7]}
    theirs = {
        name: np.float32(value) if name == "threshold" else np.int64(value) for name, value in mine.items() if name != "keys"
    }
    theirs["keys"] = [np.uint32(7)]
    condition = sg.contains("a") * sg.length(max=4)
    (ours,) = sg.sample(LM**2 * condition, ["ca"], **mine)
    (other,) = sg.sample(LM ** np.int64(2) * (sg.contains("a") * sg.length(max=np.int8(4))), ["ca"], **theirs)
    assert other.to_json() == ours.to_json()
    assert other.texts(np.int64(3)) == ours.texts(3)
    assert json.loads(ours.to_json())["settings"]["seed"] == 3
    lm = LM.at(top_k=np.int32(2), temperature=np.float32(0.5), top_p=np.float16(0.5))
    assert lm == LM.at(top_k=2, temperature=0.5, top_p=0.5)
    assert type(lm.truncation.top_k) is int
    assert sg.Ramp(first=np.float32(0.5), rounds=np.int64(3)) == sg.Ramp(first=0.5, rounds=3)
    assert sg.NGram(order=np.int64(2)) == sg.NGram(order=2)
    assert repr(sg.phrases({"a": np.float32(0.5)})) == repr(sg.phrases({"a": 0.5}))
    assert repr(sg.reward(lambda texts: [0.0] * len(texts), np.float32(0.5), name="r")) == "reward(r, beta=0.5)"


def test_what_is_plain_stays():
    truth = np.bool_(True)
    assert plain(truth) is truth
    assert plain([np.int64(2), 3, "a", np.float64(0.5)]) == [2, 3, "a", 0.5]
    assert [type(value) for value in plain((np.int64(2), np.float64(0.5), True))] == [int, float, bool]
    with pytest.raises(sg.UsageError, match="particles="):
        sg.sample(LM, "ca", particles=truth)
    with pytest.raises(sg.UsageError, match=r"max_tokens=3\.5"):
        sg.sample(LM, "ca", max_tokens=np.float32(3.5))


@pytest.mark.parametrize(
    ("other", "remedy"),
    [
        ("a+", r"sg\.regex\('a\+'\).*sg\.contains"),
        (3, r"a power write \*\* 3"),
        (np.int64(3), r"a power write \*\* 3"),
        (re.compile("a"), r"sg\.regex"),
        ({"type": "string"}, r"sg\.json_schema"),
        (["a", "b"], r"sg\.choice"),
        (len, r"smcgen\.potential\(len\)"),
        (None, "a language model or a potential"),
    ],
)
def test_products_with_what_is_no_factor(other, remedy):
    for product in (lambda: LM * other, lambda: LM / other, lambda: other * LM, lambda: LM * sg.regex("a") * other):
        with pytest.raises(sg.UsageError, match=remedy):
            product()
    with pytest.raises(TypeError):
        LM * other
    with pytest.raises(sg.UsageError, match="an exponent is a number"):
        LM ** "2"


def test_what_describe_takes():
    with pytest.raises(sg.UsageError, match=r"'a\+' has no masks: write sg\.regex\('a\+'\)"):
        sg.describe("a+")
    with pytest.raises(sg.UsageError, match=r"has no masks: write sg\.json_schema"):
        sg.describe({"type": "string"})
    with pytest.raises(sg.UsageError, match=r"phrases.* has no masks: give one grammar"):
        sg.describe(sg.phrases({"a": 1.0}))


class Person(pydantic.BaseModel):
    age: int


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (Person(age=3), "an instance of Person: give the class itself"),
        ({"const": datetime.date(2026, 1, 1)}, "date is no JSON value: a schema holds what JSON has"),
        ({"enum": [{1, 2}]}, "set is no JSON value"),
        ({"const": math.nan}, "a schema holds what JSON has"),
    ],
)
def test_schemas_that_json_cannot_hold(schema, message):
    with pytest.raises(sg.UsageError, match=message):
        sg.json_schema(schema)


def test_schemas_with_numbers_of_numpy():
    schema = sg.json_schema({"type": "array", "items": {"maximum": np.float32(0.5)}, "maxItems": np.int64(1)}, np.int64(0))
    assert (schema.accepts("[0.25]"), schema.accepts("[0.75]"), schema.accepts("[0,0]")) == (True, False, False)
    assert schema.blanks == 0


def test_warnings_point_at_the_call(monkeypatch):
    def timed(plan, *given):
        record = run(plan, *given)
        record.info["tokens_per_second"] = 2.0 if plan.draft is None else 1.0
        return record

    monkeypatch.setattr("smcgen.sampling.run", timed)
    with pytest.warns(UserWarning, match="draft does not pay") as found:
        sg.sample(LM, "ca", mode="exact", draft=sg.LM(DRAFT), max_tokens=5, seed=0, baseline=True)
    assert [warning.filename for warning in found] == [__file__]
