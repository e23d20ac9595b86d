"""genlm-control in both directions. Skipped where the package is absent."""

from __future__ import annotations

import asyncio
import itertools
import math
import re

import numpy as np
import pytest
import torch

pytest.importorskip("genlm.control")

from genlm.backend.llm.hf import AsyncTransformer
from genlm.control import AWRS, WCFG, WFSA, BoolCFG, BoolFSA, JsonSchema, PromptedLLM, direct_token_sampler

import smcgen as sg
from smcgen.interop.genlm import from_genlm, to_genlm
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.check import check
from tests.statistics import evidence_z, many, measure
from tests.tables import TableLM, enumerate_target, tables
from tests.test_potential_function import VOCABULARY
from tests.tiny_models import byte_level, tiny_model

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
PATTERN = "a?(b|ca)*c?"
LARK = """
start: "a"* pair
pair: "b" pair "c" | "b"
"""
WEIGHTED = """
0.5: S -> a S b
0.3: S -> c
0.2: S -> S a
"""
POTENTIALS = {
    "BoolFSA": BoolFSA.from_regex(PATTERN),
    "BoolFSA of characters": BoolFSA.from_regex(PATTERN, to_bytes=False),
    "WFSA": WFSA.from_regex(PATTERN),
    "BoolCFG": BoolCFG.from_lark(LARK),
    "WCFG": WCFG.from_string(WEIGHTED),
    "product": WFSA.from_regex("[abc]*") * BoolFSA.from_regex(PATTERN),
}


def complete(potential, text: str) -> float:
    """Their own value of a text, asked apart from everything of ours."""
    symbols = list(text) if isinstance(potential.vocab[0], str) else list(text.encode())
    if any(s not in potential.lookup for s in symbols):
        return 0.0
    return math.exp(asyncio.run(potential.complete(symbols)))


@pytest.mark.parametrize(
    "options", [{"draft": SMALL, "block": 2}, {"candidates": 4, "groups": 4000}], ids=["draft", "rejection"]
)
@pytest.mark.parametrize("name", POTENTIALS)
def test_evidence_and_posterior_equal_enumeration(name, options):
    theirs = POTENTIALS[name]
    truth = enumerate_target([(BASE, 1.0, (2, 0))], phi=lambda text: complete(theirs, text))
    assert 0 < truth.z < 1
    posts = many(LM * from_genlm(theirs), **options)
    assert abs(evidence_z(posts, truth)) < 4
    weights = measure(posts, list(truth.gamma)).mean(0)
    assert 0.5 * np.abs(weights / weights.sum() - np.array(list(truth.gamma.values())) / truth.z).sum() < 0.05


def test_a_json_schema():
    lm = TableLM(BASE.table, "json")
    lm.vocabulary = Vocabulary("json", [b"[", b"1", b"]", b"<end>"], special=(3,), end_ids=(3,))
    theirs = JsonSchema({"type": "array", "items": {"type": "integer"}, "maxItems": 1})

    def spelled(sample):
        return b"".join(lm.vocabulary.tokens[i] for i in sample).decode()

    truth = enumerate_target([(BASE, 1.0, (2, 0))])
    truth.gamma = {x: g * complete(theirs, spelled(x)) for x, g in truth.gamma.items()}
    assert sum(g > 0 for g in truth.gamma.values()) >= 4
    posts = many(sg.LM(lm) * from_genlm(theirs), prompt=[2, 0], particles=8, groups=1000)
    assert abs(evidence_z(posts, truth)) < 4


def test_the_same_text_through_our_own_regex():
    ours = many(LM * sg.regex(PATTERN), groups=4000)
    theirs = enumerate_target([(BASE, 1.0, (2, 0))], phi=lambda text: complete(POTENTIALS["BoolFSA"], text))
    assert abs(evidence_z(ours, theirs)) < 4


@pytest.mark.parametrize("name", ["BoolFSA", "WFSA", "BoolCFG", "product"])
def test_laws_hold(name):
    check(from_genlm(POTENTIALS[name]), VOCABULARY, ["ab", "b", "", "aab"])


@pytest.fixture(scope="module")
def prompted():
    tokenizer = byte_level(bos=False)
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    theirs = PromptedLLM(AsyncTransformer(model, tokenizer), prompt_ids=tokenizer.encode("b a"))
    return sg.LM(model, tokenizer), theirs, tokenizer


def test_a_prompted_llm(prompted):
    """p(x | "a") * p(x | "b a") over the texts of a and b with at most two letters, tokens enumerated."""
    lm, theirs, tokenizer = prompted
    ids = tokenizer.convert_tokens_to_ids(["a", "b", "ab"])
    end = tokenizer.eos_token_id
    target = lm * from_genlm(theirs) * sg.regex("[ab]{0,2}")

    def log_p(prompt, body):
        read = [*tokenizer.encode(prompt), *body]
        with torch.inference_mode():
            logits = lm.handle.spec(torch.tensor([read])).logits[0].double().log_softmax(-1)
        places = range(len(read) - len(body) - 1, len(read))
        return sum(logits[i, t].item() for i, t in zip(places, [*body, end], strict=True))

    bodies = [body for n in range(3) for body in itertools.product(ids, repeat=n) if len(tokenizer.decode(body)) <= 2]
    total = sum(math.exp(log_p("a", body) + log_p("b a", body)) for body in bodies)
    posts = sg.sample(target, ["a"] * 2000, particles=8, max_tokens=4, chat=False, seed=1)
    z = np.exp(posts.log_evidence[:, 0])
    assert abs((z.mean() - total) / (z.std() / math.sqrt(len(z)))) < 4


def test_a_product_with_a_prompted_llm(prompted):
    lm, theirs, _ = prompted
    condition = sg.regex("[ab]{0,2}")
    options = {"particles": 64, "max_tokens": 4, "chat": False, "seed": 1, "runs": 4}
    one = sg.sample(lm * from_genlm(theirs * to_genlm(condition, lm)), "a", candidates=300, **options)
    other = sg.sample(lm * from_genlm(theirs) * condition, "a", **options)
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=5 * math.hypot(one.log_evidence_se, other.log_evidence_se))
    assert all(re.fullmatch("[ab]{0,2}", text) for text in one.texts(10))


def test_what_cannot_be_read(prompted):
    lm, theirs, _ = prompted
    with pytest.raises(sg.UsageError, match="leave the stop strings out"):
        sg.sample(lm * from_genlm(theirs), "a", stop="b", max_tokens=3)
    with pytest.raises(sg.UsageError, match="different tokenizers"):
        sg.sample(LM * from_genlm(theirs), "ca", max_tokens=3)
    with pytest.raises(sg.UsageError, match="expected a potential of genlm-control"):
        from_genlm(sg.regex("a"))
    with pytest.raises(sg.UsageError, match="no potential"):
        to_genlm(theirs, lm)
    with pytest.raises(sg.UsageError, match="timeout=0"):
        from_genlm(theirs, timeout=0)


class Broken(BoolFSA):
    async def batch_complete(self, contexts):
        raise RuntimeError("out of order")


class Slow(BoolFSA):
    async def batch_prefix(self, contexts):
        await asyncio.sleep(3)


def test_errors_name_the_text():
    wfsa = POTENTIALS["BoolFSA"].wfsa
    with pytest.raises(sg.PotentialError, match=r"genlm\(Broken\) on the text '.*raised RuntimeError \(out of order\)"):
        sg.sample(LM * from_genlm(Broken(wfsa)), "ca", max_tokens=3)
    with pytest.raises(sg.PotentialError, match=r"did not return within 0\.1 s"):
        sg.sample(LM * from_genlm(Slow(wfsa), timeout=0.1), "ca", max_tokens=3)


# --- the other way --------------------------------------------------------------------------------------------------


@sg.potential(prefix=lambda text: -0.1 * len(text))
def likes_b(text):
    return 0.5 * text.count("b")


@sg.potential
async def slowly(text):
    await asyncio.sleep(0)
    return -0.2 * len(text)


OURS = {
    "regex": sg.regex(PATTERN),
    "lark": sg.lark('start: "a"* "b" ["c"]'),
    "function": likes_b,
    "function of whole texts": sg.potential(lambda text: "bb" not in text),
    "coroutine": slowly,
    "reward": sg.reward(lambda texts: [0.3 * text.count("a") for text in texts], at="block"),
}


@pytest.mark.parametrize("name", OURS)
def test_their_own_laws_hold(name):
    theirs = to_genlm(OURS[name], LM)
    a, b, c = theirs.vocab
    contexts = [[], [a], [b], [a, b], [a, b, c]]

    async def laws():
        alive = [context for context in contexts if await theirs.prefix(context) > -math.inf]
        assert len(alive) >= 3
        await theirs.assert_contract(alive)

    asyncio.run(laws())


def test_their_samplers_with_our_potential(prompted):
    """Their SMC on the product of their language model and our constraint has the evidence that ours has."""
    lm, theirs, _ = prompted
    condition = to_genlm(sg.regex("[ab]{0,2}"), lm)

    async def run():
        exact = direct_token_sampler(theirs * condition)
        rejecting = AWRS(theirs, condition, seed=1)
        return [
            [await sampler.smc(n_particles=32, ess_threshold=0.5, max_tokens=4) for _ in range(n)]
            for sampler, n in ((exact, 20), (rejecting, 1))
        ]

    results = asyncio.run(run())
    ended = [context for r in itertools.chain(*results) for context in r.contexts if context and context[-1] == theirs.eos]
    assert len(ended) > 100
    assert all(re.fullmatch(b"[ab]{0,2}", b"".join(context[:-1])) for context in ended)
    z = np.exp([r.log_ml for r in results[0]])
    ours = sg.sample(lm * sg.regex("[ab]{0,2}"), "b a", particles=512, max_tokens=4, chat=False, seed=1, runs=8)
    error = math.hypot(z.std() / math.sqrt(len(z)), ours.log_evidence_se * math.exp(ours.log_evidence))
    assert abs(z.mean() - math.exp(ours.log_evidence)) < 4 * error


def test_there_and_back():
    for factor in (likes_b, slowly):
        again = from_genlm(to_genlm(factor, LM))
        for seed in range(3):
            posts = [sg.sample(LM * f, "ca", max_tokens=5, seed=seed) for f in (factor, again)]
            assert posts[0].log_evidence == pytest.approx(posts[1].log_evidence, abs=1e-9)
