"""The memory of a run: how many groups its K/V caches leave room for, and how many pages they use."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smcgen.drafts.ngram import NGramContext, NGramLM
from smcgen.errors import ModelError
from smcgen.kernels import pages as kernel
from smcgen.lm import pages
from smcgen.lm.base import Context, LanguageModel
from smcgen.lm.batch import Reader
from smcgen.lm.paged import PagedContext, PagedLM

USABLE = 0.95  # of the free memory: the rest is for activations and the workspaces of libraries


@dataclass(frozen=True)
class Demand:
    """What a run asks of one model: `contexts` for each group, of `rows` rows that read up to `tokens` tokens in a forward."""

    lm: LanguageModel
    contexts: int
    rows: int
    tokens: int

    def bytes(self, groups: int, prompt_tokens: int, new_tokens: int) -> int:
        """Of the cache for the worst case, and of the logits of a forward: as they come, once more behind a temperature or a
        truncation, and two laws of one position in float64. 0 for a model that keeps no pages."""
        lm = self.lm.model if isinstance(self.lm, NGramLM) else self.lm
        if not isinstance(lm, PagedLM):
            return 0
        count = pages.pages_needed(self.contexts * groups, self.rows, prompt_tokens, new_tokens, lm.page)
        logit_bytes = 2 * self.tokens * lm.shape.dtype.itemsize + 16
        logits = self.contexts * groups * self.rows * len(lm.vocabulary) * logit_bytes
        return count * lm.page * lm.shape.token_bytes + logits


def groups_that_fit(demands: Sequence[Demand], groups: int, prompt_tokens: int, new_tokens: int, device: torch.device) -> int:
    """As many groups at a time, at most `groups`, as leave room for the worst case of all models together.

    Raises ModelError if not even one does."""

    def needed(count: int) -> int:
        return sum(demand.bytes(count, prompt_tokens, new_tokens) for demand in demands)

    free = max(pages.available_bytes(device), 0)
    fitting = bisect_right(range(1, groups + 1), int(USABLE * free), key=needed)
    if fitting == 0:
        names = " and ".join(dict.fromkeys(demand.lm.name for demand in demands))
        raise ModelError(
            f"the K/V cache and the logits of {names} for {demands[0].rows} rows of {prompt_tokens} + {new_tokens} tokens need"
            f" {needed(1) / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on {device}: take fewer particles or chains, a "
            "smaller max_tokens, a shorter prompt or a smaller model"
        )
    return fitting


class Memory:
    """The pages that the readers of a run use, counted at the end of each round.

    Nothing is counted on the device: its tables are copied and counted on the host, so that no round waits.

    Attributes:
        counts: for each round counted, pages in use and pages that caches without sharing would use, of each cache:
            [caches][2].
    """

    def __init__(self, readers: Iterable[Reader]):
        self.pools = [_pool(reader.context) for reader in readers]  # in the order of the models, None where there is no cache
        self.caches = [pool for pool in self.pools if pool is not None]
        self.counts: list[list[tuple[int, int]]] = []
        self.left: deque[Sequence[torch.Tensor]] = deque()  # tables that are still to be counted

    def tables(self) -> list[torch.Tensor]:
        """Two tensors of each cache, small: the pages of its rows and the lengths."""
        return [tensor for cache in self.caches for tensor in (cache.table, cache.length)]

    def note(self, tables: Sequence[torch.Tensor]) -> None:
        """Takes down a round, from copies on the host of what `tables` gives; the last round is left to `count`."""
        self.left.append(tables)
        self.count(1)

    def count(self, leave: int = 0) -> None:
        """Counts the rounds taken down, but for the last `leave`."""
        while len(self.left) > leave:
            self._count(self.left.popleft())

    def _count(self, tables: Sequence[torch.Tensor]) -> None:
        pairs = zip(self.caches, tables[::2], tables[1::2], strict=True)
        self.counts.append(
            [
                (
                    int(kernel.used(table, length, cache.page, cache.count).sum()),
                    int(((length + cache.page - 1) // cache.page).sum()),
                )
                for cache, table, length in pairs
            ]
        )

    def summary(self) -> dict[str, Any]:
        """For `info`. `pages` and `pages_unshared` (without sharing) at the ends of rounds, of all models together: after the
        last, and the most (`peak_`); `shared`, the part of the pages that sharing saved over all rounds, None without pages;
        `pool_bytes` reserved for each model, in the order of `models`; `peak_bytes`, the most that this process had from
        torch on the GPU, None elsewhere."""
        self.count()
        rounds = [[sum(cache[i] for cache in counts) for counts in self.counts] for i in range(2)]
        used, unshared = ([*values, 0] if not values else values for values in rounds)
        device = self.caches[0].keys.device if self.caches else None
        return {
            "page_tokens": self.caches[0].page if self.caches else None,
            "pages": used[-1],
            "pages_unshared": unshared[-1],
            "peak_pages": max(used),
            "peak_pages_unshared": max(unshared),
            "shared": 1 - sum(used) / sum(unshared) if any(unshared) else None,
            "pool_bytes": [0 if pool is None else pool.keys.nbytes + pool.values.nbytes for pool in self.pools],
            "peak_bytes": torch.cuda.max_memory_allocated(device) if device is not None and device.type == "cuda" else None,
        }


def _pool(context: Context | None) -> pages.Pages | None:
    if isinstance(context, NGramContext):
        return _pool(context.inner)
    return context.pages if isinstance(context, PagedContext) else None
