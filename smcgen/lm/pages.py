"""The K/V cache of one context: a pool of pages and the table that says which rows read which.

The rules are in `smcgen.kernels.pages`; here is the memory behind them, reserved once for the worst case.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from smcgen.errors import ModelError
from smcgen.kernels import pages as kernel

PAGE = 16  # tokens


@dataclass(frozen=True)
class CacheShape:
    """What a model stores for each token: in `layers` layers, a key and a value for each of `heads` heads."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass
class Pages:
    """A pool and its table.

    Attributes:
        keys, values: [layers, pages, heads, page, dim].
        table: int64 [rows, columns]; length: int64 [rows].
        shared: int64 [groups], leading pages that the rows of a group name alike and have filled; a smaller number is no error.
        own: tokens of a row that lie beyond the shared pages, at most.
        short: bool [], True once room ran out, which only rows longer than was declared can cause.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    length: torch.Tensor
    shared: torch.Tensor
    own: int
    short: torch.Tensor

    @classmethod
    def reserve(
        cls,
        shape: CacheShape,
        groups: int,
        particles: int,
        prompt_tokens: int,
        new_tokens: int,
        device: torch.device,
        name: str,
        page: int = PAGE,
    ) -> Pages:
        """An empty cache in which the rows of a group share their prompt. Raises ModelError if it does not fit into the
        memory of `device`; `name` is the model's."""
        count = pages_needed(groups, particles, prompt_tokens, new_tokens, page)
        columns = max(1, -(-(prompt_tokens + new_tokens) // page))
        needed, available = count * page * shape.token_bytes, available_bytes(device)
        if needed > available:
            raise ModelError(
                f"the K/V cache of {name} for {groups} x {particles} rows of {prompt_tokens} + {new_tokens} tokens needs "
                f"{needed / 1e9:.2f} GB, and {max(available, 0) / 1e9:.2f} GB are free on {device}: "
                "take fewer prompts at once, fewer particles or fewer tokens"
            )
        size = (shape.layers, count, shape.heads, page)
        rows = groups * particles
        return cls(
            keys=torch.zeros(*size, shape.key_dim, dtype=shape.dtype, device=device),
            values=torch.zeros(*size, shape.value_dim, dtype=shape.dtype, device=device),
            table=torch.zeros(rows, columns, dtype=torch.int64, device=device),
            length=torch.zeros(rows, dtype=torch.int64, device=device),
            shared=torch.zeros(groups, dtype=torch.int64, device=device),
            own=new_tokens + page,
            short=torch.zeros((), dtype=torch.bool, device=device),
        )

    @property
    def page(self) -> int:
        return self.keys.shape[3]

    @property
    def count(self) -> int:
        """Pages in the pool, scratch included."""
        return self.keys.shape[1]

    def grow(self, counts: torch.Tensor) -> torch.Tensor:
        """Room for `counts` int64 [rows] more tokens, which count as held from now on: pages are handed out, shared last pages
        copied first. Returns the lengths before, int64 [rows]."""
        before, source, target, _ = kernel.grow(self.table, self.length, counts, self.page, self.count, self.short)
        kernel.copy_pools([self.keys, self.values], [source, source], [target, target])
        return before

    def fork(self, ancestors: torch.Tensor) -> None:
        """Row r names what row ancestors[r] names (see `kernels.pages.fork`). No data moves."""
        kernel.fork(self.table, self.length, self.shared, ancestors, self.page)

    def trim(self, lengths: torch.Tensor) -> None:
        """Row r keeps its first `lengths[r]` tokens; the page it then ends in may become its own."""
        kernel.trim(self.length, self.shared, lengths, self.page)

    def in_use(self) -> int:
        """Pages that some row names."""
        return int(kernel.used(self.table, self.length, self.page, self.count).sum())

    def unshared(self) -> int:
        """Pages that would be in use if no two rows shared one."""
        return int(kernel.named(self.table, self.length, self.page).sum())

    def verify(self) -> None:
        """Raises RuntimeError if room ran out (waits for the device)."""
        if self.short:
            raise RuntimeError("a row read more tokens than its context was opened for")


def pages_needed(groups: int, particles: int, prompt_tokens: int, new_tokens: int, page: int = PAGE) -> int:
    """Pages that suffice whatever the rows do: the whole pages of a prompt are shared, and each row may need its own for
    the prompt's rest and the new tokens. Page 0 is scratch."""
    return 1 + groups * (prompt_tokens // page + particles * -(-(page - 1 + new_tokens) // page))


def available_bytes(device: torch.device) -> int:
    """Memory that can still be had on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:  # Linux: what can be freed without swapping, and what a container may have
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            held = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
            free = min(free, int(limit) - int(held["anon"]))
    except OSError:
        pass
    return free
