"""The engine on tiny transformers models through the paged cache: unbiased evidence, reproducible bits, honest log-probs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import smcgen as sg
from smcgen.smc import factors
from tests.statistics import measure, z_score

LETTERS = ["a", "b", "c", "d", "e", "f"]
END = 7
T = 3


def tokenizer(order: list[str] = LETTERS) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*order, "<s>", "</s>"])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def tiny(kind: str = "llama", seed: int = 0, size: int = 8) -> torch.nn.Module:
    """A random model with context-dependent, far from uniform next-token laws. `size`: rows of its padded vocabulary."""
    shape = {
        "vocab_size": size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "bos_token_id": 6,
        "eos_token_id": END,
    }
    torch.manual_seed(seed)
    config, make = (LlamaConfig, LlamaForCausalLM) if kind == "llama" else (Qwen3Config, Qwen3ForCausalLM)
    model = make(config(**shape)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.45)
    return model


@pytest.fixture(scope="module")
def base():
    return tiny(seed=1)


@pytest.fixture(scope="module")
def lm(base):
    return sg.LM(base, tokenizer())


@pytest.fixture(scope="module")
def draft():
    noisy = tiny(seed=1)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    return sg.LM(noisy, tokenizer())


@torch.no_grad()
def enumerate_samples(model, prompt: list[int], alpha: float, max_tokens: int = T) -> dict[tuple[int, ...], float]:
    """gamma = p**alpha of all 400 samples, from plain forwards of the unchanged model."""
    bodies = [b for n in range(max_tokens + 1) for b in itertools.product(range(END), repeat=n)]
    full = [b for b in bodies if len(b) == max_tokens]
    logits = model(torch.tensor([[*prompt, *b] for b in full])).logits[..., :8].double().log_softmax(-1)
    row = {b: logits[i] for i, b in enumerate(full)}
    gamma = {}
    first = len(prompt) - 1
    for body in bodies:
        sample = body if len(body) == max_tokens else (*body, END)
        table = row[(*body, *[0] * (max_tokens - len(body)))]
        gamma[sample] = math.exp(alpha * sum(float(table[first + i, t]) for i, t in enumerate(sample)))
    return gamma


def run(target, prompts, **options):
    defaults = {"particles": 4, "max_tokens": T, "seed": 3, "groups": len(prompts), "chat": False}
    return sg.sample(target, prompts, **{**defaults, **options})


@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("block", [None, 1, 2])
def test_evidence_through_the_pages(base, lm, draft, alpha, block):
    gamma = enumerate_samples(base, [0, 3, 1], alpha)
    options = {} if block is None else {"draft": draft, "block": block}
    posts = run(lm**alpha, [[0, 3, 1]] * 4000, **options)
    z = np.exp(posts.log_evidence[:, 0])
    if alpha == 1 and block is None:
        assert np.allclose(z, 1, atol=1e-5)
    else:
        assert abs(z_score(z, sum(gamma.values()))) < 4


def test_posterior_with_a_constraint_and_two_prompts(base, lm, draft):
    first, second = (enumerate_samples(base, ids, 1.0) for ids in ([0, 3, 1], [5, 5]))
    constraint = {x: first[x] ** 1.5 * second[x] ** 0.5 for x in first if x[-1] == END and 2 in x and 6 not in x}
    total = sum(constraint.values())
    target = lm**1.5 * lm.given([5, 5]) ** 0.5 * sg.regex("[a-f]*c[a-f]*")
    options = {"draft": draft, "block": 2, "draft_temperature": 1.5, "on_budget": "condition"}
    posts = run(target, [[0, 3, 1]] * 4000, particles=16, **options)
    assert abs(z_score(np.exp(posts.log_evidence[:, 0]), total)) < 4
    support = list(constraint)
    weights = measure(posts, support)
    for x in (x for x in support if constraint[x] > 0.02 * total):
        assert abs(z_score(weights[:, support.index(x)], constraint[x])) < 4.5


def test_a_cache_that_does_not_move_is_seen(monkeypatch, base, lm, draft):
    gamma = enumerate_samples(base, [0, 3, 1], 1.0)
    likely = [x for x in gamma if gamma[x] > 0.01]

    def worst() -> float:
        posts = run(lm, [[0, 3, 1]] * 4000, draft=draft, block=1, threshold=1.0)
        weights = measure(posts, list(gamma))
        return max(abs(z_score(weights[:, list(gamma).index(x)], gamma[x])) for x in likely)

    assert worst() < 4.5
    monkeypatch.setattr(factors.Scorer, "fork", lambda self, ancestors: None)
    assert worst() > 6


@pytest.mark.parametrize("block", [None, 3])
def test_token_log_probs_are_those_of_a_fresh_forward(base, lm, draft, block):
    options = {} if block is None else {"draft": draft, "block": block}
    post = sg.sample(lm, [4, 1], particles=6, max_tokens=12, seed=2, **options)
    for s in post.particles:
        with torch.no_grad():
            logits = base(torch.tensor([[4, 1, *s.token_ids]])).logits[0, 1:-1].log_softmax(-1)
        want = logits.gather(-1, torch.tensor(s.token_ids)[:, None])[:, 0]
        got = torch.tensor(s.token_log_p)[:, 0]
        assert torch.allclose(got, want, atol=1e-5)
        assert len(s.token_ids) == len(s.token_log_q) == len(s.token_log_p)
        assert math.isclose(s.log_p[0], float(want.double().sum()), abs_tol=1e-4)


PROMPTS = [[0, 3, 1], [2], [5, 4, 3, 2, 1, 0, 1, 2], [1, 1], [3, 2, 2, 5, 0]]


def summary(post: sg.Posterior) -> list[tuple]:
    return [(s.token_ids, s.reason, s.weight) for s in post.particles]


@pytest.mark.parametrize("groups", [2, 5])
def test_many_prompts_of_different_lengths(lm, draft, groups):
    """Each prompt's result is its own single run's, whichever others run beside it and whenever it got its place."""
    options = {"particles": 6, "max_tokens": 10, "seed": 11, "draft": draft, "block": 3, "deterministic": True}
    posts = sg.sample(lm**2, PROMPTS, groups=groups, **options)
    for i, prompt in enumerate(PROMPTS):
        alone = sg.sample(lm**2, prompt, keys=[i], **options)
        assert summary(alone) == summary(posts[i])
        assert alone.log_evidence == posts[i].log_evidence
        assert [r.ancestors for r in alone.rounds[0]] == [r.ancestors for r in posts[i].rounds[0]]


def test_same_seed_same_bits(lm, draft):
    options = {"particles": 6, "max_tokens": 10, "draft": draft, "block": 3}
    one, two, other = (sg.sample(lm**2, [2, 2], seed=s, **options).to_json() for s in (7, 7, 8))
    assert one == two
    assert one != other


def test_padded_vocabularies(lm, base):
    padded = tiny(seed=1, size=13)
    with torch.no_grad():
        for (name, wide), (_, narrow) in zip(padded.named_parameters(), base.named_parameters(), strict=True):
            wide.copy_(narrow) if wide.shape == narrow.shape else wide[:8].copy_(narrow)
            if wide.shape != narrow.shape:
                wide[8:] = 3.0 if "head" in name else 0.0  # tokens that do not exist would be likely
    other = sg.LM(padded, tokenizer())
    posts = run(other**2, [[0, 3, 1]] * 2000, draft=lm, block=2)
    gamma = enumerate_samples(base, [0, 3, 1], 2.0)
    assert abs(z_score(np.exp(posts.log_evidence[:, 0]), sum(gamma.values()))) < 4


def test_another_tokenizer_is_refused(lm):
    other = sg.LM(tiny(seed=2), tokenizer(LETTERS[::-1]))
    with pytest.raises(sg.UsageError, match="different tokenizers"):
        sg.sample(lm, "ab", draft=other)
    with pytest.raises(sg.UsageError, match="different tokenizers"):
        sg.sample(lm * other, "ab")


def test_nan_logits_name_the_model(lm):
    broken = tiny(seed=1)
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    bad = sg.LM(broken, tokenizer())
    for target, draft in ((bad, None), (lm, bad), (bad, lm)):
        with pytest.raises(sg.ModelError, match="LlamaForCausalLM"):
            sg.sample(target, "ab", draft=draft, max_tokens=4)


def test_a_prompt_that_does_not_fit(lm):
    with pytest.raises(sg.SmcgenError, match="64"):
        sg.sample(lm, [1] * 70, max_tokens=4)
    with pytest.raises(sg.SmcgenError, match="64"):
        sg.sample(lm, [1] * 50, max_tokens=40)


def test_works_inside_an_event_loop(lm):
    import asyncio

    async def main() -> tuple[str, str]:
        return sg.sample(lm, "ab", max_tokens=4, seed=0).text, (await sg.asample(lm, "ab", max_tokens=4, seed=0)).text

    one, two = asyncio.run(main())
    assert one == two
