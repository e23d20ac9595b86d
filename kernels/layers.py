"""The small operations between the matrix products of a transformer layer."""

from __future__ import annotations

import torch

from smcgen.kernels.device import on_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean x**2 + eps) * weight over the last axis (Zhang & Sennrich, "Root mean square layer normalization", 2019).

    x [..., dim], weight [dim]; computed in float32, returned in the dtype of x."""
    if on_triton(x):
        from smcgen.kernels.gpu import layers as gpu

        return gpu.rms_norm(x, weight, eps)
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x A^T) * (x B^T) for the halves A, B of `weight` [2 * dim, inputs]: [rows, inputs] -> [rows, dim]."""
    if on_triton(x):
        from smcgen.kernels.gpu import layers as gpu

        return gpu.gated_linear(x, weight)
    gate, up = torch.nn.functional.linear(x, weight).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
