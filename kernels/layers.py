"""The small operations between the matrix products of a transformer layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from smcgen.kernels.device import on_triton

LINES = 4096  # of a matrix that are rounded at a time, for the memory that it takes


class Rounded(NamedTuple):
    """A matrix [outputs, inputs] that is the product of numbers int8 [outputs, inputs] and a scale float32 [outputs]."""

    numbers: torch.Tensor
    scale: torch.Tensor

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in `dtype`; the product is taken in float32."""
        out = torch.empty(self.numbers.shape, dtype=dtype, device=self.numbers.device)
        return torch.mul(self.numbers, self.scale[:, None], out=out)


Weight = torch.Tensor | Rounded


def rounded(weight: torch.Tensor) -> Rounded:
    """`weight` [outputs, inputs] rounded to the nearest of 255 levels, symmetrically, one scale for each output: max |w| / 127
    (as vectors are in Dettmers et al., "LLM.int8(): 8-bit matrix multiplication for transformers at scale", 2022)."""
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for first in range(0, len(weight), LINES):
        lines = slice(first, first + LINES)
        part = weight[lines].float()
        scale[lines] = (part.abs().amax(-1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        numbers[lines] = (part / scale[lines, None]).round_().clamp_(-127, 127)
    return Rounded(numbers, scale)


def whole(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """A matrix as a tensor in `dtype`, which one that is not rounded has already."""
    return weight.widened(dtype) if isinstance(weight, Rounded) else weight


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


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias: [rows, inputs], [outputs, inputs], [outputs] -> [rows, outputs]."""
    if on_triton(x):
        from smcgen.kernels.gpu import layers as gpu

        return gpu.linear(x, weight, bias)
    return torch.nn.functional.linear(x, whole(weight, x.dtype), bias)


def add_linear(into: torch.Tensor, x: torch.Tensor, weight: Weight, later: bool = True) -> torch.Tensor | None:
    """Adds x W^T to `into` [rows, outputs], in place, or returns parts float32 [parts, rows, outputs] whose sum is still to be
    added (if `later`), by the `rms_norm` that follows: where rows are few, so are the outputs, and splitting the inputs as well
    keeps a GPU busy."""
    parts = None
    if later and on_triton(x):
        from smcgen.kernels.gpu import layers as gpu

        parts = gpu.linear_parts(x, weight)
    if parts is None:
        # In place, as nobody else holds it: cuBLAS adds for nothing, but copies what it may not change.
        into.addmm_(x, whole(weight, x.dtype).t())
    return parts


def gated_linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """silu(x A^T) * (x B^T) for the halves A, B of `weight` [2 * dim, inputs]: [rows, inputs] -> [rows, dim]."""
    if on_triton(x):
        from smcgen.kernels.gpu import layers as gpu

        return gpu.gated_linear(x, weight)
    gate, up = torch.nn.functional.linear(x, whole(weight, x.dtype)).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
