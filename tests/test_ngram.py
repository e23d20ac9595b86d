"""Look-up drafts: what they propose, that the law of the text does not move, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.drafts.ngram import NGram, NGramLM
from tests.statistics import evidence_z, law_p_value, many
from tests.tables import END, TableLM, V
from tests.test_evidence import exact
from tests.test_exact import BASE, DRAWS, LM, SMALL, TOKENS, truth
from tests.test_paged_engine import tiny, tokenizer


def frequencies(history: list[int], order: int) -> np.ndarray:
    """The law of the next token, from its definition."""
    for n in range(order, -1, -1):
        tail = history[len(history) - n :]
        follow = [history[j] for j in range(max(n, 1), len(history)) if history[j - n : j] == tail]
        if n <= len(history) and follow:
            return np.bincount(follow, minlength=V) / len(follow)
    return np.full(V, 1 / V)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_what_it_proposes(order):
    """Read in pieces, after a fork and after a trim, it says the same as the definition."""
    generator = np.random.default_rng(order)
    lm = NGramLM(NGram(order), BASE, None)
    context = lm.open(1, 2, 5, 20)
    prompt = generator.integers(0, V, 5).tolist()
    lm.prefill(context, [0], [prompt])
    histories = [list(prompt), list(prompt)]
    for round in range(6):
        tokens = torch.from_numpy(generator.integers(0, V, (2, 3)))
        counts = torch.from_numpy(generator.integers(0, 4, 2))
        laws = lm.extend(context, tokens, counts).softmax(-1).numpy()
        for row in range(2):
            for t in range(int(counts[row])):
                histories[row].append(int(tokens[row, t]))
                assert np.allclose(laws[row, t], frequencies(histories[row], order), atol=1e-6)
        if round == 2:
            lm.fork(context, torch.tensor([1, 1]))
            histories[0] = list(histories[1])
        if round == 3:
            lm.trim(context, torch.tensor([len(h) - 1 for h in histories]))
            histories = [h[:-1] for h in histories]


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("prompt", ["ca", "abcaabcbca"])
def test_law(prompt, chains):
    """The table's law depends on the last two tokens, "ca" in both prompts."""
    posts = many(
        LM, prompt=prompt, groups=DRAWS, mode="exact", particles=1, max_tokens=TOKENS, draft="ngram", block=3, chains=chains
    )
    assert law_p_value(posts, truth()) > 1e-4


def test_law_beside_a_model():
    posts = many(
        LM, groups=DRAWS, mode="exact", particles=1, max_tokens=TOKENS, draft=["ngram", SMALL], block=2, policy="thompson"
    )
    assert law_p_value(posts, truth()) > 1e-4
    assert min(posts.info["draft_rounds"]) > 0


def test_mixed_with_a_model_it_covers_the_target():
    posts = many(LM**2, draft=NGram(model=SMALL), block=2, leniency=2.0, prompt="abcaabcbca", groups=10_000)
    assert abs(evidence_z(posts, exact(2))) < 4
    posts = many(LM**2, draft=NGram(model=SMALL, share=0.2), block=2, particles=16, prompt="abcaabcbca", groups=10_000)
    assert abs(evidence_z(posts, exact(2))) < 4


def test_a_mixture_is_not_sharpened():
    """At temperature 1 / alpha the part of the model, which covers what look-up does not know, would all but vanish."""
    options = {"max_tokens": 3, "seed": 0, "particles": 2, "leniency": 2.0}
    assert sg.sample(LM**2, "ca", draft=NGram(model=SMALL), **options).settings["draft_temperature"] == 1.0
    assert sg.sample(LM**2, "ca", draft=SMALL, **options).settings["draft_temperature"] == 0.5


def test_what_repeats_is_found():
    table = torch.full((V + 1, V + 1, V), -20.0)
    for token in range(END):
        table[:, token, (token + 1) % END] = 0.0
    post = sg.sample(sg.LM(TableLM(table)), "abca", draft="ngram", mode="exact", block=5, max_tokens=60, seed=1)
    assert post.acceptance > 0.99
    assert post.tokens_per_round > 5
    assert post.settings["draft"] == "ngram"


def test_through_the_pages():
    base = tiny(seed=1)
    lm = sg.LM(base, tokenizer()).at(temperature=0)
    options = {"mode": "exact", "max_tokens": 30}
    prompts = [[0, 3, 1, 0, 3, 1, 0], [2], [1, 1]]
    plain = sg.sample(lm, prompts, **options)
    for draft in ("ngram", NGram(2, sg.LM(tiny(seed=2), tokenizer()))):
        drafted = sg.sample(lm, prompts, draft=draft, block=3, chains=2, **options)
        assert [p.sample.token_ids for p in drafted] == [p.sample.token_ids for p in plain]


def test_refusals():
    with pytest.raises(sg.UsageError, match="mix it with a model"):
        sg.sample(LM, "ca", draft="ngram", max_tokens=3)
    with pytest.raises(sg.UsageError, match="mix it with a model"):
        sg.sample(LM, "ca", draft=[SMALL, NGram()], leniency=2.0, max_tokens=3)
    with pytest.raises(sg.UsageError, match="order"):
        NGram(0)
    with pytest.raises(sg.UsageError, match="share"):
        NGram(share=1.0)
    with pytest.raises(sg.UsageError, match="share"):
        NGram(share="half")  # pyright: ignore[reportArgumentType]
    with pytest.raises(sg.UsageError, match="model=5"):
        NGram(model=5)
    assert NGram(model="tiny-draft").name == "ngram+tiny-draft"
