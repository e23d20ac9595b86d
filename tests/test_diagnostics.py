"""Diagnostics and advice: statistics against their definitions, rules that speak when they should and only then."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import smcgen as sg
from smcgen import advice
from smcgen.diagnostics import Diagnostics, barred, blank_share, fit_pareto, pareto_k
from tests.tables import T, TableLM, V, enumerate_target, tables

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
SETTINGS = {"draft": None, "max_tokens": T, "potentials": ["json_schema(<schema>)"]}


def garden(rare: float = 1e-3) -> TableLM:
    """It begins with a, all but surely, and then hardly ever goes on with b or c; after b (rare) it goes on freely."""
    table = torch.full((V + 1, V + 1, V), -20.0)
    table[2, 0] = torch.tensor([1 - rare, rare, 0, 0]).clamp(min=1e-20).log()  # the prompt ends with ca
    table[:, 1] = torch.tensor([-20.0, 0, 0, -20])
    table[0, 0] = torch.tensor([0.0, -18, -18, 0])
    return TableLM(table, "garden")


def healthy() -> Diagnostics:
    return sg.sample(LM, "ca", draft=LM, block=2, particles=64, max_tokens=3, seed=0).diagnostics()


def test_a_healthy_run_needs_no_advice():
    post = sg.sample(LM, "ca", draft=LM, block=2, particles=64, max_tokens=3, seed=0, on_budget="condition")
    assert post.advice() == []


@pytest.mark.parametrize("options", [{}, {"draft": True, "block": 2}, {"draft": True, "block": 2, "leniency": 1.0}])
def test_a_garden_path_is_seen_where_the_ess_is_full(options):
    lm = sg.LM(garden())
    options = {**options, "draft": lm} if options else {}
    post = sg.sample(lm * sg.regex("a?[bc][bc]"), "ca", particles=16, max_tokens=3, seed=1, **options)
    truth = math.log(enumerate_target([(garden(), 1, (2, 0))], accept=_matches, max_tokens=3).z)
    found = post.diagnostics()
    assert {s.text[0] for s in post.particles} == {"a"}  # nobody took the rare beginning
    assert min(map(min, found.ess)) > 14
    assert truth - post.log_evidence > 9
    assert found.hidden_nats > 9
    assert any("begin" in line and "nats too low" in line for line in post.advice())


def test_the_way_round_the_garden_path_is_silent():
    lm = sg.LM(garden(rare=0.3))
    post = sg.sample(lm * sg.regex("a?[bc][bc]"), "ca", particles=16, max_tokens=3, seed=1)
    truth = math.log(enumerate_target([(garden(0.3), 1, (2, 0))], accept=_matches, max_tokens=3).z)
    assert abs(post.log_evidence - truth) < 1
    assert post.diagnostics().hidden_nats == 0


def test_a_constraint_on_the_first_token_hides_nothing():
    lm = sg.LM(garden(rare=1e-6))
    post = sg.sample(lm * sg.regex("b[bc]*"), "ca", particles=16, max_tokens=3, seed=1)
    truth = math.log(enumerate_target([(garden(1e-6), 1, (2, 0))], accept=lambda x: x[0] == 1 and 0 not in x, max_tokens=3).z)
    assert post.log_evidence == pytest.approx(truth, abs=0.1)
    assert post.diagnostics().hidden_nats == 0


def _matches(sample: tuple[int, ...]) -> bool:
    body = sample[1:] if sample[0] == 0 else sample
    return (len(body) == 2 and set(body) <= {1, 2}) or (len(body) == 3 and set(body[:2]) <= {1, 2} and body[2] == 3)


@pytest.mark.parametrize("options", [{}, {"draft": LM, "block": 2}, {"draft": LM, "block": 2, "leniency": 2.0, "chains": 2}])
def test_what_the_masks_left_is_the_evidence_of_a_plain_condition(options):
    """With the model as its own proposal and exponent 1 the masks are all that weighs."""
    target = LM * sg.regex("[ab]*c?")
    post = sg.sample(target, "ca", particles=8, max_tokens=T, seed=3, threshold=0.0, **options)
    weights, total = np.zeros(8), 0.0
    for r in post.rounds[0]:
        if not options:
            total += r.log_left[-1]
            assert r.log_evidence == pytest.approx(total, abs=1e-6)
        assert all(later <= earlier + 1e-12 for earlier, later in zip(r.log_left, r.log_left[1:], strict=False))
        weights = np.array(r.log_weight)
        assert sg.Posterior.from_json(post.to_json()).rounds == post.rounds
    assert np.log(np.exp(weights).mean()) == pytest.approx(post.log_evidence)


def test_rounds_hold_what_every_particle_drew():
    post = sg.sample(LM**2, "ca", draft=SMALL, block=2, particles=16, max_tokens=T, seed=2, leniency=math.inf)
    lines: list[list[int]] = [[] for _ in range(16)]
    for r in post.rounds[0]:
        assert [len(tokens) for tokens in r.tokens] == r.counts
        lines = [lines[n] + r.tokens[n] for n in range(16)]
        lines = [list(lines[a]) for a in r.ancestors]
        weights = np.exp(np.array(r.log_weight) - max(r.log_weight))
        assert weights.sum() ** 2 / (weights**2).sum() == pytest.approx(r.ess)
    assert lines == [s.token_ids for s in post.particles]


def test_diagnostics_agree_with_the_particles():
    post = sg.sample(LM**3, "ca", particles=16, runs=4, max_tokens=T, seed=5, draft=SMALL, block=1, leniency=2.0)
    d = post.diagnostics()
    shares: dict[tuple[int, int], float] = {}
    for s in post.particles:
        shares[s.run, s.root] = shares.get((s.run, s.root), 0.0) + s.weight
    assert d.root_share == pytest.approx(max(shares.values()))
    assert d.run_share == pytest.approx(max(sum(w for (r, _), w in shares.items() if r == run) for run in range(4)))
    assert [run[-1] for run in d.ancestors] == [len({s.root for s in post.particles if s.run == r}) for r in range(4)]
    assert 0 < d.acceptance <= 1
    assert d.seconds > 0
    assert "first particles left" in repr(d)
    assert repr(d).startswith("Diagnostics(4 runs of 16 particles, ")
    one = sg.sample(LM, "ca", particles=1, max_tokens=T, seed=5).diagnostics()
    assert repr(one).startswith("Diagnostics(1 run of 1 particle, ")
    assert json.loads(json.dumps(d.to_dict()))["ess"] == d.ess
    again = sg.Posterior.from_json(post.to_json()).diagnostics()
    assert again.summary() == d.summary() == json.loads(post.to_json())["diagnostics"]
    assert again.seconds is None


@pytest.mark.parametrize("shape", [-0.3, 0.2, 0.7, 1.2])
def test_pareto_fit(shape):
    """As good as maximum likelihood on the whole, and in agreement with it on large samples."""
    generator = np.random.default_rng(0)
    draws = np.sort(stats.genpareto.rvs(shape, size=(200, 400), random_state=generator), -1)
    ours = np.array([fit_pareto(row) for row in draws])
    assert abs(ours.mean() - shape) < 4 * ours.std() / math.sqrt(200) + 0.02
    large = np.sort(stats.genpareto.rvs(shape, size=5000, random_state=generator))
    if shape > 0:
        assert fit_pareto(large) == pytest.approx(stats.genpareto.fit(large, floc=0)[0], abs=0.02)
    assert fit_pareto(7.5 * large) == pytest.approx(fit_pareto(large))


def test_pareto_k_of_weights():
    generator = np.random.default_rng(1)
    assert pareto_k(np.ones(400)) is None
    assert pareto_k(generator.random(20)) is None
    assert pareto_k(generator.random(4000)) < 0.3
    assert pareto_k(generator.pareto(1.0, 4000)) == pytest.approx(1.0, abs=0.2)
    assert pareto_k(np.r_[np.zeros(90), generator.random(10)]) is None
    nearly_equal = np.r_[1 + 1e-4 * generator.random(59), np.full(5, 1.014)]
    ordered = np.sort(nearly_equal)
    assert fit_pareto(ordered[-13:] - ordered[-14]) > 1  # the fit alone sees a very heavy tail
    assert pareto_k(nearly_equal) == 0.5


def test_barred_counts_narrow_steps_after_the_first_token():
    post = sg.sample(LM, "ca", particles=4, max_tokens=2, seed=0)
    first, second = post.rounds[0]
    first, second = replace(first, log_left=[-9.0, -9.5, -14.5]), replace(second, log_left=[-0.1, -7.1])
    assert barred([first, second]) == pytest.approx(5 + 7)
    assert barred([first, replace(second, log_left=[-math.inf])]) == pytest.approx(5)


# Of each rule: a change to a healthy run's diagnostics that it must see, and words of its remedy.
CASES = {
    advice.nothing_left: ({"run_share": 0.0}, "max_tokens"),
    advice.garden_path: ({"hidden_nats": 12.0}, "12 nats too low"),
    advice.runs_disagree: (
        {"runs": 4, "run_share": 0.97, "log_evidence": [[-9.0], [-9.0], [-8.0], [-2.0]]},
        "more particles in each run",
    ),
    advice.runs_lost: ({"runs": 2, "log_evidence": [[-9.0], [-math.inf]]}, "1 of 2 runs lost every particle"),
    advice.collapsed: ({"root_share": 1.0, "resampled": [[True] * 8 + [False] * 2]}, "8 of 10 rounds resampled"),
    advice.low_ess: ({"ess": [[1.5, 60.0, 2.0, 3.0]]}, "In 3 of 4 rounds"),
    advice.heavy_tail: ({"pareto_k": [0.1, None, 0.95]}, "Pareto k up to 0.95"),
    advice.deaths: ({"deaths": [[40, 30]]}, "regex"),
    advice.cut: ({"cut_probability": 0.6}, "max_tokens"),
    advice.padded: ({"ess": [[60.0] * 4], "deaths": [[16]], "blank_share": 0.5}, "blanks=0"),
    advice.one_particle: ({"particles": 1, "log_evidence": [[-2.0]]}, "particles=8"),
    advice.slow_potentials: ({"seconds": 10.0, "potential_seconds": 9.0}, "90%"),
}


def test_every_rule_has_a_case():
    assert set(CASES) == set(advice.RULES)


@pytest.mark.parametrize("rule", advice.RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    change, words = CASES[rule]
    calm = replace(healthy(), cut_probability=0.0)
    assert rule(calm, SETTINGS) is None
    found = advice.advise(replace(calm, **change), SETTINGS)
    assert len(found) == 1
    assert words in found[0]


def test_remedies_name_the_draft_if_there_is_one():
    tired = replace(healthy(), ess=[[1.0, 1.0]], root_share=1.0, resampled=[[True, True]])
    lines = advice.advise(tired, {**SETTINGS, "draft": "small"})
    assert any("draft temperature nearer T / alpha" in line for line in lines)
    assert any("shorter blocks" in line for line in lines)


def test_advice_without_survivors():
    @sg.potential
    def never(text: str) -> bool:
        return False

    post = sg.sample(LM * never, ["ca"], particles=4, max_tokens=3, seed=0)[0]
    assert len(post.advice()) == 1
    assert "No particle survived" in post.advice()[0]
    json.dumps(post.diagnostics().to_dict(), allow_nan=False)
    repr(post.diagnostics())


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_blanks_that_took_the_budget_are_named():
    ask = ["Anna is 31 years old. Write JSON."]
    tiny, options = sg.LM("tiny"), {"max_tokens": 40, "seed": 0}
    (post,) = sg.sample(tiny * sg.json_schema(PERSON, blanks=20), ask, **options)
    assert post.failed
    assert post.diagnostics().blank_share > 0.25
    assert re.search(
        r"use blanks=0 or blanks=1 in json_schema, or --blanks \(\d+% of the tokens drawn are blanks\), a larger",
        str(post.failure()),
    )
    assert any("blanks=0" in line for line in post.advice())
    assert str(sg.Posterior.from_json(post.to_json()).failure()) == str(post.failure())
    (post,) = sg.sample(tiny * sg.json_schema(PERSON, blanks=0), ask, **options)
    assert not post.failed
    assert post.diagnostics().blank_share == 0
    assert not any("blanks" in line for line in post.advice())


def test_blanks_that_a_grammar_ignores_are_named():
    grammar = sg.lark('start: "[" "a"+ "]"\n%ignore /[ \\n]/')
    blank = replace(healthy(), blank_share=0.5, cut_probability=0.5)
    settings = {**SETTINGS, "potentials": [repr(grammar)]}
    assert any("in place of %ignore" in line for line in advice.advise(blank, settings))
    assert advice.padded(blank, {**SETTINGS, "potentials": ["regex('a')"]}) is None
    assert advice.padded(replace(blank, cut_probability=0.0), settings) is None
    assert advice.padded(replace(blank, blank_share=0.2), settings) is None


def test_the_share_of_blanks():
    first, second = sg.sample(LM, "ca", particles=2, max_tokens=2, seed=0).rounds[0][:2]
    rounds = [[replace(first, tokens=[[0, 1], [2]]), replace(second, tokens=[[], [2]])], [replace(first, tokens=[[0], [1]])]]
    assert blank_share(rounds, [b"a", b" \n", b""].__getitem__) == pytest.approx(2 / 6)
    assert blank_share([[replace(first, tokens=[[], []])]], [].__getitem__) == 0
