"""Resampling schemes: mean offspring N * W, each scheme's own bounds, and weights at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smcgen.smc.resampling import SCHEMES, ancestors_in_place
from smcgen.smc.weights import effective_sample_size, log_mean_exp, normalize

W8 = torch.tensor([0.30, 0.22, 0.15, 0.125, 0.10, 0.06, 0.04, 0.005], dtype=torch.float64)


def uniforms(groups: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(groups, 2 * n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", SCHEMES)
def test_offspring_have_mean_n_w(name):
    groups = 40_000
    counts = SCHEMES[name](W8.expand(groups, -1), uniforms(groups, 8)).double()
    assert (counts.sum(-1) == 8).all()
    error = counts.std(0) / groups**0.5
    assert ((counts.mean(0) - 8 * W8).abs() < 4.5 * error + 1e-12).all()


def test_bounds_and_variances():
    groups = 40_000
    counts = {name: f(W8.expand(groups, -1), uniforms(groups, 8)).double() for name, f in SCHEMES.items()}
    expected = 8 * W8
    for name in ("systematic", "ssp"):
        assert ((counts[name] - expected).abs() < 1).all()
    assert ((counts["stratified"] - expected).abs() < 2).all()
    assert (counts["residual"] >= expected.floor()).all()
    variance = {name: c.var(0).sum() for name, c in counts.items()}
    assert variance["residual"] <= variance["multinomial"]
    assert variance["stratified"] <= variance["multinomial"]
    assert abs(variance["multinomial"] - (expected * (1 - W8)).sum()) < 0.1


EDGES = {
    "one-hot": [0.0, 1.0, 0.0, 0.0],
    "last only": [0.0, 0.0, 0.0, 1.0],
    "ties": [0.25] * 4,
    "ties and zeros": [0.5, 0.0, 0.5, 0.0],
    "tiny": [1 - 3e-17, 1e-17, 1e-17, 1e-17],
    "sums to a little more": [0.25 + 1e-7] * 4,
    "sums to a little less": [0.25 - 1e-7] * 4,
    "not a power of two": [0.1, 0.2, 0.3, 0.2, 0.2],
    "one": [1.0],
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", SCHEMES)
def test_edges(name, edge):
    w = torch.tensor([EDGES[edge]], dtype=torch.float64)
    n = w.shape[-1]
    for u in (1 - 2.0**-48, 2.0**-54, 0.5):
        counts = SCHEMES[name](w, torch.full((1, 2 * n), u, dtype=torch.float64))
        assert counts.sum() == n
        assert (counts >= 0).all()
        assert counts[w == 0].sum() == 0
        if edge in ("ties", "one") and name in ("residual", "stratified", "systematic", "ssp", "killing"):
            assert (counts == 1).all()


@given(
    st.lists(st.floats(-30, 30) | st.just(float("-inf")), min_size=1, max_size=9),
    st.integers(0, 2**31),
    st.sampled_from(sorted(SCHEMES)),
)
def test_any_weights(log_weight, seed, name):
    w = torch.tensor([log_weight], dtype=torch.float64)
    n = w.shape[-1]
    shares = normalize(w)
    if not np.isfinite(max(log_weight)):
        assert effective_sample_size(w).item() == 0
        assert log_mean_exp(w).item() == -np.inf
        assert shares.sum() == 0
        return
    counts = SCHEMES[name](shares, uniforms(1, n, seed))
    assert counts.sum() == n
    assert counts[shares == 0].sum() == 0
    ancestors = ancestors_in_place(counts)[0]
    assert torch.bincount(ancestors, minlength=n).tolist() == counts[0].tolist()
    survivors = counts[0].nonzero()[:, 0]
    assert (ancestors[survivors] == survivors).all()
    assert 1 - 1e-9 <= effective_sample_size(w).item() <= n + 1e-9
    assert torch.isclose(log_mean_exp(w), w.logsumexp(-1) - np.log(n)).all()
