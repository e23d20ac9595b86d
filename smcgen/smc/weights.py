"""Log weights: float64, natural, [groups, particles]; -inf is a particle of weight 0."""

from __future__ import annotations

import math

import torch


def log_mean_exp(log_weight: torch.Tensor) -> torch.Tensor:
    """log of the mean weight of each group: [groups, particles] -> [groups], -inf if all are dead."""
    return log_weight.logsumexp(-1) - math.log(log_weight.shape[-1])


def normalize(log_weight: torch.Tensor) -> torch.Tensor:
    """Weights that sum to 1 in each group (all 0 in a dead group): [groups, particles], float64."""
    top = log_weight.amax(-1, keepdim=True)
    weight = (log_weight - torch.where(top == -torch.inf, 0.0, top)).exp()
    return weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def effective_sample_size(log_weight: torch.Tensor) -> torch.Tensor:
    """(sum w)**2 / sum w**2 of each group (Kong, Liu & Wong 1994): [groups, particles] -> [groups], 0 for a dead group."""
    weight = normalize(log_weight)
    square = weight.square().sum(-1)
    return torch.where(square > 0, 1 / square.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
