"""The engine on a CUDA device: the enumeration tests in float32, and the same draws as on the CPU. Run with -m gpu."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.smc import graph
from tests.statistics import evidence_z, many, measure, z_score
from tests.tables import enumerate_target, tables
from tests.test_evidence import IDS, PATTERN, likes_b, matches
from tests.test_judged import Late
from tests.test_paged_engine import enumerate_samples, run, tiny, tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def pair():
    return tables(device="cuda")


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["plain", "regex", "function", "annealed"])
def test_evidence_on_the_device(pair, alpha, kind):
    base, draft = pair
    target, options = sg.LM(base) ** alpha, {"draft": sg.LM(draft), "block": 2}
    truth = enumerate_target([(base, alpha, IDS)])
    if kind == "regex":
        target, truth = target * sg.regex(PATTERN), enumerate_target([(base, alpha, IDS)], accept=matches)
    if kind == "function":
        target = target * likes_b
        truth = enumerate_target([(base, alpha, IDS)], phi=lambda t: math.exp(likes_b.function(t)))
    if kind == "annealed":
        options |= {"anneal": sg.Ramp(first=0.5, rounds=2), "block": 1}
    assert abs(evidence_z(many(target, **options), truth)) < 4


def test_the_same_draws_as_on_the_cpu(pair):
    here, there = tables(), pair
    results = []
    for base, draft in (here, there):
        posts = many(sg.LM(base) ** 2, groups=500, draft=sg.LM(draft), block=2)
        results.append((posts.arrays(), posts.log_evidence))
    same = (results[0][0]["tokens"] == results[1][0]["tokens"]).all((1, 2))
    assert same.mean() > 0.995  # rounding may move a draw across the edge of a token
    assert np.allclose(results[0][1][same], results[1][1][same], atol=1e-5)


@pytest.mark.parametrize("block", [None, 2])
def test_transformers_through_the_pages_on_the_device(block):
    base = tiny(seed=1)
    gamma = enumerate_samples(base, [0, 3, 1], 2.0)
    lm = sg.LM(copy.deepcopy(base).cuda(), tokenizer())
    options = (
        {} if block is None else {"draft": sg.LM(tiny(seed=1).to(torch.bfloat16).float().cuda(), tokenizer()), "block": block}
    )
    posts = run(lm**2, [[0, 3, 1]] * 4000, **options)
    assert abs(z_score(np.exp(posts.log_evidence[:, 0]), sum(gamma.values()))) < 4
    weights = measure(posts, list(gamma)).mean(0)
    truth = np.array(list(gamma.values()))
    assert 0.5 * np.abs(weights - truth).sum() / truth.sum() < 0.1


def test_bits_repeat_on_the_device():
    lm = sg.LM(tiny(seed=1).cuda(), tokenizer())
    one, two = (sg.sample(lm**2, [2, 2], seed=7, particles=8, max_tokens=12).to_json() for _ in range(2))
    assert one == two


GRAMMAR = 'start: item+\nitem: "a" item "b" | /[cdef]/\n'


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("on_host", [False, True])
def test_a_round_does_not_wait_for_the_device(monkeypatch, block, on_host):
    """Nothing inside a round asks the device for a value (CUDA's own debug mode raises if so). With potentials on the host
    the host waits for what it was sent, by events, which the debug mode lets pass."""
    original = graph.step

    def step(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(graph, "step", step)
    replay = graph.Recording.replay

    def strict(recording):
        torch.cuda.set_sync_debug_mode("error")
        try:
            replay(recording)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(graph.Recording, "replay", strict)
    lm, draft = (sg.LM(tiny(seed=1).cuda(), tokenizer()) for _ in range(2))
    options = {} if block is None else {"draft": draft, "block": block}
    target = lm**2 * sg.lark(GRAMMAR) * likes_b if on_host else lm**2
    post = sg.sample(target, [[2, 2]], particles=8, max_tokens=20, seed=0, **options)
    assert post.info["rounds"] > 1
    assert post.info["graphs_a_round"] == (1 if not on_host else 3 if block is None else block + 3)


@pytest.mark.parametrize("options", [{}, {"block": 3, "leniency": math.inf}, {"block": 3, "leniency": 1.5, "chains": 2}])
def test_recorded_rounds_draw_the_same(monkeypatch, options):
    """Several groups that end at different times and are filled again."""
    lm, draft = sg.LM(tiny(seed=1).cuda(), tokenizer()), sg.LM(tiny(seed=2).cuda(), tokenizer())
    if options:
        options = options | {"draft": draft}

    def texts():
        return sg.sample(lm**2, [[2, 2], [3, 1, 2], [4]] * 4, particles=4, max_tokens=15, seed=3, groups=5, **options)

    recorded = texts()
    monkeypatch.setattr(graph, "recordable", lambda *_: False)
    plain = texts()
    assert (recorded.info["cuda_graph"], plain.info["cuda_graph"]) == (True, False)
    assert np.allclose(recorded.log_evidence, plain.log_evidence, atol=1e-4)  # rows of other items stand beside it
    assert all((recorded.arrays()[name] == plain.arrays()[name]).all() for name in ("tokens", "length", "reason"))


def test_a_constraint_on_tables_is_recorded():
    lm = sg.LM(tiny(seed=1).cuda(), tokenizer())
    posts = sg.sample(lm * sg.regex("[a-d]+"), [[2, 2]] * 3, particles=8, max_tokens=12, seed=0)
    assert posts.info["cuda_graph"]
    posts = sg.sample(lm * sg.regex("[a-d]+"), [[2, 2]] * 3, particles=8, max_tokens=12, seed=0, draft=lm, block=3)
    assert posts.info["cuda_graph"]


ON_HOST = {
    "grammar": (lambda lm: lm * sg.lark(GRAMMAR), {"block": 3, "leniency": math.inf}),
    "grammar, the target alone": (lambda lm: lm**2 * sg.lark(GRAMMAR), {}),
    "grammar, chains": (lambda lm: lm**2 * sg.lark(GRAMMAR), {"block": 3, "leniency": 2.0, "chains": 2}),
    "function": (lambda lm: lm * likes_b, {"block": 3, "leniency": math.inf}),
    "late": (lambda lm: lm**2 * Late() * likes_b, {"block": 3, "leniency": math.inf}),
    "must end": (lambda lm: lm * sg.lark(GRAMMAR), {"block": 3, "leniency": 2.0, "on_budget": "condition"}),
    "stop strings": (lambda lm: lm * sg.lark("start: /[abcd]+/"), {"block": 3, "leniency": math.inf, "stop": ["bb", "ca"]}),
}


@pytest.mark.parametrize("name", ON_HOST)
def test_recorded_rounds_with_potentials_on_the_host_draw_the_same(monkeypatch, name):
    """Several groups that end at different times and are filled again; in graphs between which the host works."""
    lm, draft = sg.LM(tiny(seed=1).cuda(), tokenizer()), sg.LM(tiny(seed=2).cuda(), tokenizer())
    target, options = ON_HOST[name]
    monkeypatch.setattr("smcgen.potentials.tabled.token_table", lambda *_: None)
    if options:
        options = options | {"draft": draft}

    def texts():
        prompts = [[2, 2], [3, 1, 2], [4]] * 4
        return sg.sample(target(lm), prompts, particles=4, max_tokens=15, seed=3, groups=5, **options)

    recorded = texts()
    monkeypatch.setattr(graph, "recordable", lambda *_: False)
    plain = texts()
    assert recorded.info["graphs_a_round"] > 1
    assert plain.info["graphs_a_round"] == 0
    finite = np.isfinite(plain.log_evidence)
    assert (np.isfinite(recorded.log_evidence) == finite).all()
    assert np.allclose(recorded.log_evidence[finite], plain.log_evidence[finite], atol=1e-4)
    assert all((recorded.arrays()[name] == plain.arrays()[name]).all() for name in ("tokens", "length", "reason", "cause"))
