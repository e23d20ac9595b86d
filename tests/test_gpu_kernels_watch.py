"""Numbers that are not numbers, found in one launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from smcgen.kernels.gpu.watch import watch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 7, 9), (40, 30, 1), (2, 3, 130)])
@pytest.mark.parametrize("narrow", [False, True])
def test_where_used(shape, narrow):
    torch.manual_seed(0)
    for _ in range(8):
        values = torch.randn(shape, dtype=torch.float64)
        values.view(-1)[torch.randint(0, values.numel(), (1,))] = torch.nan
        values.view(-1)[torch.randint(0, values.numel(), (1,))] = -torch.inf
        used = torch.rand((*shape[:-1], 1) if narrow else shape) < 0.6
        for before in (False, True):
            broken = torch.tensor(before, device=DEVICE)
            watch(broken, values.to(DEVICE), used.to(DEVICE))
            assert bool(broken) == (before or bool((values.isnan() & used).any()))
