"""`smcgen.kernels.verify.totals` in one launch."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _totals(Target, Law, LogP, LogZ, Counts, Gain, SumZ, Out, K: tl.constexpr, P: tl.constexpr):
    """One program for each row, K its positions."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    used = (k < K) & (k < tl.load(Counts + row))
    at = row * K + k
    law = tl.load(Law + at, mask=used, other=0.0)
    log_z = tl.load(LogZ + at, mask=used, other=0.0)
    gain = log_z + tl.where(law == float("-inf"), float("-inf"), tl.load(Target + at, mask=used, other=0.0) - law)
    tl.store(Gain + row, tl.sum(tl.where(used, gain, 0.0), 0))
    tl.store(SumZ + row, tl.sum(log_z, 0))
    tl.store(Out + at, tl.load(LogP + at, mask=used, other=0.0), mask=k < K)


def totals(
    log_target: torch.Tensor, log_law: torch.Tensor, log_p: torch.Tensor, log_z: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `kernels.verify.totals`, of these fields of the verdict."""
    rows, positions = log_p.shape
    gain, sum_z = torch.empty(2, rows, dtype=torch.float64, device=log_p.device)
    out = torch.empty_like(log_p, memory_format=torch.contiguous_format)
    given = (x.contiguous() for x in (log_target, log_law, log_p, log_z, counts))
    _totals[(rows,)](*given, gain, sum_z, out, K=positions, P=triton.next_power_of_2(positions), num_warps=1)
    return gain, sum_z, out
