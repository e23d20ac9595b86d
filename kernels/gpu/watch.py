"""`smcgen.lm.batch.Reader.watch` in one launch."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _watch(Values, Used, Broken, size, inner, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(Values + i, mask=i < size, other=0.0)
    used = tl.load(Used + i // inner, mask=i < size, other=0) != 0
    if tl.max(tl.where((value != value) & used, 1, 0), 0) > 0:
        tl.store(Broken, 1)


def watch(broken: torch.Tensor, values: torch.Tensor, used: torch.Tensor) -> None:
    """Sets `broken`, bool [], if a value is NaN where `used` bool, of the same shape or with last axes of 1."""
    size = values.numel()
    _watch[(triton.cdiv(size, BLOCK),)](
        values.contiguous(), used.contiguous(), broken, size, max(size // max(used.numel(), 1), 1), BLOCK, num_warps=4
    )
