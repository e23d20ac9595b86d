"""Truncated next-token laws: top-k, top-p and min-p, in torch on every device.

They make another base model: tokens outside the set have probability 0, the rest is normalised anew. Top-p is the nucleus of
Holtzman et al., "The curious case of neural text degeneration" (2020); min-p is Nguyen et al., "Turning up the heat" (2024).
"""

from __future__ import annotations

import torch

from smcgen.kernels.categorical import scaled


def truncate(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> torch.Tensor:
    """The logits [..., V] with -inf outside the set. A token must pass every rule, each judged on the whole law
    softmax(logits / temperature); the likeliest token always stays, and of equally likely ones the lowest comes first.

    Args:
        top_k: the k likeliest tokens.
        top_p: the fewest likeliest tokens whose probabilities reach top_p together.
        min_p: tokens at least min_p times as likely as the likeliest.
    """
    if top_k is None and top_p is None and min_p is None:
        return logits
    mass = scaled(logits, temperature)
    keep = torch.ones_like(mass, dtype=torch.bool)
    if min_p is not None:
        keep = mass.exp() >= min_p
    if top_k is not None or top_p is not None:
        ordered, order = mass.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(mass.shape[-1], device=mass.device)
        first = rank < (mass.shape[-1] if top_k is None else top_k)
        if top_p is not None:
            probability = ordered.double().softmax(-1)
            first = first & (probability.cumsum(-1) - probability < top_p)
        keep = keep & torch.empty_like(keep).scatter_(-1, order, first.expand_as(keep) | (rank == 0))
    return logits.masked_fill(~keep, -torch.inf)
