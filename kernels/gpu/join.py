"""Pieces of attention into one, in Triton."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.pdl import early, release, wait

PROGRAMS = 264  # two for each of the 132 processors of an H100 or H200


@triton.jit
def _join(
    Out,
    Lse,
    Sinks,
    Final,
    total,
    heads,
    PIECES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """The pieces of BLOCK_R outputs together, by their log-sum-exp. (Joined by whichever piece comes last, a launch less, they
    took longer on an H200.)"""
    release(PDL)
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = i < total
    p = tl.arange(0, BLOCK_P)
    wait(PDL)
    lse = tl.load(Lse + p[:, None] * total + i[None, :], mask=(p < PIECES)[:, None] & inside[None, :], other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    if SINKS:
        sink = tl.load(Sinks + i % heads, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(top, sink)
    mass = tl.sum(tl.exp(lse - top[None, :]), 0)
    if SINKS:
        mass += tl.exp(sink - top)
    d = tl.arange(0, BLOCK_D)
    whole = inside[:, None] & (d < DIM)[None, :]
    sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for piece in tl.static_range(PIECES):  # unrolled, so that all are asked for at once
        part = tl.load(Lse + piece * total + i, mask=inside, other=float("-inf"))
        where = (piece * total + i).to(tl.int64)[:, None] * DIM + d[None, :]
        sums += tl.load(Out + where, mask=whole, other=0.0) * tl.exp(part - top)[:, None]
    result = sums / tl.where(mass == 0, 1.0, mass)[:, None]
    tl.store(Final + i.to(tl.int64)[:, None] * DIM + d[None, :], result, mask=whole)


def join(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, final: torch.Tensor, total: int, heads: int) -> None:
    """Pieces `out` [pieces, total, dim] with their log-sum-exp `lse` [pieces, total], both float32, into `final`, of as many
    elements as a piece. Output i is of head i % heads; sinks: [heads] or None."""
    pieces, _, dim = out.shape
    block_r = 1 if total <= 4 * PROGRAMS else 4
    _join[(triton.cdiv(total, block_r),)](
        out,
        lse,
        lse if sinks is None else sinks,
        final,
        total,
        heads,
        PIECES=pieces,
        BLOCK_P=triton.next_power_of_2(pieces),
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        SINKS=sinks is not None,
        BLOCK_R=block_r,
        num_warps=4,
        **early(final),
    )
