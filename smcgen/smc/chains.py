"""Chains: the M candidate continuations that each particle drafts.

Whatever reads all chains has rows [G, N * M], row n * M + m being chain m of particle n. Between rounds the M rows of a
particle are equal; inside a round each reads its own chain.
"""

from __future__ import annotations

import torch


def widen(values: torch.Tensor, chains: int) -> torch.Tensor:
    """[G, N, ...] -> [G, N * M, ...], every particle's value M times."""
    return values if chains == 1 else values.repeat_interleave(chains, 1)


def split(values: torch.Tensor, chains: int) -> torch.Tensor:
    """[G, N * M, ...] -> [G, N, M, ...]."""
    return values.unflatten(1, (-1, chains))


def pick(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[G, N * M, ...] -> [G, N, ...]: row `rows[g, n]`, int64, for particle n."""
    if values.shape[1] == rows.shape[1]:
        return values  # one chain: nothing to pick
    return values.gather(1, rows.reshape(*rows.shape, *[1] * (values.ndim - 2)).expand(-1, -1, *values.shape[2:]))


def offspring(ancestors: torch.Tensor, chains: int) -> torch.Tensor:
    """Ancestors of particles, int64 [G, N], as ancestors of rows, int64 [G, N * M]."""
    if chains == 1:
        return ancestors
    return (ancestors[..., None] * chains + torch.arange(chains, device=ancestors.device)).flatten(1)
