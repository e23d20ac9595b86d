"""Acceptance of drafted tokens: recursive rejection with leniency, the torch reference.

At one position let p be the local target, q the draft, and x_1 ... x_n independent draws from q. With r_0 = p, candidate i is
accepted if u_i q(x_i) < s r_{i-1}(x_i), and a rejection leaves r_i, proportional to (r_{i-1} - q)+. If none is accepted the
token is drawn from r_n. Because r_i is proportional to (p - c_i q)+ with

    c_0 = 0, N_0 = 1,    c_i = c_{i-1} + N_{i-1},    N_i = sum_v (p - c_i q)+ ,

a level of the recursion is two numbers, whatever the vocabulary. The token's law is

    L_n(x) = sum_i b_{i-1} min(q(x), s r_{i-1}(x)) + b_n r_n(x),    b_i = b_{i-1} sum_v (q - s r_{i-1})+ ,

which is p itself for s = 1. One candidate: Leviathan, Kalman & Matias, "Fast inference from transformers via speculative
decoding" (2023); several: Miao et al., "SpecInfer" (2024), and Sun et al., "SpecTr" (2023).

p and q are given as logs, float64 [..., V], normalised; -inf is a token that cannot come. 0/0 occurs nowhere: a token with
q = 0 is no candidate, one with p = 0 is never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 1 << 15  # columns of the vocabulary that one pass holds in float64
TINY = 1e-300


@dataclass
class Levels:
    """The recursion at one position of every row; entry i of the last axis belongs to r_i, for i = 0 ... M. Where fewer
    than M candidates exist, the levels of those that do not repeat the one before."""

    cost: torch.Tensor  # float64 [..., M + 1], c_i
    mass: torch.Tensor  # float64 [..., M + 1], N_i
    reach: torch.Tensor  # float64 [..., M + 1], b_i (1 throughout if s = 1, where nothing needs it)

    def log_density(self, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        """log r_i of one token per row, from its log_p and log_q [...]: float64 [..., M + 1]."""
        return log_excess(log_p[..., None], log_q[..., None], self.cost) - self.mass.log()


def log_excess(log_p: torch.Tensor, log_q: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """log (p - cost q)+, broadcast together; -inf where p = 0."""
    ratio = cost * (log_q - torch.where(log_p == -torch.inf, 0.0, log_p)).exp()
    return torch.where(log_p == -torch.inf, -torch.inf, log_p + torch.log1p(-ratio.clamp(max=1.0)))


def levels(log_p: torch.Tensor, log_q: torch.Tensor, candidates: torch.Tensor, leniency: float) -> Levels:
    """The levels for the candidates that exist: log_p, log_q float64 [..., V], candidates bool [..., M].

    Every level passes over the vocabulary in chunks, and on a CPU only over rows that have the candidate."""
    ones = torch.ones_like(log_p[..., 0])
    cost, mass, reach = [torch.zeros_like(ones)], [ones], [ones]
    for here in candidates.unbind(-1):
        c, n, b = cost[-1], mass[-1], reach[-1]
        if leniency > 1:
            b = torch.where(here, b * _sum_above(log_q, log_p, c, n, leniency), b)
        next_c = c + n
        next_n = _sum_excess(log_p, log_q, next_c)
        # Nothing left over: the candidate is accepted for certain, and r_i may be anything; p will do.
        some = next_n > TINY
        cost.append(torch.where(here, torch.where(some, next_c, 0.0), c))
        mass.append(torch.where(here, torch.where(some, next_n, 1.0), n))
        reach.append(b)
    return Levels(torch.stack(cost, -1), torch.stack(mass, -1), torch.stack(reach, -1))


def _sum_excess(log_p: torch.Tensor, log_q: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """sum_v (p - cost q)+ : [..., V], [..., V], [...] -> [...]."""
    total = torch.zeros_like(cost)
    for p, q in zip(log_p.split(CHUNK, -1), log_q.split(CHUNK, -1), strict=True):
        total += (p.exp() - cost[..., None] * q.exp()).clamp(min=0).sum(-1)
    return total


def _sum_above(
    log_q: torch.Tensor, log_p: torch.Tensor, cost: torch.Tensor, mass: torch.Tensor, leniency: float
) -> torch.Tensor:
    """sum_v (q - s r)+ with r = (p - cost q)+ / mass."""
    total = torch.zeros_like(cost)
    scale = (leniency / mass)[..., None]
    for p, q in zip(log_p.split(CHUNK, -1), log_q.split(CHUNK, -1), strict=True):
        q = q.exp()
        total += (q - scale * (p.exp() - cost[..., None] * q).clamp(min=0)).clamp(min=0).sum(-1)
    return total


def accept(
    levels: Levels,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    candidates: torch.Tensor,
    uniform: torch.Tensor,
    leniency: float,
) -> torch.Tensor:
    """The first candidate that is accepted, int64 [...]; M if none is.

    Args:
        levels: at this position.
        log_p, log_q: float64 [..., M], of the M candidate tokens.
        candidates: bool [..., M], which of them exist.
        uniform: float64 [..., M] in (0, 1).
        leniency: s >= 1.
    """
    log_r = log_excess(log_p, log_q, levels.cost[..., :-1]) - levels.mass[..., :-1].log()
    taken = candidates & (uniform.log() + log_q < log_r + torch.tensor(leniency, dtype=log_r.dtype).log())
    return torch.where(taken.any(-1), taken.int().argmax(-1), taken.shape[-1])


def log_law(
    levels: Levels, log_p: torch.Tensor, log_q: torch.Tensor, candidates: torch.Tensor, leniency: float
) -> torch.Tensor:
    """log L_n of one token per row, accepted or not: log_p, log_q float64 [...], candidates bool [..., M]."""
    if leniency == 1:
        return log_p
    log_r = levels.log_density(log_p, log_q)
    log_m = torch.minimum(log_q[..., None], log_r[..., :-1] + torch.tensor(leniency, dtype=log_r.dtype).log())
    terms = torch.where(candidates, levels.reach[..., :-1].log() + log_m, -torch.inf)
    return torch.cat([terms, (levels.reach[..., -1].log() + log_r[..., -1])[..., None]], -1).logsumexp(-1)
