"""Resampling: how many offspring each particle gets, and where they go.

Every scheme maps normalised weights W [groups, particles] and uniforms [groups, 2 * particles] to offspring counts with mean
N * W and sum N. The six are those of Chopin & Papaspiliopoulos, "An Introduction to Sequential Monte Carlo" (2020), ch. 9,
SSP being Gerber, Chopin & Whiteley (2019).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Scheme = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _count(weights: torch.Tensor, points: torch.Tensor, use: torch.Tensor | None = None) -> torch.Tensor:
    """How many of the points (in [0, 1), any order) fall on each particle's stretch of the cumulative weight."""
    cumulative = weights.cumsum(-1)
    total = cumulative[..., -1:]
    last = torch.searchsorted(cumulative, total.contiguous())  # the last particle with weight: rounding never passes it
    owner = torch.minimum(torch.searchsorted(cumulative, (points * total).contiguous(), right=True), last)
    ones = torch.ones_like(owner) if use is None else use.to(owner.dtype)
    return torch.zeros_like(owner).scatter_add_(-1, owner, ones)


def multinomial(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """N independent draws."""
    return _count(weights, uniforms[..., : weights.shape[-1]])


def residual(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """floor(N W) copies for certain, the rest by independent draws from the fractional parts."""
    n = weights.shape[-1]
    sure, fraction = _split(weights)
    left = n - sure.sum(-1, keepdim=True)
    rank = torch.arange(n, device=weights.device)
    return sure + _count(fraction, uniforms[..., :n], use=rank < left)


def stratified(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One point drawn in each of N equal strata."""
    n = weights.shape[-1]
    return _count(weights, (torch.arange(n, device=weights.device) + uniforms[..., :n]) / n)


def systematic(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """A comb of N points with one random offset."""
    n = weights.shape[-1]
    return _count(weights, (torch.arange(n, device=weights.device) + uniforms[..., :1]) / n)


def ssp(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Srinivasan sampling process: pairs trade their fractional parts until each is 0 or 1, so |count - N W| < 1."""
    n = weights.shape[-1]
    sure, fraction = _split(weights)
    held, index = fraction[..., 0], torch.zeros_like(sure[..., 0])  # the one particle whose part is still open, and its place
    extra = torch.zeros_like(weights)
    for j in range(1, n):
        other = fraction[..., j]
        up, down = torch.minimum(1 - held, other), torch.minimum(held, 1 - other)
        rise = uniforms[..., j] * (up + down) < down
        held, other = torch.where(rise, held + up, held - down), torch.where(rise, other - up, other + down)
        # One of the two is settled now (0 or 1); the other stays open. Where both are, either may be carried on.
        settled = (held <= _TINY) | (held >= 1 - _TINY)
        extra = extra.scatter(-1, torch.where(settled, index, j)[..., None], torch.where(settled, held, other)[..., None])
        index = torch.where(settled, j, index)
        held = torch.where(settled, other, held)
    count = sure + extra.scatter(-1, index[..., None], held[..., None]).round().long()
    # Rounding of the weights can leave the sum one off: the heaviest particle takes the difference.
    heaviest = weights.argmax(-1, keepdim=True)
    return count.scatter_add(-1, heaviest, n - count.sum(-1, keepdim=True))


def killing(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """A particle survives with probability W / max W; each one killed is replaced by an independent draw."""
    n = weights.shape[-1]
    top = weights.amax(-1, keepdim=True)
    survives = uniforms[..., :n] * top < weights
    return survives.long() + _count(weights, uniforms[..., n:], use=~survives)


_TINY = 1e-12


def _split(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """floor(N W) as int64, and the fractional parts N W - floor(N W); a part within rounding of 1 counts as whole."""
    expected = weights * weights.shape[-1]
    sure = (expected + _TINY).floor()
    return sure.long(), (expected - sure).clamp(min=0)


SCHEMES: dict[str, Scheme] = {f.__name__: f for f in (multinomial, residual, stratified, systematic, ssp, killing)}


def ancestors_in_place(counts: torch.Tensor) -> torch.Tensor:
    """Offspring counts int64 [groups, N] -> ancestors int64 [groups, N]: survivors keep their place, and the k-th empty
    place takes the k-th spare copy, so that only what must move moves."""
    spare = (counts - 1).clamp(min=0).cumsum(-1)
    empty = counts == 0
    rank = empty.long().cumsum(-1) - 1
    donor = torch.searchsorted(spare, rank, right=True).clamp(max=counts.shape[-1] - 1)
    place = torch.arange(counts.shape[-1], device=counts.device)
    return torch.where(empty, donor, place)
