"""One language model reading the samples of all groups, for one or several factors of a target at once.

A reader has always read every token of a sample but the last one (a draft: the last one or two), so that the next forward
reads what is unread, then new tokens. Factors that share a model share its forward: their contexts are stacked, so that the
model's groups are [copies, groups] in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smcgen.errors import ModelError
from smcgen.kernels.device import on_triton
from smcgen.kernels.unread import unread
from smcgen.lm.base import LanguageModel


class Reader:
    """`copies` contexts of one model, each with its own prompt per group.

    Args:
        lm: the model.
        shape: (copies, groups, particles).
        prompt_tokens, new_tokens: the longest prompt and the most tokens read after it.
        isolate: bits independent of the other groups (see `LanguageModel.open`).
    """

    def __init__(
        self,
        lm: LanguageModel,
        shape: tuple[int, int, int],
        prompt_tokens: int,
        new_tokens: int,
        isolate: bool = False,
    ):
        self.lm, self.shape = lm, shape
        copies, groups, particles = shape
        self.context = lm.open(copies * groups, particles, prompt_tokens, new_tokens, isolate)
        self.prompt_length = torch.ones(copies, groups, 1, dtype=torch.int64, device=lm.device)
        self.prompt_last = torch.zeros(copies, groups, 1, dtype=torch.int64, device=lm.device)
        first = torch.arange(0, copies * groups * particles, particles, device=lm.device)
        self.first = first.view(copies, groups, 1)  # row of each group's first particle
        self.broken = torch.zeros((), dtype=torch.bool, device=lm.device)  # a NaN was seen

    def admit(self, groups: Sequence[int], prompts: Sequence[Sequence[Sequence[int]]]) -> None:
        """Groups begin anew: `prompts[c][i]` are the token ids (at least one) that copy c of group `groups[i]` reads."""
        width = self.shape[1]
        where = [c * width + g for c in range(self.shape[0]) for g in groups]
        flat = [prompt for copy in prompts for prompt in copy]
        self.lm.prefill(self.context, where, [prompt[:-1] for prompt in flat])
        index = torch.tensor(where, device=self.prompt_length.device)
        self.prompt_length.view(-1)[index] = torch.tensor([len(p) for p in flat], device=index.device)
        self.prompt_last.view(-1)[index] = torch.tensor([p[-1] for p in flat], device=index.device)

    def count(self, groups: Sequence[int], generated: Sequence[int]) -> None:
        """Of the tokens just admitted to these groups, so many at the end are no prompt but generated."""
        self.prompt_length[:, list(groups), 0] -= torch.tensor(generated, device=self.prompt_length.device)

    @property
    def length(self) -> torch.Tensor:
        """int64 [copies, groups, particles]: tokens read."""
        return self.context.length.view(self.shape)

    def unread(
        self,
        tokens: torch.Tensor,
        length: torch.Tensor,
        alive: torch.Tensor,
        width: int,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What this model has to read: the tokens of `alive` samples that it has not read yet, then `new` ones; see
        `smcgen.kernels.unread`. At most `width`, 1 or 2, are unread."""
        return unread(tokens, length, alive, self.length, self.prompt_length, self.prompt_last, width, new)

    def read(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Reads int64 [copies, groups, particles, T], the first `counts` [copies, groups, particles] of each row.

        Returns logits [copies, groups, particles, T, V]."""
        logits = self.lm.extend(self.context, tokens.flatten(0, 2), counts.flatten())
        return logits.view(*self.shape, *logits.shape[1:])

    def trim(self, length: torch.Tensor) -> None:
        """Forgets what was read beyond all but the last of `length` int64 [groups, particles] generated tokens."""
        keep = torch.minimum(self.length, self.prompt_length + length - 1)
        self.lm.trim(self.context, keep.flatten())

    def fork(self, ancestors: torch.Tensor) -> None:
        """Particle n of each group becomes a copy of particle `ancestors[g, n]`, int64 [groups, particles]."""
        self.lm.fork(self.context, (self.first + ancestors).flatten())

    def watch(self, log_prob: torch.Tensor, used: torch.Tensor) -> None:
        """Remembers, without waiting for the device, whether a number that was `used` is NaN; last axes of `used` may be 1."""
        if on_triton(log_prob):
            from smcgen.kernels.gpu.watch import watch

            return watch(self.broken, log_prob, used)
        self.broken |= (log_prob.isnan() & used).any()

    def verify(self) -> None:
        """Raises ModelError if a NaN was seen."""
        if self.broken:
            raise ModelError(
                f"model {self.lm.name!r} returned NaN logits: its weights or dtype are broken, try dtype='float32'"
            )
