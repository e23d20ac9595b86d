"""A language model that is a table, small enough to enumerate: four tokens, texts of at most five, order two.

Everything that the engine does with it goes through the same contract as for a transformers model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from smcgen.lm.base import Context
from smcgen.lm.vocabulary import Vocabulary

TOKENS = (b"a", b"b", b"c", b"")
END = 3
V, T = len(TOKENS), 5
START = V  # stands for "no token" in a table's first two axes


def vocabulary(name: str = "table") -> Vocabulary:
    return Vocabulary(name, TOKENS, special=frozenset({END}), end_ids=(END,), bos_id=None)


@dataclass
class TableContext(Context):
    history: torch.Tensor  # int64 [rows, L], `start` before the first token


class TableLM:
    """p(token | last two tokens), from a table of logits float [V + 1, V + 1, V]."""

    max_tokens = None

    def __init__(self, table: torch.Tensor, name: str = "table", words: Vocabulary | None = None):
        self.table, self.name, self.start = table, name, len(table) - 1
        self.vocabulary = words or vocabulary(name)
        self.device = table.device

    def open(self, groups: int, particles: int, prompt_tokens: int, new_tokens: int, isolate: bool = False) -> TableContext:
        rows = groups * particles
        return TableContext(
            groups,
            particles,
            torch.zeros(rows, dtype=torch.int64, device=self.device),
            torch.full((rows, prompt_tokens + new_tokens), self.start, device=self.device),
        )

    def prefill(self, context: TableContext, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for prompt in set(map(tuple, prompts)):
            where = torch.tensor([g for g, p in zip(groups, prompts, strict=True) if tuple(p) == prompt])
            rows = (where[:, None] * context.particles + torch.arange(context.particles)).flatten()
            context.length[rows] = len(prompt)
            context.history[rows, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64, device=self.device)

    def extend(self, context: TableContext, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        width = context.history.shape[1]
        for t in range(tokens.shape[1]):
            rows = (t < counts).nonzero()[:, 0]
            context.history[rows, context.length[rows] + t] = tokens[rows, t]
        at = context.length[:, None] + torch.arange(tokens.shape[1], device=self.device)
        last = context.history.gather(1, at.clamp(max=width - 1))
        before = torch.where(at > 0, context.history.gather(1, (at - 1).clamp(0, width - 1)), self.start)
        context.length += counts
        return self.table[before, last]

    def fork(self, context: TableContext, ancestors: torch.Tensor) -> None:
        context.history, context.length = context.history[ancestors], context.length[ancestors]

    def trim(self, context: TableContext, lengths: torch.Tensor) -> None:
        assert (lengths <= context.length).all()
        context.length = lengths.clone()

    def probabilities(self, prompt: Sequence[int], prefix: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """p(. | prompt + prefix), float64 [V], computed apart from everything the engine uses."""
        read = [self.start, self.start, *prompt, *prefix]
        logits = self.table[read[-2], read[-1]].double().cpu().numpy() / temperature
        mass = np.exp(logits - logits.max())
        return mass / mass.sum()


def tables(seed: int = 0, noise: float = 0.6, device: str = "cpu") -> tuple[TableLM, TableLM]:
    """A base model with normal logits of deviation 1.2, and a draft that is 0.6 of it plus noise."""
    generator = torch.Generator().manual_seed(seed)
    base = 1.2 * torch.randn(V + 1, V + 1, V, generator=generator)
    draft = 0.6 * base + noise * torch.randn(V + 1, V + 1, V, generator=generator)
    return TableLM(base.to(device), "base"), TableLM(draft.to(device), "draft")


def samples(max_tokens: int = T) -> Iterator[tuple[int, ...]]:
    """All token sequences that end with END or have `max_tokens` tokens: 364 of them for five."""
    for n in range(max_tokens + 1):
        for body in itertools.product(range(END), repeat=n):
            if n < max_tokens:
                yield (*body, END)
            else:
                yield body


def text_of(sample: Sequence[int]) -> str:
    return b"".join(TOKENS[t] for t in sample).decode()


def log_p(lm: TableLM, prompt: Sequence[int], sample: Sequence[int], temperature: float = 1.0) -> float:
    """log p(sample | prompt)."""
    return sum(math.log(lm.probabilities(prompt, sample[:i], temperature)[t]) for i, t in enumerate(sample))


@dataclass
class Exact:
    """gamma over all samples, by enumeration."""

    gamma: dict[tuple[int, ...], float]

    @property
    def z(self) -> float:
        return sum(self.gamma.values())

    def expectation(self, f: Callable[[tuple[int, ...]], float]) -> float:
        return sum(g * f(x) for x, g in self.gamma.items()) / self.z

    def texts(self) -> dict[str, float]:
        """The posterior of each text: its samples' shares added."""
        out: dict[str, float] = {}
        for x, g in self.gamma.items():
            out[text_of(x)] = out.get(text_of(x), 0.0) + g / self.z
        return out


def enumerate_target(
    lms: Sequence[tuple[TableLM, float, Sequence[int]]],
    phi: Callable[[str], float] = lambda text: 1.0,
    accept: Callable[[tuple[int, ...]], bool] = lambda sample: True,
    max_tokens: int = T,
    temperature: float = 1.0,
) -> Exact:
    """gamma(x) = prod p_j(x | prompt_j)**alpha_j * phi(text), for (model, exponent, prompt ids) in `lms`."""
    return Exact(
        {
            x: math.exp(sum(a * log_p(lm, prompt, x, temperature) for lm, a, prompt in lms)) * phi(text_of(x))
            for x in samples(max_tokens)
            if accept(x)
        }
    )
