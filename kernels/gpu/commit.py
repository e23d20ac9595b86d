"""`smcgen.kernels.commit` in Triton: one launch for each function, weights in float64."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from smcgen.kernels.commit import Measured, Said, Weighed
from smcgen.kernels.gpu.rows import whole_group
from smcgen.potentials.base import ALIVE, DEAD

if TYPE_CHECKING:
    from smcgen.kernels.resample import Resampled
    from smcgen.smc.particles import Block, Particles

BLOCK = 256  # tokens of a sample that a program takes at a time
INHERITED = ("length", "reason", "stop_state", "history", "cause", "root", "log_phi", "log_p", "log_weight")
_ALIVE, _DEAD = tl.constexpr(ALIVE), tl.constexpr(DEAD)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[G, N, ...] with one distance from particle to particle through all groups, and that distance."""
    inner = x.shape[2:].numel()
    whole = x[0, 0].is_contiguous() and x.stride(0) == x.shape[1] * x.stride(1)
    return (x, x.stride(1)) if whole else (x.contiguous(), inner)


def _size(n: int) -> dict[str, Any]:
    columns, warps = whole_group(n)
    return {"P": columns, "num_warps": warps}


@triton.jit
def _put(
    Tokens,
    LogP,
    LogQ,
    Length,
    New,
    NewLogP,
    NewLogQ,
    Counts,
    OutTokens,
    OutLogP,
    OutLogQ,
    OutLength,
    new_s,
    new_p_s,
    new_q_s,
    counts_s,
    room,
    J: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length, count = tl.load(Length + row), tl.load(Counts + row * counts_s)
    inside = at < room
    new = (at >= length) & (at < length + count) & inside
    here = row * room + at
    there = at - length
    token = tl.load(Tokens + here, mask=inside, other=0)
    tl.store(OutTokens + here, tl.where(new, tl.load(New + row * new_s + there, mask=new, other=0), token), mask=inside)
    log_q = tl.load(LogQ + here, mask=inside, other=0.0)
    drawn = tl.load(NewLogQ + row * new_q_s + there, mask=new, other=0.0).to(tl.float32)
    tl.store(OutLogQ + here, tl.where(new, drawn, log_q), mask=inside)
    for j in tl.static_range(J):
        log_p = tl.load(LogP + here * J + j, mask=inside, other=0.0)
        found = tl.load(NewLogP + row * new_p_s + there * J + j, mask=new, other=0.0).to(tl.float32)
        tl.store(OutLogP + here * J + j, tl.where(new, found, log_p), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(OutLength + row, length + count)


def append(particles: Particles, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, log_p, log_q = (x.contiguous() for x in (particles.tokens, particles.token_log_p, particles.token_log_q))
    new, strides = zip(*map(_rows, (block.tokens, block.token_log_p, block.token_log_q)), strict=True)
    length, (counts, counts_s) = particles.length.contiguous(), _rows(block.counts)
    out = torch.empty_like(tokens), torch.empty_like(log_p), torch.empty_like(log_q), torch.empty_like(length)
    room = tokens.shape[2]
    _put[(length.numel(), triton.cdiv(room, BLOCK))](
        tokens, log_p, log_q, length, *new, counts, *out, *strides, counts_s, room,
        J=log_p.shape[3], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _weigh(
    LogP,
    LogPhi,
    LogWeight,
    Reason,
    SoftScale,
    LogZ,
    Drawn,
    TokenLogP,
    BlockWeight,
    BlockReason,
    BlockCause,
    BlockLogZ,
    Counts,
    Soft,
    SoftCause,
    Last,
    LastCause,
    OutLogP,
    OutLogPhi,
    OutLogWeight,
    OutReason,
    OutCause,
    OutLogZ,
    OutDrawn,
    token_s,
    weight_s,
    reason_s,
    cause_s,
    z_s,
    counts_s,
    by_models,
    N,
    B,
    J: tl.constexpr,
    SOFT: tl.constexpr,
    LAST: tl.constexpr,
    P: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, P)
    here = n < N
    i = group * N + n
    infinite = float("-inf")
    reason = tl.load(BlockReason + i * reason_s, mask=here, other=_DEAD)
    cause = tl.load(BlockCause + i * cause_s, mask=here, other=0)
    weight = tl.load(LogWeight + i, mask=here, other=0.0) + tl.load(BlockWeight + i * weight_s, mask=here, other=0.0)
    log_phi = tl.load(LogPhi + i, mask=here, other=0.0)
    scale = tl.load(SoftScale + group)
    lost = n < 0
    if SOFT:
        soft = tl.load(Soft + i, mask=here, other=0.0)
        lost = soft == infinite
        weight += scale * soft
        log_phi += soft
        cause = tl.where(lost, tl.load(SoftCause + i, mask=here, other=0), cause)
        reason = tl.where(lost, _DEAD, reason)
    blame = tl.full([P], by_models, tl.int64)
    if LAST:
        ended = (tl.load(Reason + i, mask=here, other=_DEAD) == _ALIVE) & (reason != _ALIVE) & (reason != _DEAD)
        last = tl.where(ended, tl.load(Last + i, mask=here, other=0.0), 0.0)
        lost = lost | (last == infinite)
        weight += scale * last
        log_phi += last
        blame = tl.where(last == infinite, tl.load(LastCause + i, mask=here, other=0), blame)
    dead = (weight == infinite) & (reason != _DEAD)
    tl.store(OutLogPhi + i, tl.where(lost, 0.0, log_phi), mask=here)
    tl.store(OutLogWeight + i, weight, mask=here)
    tl.store(OutReason + i, tl.where(dead, _DEAD, reason), mask=here)
    tl.store(OutCause + i, tl.where(dead, blame, cause), mask=here)
    for j in tl.static_range(J):
        log_p = tl.load(LogP + i * J + j, mask=here, other=0.0)
        block = tl.zeros([P], tl.float64)
        for b in range(B):
            block += tl.load(TokenLogP + i * token_s + b * J + j, mask=here, other=0.0)
        tl.store(OutLogP + i * J + j, log_p + block, mask=here)
    log_z = tl.sum(tl.load(BlockLogZ + i * z_s, mask=here, other=0.0), 0)
    tl.store(OutLogZ + group, tl.load(LogZ + group) + log_z)
    drawn = tl.sum(tl.load(Counts + i * counts_s, mask=here, other=0), 0)
    tl.store(OutDrawn + group, tl.load(Drawn + group) + drawn)


def weigh(particles: Particles, block: Block, soft: Said | None, last: Said | None, by_models: int) -> Weighed:
    groups, n, size, factors = block.token_log_p.shape
    x = particles
    old = [y.contiguous() for y in (x.log_p, x.log_phi, x.log_weight, x.reason, x.soft_scale, x.log_z, x.drawn)]
    fields = (block.token_log_p, block.log_weight, block.reason, block.cause, block.log_z, block.counts)
    given, strides = zip(*map(_rows, fields), strict=True)
    said = [old[1], old[3]] * 2 if soft is None else [y.contiguous() for y in soft] * 2
    if last is not None:
        said[2:] = [y.contiguous() for y in last]
    out = Weighed(*(torch.empty_like(y) for y in (*old[:4], old[3], *old[5:])))
    _weigh[(groups,)](
        *old, *given, *said, *out, *strides, by_models, n, size,
        J=factors, SOFT=soft is not None, LAST=last is not None, **_size(n),
    )  # fmt: skip
    return out


@triton.jit
def _measure(
    LogWeight,
    Length,
    Reason,
    Before,
    OldReason,
    Penalty,
    LogLeft,
    Judged,
    Accepted,
    Active,
    Score,
    ChiSquare,
    Deaths,
    OutLeft,
    OutJudged,
    OutAccepted,
    Eligible,
    left_s,
    judged_s,
    accepted_s,
    N,
    B,
    HARD: tl.constexpr,
    P: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, P)
    here = n < N
    i = group * N + n
    infinite = float("-inf")
    weight = tl.load(LogWeight + i, mask=here, other=infinite)
    before = tl.load(Before + i, mask=here, other=infinite)
    length = tl.load(Length + i, mask=here, other=0).to(tl.float64)
    tl.store(Score + i, weight - tl.load(Penalty + group) * length, mask=here)
    reason = tl.load(Reason + i, mask=here, other=_DEAD)
    was = tl.load(OldReason + i, mask=here, other=_DEAD) == _ALIVE
    tl.store(Deaths + group, tl.sum((was & (reason == _DEAD)).to(tl.int64), 0))
    going = tl.sum((reason == _ALIVE).to(tl.int32), 0) > 0
    tl.store(Eligible + group, ((tl.load(Active + group) != 0) & going).to(tl.uint8))
    tl.store(OutJudged + group, tl.sum(tl.load(Judged + i * judged_s, mask=here, other=0), 0))
    tl.store(OutAccepted + group, tl.sum(tl.load(Accepted + i * accepted_s, mask=here, other=0), 0))

    high = tl.max(before, 0)
    base = tl.exp(before - tl.where(high == infinite, 0.0, high))
    base = base / tl.maximum(tl.sum(base, 0), 2.2250738585072014e-308)
    increment = tl.where(before > infinite, weight - before, infinite)
    top = tl.max(increment, 0)
    w = tl.exp(increment - tl.where((top > infinite) & (top < float("inf")), top, 0.0))
    mean = tl.sum(base * w, 0)
    square = tl.sum(base * w * w, 0) / tl.maximum(mean * mean, 1e-300) - 1.0
    tl.store(ChiSquare + group, tl.where(mean > 0, square, 0.0))

    share = tl.log(base)
    for b in range(B):
        left = tl.load(LogLeft + i * left_s + b, mask=here, other=0.0)
        if HARD:
            share += left
            most = tl.max(share, 0)
            most = tl.where(most == infinite, 0.0, most)
            found = tl.log(tl.sum(tl.exp(share - most), 0)) + most
        else:
            found = tl.sum(tl.where(n == 0, left, 0.0), 0)
        tl.store(OutLeft + group * B + b, found)


def measure(
    particles: Particles, before: Particles, block: Block, penalty: torch.Tensor, active: torch.Tensor, hard: bool
) -> Measured:
    groups, n, size = block.log_left.shape
    now, then = particles, before
    x = [y.contiguous() for y in (now.log_weight, now.length, now.reason, then.log_weight, then.reason, penalty)]
    given, strides = zip(*map(_rows, (block.log_left, block.judged, block.accepted)), strict=True)
    whole, real = torch.empty(3, groups, dtype=torch.int64, device=penalty.device), torch.empty_like(x[0])
    eligible = torch.empty_like(active)
    out = Measured(real, torch.empty_like(penalty), whole[0], real.new_empty(groups, size), whole[1], whole[2], eligible)
    _measure[(groups,)](
        *x, *given, active.view(torch.uint8), *out[:-1], eligible.view(torch.uint8), *strides, n, size, HARD=hard, **_size(n)
    )
    return out


@triton.jit
def _inherit(
    Length,
    Reason,
    State,
    History,
    Cause,
    Root,
    LogPhi,
    LogP,
    LogWeight,
    Score,
    LogEvidence,
    Ancestors,
    Go,
    LogMean,
    OutLength,
    OutReason,
    OutState,
    OutHistory,
    OutCause,
    OutRoot,
    OutLogPhi,
    OutLogP,
    OutLogWeight,
    OutLogEvidence,
    N,
    J: tl.constexpr,
    P: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, P)
    here = n < N
    i = group * N + n
    at = group * N + tl.load(Ancestors + i, mask=here, other=0)
    tl.store(OutLength + i, tl.load(Length + at, mask=here, other=0), mask=here)
    tl.store(OutReason + i, tl.load(Reason + at, mask=here, other=0), mask=here)
    tl.store(OutState + i, tl.load(State + at, mask=here, other=0), mask=here)
    tl.store(OutHistory + i, tl.load(History + at, mask=here, other=0), mask=here)
    tl.store(OutCause + i, tl.load(Cause + at, mask=here, other=0), mask=here)
    tl.store(OutRoot + i, tl.load(Root + at, mask=here, other=0), mask=here)
    tl.store(OutLogPhi + i, tl.load(LogPhi + at, mask=here, other=0.0), mask=here)
    for j in tl.static_range(J):
        tl.store(OutLogP + i * J + j, tl.load(LogP + at * J + j, mask=here, other=0.0), mask=here)
    go = tl.load(Go + group) != 0
    weight = tl.load(LogWeight + at, mask=here, other=0.0)
    tl.store(OutLogWeight + i, tl.where(go, weight - tl.load(Score + at, mask=here, other=0.0), weight), mask=here)
    tl.store(OutLogEvidence + group, tl.load(LogEvidence + group) + tl.where(go, tl.load(LogMean + group), 0.0))


def inherit(particles: Particles, score: torch.Tensor, resampled: Resampled) -> Particles:
    old = [getattr(particles, name).contiguous() for name in INHERITED]
    evidence = particles.log_evidence.contiguous()
    out = [torch.empty_like(x) for x in (*old, evidence)]
    groups, n = particles.length.shape
    _inherit[(groups,)](
        *old, score.contiguous(), evidence, resampled.ancestors, resampled.go.view(torch.uint8), resampled.log_mean,
        *out, n, J=particles.log_p.shape[2], **_size(n),
    )  # fmt: skip
    ancestors = resampled.ancestors[..., None]
    tokens, log_q = (x.gather(1, ancestors.expand_as(x)) for x in (particles.tokens, particles.token_log_q))
    log_p = particles.token_log_p.gather(1, ancestors[..., None].expand_as(particles.token_log_p))
    fields = dict(zip((*INHERITED, "log_evidence"), out, strict=True))
    return replace(particles, tokens=tokens, token_log_p=log_p, token_log_q=log_q, **fields)
