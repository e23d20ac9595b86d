"""`smcgen.kernels.layers` in Triton."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.attention import PROGRAMS
from smcgen.kernels.gpu.pdl import early, prefetch, release, wait

FEW = 16  # rows, from which on cuBLAS is faster
BLOCKS = {2: (64, 128, 6), 4: (32, 64, 4)}  # by bytes of a weight: outputs and inputs of a step, steps under way
AHEAD = 256  # inputs of each output whose weights are asked for before the wait


@triton.jit
def _rms_norm(X, Parts, Weight, Out, dim, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    weight = tl.load(Weight + d, mask=d < dim, other=0.0)
    wait(PDL)
    x = tl.load(X + row * dim + d, mask=d < dim, other=0.0)
    if PARTS > 0:
        total = x.to(tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(Parts + (part * tl.num_programs(0) + row) * dim + d, mask=d < dim, other=0.0)
        x = total.to(x.dtype)
        tl.store(X + row * dim + d, x, mask=d < dim)
    y = x.to(tl.float32)
    y = y * (1 / tl.sqrt(tl.sum(y * y, 0) / dim + eps))
    # rounded before the weight is applied, as the models themselves do
    tl.store(Out + row * dim + d, y.to(Out.dtype.element_ty).to(tl.float32) * weight.to(tl.float32), mask=d < dim)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, parts: torch.Tensor | None = None) -> torch.Tensor:
    x = x.contiguous()
    dim = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(dim)
    _rms_norm[(x.numel() // dim,)](
        x, x if parts is None else parts, weight, out, dim, eps, PARTS=0 if parts is None else len(parts), BLOCK=block,
        num_warps=min(16, max(1, block // 512)), **early(x),
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul(X, Out, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(X + row * 2 * dim + d, mask=d < dim, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * dim + dim + d, mask=d < dim, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(Out.dtype.element_ty).to(tl.float32)
    tl.store(Out + row * dim + d, gate * up, mask=d < dim)


@triton.jit
def _linear(
    X,
    Weight,
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
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # inputs whose weights are asked for before the wait
    SIZE: tl.constexpr,  # bytes of a weight
    PDL: tl.constexpr,
):
    release(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    size = tl.cdiv(tl.cdiv(inputs, SPLITS), BLOCK_K) * BLOCK_K
    first, last = split * size, tl.minimum(split * size + size, inputs)
    r = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    line = n.to(tl.int64)[:, None] * inputs
    half = outputs.to(tl.int64) * inputs  # from a gate to its partner
    if PDL and AHEAD > 0:
        # One request a thread, each for a part of a line of the matrix.
        each: tl.constexpr = AHEAD * BLOCK_N // 128
        j = tl.arange(0, 128)
        there = tl.program_id(0) * BLOCK_N + j * each // AHEAD
        begin = first + j * each % AHEAD
        asked = tl.where(there < outputs, tl.minimum(each, last - begin), 0) * SIZE
        prefetch(Weight + there.to(tl.int64) * inputs + begin, asked)
        if GATED:
            prefetch(Weight + half + there.to(tl.int64) * inputs + begin, asked)
    wait(PDL)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gated = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_K):
        at = start + k
        inside = (n < outputs)[:, None] & (at < last)[None, :]
        x = tl.load(X + r[:, None] * inputs + at[None, :], mask=(r < rows)[:, None] & (at < last)[None, :], other=0.0)
        x = tl.trans(x)
        w = tl.load(Weight + line + at[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(w, x, sums, input_precision="ieee")
        if GATED:
            w = tl.load(Weight + half + line + at[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            gated = tl.dot(w, x, gated, input_precision="ieee")
    if GATED:
        sums = sums * tl.sigmoid(sums) * gated
    if BIAS:
        sums += tl.load(Bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    out = Out + (split * rows + r).to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out, sums, mask=(n < outputs)[:, None] & (r < rows)[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if len(x) > FEW:
        return torch.nn.functional.linear(x, weight, bias)
    return _few(x, weight, bias, len(weight))[0]


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    if len(x) > FEW:
        return None
    blocks = triton.cdiv(len(weight), BLOCKS[x.element_size()][0])
    return _few(x, weight, None, len(weight), splits=max(1, min(PROGRAMS // blocks, x.shape[1] // 512)))


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if len(x) > FEW:
        return silu_mul(torch.nn.functional.linear(x, weight))
    return _few(x, weight, None, weight.shape[0] // 2, gated=True)[0]


def _few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, outputs: int, splits: int = 0, gated: bool = False
) -> torch.Tensor:
    """For a few rows a kernel that streams the weights, and asks for the first before it waits for x.

    Returns [1, rows, outputs] in the dtype of x, or with splits the parts of the sum, float32 [splits, rows, outputs]."""
    x = x.contiguous()
    block_n, block_k, stages = (64, 128, 4) if gated and x.element_size() == 2 else BLOCKS[x.element_size()]
    ahead = AHEAD if x.shape[1] * x.element_size() % 16 == 0 else 0
    dtype = torch.float32 if splits else x.dtype
    out = torch.empty(max(1, splits), len(x), outputs, dtype=dtype, device=x.device)
    _linear[(triton.cdiv(outputs, block_n), max(1, splits))](
        x, weight, weight if bias is None else bias, out, len(x), outputs, x.shape[1], BIAS=bias is not None, GATED=gated,
        SPLITS=max(1, splits), BLOCK_M=FEW, BLOCK_N=block_n, BLOCK_K=block_k, AHEAD=ahead,
        SIZE=x.element_size(), num_warps=4, num_stages=stages, **early(x),
    )  # fmt: skip
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(a) * b for the halves a, b of the last axis: [..., 2 * dim] -> [..., dim]."""
    x = x.contiguous()
    dim = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], dim, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(dim))
    _silu_mul[(out.numel() // dim, triton.cdiv(dim, block))](x, out, dim, BLOCK=block, num_warps=4)
    return out
