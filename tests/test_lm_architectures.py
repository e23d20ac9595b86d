"""Models of many architectures, read through pages, against the same models reading each row from its beginning."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch
from transformers import CONFIG_MAPPING

from smcgen.errors import ModelError
from smcgen.kernels import attention as attention_kernel
from smcgen.kernels import pages as pages_kernel
from smcgen.lm import paged
from smcgen.lm.load import load
from tests.tiny_models import REFUSED, SUPPORTED, tiny_model, word_tokenizer

torch.set_num_threads(1)


class Mirror:
    """A context beside plain lists of tokens: the same verbs on both, and the logits compared."""

    def __init__(self, kind, groups, particles, page, seed, isolate=False, device="cpu"):
        self.device = device
        self.model = tiny_model(kind).to(device)
        self.lm = load(self.model, word_tokenizer())
        self.lm.page = page
        self.random = torch.Generator().manual_seed(seed)
        self.context = self.lm.open(groups, particles, prompt_tokens=11, new_tokens=30, isolate=isolate)
        self.rows = [[] for _ in range(groups * particles)]
        self.prompt = [0] * len(self.rows)
        self.error = 0.0  # the largest error so far, relative to the size of the logits

    def integers(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.random)

    def prefill(self, groups, prompts):
        self.lm.prefill(self.context, groups, prompts)
        n = self.context.particles
        for group, prompt in zip(groups, prompts, strict=True):
            for row in range(group * n, (group + 1) * n):
                self.rows[row], self.prompt[row] = list(prompt), len(prompt)

    def extend(self, counts, steps=None):
        tokens = self.integers(0, 97, len(self.rows), steps or int(counts.max()))
        logits = self.lm.extend(self.context, tokens.to(self.device), counts.to(self.device)).cpu()
        assert logits.shape == (*tokens.shape, 97)
        before = [len(row) for row in self.rows]
        for row, ids, count in zip(self.rows, tokens.tolist(), counts.tolist(), strict=True):
            row += ids[:count]
        width = max(len(row) for row in self.rows)
        padded = torch.tensor([row + [0] * (width - len(row)) for row in self.rows], device=self.device)
        with torch.no_grad():
            truth = self.model(padded, use_cache=False).logits.cpu()
        for row, (start, count) in enumerate(zip(before, counts.tolist(), strict=True)):
            wrong = logits[row, :count] - truth[row, start : start + count]
            if count:
                self.error = max(self.error, float(wrong.abs().nan_to_num(1e9).max() / truth.abs().max()))

    def fork(self, ancestors):
        self.lm.fork(self.context, ancestors.to(self.device))
        self.rows = [list(self.rows[i]) for i in ancestors.tolist()]

    def trim(self, lengths):
        self.lm.trim(self.context, lengths.to(self.device))
        self.rows = [row[:n] for row, n in zip(self.rows, lengths.tolist(), strict=True)]

    @property
    def length(self):
        return self.context.length.cpu()

    def check_lengths(self):
        assert self.length.tolist() == [len(row) for row in self.rows]


def exercise(kind, page=4, rounds=7, seed=0, device="cpu"):
    """Every pair of page offsets of source and destination, then random rounds; returns the largest relative error."""
    groups, particles = page * page, 3
    mirror = Mirror(kind, groups, particles, page, seed, device=device)
    lengths = mirror.integers(1, 12, groups).tolist()
    prompts = [mirror.integers(0, 97, n).tolist() for n in lengths]
    prompts[1] = prompts[0]
    prompts[2] = []
    mirror.prefill(range(groups), prompts)
    offset = torch.tensor([[group % page, group // page] for group in range(groups)])
    start = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    counts = torch.cat([(offset - start) % page, mirror.integers(0, page, groups, 1)], 1)
    mirror.extend(counts.flatten())
    assert {tuple(pair) for pair in (mirror.length.view(groups, 3)[:, :2] % page).tolist()} == {
        (a, b) for a in range(page) for b in range(page)
    }
    first = torch.arange(groups)[:, None] * particles
    mirror.fork((first + torch.tensor([1, 1, 0])).flatten())  # 0 becomes 1, and 2 becomes what 0 was
    for _ in range(rounds):
        mirror.extend(mirror.integers(0, 4, groups * particles))
        mirror.fork((first + mirror.integers(0, particles, groups, particles)).flatten())
        newer = torch.tensor([len(row) - p for row, p in zip(mirror.rows, mirror.prompt, strict=True)])
        keep = mirror.length - torch.minimum(newer, mirror.integers(0, 3, groups * particles))
        mirror.trim(keep)
        mirror.check_lengths()
    mirror.prefill([3, 0], [prompts[5], prompts[5]])  # places are filled again
    mirror.extend(torch.ones(groups * particles, dtype=torch.int64), steps=2)
    mirror.check_lengths()
    return mirror.error


@pytest.mark.parametrize("kind", SUPPORTED)
def test_pages_give_the_logits_of_a_full_forward(kind):
    assert exercise(kind) < 1e-4


def test_pages_of_sixteen():
    assert exercise("llama", page=16, rounds=2) < 1e-4


def mutate(monkeypatch, function, old, new, *places):
    """Puts `function` with `old` replaced by `new` in its source at (module or class, name) for each of `places`."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, "the mutation no longer fits the code"
    scope = dict(function.__globals__)
    exec(source.replace(old, new), scope)
    for place in places:
        monkeypatch.setattr(place, function.__name__, scope[function.__name__])


GROW = (pages_kernel.grow, pages_kernel)
COPY = (pages_kernel.copy_pools, pages_kernel)
PLACES = (attention_kernel.new_places, paged)
ATTEND = (attention_kernel.paged_attention, attention_kernel)
FORWARD = (paged.PagedLM._forward, paged.PagedLM)
MUTANTS = {
    "no copy on write": ("llama", *GROW, "& (keeper != row)", "& (row < 0)"),
    "the lowest row keeps a page, whatever others read of it": ("llama", *GROW, "held * rows", "0 * held"),
    "every namer keeps its page if it stands alone at its length": (
        "llama",
        *GROW,
        "length % page != 0",
        "length % page > 1",
    ),
    "a new page without the old tokens": ("llama", *COPY, "due = target > 0", "due = target < 0"),
    "entries of ended rows count as named": ("llama", *GROW, "~names & (column", "(table == 0) & (column"),
    "positions from 0": ("llama", *FORWARD, "length[:, None] + step, 0)", "step, 0)"),
    "absolute positions from 0": ("gpt2", *FORWARD, "length[:, None] + step, 0)", "step, 0)"),
    "places from 0": ("llama", *PLACES, "length[:, None] + step, 0)", "step, 0)"),
    "padding overwrites": (
        "llama",
        *PLACES,
        "torch.where(real, table.gather(1, position // page), 0)",
        "table.gather(1, position // page)",
    ),
    "one token too many is seen": ("llama", *ATTEND, "at > position", "at > 1 + position"),
    "no window": ("mistral", *ATTEND, "if window is not None", "if False"),
    "window off by one": ("gemma3", *ATTEND, "at <= position[..., None] - window", "at < position[..., None] - window"),
    "no soft cap": ("gemma2", *ATTEND, "if softcap is not None", "if False"),
    "no sinks": ("gpt-oss", *ATTEND, "if sinks is None", "if True"),
    "scale of its own": ("granite", *ATTEND, "mul_(scale)", "mul_(dim**-0.5)"),
    "heads share keys in another order": (
        "llama",
        *ATTEND,
        "q = query.float().reshape(rows, kv_heads, heads // kv_heads * steps, dim)",
        "q = query.float().view(rows, -1, kv_heads, steps, dim).transpose(1, 2).reshape(rows, kv_heads, -1, dim)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    kind, function, place, old, new = MUTANTS[name]
    monkeypatch.setattr("smcgen.lm.load.check_agreement", lambda *_: None)  # the check at load would refuse most
    mutate(monkeypatch, function, old, new, place)
    assert exercise(kind) > 1e-2


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind):
    if REFUSED[kind][0] not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    model = tiny_model(kind)
    with pytest.raises(ModelError, match="cannot be used: ") as error:
        load(model, word_tokenizer())
    assert REFUSED[kind][0] in str(error.value)
    assert "\n" not in str(error.value)
