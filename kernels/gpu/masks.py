"""`smcgen.kernels.masks` in Triton."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def _joint(
    Mask,
    Active,
    Out,
    Cause,
    words,
    NUMBER: tl.constexpr,  # of the mask; 0 begins Out and Cause, others go on from what earlier ones left there
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    active = tl.load(Active + row) != 0
    some = tl.zeros([BLOCK], tl.int32)
    some_together = tl.zeros([BLOCK], tl.int32)
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        bits = tl.where(active, tl.load(Mask + row * words + at, mask=inside, other=0), -1)
        together = bits
        if NUMBER > 0:
            together = bits & tl.load(Out + row * words + at, mask=inside, other=0)
        tl.store(Out + row * words + at, together, mask=inside)
        some = some | tl.where(inside, bits, 0)
        some_together = some_together | tl.where(inside, together, 0)
    none = tl.max((some != 0).to(tl.int32), 0) == 0
    none_together = tl.max((some_together != 0).to(tl.int32), 0) == 0
    cause = tl.full([], -1, tl.int64)
    if NUMBER > 0:
        cause = tl.load(Cause + row)
    cause = tl.where((cause < 0) & none, NUMBER, cause)
    if LAST:
        cause = tl.where((cause < 0) & none_together, NUMBER + 1, cause)
    tl.store(Cause + row, cause)


def joint(masks: Sequence[torch.Tensor], active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch for each mask."""
    rows, words = masks[0].shape
    out = torch.empty_like(masks[0], memory_format=torch.contiguous_format)
    cause = torch.empty(rows, dtype=torch.int64, device=active.device)
    for i, mask in enumerate(masks):
        _joint[(rows,)](
            mask.contiguous(), active, out, cause, words, NUMBER=i, LAST=i == len(masks) - 1, BLOCK=1024, num_warps=4
        )
    return out, cause
