"""Steps of an automaton over tokens that is given as tables (`smcgen.potentials.tables`)."""

from __future__ import annotations

import torch

from smcgen.kernels.device import on_triton


def walk(
    now: torch.Tensor,
    depth: torch.Tensor,
    past: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    classes: torch.Tensor,
    following: torch.Tensor,
    dead: int,
) -> torch.Tensor:
    """Rows read tokens, in place.

    Args:
        now: int64 [...], the state of each row; depth: int64 [...], tokens read.
        past: int64 [..., capacity + 1], the states after so many tokens, modulo capacity; the last column is for what is not
            kept.
        tokens: int64 [..., T], of which each row reads the first `counts` int64 [...].
        classes: int32 [V], the class of each token; following: int32 [states, classes].
        dead: the state from which no text is accepted.

    Returns:
        float64 [...]: -inf where a row that has read something is dead, else 0.
    """
    if on_triton(now):
        from smcgen.kernels.gpu import automaton as gpu

        return gpu.walk(now, depth, past, tokens, counts, classes, following, dead)
    capacity = past.shape[-1] - 1
    for column in range(tokens.shape[-1]):
        reading = column < counts
        now.copy_(torch.where(reading, following[now, classes[tokens[..., column]].long()].long(), now))
        depth.add_(reading)
        place = torch.where(reading, depth % capacity, capacity)
        past.scatter_(-1, place[..., None], now[..., None])
    refused = (now == dead) & (counts > 0)
    return torch.zeros(now.shape, dtype=torch.float64, device=now.device).masked_fill(refused, -torch.inf)
