"""One resampling step of every group: effective sample size, evidence, the decision, and where the offspring go."""

from __future__ import annotations

from typing import NamedTuple

import torch

from smcgen.kernels.device import on_triton
from smcgen.smc.resampling import SCHEMES, ancestors_in_place
from smcgen.smc.weights import effective_sample_size, log_mean_exp, normalize

# Particles of a group that one program takes: it matches every point with every particle, and with more a search in torch is
# the faster (1,024 at once took 2.7 times as long on an H200). SSP goes from particle to particle in either.
MOST = 256


class Resampled(NamedTuple):
    """A step for G groups of N particles."""

    ess: torch.Tensor  # float64 [G]; 0 for a dead group
    log_mean: torch.Tensor  # float64 [G], log of the mean weight; -inf for a dead group
    go: torch.Tensor  # bool [G], which groups are resampled
    ancestors: torch.Tensor  # int64 [G, N]; place n takes a copy of particle ancestors[g, n], n itself where `go` is False


def resample(score: torch.Tensor, uniforms: torch.Tensor, scheme: str, threshold: float, eligible: torch.Tensor) -> Resampled:
    """Resamples the groups that are `eligible` and not dead and whose ESS is below threshold * N.

    Args:
        score: float64 [G, N], log weights; -inf is a particle of weight 0.
        uniforms: float64 [G, 2 * N] in (0, 1).
        scheme: a key of `smc.resampling.SCHEMES`.
        threshold: 0 never, 1 always (but for equal weights).
        eligible: bool [G].

    On CUDA, for N up to `MOST`, this is one launch with one program per group. Sums are added up in another order there: where
    a point of a scheme or the ESS lies within rounding (1e-15) of an edge, the outcome may be the neighbour's.
    """
    n = score.shape[-1]
    if on_triton(score) and n <= (1024 if scheme == "ssp" else MOST):
        from smcgen.kernels.gpu import resample as gpu

        return Resampled(*gpu.resample(score, uniforms, scheme, threshold, eligible))
    ess = effective_sample_size(score)
    go = eligible & (ess < threshold * n) & (ess > 0)
    weights = normalize(score).nan_to_num(0.0)  # NaN moves nothing: no ESS is below the threshold
    ancestors = ancestors_in_place(SCHEMES[scheme](weights, uniforms))
    ancestors = torch.where(go[:, None], ancestors, torch.arange(n, device=score.device))
    return Resampled(ess, log_mean_exp(score), go, ancestors)
