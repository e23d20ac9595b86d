"""`smcgen.kernels.automaton` in Triton."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def _walk(
    Now,
    Depth,
    Past,
    Tokens,
    Counts,
    Classes,
    Following,
    Out,
    rows,
    width,  # of a line of Tokens
    kinds,
    capacity,
    dead,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < rows
    now = tl.load(Now + i, mask=here, other=0)
    depth = tl.load(Depth + i, mask=here, other=0)
    counts = tl.load(Counts + i, mask=here, other=0)
    for step in range(STEPS):
        reading = here & (step < counts)
        token = tl.load(Tokens + i * width + step, mask=reading, other=0)
        kind = tl.load(Classes + token, mask=reading, other=0)
        now = tl.where(reading, tl.load(Following + now * kinds + kind, mask=reading, other=0).to(tl.int64), now)
        depth += reading.to(tl.int64)
        tl.store(Past + i * (capacity + 1) + depth % capacity, now, mask=reading)
    tl.store(Now + i, now, mask=here)
    tl.store(Depth + i, depth, mask=here)
    tl.store(Out + i, tl.where((now == dead) & (counts > 0), float("-inf"), 0.0).to(tl.float64), mask=here)


def walk(
    now: torch.Tensor,
    depth: torch.Tensor,
    past: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    classes: torch.Tensor,
    following: torch.Tensor,
    dead: int,
) -> torch.Tensor:
    out = torch.empty(now.shape, dtype=torch.float64, device=now.device)
    assert all(x.is_contiguous() for x in (now, depth, past))
    tokens, counts = tokens.contiguous(), counts.contiguous()
    rows, steps = now.numel(), tokens.shape[-1]
    _walk[(triton.cdiv(rows, BLOCK),)](
        now, depth, past, tokens, counts, classes, following, out, rows, steps, following.shape[1], past.shape[-1] - 1, dead,
        STEPS=steps, BLOCK=BLOCK,
    )  # fmt: skip
    return out
