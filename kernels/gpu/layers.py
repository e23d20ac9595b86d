"""`smcgen.kernels.layers` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(X, Weight, Out, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(X + row * dim + d, mask=d < dim, other=0.0)
    weight = tl.load(Weight + d, mask=d < dim, other=0.0)
    y = x.to(tl.float32)
    y = y * (1 / tl.sqrt(tl.sum(y * y, 0) / dim + eps))
    # rounded before the weight is applied, as the models themselves do
    tl.store(Out + row * dim + d, y.to(Out.dtype.element_ty).to(tl.float32) * weight.to(tl.float32), mask=d < dim)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    dim = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(dim)
    _rms_norm[(x.numel() // dim,)](x, weight, out, dim, eps, BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return out


@triton.jit
def _silu_mul(X, Out, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(X + row * 2 * dim + d, mask=d < dim, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * dim + dim + d, mask=d < dim, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(Out.dtype.element_ty).to(tl.float32)
    tl.store(Out + row * dim + d, gate * up, mask=d < dim)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    dim = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], dim, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(dim))
    _silu_mul[(out.numel() // dim, triton.cdiv(dim, block))](x, out, dim, BLOCK=block, num_warps=4)
    return out
