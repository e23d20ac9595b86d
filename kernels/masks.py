"""Masks as bit rows: int32 [rows, ceil(V / 32)], bit v % 32 of word v // 32 set iff token v is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smcgen.kernels.device import on_triton


def joint(masks: Sequence[torch.Tensor], active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What all of `masks` (at least one) allow in the rows where `active` bool [rows]; in others everything is allowed.

    Returns bit rows, and int64 [rows]: -1 if some token is left, else the first of `masks` that leaves none, or their number if
    only together they leave none."""
    if on_triton(active):
        from smcgen.kernels.gpu import masks as gpu

        return gpu.joint(masks, active)
    cause = torch.full(active.shape, -1, dtype=torch.int64, device=active.device)
    together: torch.Tensor | None = None
    for i, mask in enumerate(masks):
        bits = torch.where(active[:, None], mask, -1)
        together = bits if together is None else together & bits
        cause = torch.where((bits == 0).all(-1) & (cause < 0), i, cause)
    assert together is not None
    return together, torch.where((together == 0).all(-1) & (cause < 0), len(masks), cause)
