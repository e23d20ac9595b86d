"""Products of a few rows with a matrix of int8 numbers (`smcgen.kernels.layers.Rounded`).

The numbers have to be widened in registers, and that is more work than the product. So the warps of a program share its inputs,
not its outputs: none widens what another does, each has a sum of its own, and these are added at the end.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from smcgen.kernels.gpu.pdl import ask, release, wait
from smcgen.kernels.gpu.sums import piece, put


@triton.jit
def _order(k):
    """Where the inputs k lie. A thread hands four neighbours at a time to the tensor cores, four times in 64 inputs: in this
    order these are 16 bytes side by side, which it reads at once. The sum is the same in any order."""
    return k // 64 * 64 + k // 4 % 4 * 16 + k // 16 % 4 * 4 + k % 4


@triton.jit
def _numbers(pointers, inside, x):
    """Some of the matrix, [warps, outputs, inputs], in the dtype of x, its inputs in the order of `_order`."""
    w = tl.load(pointers, mask=inside, other=0, eviction_policy="evict_first")
    warps: tl.constexpr = w.shape[0]
    lines: tl.constexpr = w.shape[1]
    inputs: tl.constexpr = w.shape[2]
    w = tl.permute(tl.reshape(w, [warps, lines, inputs // 64, 4, 4, 4]), [0, 1, 2, 4, 3, 5])
    return tl.reshape(w, [warps, lines, inputs]).to(x.dtype)


@triton.jit
def _rounded_linear(
    X,
    Weight,
    Scale,
    Bias,
    Out,
    rows,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,  # of the inputs
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of a warp
    AHEAD: tl.constexpr,  # inputs whose weights are asked for before the wait
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    STEP: tl.constexpr = WARPS * BLOCK_K
    first, last = piece(split, inputs, SPLITS, STEP)
    half = tl.cast(outputs, tl.int64) * inputs  # from a gate to its partner
    if PDL and AHEAD > 0:
        ask(Weight, first, last, outputs, inputs, 1, BLOCK_N, AHEAD, 32 * WARPS)
        if GATED:
            ask(Weight + half, first, last, outputs, inputs, 1, BLOCK_N, AHEAD, 32 * WARPS)
    scale = tl.load(Scale + n, mask=n < outputs, other=0.0)
    if GATED:
        scale_of_gated = tl.load(Scale + outputs + n, mask=n < outputs, other=0.0)
    wait(PDL)
    r = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    part = tl.arange(0, WARPS)[:, None, None] * BLOCK_K
    line = n.to(tl.int64)[None, :, None] * inputs
    sums = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    gated = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    for start in range(first, last, STEP):
        at = start + part + k[None, None, :]
        lies = start + part + _order(k)[None, None, :]
        x = tl.load(X + r[None, :, None] * inputs + lies, mask=(r < rows)[None, :, None] & (lies < last), other=0.0)
        x = tl.permute(x, [0, 2, 1])
        inside = (n < outputs)[None, :, None] & (at < last)
        sums = tl.dot(_numbers(Weight + line + at, inside, x), x, sums)
        if GATED:
            gated = tl.dot(_numbers(Weight + half + line + at, inside, x), x, gated)
    total, total_of_gated = tl.sum(sums, 0) * scale[:, None], tl.sum(gated, 0)
    if GATED:
        total_of_gated *= scale_of_gated[:, None]
    put(Out, Scale, Bias, total, total_of_gated, n, outputs, 0, rows, split, False, BIAS, GATED, BLOCK_M)
