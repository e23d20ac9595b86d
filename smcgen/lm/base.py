"""The contract between the engine and a language model.

A *context* is one language model with one prompt per group: `groups * particles` rows, flat, row = group * particles +
particle. It remembers, for each row, the tokens it has read (their K/V, or whatever the model keeps). Lengths may differ
inside a group. The engine never asks a model for more than the five verbs below, so a table of probabilities in a test and a
transformers model on a paged cache are the same thing to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from smcgen.lm.vocabulary import Vocabulary


@dataclass
class Context:
    """One language model reading for `groups * particles` rows. Models subclass it with their own cache."""

    groups: int
    particles: int
    length: torch.Tensor  # int64 [rows], tokens read so far, on the model's device

    @property
    def rows(self) -> int:
        return self.groups * self.particles


@runtime_checkable
class LanguageModel(Protocol):
    """What the engine needs of a language model.

    Attributes:
        name: how messages call it (hub id, file name, class name).
        vocabulary: its tokens (`smcgen.lm.vocabulary.Vocabulary`); logits have `len(vocabulary)` columns.
        device: where its tensors live.
        max_tokens: the longest sequence it can read, in tokens; None if there is no limit.
    """

    name: str
    vocabulary: Vocabulary
    device: torch.device
    max_tokens: int | None

    def open(self, groups: int, particles: int, prompt_tokens: int, new_tokens: int, isolate: bool = False) -> Context:
        """An empty context. No prompt will be longer than `prompt_tokens` and no row will read more than `new_tokens`
        after its prompt: memory for the worst case is reserved here, or a ModelError says what does not fit.
        `isolate`: a row's logits must not depend, in any bit, on the rows of other groups."""
        ...

    def prefill(self, context: Context, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Group `groups[i]` begins anew: every row of it has read exactly `prompts[i]` (token ids, possibly none),
        whatever it held before. Equal prompts are read once."""
        ...

    def extend(self, context: Context, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Reads `tokens` int64 [rows, T], of which the first `counts` int64 [rows] (0 <= counts <= T) are real.

        Returns logits [rows, T, len(vocabulary)] in the model's own dtype: entry [r, t] is for the token after
        `tokens[r, t]`; entries at t >= counts[r] mean nothing. `context.length` grows by counts."""
        ...

    def fork(self, context: Context, ancestors: torch.Tensor) -> None:
        """Row r becomes a copy of row `ancestors[r]` (int64 [rows]), any map inside the groups, lengths included."""
        ...

    def trim(self, context: Context, lengths: torch.Tensor) -> None:
        """Row r forgets all but its first `lengths[r]` tokens (int64 [rows], never more than it has)."""
        ...
