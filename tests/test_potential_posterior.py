"""Schemas, grammars and stop strings through the public call, against enumeration of a small JSON language."""

import itertools
import json
import math

import jsonschema
import lark
import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.kernels import categorical
from smcgen.lm.vocabulary import Vocabulary
from smcgen.smc import factors
from tests.statistics import evidence_z, many, measure, z_score
from tests.stops import cut
from tests.tables import Exact as Law
from tests.tables import T, TableLM, log_p

TOKENS = (b"[", b"]", b",", b"1", b"true", b"1]", b"", b"")
END, BOS = 6, 7
WORDS = Vocabulary("json table", [*TOKENS[:END], b"<end>", b"<s>"], special=(END, BOS), end_ids=(END,), bos_id=BOS)
PROMPT = (5, 0)


def table(seed: int, other: torch.Tensor | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(9, 9, 8, generator=generator)
    logits = 1.2 * noise if other is None else 0.6 * other + 0.6 * noise
    logits[..., END] += 1.0
    logits[..., BOS] = -20.0
    return logits


BASE = TableLM(table(0), "json base", WORDS)
DRAFT = TableLM(table(1, BASE.table), "json draft", WORDS)
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
SCHEMA = {"anyOf": [{"enum": [1, True]}, {"type": "array", "items": {"enum": [1, True]}, "minItems": 1, "maxItems": 2}]}
GRAMMAR = 'start: value\nvalue: "1" | "true" | "[" [value ("," value)*] "]"\n'
PARSER = lark.Lark(GRAMMAR, parser="earley", lexer="dynamic")


def text(sample) -> str:
    return b"".join(TOKENS[t] for t in sample).decode()


def valid(written: str) -> bool:
    try:
        jsonschema.validate(json.loads(written), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def parses(written: str) -> bool:
    try:
        PARSER.parse(written)
    except lark.exceptions.UnexpectedInput:
        return False
    return True


RULES = {"schema": (sg.json_schema(SCHEMA), valid), "grammar": (sg.lark(GRAMMAR), parses)}
RULES["exact parser"] = (sg.lark(GRAMMAR, exact=True), parses)


def law(accept, stops=(), alpha=1.0, ends=lambda sample: True) -> Law:
    """gamma over the samples of at most T tokens whose text is accepted: ended, stopped, or cut by the budget."""
    gamma = {}
    for size in range(T + 1):
        for body in itertools.product(range(END), repeat=size):
            if any(cut(text(body[:n]), stops) is not None for n in range(size)):
                continue
            short = cut(text(body), stops)
            if short is None:
                samples, written = ([(*body, END)] if size < T else [body]), text(body)
            else:
                samples, written = [body], short
            if accept(written):
                gamma |= {x: math.exp(alpha * log_p(BASE, PROMPT, x)) for x in samples if ends(x)}
    return Law(gamma)


def run(target, **options):
    return many(target, prompt=list(PROMPT), **{"draft": SMALL, "block": 2, "groups": 10_000, **options})


def agrees(posts, truth):
    assert abs(evidence_z(posts, truth)) < 4
    support = sorted(truth.gamma, key=truth.gamma.__getitem__)[-12:]  # the likeliest
    weights = measure(posts, list(truth.gamma))
    places = [list(truth.gamma).index(sample) for sample in support]
    for sample, column in zip(support, weights[:, places].T, strict=True):
        assert abs(z_score(column, truth.gamma[sample])) < 4.5, text(sample)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("alpha", [1, 2])
def test_evidence_and_posterior(name, alpha):
    constraint, accept = RULES[name]
    truth = law(accept, alpha=alpha)
    assert len(truth.gamma) > 8
    agrees(run(LM**alpha * constraint), truth)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("stops", [(",1",), ("]",), ("true", "]1"), ("1]",)])
def test_stop_strings(name, stops):
    constraint, accept = RULES[name]
    truth = law(accept, stops)
    assert len(truth.gamma) > 3
    agrees(run(LM * constraint, stop=stops), truth)


@pytest.mark.parametrize("stops", [("1",), ("1,", "]"), ("true1",)])
def test_stop_strings_and_token_counts(stops):
    bounds = lambda x: 1 <= len(x) - (x[-1] == END or cut(text(x), stops) is not None) <= 3  # noqa: E731
    truth = law(lambda written: True, stops, ends=bounds)
    agrees(run(LM * sg.length(1, 3), stop=stops), truth)


def test_stop_strings_in_a_product_of_conditions():
    truth = law(lambda written: parses(written) and "true" in written, ("]1", "1,"))
    agrees(run(LM * sg.lark(GRAMMAR) * sg.contains("true"), stop=("]1", "1,")), truth)


@pytest.mark.parametrize("name", RULES)
def test_masks_alone_are_seen_to_be_wrong(name, monkeypatch):
    constraint, accept = RULES[name]
    truth = law(accept)
    shares = {x: g / truth.z for x, g in truth.gamma.items()}

    def unweighted(*args):
        drawn = categorical.power_draw(*args)
        return drawn._replace(log_z=torch.where(drawn.log_z > -torch.inf, 0.0, drawn.log_z))

    monkeypatch.setattr(factors, "power_draw", unweighted)
    weights = measure(many(LM * constraint, 10_000, list(PROMPT)), list(shares))
    seen = [abs(z_score(column, share)) for column, share in zip(weights.T, shares.values(), strict=True) if share > 0.01]
    assert max(seen) > 6


@pytest.mark.parametrize("constraint", [sg.json_schema({"const": True}), sg.lark('start: "true"'), sg.choice(["true"])])
def test_a_text_that_cannot_grow_pays_for_its_end_token(constraint):
    expected = log_p(BASE, PROMPT, (4, END))
    for block in (1, 2, 4):
        posts = run(LM * constraint, groups=50, block=block)
        assert np.allclose(posts.log_evidence, expected, atol=1e-5)


def test_a_text_that_cannot_grow_pays_for_its_stop_string():
    truth = law(lambda written: written == "true", ("]",))
    posts = run(LM * sg.lark('start: "true"'), stop=("]",))
    assert abs(evidence_z(posts, truth)) < 4
    assert {x[-1] for x in truth.gamma} == {END, 1}
