"""The small operations between the matrix products of a transformer layer."""

from __future__ import annotations

import torch

from smcgen.kernels.device import on_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, parts: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean x**2 + eps) * weight over the last axis (Zhang & Sennrich, "Root mean square layer normalization", 2019).

    x [..., dim], weight [dim]; computed in float32, returned in the dtype of x. The sum of `parts` [parts, rows, dim] (see
    `add_linear`) is first added to x, in place."""
    if on_triton(x):
        from smcgen.kernels.gpu import layers as gpu

        return gpu.rms_norm(x, weight, eps, parts)
    if parts is not None:
        x += parts.sum(0).to(x.dtype).view_as(x)
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def embed_norm(into: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Writes the lines `tokens` int64 [rows] of `table` [size, dim] to `into` [rows, dim]; returns `rms_norm` of that.

    Tokens below 0 and from `size` on stand for the first and the last."""
    if on_triton(into):
        from smcgen.kernels.gpu import layers as gpu

        return gpu.embed_norm(into, tokens, table, weight, eps)
    return rms_norm(into.copy_(table[tokens.clamp(0, len(table) - 1)]), weight, eps)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias: [rows, inputs], [outputs, inputs], [outputs] -> [rows, outputs]."""
    if on_triton(x):
        from smcgen.kernels.gpu import layers as gpu

        return gpu.linear(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def add_linear(into: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, later: bool = True) -> torch.Tensor | None:
    """Adds x W^T to `into` [rows, outputs], in place, or returns parts float32 [parts, rows, outputs] whose sum is still to be
    added (if `later`), by the `rms_norm` that follows: where rows are few, so are the outputs, and splitting the inputs as well
    keeps a GPU busy."""
    parts = None
    if later and on_triton(x):
        from smcgen.kernels.gpu import layers as gpu

        parts = gpu.linear_parts(x, weight)
    if parts is None:
        # In place, as nobody else holds it: cuBLAS adds for nothing, but copies what it may not change.
        into.addmm_(x, weight.t())
    return parts


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x A^T) * (x B^T) for the halves A, B of `weight` [2 * dim, inputs]: [rows, inputs] -> [rows, dim]."""
    if on_triton(x):
        from smcgen.kernels.gpu import layers as gpu

        return gpu.gated_linear(x, weight)
    gate, up = torch.nn.functional.linear(x, weight).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
