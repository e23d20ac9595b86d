"""`smcgen.kernels.layers` in Triton."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.join import PROGRAMS
from smcgen.kernels.gpu.pdl import ask, early, release, wait
from smcgen.kernels.gpu.rounded import _rounded_linear
from smcgen.kernels.gpu.sums import piece, put
from smcgen.kernels.layers import Rounded, Weight, whole

MANY = 80  # rows that are still few
# By bytes of a weight: rows, from which on cuBLAS is faster; for int8 also with the matrix turned into another dtype before.
FEW = {1: MANY, 2: MANY, 4: 16}
WIDE = 1 << 15  # outputs of a matrix that is a model's head; for more than 16 rows cuBLAS is faster there


class Tiles(NamedTuple):
    """How `_linear` goes through a matrix."""

    outputs: int  # of a program
    inputs: int  # of a step
    stages: int  # steps under way
    warps: int
    programs: int = PROGRAMS  # at most, where parts are wanted
    ahead: int = 256  # inputs of each output whose weights are asked for before the wait


ALONE = PROGRAMS // 2  # where a program has a processor to itself, for the memory that it takes

# By bytes of a weight (with x in float32: of x), what is wanted (see `_few`), and the most rows. Of int8 up to 16 rows a step's
# inputs are those of one warp.
TILES = {
    (1, "linear", 8): Tiles(16, 128, 6, 4, ahead=1024),
    (1, "parts", 8): Tiles(16, 128, 6, 4, ahead=512),
    (1, "gated", 8): Tiles(32, 128, 3, 4, ahead=512),
    (1, "head", 8): Tiles(32, 128, 4, 2, ahead=512),
    (1, "linear", 16): Tiles(32, 128, 3, 4, ahead=512),
    (1, "parts", 16): Tiles(32, 128, 3, 4, ahead=512),
    (1, "gated", 16): Tiles(32, 128, 3, 4, ahead=512),
    (1, "head", 16): Tiles(32, 128, 4, 2, ahead=512),
    (1, "linear", MANY): Tiles(64, 128, 4, 4, ahead=512),
    (1, "parts", MANY): Tiles(64, 128, 4, 4, ALONE, ahead=512),
    (1, "gated", MANY): Tiles(64, 128, 4, 4, ahead=512),
    (2, "linear", 16): Tiles(64, 128, 6, 4),
    (2, "parts", 16): Tiles(64, 128, 6, 4, ALONE),
    (2, "gated", 16): Tiles(64, 128, 4, 4),
    (2, "head", 16): Tiles(64, 128, 4, 4),
    (2, "linear", MANY): Tiles(64, 128, 6, 4),
    (2, "parts", MANY): Tiles(64, 128, 6, 4, ALONE),
    (2, "gated", MANY): Tiles(128, 64, 4, 4),
    (4, "linear", 16): Tiles(32, 64, 4, 4),
    (4, "parts", 16): Tiles(32, 64, 4, 4),
    (4, "gated", 16): Tiles(32, 64, 4, 4),
    (4, "head", 16): Tiles(32, 64, 4, 4),
    (4, "linear", MANY): Tiles(32, 32, 3, 4),
    (4, "parts", MANY): Tiles(32, 32, 3, 4),
    (4, "gated", MANY): Tiles(32, 32, 3, 4),
}


def _tiles(size: int, wanted: str, rows: int) -> Tiles:
    return TILES[size, wanted, next(most for most in (8, 16, MANY) if rows <= most and (size, wanted, most) in TILES)]


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
    _put_norm(Out + row * dim + d, x, weight, d, dim, eps)


@triton.jit
def _put_norm(out, x, weight, d, dim, eps):
    y = x.to(tl.float32)
    y = y * (1 / tl.sqrt(tl.sum(y * y, 0) / dim + eps))
    # rounded before the weight is applied, as the models themselves do
    tl.store(out, y.to(out.dtype.element_ty).to(tl.float32) * weight.to(tl.float32), mask=d < dim)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, parts: torch.Tensor | None = None) -> torch.Tensor:
    x = x.contiguous()
    dim = x.shape[-1]
    out = torch.empty_like(x)
    _rms_norm[(x.numel() // dim,)](
        x,
        x if parts is None else parts,
        weight,
        out,
        dim,
        eps,
        PARTS=0 if parts is None else len(parts),
        **_line(dim),
        **early(x),
    )
    return out


def _line(dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


@triton.jit
def _embed_norm(Tokens, Table, Weight, Into, Out, stride, size, dim, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    weight = tl.load(Weight + d, mask=d < dim, other=0.0)
    wait(PDL)
    token = tl.minimum(tl.maximum(tl.load(Tokens + row * stride), 0), size - 1)
    x = tl.load(Table + token * dim + d, mask=d < dim, other=0.0)
    tl.store(Into + row * dim + d, x, mask=d < dim)
    _put_norm(Out + row * dim + d, x, weight, d, dim, eps)


def embed_norm(into: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    assert into.is_contiguous()
    out = torch.empty_like(into)
    rows, dim = into.shape
    _embed_norm[(rows,)](tokens, table, weight, into, out, tokens.stride(0), len(table), dim, eps, **_line(dim), **early(into))
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
def _lines(X, first, rows, at, last, inputs, COUNT: tl.constexpr):
    """Inputs `at` of COUNT rows from `first` on: [inputs, rows]."""
    r = first + tl.arange(0, COUNT)
    x = tl.load(X + r[:, None] * inputs + at[None, :], mask=(r < rows)[:, None] & (at < last)[None, :], other=0.0)
    return tl.trans(x)


@triton.jit
def _weights(pointers, inside, x):
    """Some of the matrix, in the dtype of x."""
    return tl.load(pointers, mask=inside, other=0, eviction_policy="evict_first").to(x.dtype)


@triton.jit
def _linear(
    X,
    Weight,
    Scale,
    Bias,
    Out,
    rows,
    outputs,
    inputs,
    SCALED: tl.constexpr,  # whether the weights are int8 with a scale for each output
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,  # of the inputs
    BLOCK_M: tl.constexpr,
    REST: tl.constexpr,  # rows beyond BLOCK_M; both are powers of two, so that 72 rows are 64 + 16 and not 128
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # inputs whose weights are asked for before the wait
    SIZE: tl.constexpr,  # bytes of a weight
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    first, last = piece(split, inputs, SPLITS, BLOCK_K)
    k = tl.arange(0, BLOCK_K)
    line = n.to(tl.int64)[:, None] * inputs
    half = tl.cast(outputs, tl.int64) * inputs  # from a gate to its partner
    if PDL and AHEAD > 0:
        ask(Weight, first, last, outputs, inputs, SIZE, BLOCK_N, AHEAD, 32 * WARPS)
        if GATED:
            ask(Weight + half, first, last, outputs, inputs, SIZE, BLOCK_N, AHEAD, 32 * WARPS)
    wait(PDL)
    MORE: tl.constexpr = REST if REST > 0 else 1
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gated = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    more_sums = tl.zeros([BLOCK_N, MORE], tl.float32)
    more_gated = tl.zeros([BLOCK_N, MORE], tl.float32)
    for start in range(first, last, BLOCK_K):
        at = start + k
        inside = (n < outputs)[:, None] & (at < last)[None, :]
        x = _lines(X, 0, rows, at, last, inputs, BLOCK_M)
        w = _weights(Weight + line + at[None, :], inside, x)
        sums = tl.dot(w, x, sums, input_precision="ieee")
        if REST > 0:
            more_x = _lines(X, BLOCK_M, rows, at, last, inputs, REST)
            more_sums = tl.dot(w, more_x, more_sums, input_precision="ieee")
        if GATED:
            w = _weights(Weight + half + line + at[None, :], inside, x)
            gated = tl.dot(w, x, gated, input_precision="ieee")
            if REST > 0:
                more_gated = tl.dot(w, more_x, more_gated, input_precision="ieee")
    put(Out, Scale, Bias, sums, gated, n, outputs, 0, rows, split, SCALED, BIAS, GATED, BLOCK_M)
    if REST > 0:
        put(Out, Scale, Bias, more_sums, more_gated, n, outputs, BLOCK_M, rows, split, SCALED, BIAS, GATED, REST)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    rounded = isinstance(weight, Rounded)
    head = len(weight.numbers if rounded else weight) > WIDE
    if not _is_few(x, weight) or (head and len(x) > 16 and not rounded):
        return torch.nn.functional.linear(x, whole(weight, x.dtype), bias)
    return _few("head" if head and len(x) <= 16 else "linear", x, weight, bias)[0]


def linear_parts(x: torch.Tensor, weight: Weight) -> torch.Tensor | None:
    return _few("parts", x, weight) if _is_few(x, weight) else None


def gated_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if not _is_few(x, weight):
        return silu_mul(torch.nn.functional.linear(x, whole(weight, x.dtype)))
    return _few("gated", x, weight)[0]


def _is_few(x: torch.Tensor, weight: Weight) -> bool:
    return len(x) <= FEW[1 if isinstance(weight, Rounded) else x.element_size()]


def _few(wanted: str, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """For a few rows a kernel that streams the weights, and asks for the first before it waits for x.

    Returns [1, rows, outputs] in the dtype of x, or if "parts" are wanted those of the sum, float32 [splits, rows, outputs]."""
    x = x.contiguous()
    gated, parts = wanted == "gated", wanted == "parts"
    numbers, scale = weight if isinstance(weight, Rounded) else (weight, None)
    size = numbers.element_size()
    rows, inputs = x.shape
    tiles = _tiles(4 if x.dtype == torch.float32 else size, wanted, rows)
    outputs = len(numbers) // 2 if gated else len(numbers)
    blocks = triton.cdiv(outputs, tiles.outputs)
    splits = max(1, min(tiles.programs // blocks, inputs // 512)) if parts else 1
    out = torch.empty(splits, rows, outputs, dtype=torch.float32 if parts else x.dtype, device=x.device)
    arguments = x, numbers, x if scale is None else scale, x if bias is None else bias, out, rows, outputs, inputs
    aligned = numbers.data_ptr() % 16 == inputs * size % 16 == 0  # as a request in advance has to be; a view need not
    options = {"BIAS": bias is not None, "GATED": gated, "SPLITS": splits, "BLOCK_N": tiles.outputs, "BLOCK_K": tiles.inputs}
    options |= {"AHEAD": tiles.ahead if aligned else 0, "WARPS": tiles.warps, "num_warps": tiles.warps, **early(x)}
    sizes, room = (size, x.element_size()), _room(x.get_device())
    if scale is not None and rows <= 16 and x.dtype != torch.float32:
        columns = max(8, triton.next_power_of_2(rows))
        options["num_stages"] = fitting(tiles, gated, tiles.warps * tiles.inputs, columns, sizes, *room)
        _rounded_linear[(blocks, splits)](*arguments, BLOCK_M=columns, **options)
    else:
        main, rest = _powers(rows)
        options["num_stages"] = fitting(tiles, gated, tiles.inputs, main + rest, sizes, *room)
        _linear[(blocks, splits)](*arguments, SCALED=scale is not None, BLOCK_M=main, REST=rest, SIZE=size, **options)
    return out


def fitting(tiles: Tiles, gated: bool, inputs: int, columns: int, sizes: tuple[int, int], room: int, generation: int) -> int:
    """Steps under way: those of `tiles`, or as many as `room` bytes hold on a GPU of this major compute capability. A step is
    of so many inputs and columns, with weights and x of these `sizes` in bytes."""
    step = inputs * ((1 + gated) * tiles.outputs * sizes[0] + columns * sizes[1])
    # Before Hopper the step that is being multiplied lies in registers.
    return max(1, min(tiles.stages, room // step + (generation < 9)))


@functools.cache
def _room(device: int) -> tuple[int, int]:
    """Bytes of shared memory that a program can have (227 KiB on an H200, 99 on many others), and the major compute capability;
    for Triton's interpreter, which has no device, no bound."""
    if device < 0:
        return sys.maxsize, 9
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return properties["max_shared_mem"], torch.cuda.get_device_capability(device)[0]


def _powers(rows: int) -> tuple[int, int]:
    """One power of two or two, 16 at least, that hold `rows` with the least to spare."""
    whole = max(16, triton.next_power_of_2(rows))
    main = whole // 2
    rest = max(16, triton.next_power_of_2(rows - main))
    return (main, rest) if main >= 16 and rest < main else (whole, 0)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(a) * b for the halves a, b of the last axis: [..., 2 * dim] -> [..., dim]."""
    x = x.contiguous()
    dim = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], dim, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(dim))
    _silu_mul[(out.numel() // dim, triton.cdiv(dim, block))](x, out, dim, BLOCK=block, num_warps=4)
    return out
