"""Acceptance of drafted tokens: recursive rejection with leniency. `verify` judges whole blocks, on a CUDA device in Triton;
the rest is torch, position by position.

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

import math
from dataclasses import dataclass

import torch

from smcgen.kernels.categorical import draw, log_softmax, scaled, unpack
from smcgen.kernels.device import on_triton

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


@dataclass
class Verdict:
    """The blocks that `verify` made of drafted tokens. Position t holds an accepted token for t < accepted, the token that ends
    the block at t = accepted, and 0 everywhere beyond. Logs are natural."""

    tokens: torch.Tensor  # int64 [rows, K + 1]
    accepted: torch.Tensor  # int64 [rows], drafted tokens that were taken
    rejected: torch.Tensor  # bool [rows]: the last token comes from the residual, not from the local target
    chain: torch.Tensor  # int64 [rows], the chain (the lowest of several) that drafted all the accepted tokens
    log_target: torch.Tensor  # float64 [rows, K + 1], log p~ of each token
    log_law: torch.Tensor  # float64 [rows, K + 1], log L of each token; log p~ where it ends a block without a rejection
    log_p: torch.Tensor  # float64 [rows, K + 1], log p of each token, without exponent and mask
    log_z: torch.Tensor  # float64 [rows, K + 1], log Z_t, of the sum of p**exponent over what is allowed; NaN if a logit is
    log_left: torch.Tensor  # float64 [rows, K + 1], log of the share of the sum of p**exponent that the mask leaves

    @property
    def log_gain(self) -> torch.Tensor:
        """log Z_t + log p~ - log L of each token, float64 [rows, K + 1]: what it adds to the log weight; -inf where nothing
        could be drawn."""
        return self.log_z + torch.where(self.log_law == -torch.inf, -torch.inf, self.log_target - self.log_law)


def verify(
    target: torch.Tensor,
    draft: torch.Tensor,
    tokens: torch.Tensor,
    uniform: torch.Tensor,
    final: torch.Tensor,
    *,
    temperature: float = 1.0,
    draft_temperature: float = 1.0,
    exponent: torch.Tensor | None = None,
    leniency: float = 1.0,
    counts: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    block: bool = False,
) -> Verdict:
    """Judges drafted tokens in order, up to the first position where every candidate is rejected, and draws the token that
    ends the block: from the residual there, else from the local target at the first position that was not drafted.

    The local target at a position is p~ = p**exponent / Z_t on the allowed tokens with p = softmax(target / temperature); the
    drafted tokens came from q = softmax(draft / draft_temperature) on the allowed tokens. After an accepted token the chains
    that drafted it too go on as candidates. Where nothing is allowed the block ends, with log_z = log_law = -inf and token 0.

    Args:
        target: logits [rows, M, K + 1, V] of M chains, float32, float16 or bfloat16: position t of a chain follows its first t
            tokens. Every axis but the last may be strided, as in a view of a wider or of a permuted tensor.
        draft: logits [rows, M, K, V], likewise.
        tokens: int64 [rows, M, K], drawn from q, in each chain on its own.
        uniform: float64 [rows, M, K] in (0, 1), for acceptance.  final: float64 [rows], for the last token.
        exponent: float64 [rows], > 0; None is 1.
        leniency: s, finite and >= 1.
        counts: int64 [rows, M], how many tokens each chain drafted; None is K. Chains with equal tokens have equal counts.
        allowed: int32 bit rows [rows, M, K + 1, ceil(V / 32)], see `smcgen.kernels.categorical`; None is all.

        block: block verification (see `smcgen.proposals.block`): how many tokens are kept is decided for the whole block, by
            `uniform`, with the same law and more tokens kept. One chain, leniency 1, no exponent and no mask.

    On CUDA masses are formed in float32 and a few numbers per 4,096 tokens kept, nothing of the size of the logits; log
    probabilities agree with the reference to about 1e-6. With M > 1 every rejected candidate costs a pass over the vocabulary.
    """
    if not 1 <= leniency < math.inf:
        raise ValueError(f"the leniency must be finite and at least 1, got {leniency}")
    if draft.shape[:2] != target.shape[:2] or draft.shape[2] != target.shape[2] - 1 or draft.shape[3] != target.shape[3]:
        raise ValueError(
            f"target logits [rows, M, K + 1, V] and draft logits [rows, M, K, V] are wanted, got {list(target.shape)} and "
            f"{list(draft.shape)}"
        )
    if block and (leniency != 1 or target.shape[1] != 1 or exponent is not None or allowed is not None):
        raise ValueError("block verification is for one chain at leniency 1, without exponent and mask")
    if on_triton(target):
        from smcgen.kernels.gpu import verify as gpu

        heat = (temperature, draft_temperature)
        return Verdict(*gpu.verify(target, draft, tokens, uniform, final, *heat, exponent, leniency, counts, allowed, block))
    if block:
        log_p, log_q = log_softmax(target[:, 0], temperature), log_softmax(draft[:, 0], draft_temperature)
        count = torch.full_like(tokens[:, 0, 0], tokens.shape[2]) if counts is None else counts[:, 0]
        return _verify_block(log_p, log_q, tokens[:, 0], uniform[:, 0], final, count)
    rows, chains, drafted = tokens.shape
    each = torch.arange(rows, device=tokens.device)
    power = torch.ones(rows, dtype=torch.float64, device=tokens.device) if exponent is None else exponent
    bits = None if allowed is None else unpack(allowed, target.shape[-1])

    def local(at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """At positions `at` of the chains followed: log p~, log p, log Z_t and the log of the share left."""
        log_p = log_softmax(target[each, chain, at], temperature)
        log_mass = power[:, None] * log_p
        log_total = log_mass.logsumexp(-1)
        if exponent is None:
            log_total = log_total * 0.0  # the sum of probabilities, without its rounding
        log_z = log_total
        if bits is not None:
            log_mass = log_mass.masked_fill(~bits[each, chain, at], -torch.inf)
            log_z = log_mass.logsumexp(-1)
        law = torch.where(log_z[:, None] == -torch.inf, -torch.inf, log_mass - log_z[:, None])
        return law, log_p, log_z, log_z - log_total

    chain, accepted = torch.zeros_like(each), torch.zeros_like(each)
    live = torch.ones(rows, chains, dtype=torch.bool, device=tokens.device)
    going, rejected = torch.ones_like(each, dtype=torch.bool), torch.zeros_like(each, dtype=torch.bool)
    committed = torch.zeros(rows, drafted + 1, dtype=torch.int64, device=tokens.device)
    results = torch.zeros(5, rows, drafted + 1, dtype=torch.float64, device=tokens.device)
    blank = torch.zeros(rows, chains + 1, dtype=torch.float64, device=tokens.device)
    end = Levels(blank, torch.ones_like(blank), torch.ones_like(blank))
    end_q = torch.full((rows, target.shape[-1]), -torch.inf, dtype=torch.float64, device=tokens.device)
    end_candidates = torch.zeros_like(live)
    for k in range(drafted):
        at = torch.full_like(each, k)
        log_target, log_p, log_z, log_left = local(at)
        candidates = live & going[:, None] & (log_z != -torch.inf)[:, None]
        if counts is not None:
            candidates = candidates & (k < counts)
        going = candidates.any(-1)
        log_q = scaled(draft[each, chain, at], draft_temperature).double()
        if bits is not None:
            log_q = log_q.masked_fill(~bits[each, chain, at], -torch.inf)
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
        level = levels(log_target, log_q, candidates, leniency)
        token = tokens[:, :, k]
        x_target, x_q = log_target.gather(-1, token), log_q.gather(-1, token)
        which = accept(level, x_target, x_q, candidates, uniform[:, :, k], leniency)
        taken = going & (which < chains)
        fresh = going & ~taken
        rejected = rejected | fresh
        end_candidates = torch.where(fresh[:, None], candidates, end_candidates)
        end_q = torch.where(fresh[:, None], log_q, end_q)
        end = Levels(*(torch.where(fresh[:, None], getattr(level, f), getattr(end, f)) for f in ("cost", "mass", "reach")))

        which = which.clamp(max=chains - 1)
        chosen = token[each, which]
        law = log_law(level, x_target[each, which], x_q[each, which], candidates, leniency)
        found = torch.stack([x_target[each, which], law, log_p[each, chosen], log_z, log_left])
        results[:, :, k] = torch.where(taken, found, 0.0)
        committed[:, k] = torch.where(taken, chosen, 0)
        accepted, chain = accepted + taken, torch.where(taken, which, chain)
        later = torch.arange(chains, device=tokens.device) >= which[:, None]
        live = live & (~taken[:, None] | later & (token == chosen[:, None]))
        going = taken

    log_target, log_p, log_z, log_left = local(accepted)
    token, drawn, _ = draw(log_excess(log_target, end_q, end.cost[:, -1:]), final)
    some = drawn != -torch.inf
    x_target = torch.where(some, log_target[each, token], -torch.inf)
    law = log_law(end, x_target, end_q[each, token], end_candidates, leniency)
    law = torch.where(rejected & some, law, x_target)
    committed[each, accepted] = token
    results[:, each, accepted] = torch.stack(
        [x_target, law, torch.where(some, log_p[each, token], -torch.inf), log_z, log_left]
    )
    return Verdict(committed, accepted, rejected, chain, *results.unbind(0))


def totals(verdict: Verdict, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the first `counts` int64 [rows] tokens of each block come to: the sums of `log_gain` and of `log_z`, float64 [rows],
    and `log_p`, 0 beyond them."""
    if on_triton(counts):
        from smcgen.kernels.gpu import totals as gpu

        return gpu.totals(verdict.log_target, verdict.log_law, verdict.log_p, verdict.log_z, counts)
    used = torch.arange(verdict.tokens.shape[1], device=counts.device) < counts[:, None]
    gain, log_z, log_p = (torch.where(used, x, 0.0) for x in (verdict.log_gain, verdict.log_z, verdict.log_p))
    return gain.sum(-1), log_z.sum(-1), log_p


def _verify_block(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    tokens: torch.Tensor,
    uniform: torch.Tensor,
    final: torch.Tensor,
    counts: torch.Tensor,
) -> Verdict:
    """log_p float64 [rows, K + 1, V], log_q float64 [rows, K, V], tokens and uniform [rows, K], final and counts [rows]."""
    rows, drafted = tokens.shape
    place = torch.arange(drafted + 1, device=tokens.device)
    each = torch.arange(rows, device=tokens.device)
    real = place < counts[:, None]
    found = log_p[:, :-1].gather(-1, tokens[..., None])[..., 0]
    ratio = torch.where(real[:, :-1], found - log_q.gather(-1, tokens[..., None])[..., 0], 0.0)
    log_w = [torch.zeros_like(final)]
    for step in ratio.unbind(-1):
        log_w.append((log_w[-1] + step).clamp(max=0.0))
    w = torch.stack(log_w, -1).exp()
    left = (w[:, :-1, None] * log_p[:, :-1].exp() - log_q.exp()).clamp(min=0).sum(-1)
    left = torch.nn.functional.pad(left, (0, 1))
    chance = torch.where(real, left / (left + 1 - w).clamp(min=TINY), w)
    passed = (uniform < chance[:, 1:]) & (place[1:] <= counts[:, None])
    kept = torch.where(passed, place[1:], 0).amax(-1)
    rejected = kept < counts

    law = log_p[each, kept]
    cost = torch.where(rejected & (left[each, kept] > TINY), 1 / w[each, kept], 0.0)
    last_q = torch.where(rejected[:, None], log_q[each, kept.clamp(max=drafted - 1)], -torch.inf)
    token, _, _ = draw(log_excess(law, last_q, cost[:, None]), final)
    log_target = torch.where(place < kept[:, None], torch.nn.functional.pad(found, (0, 1)), 0.0)
    log_target[each, kept] = law[each, token]
    committed = torch.where(place < kept[:, None], torch.nn.functional.pad(tokens, (0, 1)), 0)
    committed[each, kept] = token
    zero = torch.zeros_like(log_target)
    log_z = torch.where(log_p.isnan().any(-1) & (place <= kept[:, None]), torch.nan, zero)
    logs = (log_target, log_target.clone(), log_target.clone(), log_z, zero)
    return Verdict(committed, kept, rejected, torch.zeros_like(kept), *logs)
