"""A transformers model behind the engine's contract: unmodified modules, K/V in pages, any rows forked at any time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from smcgen.errors import ModelError
from smcgen.kernels.attention import new_places
from smcgen.lm.attention import Reading
from smcgen.lm.base import Context
from smcgen.lm.checks import check_calls
from smcgen.lm.compiled import ROWS, TOKENS, compile_layers, uncompile
from smcgen.lm.fused import Rope, fuse, unfuse
from smcgen.lm.pages import PAGE, CacheShape, Pages
from smcgen.lm.vocabulary import Vocabulary

CHUNK = 512  # tokens of one prompt that a forward reads
PREFILL = 4096  # tokens of all prompts together that a forward reads
SMALL = 30_000_000  # weights of a model whose products are too small to be shared out among threads
MULTIPLE = 64  # on a GPU prompts are padded to multiples of it, as kernels are compiled anew for every number of tokens


@dataclass
class PagedContext(Context):
    """Rows whose K/V lie in `pages`. `isolate`: one forward per group (see `LanguageModel.open`)."""

    pages: Pages
    isolate: bool


class PagedLM:
    """A transformers causal language model whose attention goes through `smcgen.lm.attention`.

    Made by `smcgen.lm.load.load`, which also checks that the model can be read this way.

    Attributes:
        model: the transformers model, in evaluation mode, its attention replaced.
        shape: what it stores for each token.
        page: tokens of a page.
        multiple: prompts are padded to multiples of it.
        ignored: settings of the model's own generation defaults that change probabilities, which nothing here applies.
        fusion: the position tables of fused layers (`smcgen.lm.fused`), or why the layers are as transformers has them.
        compiled: True if the layers are compiled (`smcgen.lm.compiled`), False if nobody asked, or why they are not.
        name, vocabulary, device, max_tokens: see `smcgen.lm.base.LanguageModel`.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        vocabulary: Vocabulary,
        shape: CacheShape,
        max_tokens: int | None = None,
        ignored: dict[str, Any] | None = None,
        page: int = PAGE,
    ):
        self.name, self.model, self.vocabulary, self.shape = name, model, vocabulary, shape
        self.max_tokens, self.ignored, self.page = max_tokens, ignored or {}, page
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.multiple = MULTIPLE if self.device.type == "cuda" else 1
        self.fusion: Rope | str = "on a CPU nothing is gained"
        self.compiled: bool | str = False
        self.nowhere = torch.zeros(1, 1, dtype=torch.int64, device=self.device)

    def fuse(self) -> None:
        """Turns the layers into fused ones, if they are of a known kind."""
        self.fusion = fuse(self.model, check_calls(self.model, self.name)[1])

    def unfuse(self, reason: str) -> None:
        """Back to the layers as transformers has them."""
        unfuse(self.model)
        self.fusion = reason

    def compile(self, backend: Any = "inductor") -> None:
        """Compiles the layers now, for one row and more and for one token and more; warns where that cannot be."""
        if isinstance(self.fusion, Rope):
            return self._not_compiled("they are fused already")
        self.compiled = True
        compile_layers(self.model, self.shape.layers, self.uncompile, backend)
        # In the state in which a run reads: what is compiled in another is compiled anew.
        with torch.inference_mode(), one_thread(self.small), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")  # of its caches, nothing that a user could mend
            for rows, steps in ((ROWS, TOKENS), (ROWS, 1), (1, TOKENS), (1, 1)):
                if self.compiled is True:
                    context = self.open(rows, 1, 0, steps)
                    tokens = torch.zeros(rows, steps, dtype=torch.int64, device=self.device)
                    self.extend(context, tokens, torch.full((rows,), steps, device=self.device))

    def uncompile(self, reason: str) -> None:
        """Back to the layers as they were, with a warning."""
        uncompile(self.model, self.shape.layers)
        self._not_compiled(reason)

    def _not_compiled(self, reason: str) -> None:
        self.compiled = reason
        warnings.warn(f"the layers of {self.name} run without being compiled: {reason}", RuntimeWarning, stacklevel=2)

    @property
    def small(self) -> bool:
        """Whether products of this model are too small to be shared out among threads."""
        return sum(weight.numel() for weight in self.model.parameters()) < SMALL

    def __repr__(self) -> str:
        return f"PagedLM({self.name!r}, {len(self.vocabulary)} tokens, {self.shape.dtype}, {self.device})"

    def open(self, groups: int, particles: int, prompt_tokens: int, new_tokens: int, isolate: bool = False) -> PagedContext:
        """See the contract. Rows must not be trimmed to less than their prompt and then read on: its pages are shared."""
        if self.max_tokens is not None and prompt_tokens > self.max_tokens:
            raise ModelError(
                f"a prompt of {prompt_tokens} tokens is longer than the {self.max_tokens} that {self.name} can read: shorten it"
            )
        pages = Pages.reserve(self.shape, groups, particles, prompt_tokens, new_tokens, self.device, self.name, self.page)
        if isinstance(self.fusion, Rope):
            self.fusion.reach(pages.table.shape[1] * self.page)
        return PagedContext(groups, particles, pages.length, pages, isolate)

    @torch.no_grad()
    def prefill(self, context: Context, groups: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """See the contract. A prompt is read by the first row that needs it; the others name its pages."""
        assert isinstance(context, PagedContext)
        reader: dict[tuple[int, ...], int] = {}
        ancestors = torch.arange(context.rows)
        fresh = torch.zeros(context.rows, dtype=torch.bool)
        for group, prompt in zip(groups, prompts, strict=True):
            rows = slice(group * context.particles, (group + 1) * context.particles)
            ancestors[rows] = reader.setdefault(tuple(prompt), rows.start)
            fresh[rows] = True
        context.length.masked_fill_(fresh.to(self.device), 0)
        context.pages.shared.zero_()
        for batch in _batches(reader, 1 if context.isolate else PREFILL, self.multiple):
            longest = max(len(prompt) for prompt, _ in batch)
            for start in range(0, longest, CHUNK):
                chunks = [(prompt[start : start + CHUNK], row) for prompt, row in batch if len(prompt) > start]
                self._read_prompts(context, chunks)
        context.pages.fork(ancestors.to(self.device))

    def _read_prompts(self, context: PagedContext, chunks: Sequence[tuple[Sequence[int], int]]) -> None:
        longest = max(len(ids) for ids, _ in chunks)
        tokens = torch.zeros(len(chunks), _padded(longest, self.multiple), dtype=torch.int64)
        for i, (ids, _) in enumerate(chunks):
            tokens[i, : len(ids)] = torch.tensor(ids)
        tokens = tokens.to(self.device)
        rows = torch.tensor([row for _, row in chunks], device=self.device)
        counts = torch.tensor([len(ids) for ids, _ in chunks], device=self.device)
        before = context.pages.grow(torch.zeros_like(context.length).index_copy_(0, rows, counts))
        context.pages.verify()
        self._forward(context.pages, before, rows, tokens, counts, keep=1)

    @torch.no_grad()
    def extend(self, context: Context, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        assert isinstance(context, PagedContext)
        before = context.pages.grow(counts)
        if self.device.type == "cpu" or context.isolate:
            context.pages.verify()
            return self._extend_dense(context, before, tokens, counts)
        return self._forward(context.pages, before, None, tokens, counts)

    def _extend_dense(
        self, context: PagedContext, before: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Forwards of the shapes that the counts ask for, one for each group under `isolate`: what a group's forward
        looks like then depends on nothing outside the group. Waits for the device."""
        out: torch.Tensor | None = None
        groups = context.groups if context.isolate else 1
        for group in range(groups):
            first = group * (context.rows // groups)
            rows = first + counts[first : first + context.rows // groups].nonzero()[:, 0]
            if len(rows) == 0:
                continue
            steps = int(counts[rows].max())
            logits = self._forward(context.pages, before, rows, tokens[rows, :steps], counts[rows])
            if len(rows) == context.rows and steps == tokens.shape[1]:
                return logits
            if out is None:
                out = logits.new_zeros(*tokens.shape, logits.shape[-1])
            out[rows, :steps] = logits
        if out is None:
            out = torch.zeros(*tokens.shape, len(self.vocabulary), dtype=self.shape.dtype, device=self.device)
        return out

    def fork(self, context: Context, ancestors: torch.Tensor) -> None:
        """See the contract. Moves no K/V: a page that rows then share is copied when one of them writes to it."""
        assert isinstance(context, PagedContext)
        context.pages.fork(ancestors)

    def trim(self, context: Context, lengths: torch.Tensor) -> None:
        """See the contract."""
        assert isinstance(context, PagedContext)
        context.pages.trim(lengths)

    def _forward(
        self,
        pages: Pages,
        length: torch.Tensor,
        rows: torch.Tensor | None,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        keep: int = 0,
    ) -> torch.Tensor:
        """Logits [rows, T, V] (of the last `keep` tokens only, unless 0) of `tokens` int64 [rows, T] for the rows numbered
        `rows` (None: all), whose pages are there; `length` int64 [all rows] before these tokens."""
        table, shared = pages.table, pages.shared
        if rows is not None:
            table, length, shared = table[rows], length[rows], None
        if isinstance(self.fusion, Rope) and self.device.type == "cuda":
            positions = self.nowhere  # fused layers find positions themselves, and read any number as a token: it is padding
        else:  # padding reads token 0 at position 0
            step = torch.arange(tokens.shape[1], device=self.device)
            real = step < counts[:, None]
            tokens, positions = torch.where(real, tokens, 0), torch.where(real, length[:, None] + step, 0)
        columns = places = None
        if self.device.type == "cpu":
            columns = -(-int((length + counts).max()) // pages.page)
            places = new_places(table, length, counts, tokens.shape[1], pages.page)
        reading = Reading(pages, table, length, counts, columns, shared, places)
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            reading=reading,
        )
        return output.logits[..., : len(self.vocabulary)]


@contextmanager
def one_thread(needed: bool) -> Iterator[None]:
    """torch shares a lone row's sums out among threads, several rows by row: with one thread both give the same bits. And in
    small models threads wait for each other longer than they work, ten times longer where the CPU is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if needed else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _batches(reader: dict[tuple[int, ...], int], budget: int, multiple: int) -> Iterator[list[tuple[tuple[int, ...], int]]]:
    """Prompts with the rows that read them, together while right padding, to a `multiple`, keeps a forward within `budget`
    tokens."""
    batch: list[tuple[tuple[int, ...], int]] = []
    for prompt, row in sorted(reader.items(), key=lambda item: len(item[0])):
        if batch and (len(batch) + 1) * min(_padded(len(prompt), multiple), CHUNK) > budget:
            yield batch
            batch = []
        batch.append((prompt, row))
    if batch:
        yield batch
