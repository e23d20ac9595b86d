"""Resampling in one launch, one program per group; all in float64. The schemes are those of `smcgen.smc.resampling`."""
# Triton's own types do not describe its language.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.rows import whole_group

TINY = tl.constexpr(1e-12)  # a fractional part within this of 0 or 1 is whole
LEAST = tl.constexpr(torch.finfo(torch.float64).tiny)


@triton.jit
def _shares(Score, i, base, total, N):
    """Normalised weights of particles i."""
    return tl.exp(tl.load(Score + i, mask=i < N, other=float("-inf")) - base) / total


@triton.jit
def _split(share, N):
    """floor(N W), and the fractional part."""
    expected = share * N
    sure = tl.floor(expected + TINY)
    return sure, tl.maximum(expected - sure, 0.0)


@triton.jit
def _count(Score, Uniforms, share, base, total, top, left, N, P: tl.constexpr, J: tl.constexpr, SCHEME: tl.constexpr):
    """How many points fall on each particle's stretch of the cumulative `share`, int32 [P]; N points in blocks of J."""
    i = tl.arange(0, P)
    some = share > 0
    cumulative = tl.cumsum(share, 0)
    end = tl.sum(tl.where(i == N - 1, cumulative, 0.0), 0)
    last = tl.max(tl.where(some, i, 0), 0)  # the last particle with weight: rounding never passes it
    count = tl.zeros([P], tl.int32)
    for start in range(0, N, J):
        j = start + tl.arange(0, J)
        use = j < N
        if SCHEME == "systematic":
            point = (j.to(tl.float64) + tl.load(Uniforms)) / N
        elif SCHEME == "stratified":
            point = (j.to(tl.float64) + tl.load(Uniforms + j, mask=j < N, other=0.5)) / N
        elif SCHEME == "killing":
            point = tl.load(Uniforms + N + j, mask=j < N, other=0.5)
            use &= tl.load(Uniforms + j, mask=j < N, other=0.5) * top >= _shares(Score, j, base, total, N)  # the killed
        else:  # multinomial, residual
            point = tl.load(Uniforms + j, mask=j < N, other=0.5)
            use &= j < left
        beyond = (cumulative[None, :] > (point * end)[:, None]) & some[None, :]
        owner = tl.min(tl.where(beyond, i[None, :], last), 1)
        count += tl.sum(((owner[:, None] == i[None, :]) & use[:, None]).to(tl.int32), 0)
    return count


@triton.jit
def _ssp(Score, Uniforms, share, base, total, N, P: tl.constexpr):
    """The Srinivasan sampling process along the particles; see `smc.resampling.ssp`."""
    i = tl.arange(0, P)
    extra = tl.zeros([P], tl.float64)
    _, held = _split(_shares(Score, 0, base, total, N), N)
    index = 0
    for j in range(1, N):
        _, other = _split(_shares(Score, j, base, total, N), N)
        up, down = tl.minimum(1.0 - held, other), tl.minimum(held, 1.0 - other)
        rise = tl.load(Uniforms + j) * (up + down) < down
        held = tl.where(rise, held + up, held - down)
        other = tl.where(rise, other - up, other + down)
        settled = (held <= TINY) | (held >= 1.0 - TINY)
        extra = tl.where(i == tl.where(settled, index, j), tl.where(settled, held, other), extra)
        index = tl.where(settled, j, index)
        held = tl.where(settled, other, held)
    extra = tl.where(i == index, held, extra)
    sure, _ = _split(share, N)
    count = (sure + tl.floor(extra + 0.5)).to(tl.int32)
    heaviest = tl.min(tl.where(share == tl.max(share, 0), i, P), 0)
    return count + tl.where(i == heaviest, N - tl.sum(count, 0), 0)


@triton.jit
def _resample(Score, Uniforms, Eligible, Ess, LogMean, Go, Ancestors, score_s, uniforms_s, eligible_s, N,
              LIMIT: tl.constexpr, LOG_N: tl.constexpr, SCHEME: tl.constexpr, P: tl.constexpr, J: tl.constexpr):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    Score += group * score_s
    Uniforms += group * uniforms_s
    Ancestors += group * N
    i = tl.arange(0, P)
    score = tl.load(Score + i, mask=i < N, other=float("-inf"))
    high = tl.max(score, 0)
    base = tl.where(high == float("-inf"), 0.0, high)
    mass = tl.sum(tl.exp(score - base), 0)
    total = tl.maximum(mass, LEAST)
    share = tl.exp(score - base) / total
    square = tl.sum(share * share, 0)
    ess = tl.where(square > 0, 1.0 / tl.maximum(square, LEAST), square)
    go = (ess < LIMIT) & (ess > 0) & (tl.load(Eligible + group * eligible_s) != 0)

    if SCHEME == "ssp":
        count = _ssp(Score, Uniforms, share, base, total, N, P)
    elif SCHEME == "residual":
        sure, fraction = _split(share, N)
        sure = sure.to(tl.int32)
        count = sure + _count(Score, Uniforms, fraction, base, total, 1.0, N - tl.sum(sure, 0), N, P, J, SCHEME)
    else:
        top = tl.max(share, 0)
        count = _count(Score, Uniforms, share, base, total, top, N, N, P, J, SCHEME)
        if SCHEME == "killing":
            count += ((tl.load(Uniforms + i, mask=i < N, other=0.5) * top < share) & (i < N)).to(tl.int32)

    # Survivors keep their place; the k-th empty place takes the k-th spare copy. The running sums of spare copies go through
    # the output, so that their blocks can be read back.
    spare = tl.cumsum(tl.maximum(count - 1, 0), 0)
    tl.store(Ancestors + i, spare.to(tl.int64), mask=i < N)
    tl.debug_barrier()
    empty = (count == 0) & (i < N)
    rank = tl.cumsum(empty.to(tl.int32), 0) - 1
    donor = tl.zeros([P], tl.int32)
    for start in range(0, N, J):
        j = start + tl.arange(0, J)
        upto = tl.load(Ancestors + j, mask=j < N, other=2147483647).to(tl.int32)
        donor += tl.sum((upto[None, :] <= rank[:, None]).to(tl.int32), 1)
    tl.debug_barrier()
    ancestor = tl.where(empty, tl.where(go, tl.minimum(donor, N - 1), i), i)
    tl.store(Ancestors + i, ancestor.to(tl.int64), mask=i < N)
    tl.store(Ess + group, ess)
    tl.store(LogMean + group, base + tl.log(mass) - LOG_N)
    tl.store(Go + group, go.to(tl.uint8))


def resample(
    score: torch.Tensor, uniforms: torch.Tensor, scheme: str, threshold: float, eligible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `kernels.resample.resample`, N up to 1024: ess, log_mean, go, ancestors."""
    groups, n = score.shape
    score, uniforms = (x if x.stride(1) == 1 else x.contiguous() for x in (score, uniforms))
    ess, log_mean = torch.empty(2, groups, dtype=torch.float64, device=score.device).unbind()
    go = torch.empty(groups, dtype=torch.bool, device=score.device)
    ancestors = torch.empty(groups, n, dtype=torch.int64, device=score.device)
    if groups > 0:
        columns, warps = whole_group(n)
        _resample[(groups,)](
            score, uniforms, eligible.view(torch.uint8), ess, log_mean, go.view(torch.uint8), ancestors,
            score.stride(0), uniforms.stride(0), eligible.stride(0), n,
            float(threshold * n), math.log(n), scheme, columns, min(16, columns),
            num_warps=warps,
        )  # fmt: skip
    return ess, log_mean, go, ancestors
