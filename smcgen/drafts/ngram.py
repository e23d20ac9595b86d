"""Prompt look-up as a draft: what followed the last tokens where they occurred before, in the prompt or in the text so far.

Of the positions whose last `order` tokens or fewer agree with the end of the context, those that agree longest are counted:

    q(v) = (how often v followed) / (how many such positions),

without any agreement the unigram frequencies of the context. Saxena, "Prompt lookup decoding" (2023), takes one match; here q
is a law, so that it can be judged like any draft. It has no mass on new tokens, which lossless decoding makes up for and
weights do not: above leniency 1 it must be mixed with a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smcgen.errors import UsageError
from smcgen.lm.base import Context, LanguageModel
from smcgen.values import is_number, is_whole, plain


@dataclass(frozen=True)
class NGram:
    """A draft without a model: `sg.generate(lm, prompt, draft=sg.NGram())`, or `draft="ngram"`.

    Args:
        order: the most tokens that have to agree, at least 1.
        model: an LM, or its name, that shares the drafting, so that every token can come; None is for leniency 1 only.
        share: of the look-up in the mixture with `model`, in (0, 1).
    """

    order: int = 3
    model: Any = None
    share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("order", "share"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if not is_whole(self.order) or self.order < 1:
            raise UsageError(f"order={self.order!r}: give an integer of at least 1")
        if not is_number(self.share) or not 0 < self.share < 1:
            raise UsageError(f"share={self.share!r}: give a number between 0 and 1")
        if self.model is not None:
            from smcgen.target import LM

            model = LM(self.model) if isinstance(self.model, str) else self.model
            if not isinstance(model, LM):
                raise UsageError(f"model={self.model!r}: give an LM, the name of a model, or None")
            object.__setattr__(self, "model", model)

    @property
    def name(self) -> str:
        return "ngram" if self.model is None else f"ngram+{self.model.name}"

    def build(self, base: LanguageModel) -> NGramLM:
        """The draft for a base model."""
        return NGramLM(self, base, None if self.model is None else self.model.load())


@dataclass
class NGramContext(Context):
    history: torch.Tensor  # int64 [rows, L + 1] tokens read; the last column takes what is no token
    inner: Context | None  # of the model in a mixture


class NGramLM:
    """`NGram` behind the contract of language models; logits are log frequencies, -inf for tokens never seen."""

    def __init__(self, spec: NGram, base: LanguageModel, model: LanguageModel | None):
        self.spec, self.model, self.name = spec, model, spec.name
        self.vocabulary = base.vocabulary if model is None else model.vocabulary
        self.device = base.device
        self.max_tokens = None if model is None else model.max_tokens

    def open(self, groups: int, particles: int, prompt_tokens: int, new_tokens: int, isolate: bool = False) -> NGramContext:
        rows = groups * particles
        inner = None if self.model is None else self.model.open(groups, particles, prompt_tokens, new_tokens, isolate)
        history = torch.zeros(rows, prompt_tokens + new_tokens + 1, dtype=torch.int64, device=self.device)
        return NGramContext(groups, particles, torch.zeros(rows, dtype=torch.int64, device=self.device), history, inner)

    def prefill(self, context: Context, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        assert isinstance(context, NGramContext)
        for group, prompt in zip(groups, prompts, strict=True):
            rows = slice(group * context.particles, (group + 1) * context.particles)
            context.length[rows] = len(prompt)
            context.history[rows, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64, device=self.device)
        if context.inner is not None and self.model is not None:
            self.model.prefill(context.inner, groups, prompts)

    def extend(self, context: Context, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert isinstance(context, NGramContext)
        history = context.history
        step = torch.arange(tokens.shape[1], device=self.device)
        at = context.length[:, None] + step
        history.scatter_(1, torch.where(step < counts[:, None], at, history.shape[1] - 1), tokens)
        context.length = context.length + counts
        seen = self._followers(history[:, :-1], at.clamp(max=history.shape[1] - 2))
        if context.inner is None or self.model is None:
            return seen.log()
        law = self.model.extend(context.inner, tokens, counts).float().softmax(-1)
        return (self.spec.share * seen / seen.sum(-1, keepdim=True) + (1 - self.spec.share) * law).log()

    def _followers(self, history: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """How often each token followed where the context that ends at place `end` int64 [rows, T] occurred before: float32
        [rows, T, V], all 1 if there is no token before."""
        rows, width = history.shape
        place = torch.arange(width, device=self.device)
        agreed = torch.zeros(*end.shape, width, dtype=torch.int64, device=self.device)
        same = torch.ones_like(agreed, dtype=torch.bool)
        for i in range(self.spec.order):
            tail = history.gather(1, (end - i).clamp(min=0))
            shifted = history.roll(i, 1)[:, None]
            same &= (shifted == tail[..., None]) & (place >= i) & (end >= i)[..., None]
            agreed += same
        before = place < end[..., None]
        agreed = torch.where(before, agreed, -1)
        longest = before & (agreed == agreed.amax(-1, keepdim=True))
        follower = history.roll(-1, 1)[:, None].expand_as(longest)
        counts = torch.zeros(rows, end.shape[1], len(self.vocabulary), device=self.device)
        counts.scatter_add_(-1, follower, longest.float())
        return torch.where(before.any(-1, keepdim=True), counts, 1.0)

    def fork(self, context: Context, ancestors: torch.Tensor) -> None:
        assert isinstance(context, NGramContext)
        context.history, context.length = context.history[ancestors], context.length[ancestors]
        if context.inner is not None and self.model is not None:
            self.model.fork(context.inner, ancestors)

    def trim(self, context: Context, lengths: torch.Tensor) -> None:
        assert isinstance(context, NGramContext)
        context.length = lengths.clone()
        if context.inner is not None and self.model is not None:
            self.model.trim(context.inner, lengths)
