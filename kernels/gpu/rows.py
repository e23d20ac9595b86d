"""Rows of tensors of any leading shape: three strides that a kernel turns into an offset, so that views need no copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

Lead = tuple[int, int, int]


def lead(shape: Sequence[int]) -> Lead:
    """The leading axes as exactly three."""
    d0, d1, d2 = (1, 1, 1, *shape)[-3:]
    return math.prod(shape[: len(shape) - 2]) if len(shape) > 2 else d0, d1, d2


def lay(x: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, Lead]:
    """x [..., W] broadcast to [*shape, W], and its strides over `lead(shape)`: no copy, unless the last axis is not
    contiguous or there are more than three leading axes that do not merge."""
    x = x.expand(*shape, x.shape[-1])
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    if len(shape) > 3:
        x = x.flatten(0, len(shape) - 3)
    s0, s1, s2 = (0, 0, 0, *x.stride()[:-1])[-3:]
    return x, (s0, s1, s2)


def whole_group(n: int) -> tuple[int, int]:
    """Of a program that takes a group of n particles: its columns, a power of two, and its warps."""
    columns = triton.next_power_of_2(n)
    return columns, 1 if columns <= 32 else 4 if columns <= 256 else 8


@triton.jit
def offset(row, d1, d2, s0, s1, s2):
    """Where row `row` begins, of the flattened axes [d0, d1, d2] with strides s0, s1, s2: int64, for it may pass 2**31."""
    row = row.to(tl.int64)
    return row // (d1 * d2) * s0 + row // d2 % d1 * s1 + row % d2 * s2
