"""Draws from, and scores under, rows of logits over a vocabulary. `power_draw` and `score` run in Triton on a CUDA device; the
rest is torch.

Bit masks are int32 rows [..., ceil(V / 32)]: bit v % 32 of word v // 32 is set iff token v is allowed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from smcgen.kernels.device import on_triton


class Drawn(NamedTuple):
    """One token per row of the law q proportional to p**exponent on the allowed tokens, with p = softmax(logits / temperature)
    over all tokens. Logs are natural."""

    token: torch.Tensor  # int64 [...]; 0 where nothing can be drawn, which log_q = -inf says
    log_q: torch.Tensor  # float64 [...], log q(token)
    log_z: torch.Tensor  # float64 [...], log of the sum over the allowed tokens of p**exponent; NaN if a logit is NaN or +inf
    log_p: torch.Tensor  # float64 [...], log p(token)
    log_left: torch.Tensor  # float64 [...], log of the share of sum p**exponent that the mask leaves; 0 without a mask


def scaled(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """(logits - their maximum) / temperature, float32 [..., V]: an unnormalised log mass that no temperature overflows."""
    logits = logits.float()
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted if temperature == 1 else shifted / temperature


def log_softmax(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature) over the last axis, float64 [..., V]; the normaliser is summed in float64, so that
    probabilities add up to 1 within 1e-8 whatever the vocabulary."""
    mass = scaled(logits, temperature)
    return mass.double() - mass.exp().sum(-1, keepdim=True, dtype=torch.float64).log()


def score(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature) at given tokens: logits [..., V], tokens int64 [...] -> float64 [...]."""
    if on_triton(logits):
        from smcgen.kernels.gpu import categorical as gpu

        return gpu.score(logits, tokens, temperature)
    mass = scaled(logits, temperature)
    log_total = mass.exp().sum(-1, dtype=torch.float64).log()
    return mass.gather(-1, tokens[..., None])[..., 0].double() - log_total


def unpack(bits: torch.Tensor, size: int) -> torch.Tensor:
    """Bit rows int32 [..., ceil(size / 32)] -> bool [..., size]."""
    shift = torch.arange(32, device=bits.device, dtype=torch.int32)
    return ((bits[..., None] >> shift) & 1).flatten(-2)[..., :size].bool()


def draw(
    log_mass: torch.Tensor, uniform: torch.Tensor, allowed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token per row by the inverse of the cumulative mass, a token of zero mass never.

    Args:
        log_mass: float [..., V], log of the unnormalised mass of each token.
        uniform: float64 [...] in (0, 1).
        allowed: bool [..., V]; the rest has no mass.

    Returns:
        tokens int64 [...], their log probability float64 [...] and the log of the total mass float64 [...]. Where nothing
        has mass: token 0, -inf, -inf.
    """
    if allowed is not None:
        log_mass = log_mass.masked_fill(~allowed, -torch.inf)
    top = log_mass.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    cumulative = (log_mass - top).float().exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    token = torch.searchsorted(cumulative, uniform[..., None] * total, right=True)
    token = torch.minimum(token, torch.searchsorted(cumulative, total.contiguous()))  # rounding at the upper end
    token = token.clamp(max=log_mass.shape[-1] - 1)  # NaN mass; the caller sees it in the total
    log_total = top.double() + total.log()
    log_prob = torch.where(total > 0, log_mass.gather(-1, token).double() - log_total, -torch.inf)
    return token[..., 0], log_prob[..., 0], log_total[..., 0]


def power_draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: float = 1.0,
    exponent: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> Drawn:
    """Draws one token per row from softmax(logits / temperature)**exponent on the allowed tokens.

    Args:
        logits: [..., V], float32, float16 or bfloat16; rows may be strided, as in `wider[..., :V]`.
        uniform: float64 [...] in (0, 1); the token is the inverse of the cumulative mass at it.
        temperature: > 0.
        exponent: float64, broadcast to [...], > 0; None is 1.
        allowed: bool [..., V], or int32 bit rows [..., ceil(V / 32)] as in this file's head, broadcast over rows; None is all.

    On CUDA masses are formed in float32 by chunks of the vocabulary, so that a uniform within 1e-6 of the edge between two
    tokens may fall on the other side.
    """
    if on_triton(logits):
        from smcgen.kernels.gpu import categorical as gpu

        return Drawn(*gpu.power_draw(logits, uniform, temperature, exponent, allowed))
    if allowed is not None and allowed.dtype == torch.int32:
        allowed = unpack(allowed, logits.shape[-1])
    mass = scaled(logits, temperature)
    log_all = mass.exp().sum(-1, dtype=torch.float64).log()
    law = mass if exponent is None else exponent[..., None] * (mass.double() - log_all[..., None])
    token, log_q, log_total = draw(law, uniform, allowed)
    log_z = log_total - log_all if exponent is None else torch.where(log_all.isnan(), log_all, log_total)
    log_p = mass.gather(-1, token[..., None])[..., 0].double() - log_all
    if allowed is None:
        return Drawn(token, log_q, log_z, log_p, torch.zeros_like(log_z))
    return Drawn(token, log_q, log_z, log_p, log_z if exponent is None else log_z - law.logsumexp(-1))
