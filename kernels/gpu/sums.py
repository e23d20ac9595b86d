"""What products of a few rows have in common: the inputs of a program, and what becomes of its sums."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def piece(split, inputs, SPLITS: tl.constexpr, STEP: tl.constexpr):
    """The first of the inputs of piece `split`, and the one behind its last: SPLITS pieces of whole steps, but for the end."""
    size = tl.cdiv(tl.cdiv(inputs, SPLITS), STEP) * STEP
    return split * size, tl.minimum(split * size + size, inputs)


@triton.jit
def put(
    Out,
    Scale,
    Bias,
    sums,
    gated,
    n,
    outputs,
    first,
    rows,
    split,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Writes the sums [outputs, rows] of COUNT rows from `first` on."""
    if SCALED:
        sums *= tl.load(Scale + n, mask=n < outputs, other=0.0)[:, None]
        if GATED:
            gated *= tl.load(Scale + outputs + n, mask=n < outputs, other=0.0)[:, None]
    if GATED:
        sums = sums * tl.sigmoid(sums) * gated
    if BIAS:
        sums += tl.load(Bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    r = first + tl.arange(0, COUNT)
    out = Out + (split * rows + r).to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out, sums, mask=(n < outputs)[:, None] & (r < rows)[None, :])
