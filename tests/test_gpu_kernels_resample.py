"""Resampling in Triton against the engine's torch: through the interpreter on the CPU, and on a device (-m gpu)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smcgen.kernels.resample import Resampled, resample
from smcgen.smc.resampling import SCHEMES
from smcgen.smc.weights import normalize

gpu = pytest.importorskip("smcgen.kernels.gpu.resample")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: log 0, 0 / 0
ALWAYS = 2.0
INF = math.inf


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores(groups: int, n: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(groups, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 50


def both(score, uniforms, scheme, threshold=ALWAYS, eligible=None) -> tuple[Resampled, Resampled]:
    """The kernel's result, wherever it runs, and the reference's."""
    eligible = torch.ones(len(score), dtype=torch.bool) if eligible is None else eligible
    moved = (score.to(DEVICE), uniforms.to(DEVICE), scheme, threshold, eligible.to(DEVICE))
    return Resampled(*(x.cpu() for x in gpu.resample(*moved))), resample(score, uniforms, scheme, threshold, eligible)


def agree(got: Resampled, want: Resampled) -> None:
    assert torch.equal(got.go, want.go)
    assert torch.allclose(got.ess, want.ess, rtol=1e-12)
    assert torch.allclose(got.log_mean, want.log_mean, rtol=1e-13)
    assert torch.equal(got.ancestors, want.ancestors)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 33, 100])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_ancestors_of_the_engine(scheme, n):
    score, uniforms = scores(6, n, seed=n), numbers(6, 2 * n, seed=n + 1)
    score[1, n // 2 :] = -INF
    score[2] = -INF
    score[3] = 1e4
    score[4, 0] = 30.0
    agree(*both(score, uniforms, scheme))
    wide = torch.stack([score, score + 1], 2)  # strided
    agree(*both(wide[:, :, 0], torch.cat([uniforms, uniforms], 1)[:, : 2 * n], scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_large_group(scheme):
    agree(*both(scores(1, 1000), numbers(1, 2000, seed=4), scheme))


@pytest.mark.parametrize("scheme", ["systematic", "ssp"])
def test_the_decision(scheme):
    score = scores(5, 8)
    score[3] = 0.0
    score[4] = -INF
    eligible = torch.tensor([True, False, True, True, True])
    for threshold in (0.0, 0.3, 0.5, 1.0, ALWAYS):
        got, want = both(score, numbers(5, 16), scheme, threshold, eligible)
        agree(got, want)
        assert (got.ancestors[~got.go] == torch.arange(8)).all()
        assert not got.go[1]
        assert not got.go[4]
    assert got.go.tolist() == [True, False, True, True, False]
    assert got.ess[4] == 0
    assert got.log_mean[4] == -INF
    assert got.log_mean[3] == 0


def test_a_score_that_is_not_a_number_moves_nothing():
    score = scores(2, 8)
    score[0, 3] = math.nan
    for result in both(score, numbers(2, 16), "systematic"):
        assert result.go.tolist() == [False, True]
        assert result.log_mean[0].isnan()
        assert result.ancestors[0].tolist() == list(range(8))


EDGES = {
    "one-hot": [0.0, 1.0, 0.0, 0.0],
    "last only": [0.0, 0.0, 0.0, 1.0],
    "ties": [0.25] * 4,
    "ties and zeros": [0.5, 0.0, 0.5, 0.0],
    "tiny": [1 - 3e-17, 1e-17, 1e-17, 1e-17],
    "not a power of two": [0.1, 0.2, 0.3, 0.2, 0.2],
    "zeros around": [0.0] * 5 + [0.3, 0.0, 0.7] + [0.0] * 3,
    "one": [1.0],
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_edges(scheme, edge):
    weight = torch.tensor([EDGES[edge]], dtype=torch.float64)
    n = weight.shape[-1]
    for u in (1 - 2.0**-48, 2.0**-54, 0.5):
        got, _ = both(weight.log(), torch.full((1, 2 * n), u, dtype=torch.float64), scheme)
        counts = torch.bincount(got.ancestors[0], minlength=n)
        assert counts[weight[0] == 0].sum() == 0
        survivors = counts.nonzero()[:, 0]
        assert (got.ancestors[0, survivors] == survivors).all()
        if edge in ("ties", "one") and scheme not in ("multinomial",):
            assert (counts == 1).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_offspring_have_mean_n_w(scheme):
    groups = 40_000 if CUDA else 150  # the interpreter takes 10 to 20 ms a group
    weight = torch.tensor([0.40, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    got, want = both(weight.log().expand(groups, -1), numbers(groups, 10, seed=2), scheme)
    assert (got.ancestors == want.ancestors).all(1).double().mean() > 0.999
    counts = torch.nn.functional.one_hot(got.ancestors, 5).sum(1).double()
    error = counts.std(0) / groups**0.5
    assert ((counts.mean(0) - 5 * weight).abs() < 4.5 * error + 1e-12).all()


@settings(max_examples=40)
@given(
    st.lists(st.floats(-30, 30) | st.just(-INF) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=20),
    st.integers(0, 2**31),
    st.sampled_from(sorted(SCHEMES)),
)
def test_any_weights(log_weight, seed, scheme):
    score = torch.tensor([log_weight], dtype=torch.float64)
    n = len(log_weight)
    got, want = both(score, numbers(1, 2 * n, seed=seed), scheme)
    agree(got, want)
    if not np.isfinite(max(log_weight)):
        assert got.ess == 0
        return
    counts = torch.bincount(got.ancestors[0], minlength=n)
    expected = n * normalize(score)[0]
    assert counts[expected == 0].sum() == 0
    if scheme in ("systematic", "ssp"):
        assert ((counts - expected).abs() < 1 + 1e-9).all()
    if scheme == "residual":
        assert (counts >= (expected - 1e-9).floor()).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_groups_and_a_captured_graph(scheme):
    for groups, n in ((5000, 8), (500, 64), (20, 1024)):
        score, uniforms = scores(groups, n, seed=n), numbers(groups, 2 * n, seed=1)
        got, want = both(score, uniforms, scheme, 0.5)
        assert (got.go == want.go).double().mean() > 0.999
        assert (got.ancestors == want.ancestors).all(1).double().mean() > 0.999
        assert torch.allclose(got.ess, want.ess, rtol=1e-12)
        assert torch.allclose(got.log_mean, want.log_mean, rtol=1e-12)
    score, uniforms, eligible = scores(4, 8).cuda(), numbers(4, 16).cuda(), torch.ones(4, dtype=torch.bool).cuda()
    resample(score, uniforms, scheme, ALWAYS, eligible)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = resample(score, uniforms, scheme, ALWAYS, eligible)
    score.copy_(scores(4, 8, seed=9))
    graph.replay()
    assert torch.equal(out.ancestors, resample(score, uniforms, scheme, ALWAYS, eligible).ancestors)
