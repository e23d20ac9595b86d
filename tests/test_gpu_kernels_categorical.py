"""The draw and the scores in Triton against their references: through the interpreter on the CPU, and on a device (-m gpu)."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from smcgen.kernels.categorical import Drawn, draw, log_softmax, power_draw, score, unpack

gpu = pytest.importorskip("smcgen.kernels.gpu.categorical")

CUDA = torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device")]
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: log 0, 0 / 0


def rows(count: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, size, generator=generator)).to(dtype)


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """bool [..., V] -> int32 bit rows."""
    size = allowed.shape[-1]
    padded = torch.nn.functional.pad(allowed, (0, -size % 32)).unflatten(-1, (-1, 32)).long()
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def drawn(logits, uniform, temperature=1.0, exponent=None, allowed=None) -> Drawn:
    """The kernel, wherever it runs; results on the CPU."""
    move = [None if x is None else x.to(DEVICE) for x in (logits, uniform, exponent, allowed)]
    return Drawn(*(x.cpu() for x in gpu.power_draw(move[0], move[1], temperature, move[2], move[3])))


def same(got: Drawn, want: Drawn, uniform, law: torch.Tensor, tolerance: float = 3e-6) -> None:
    """`law` float64 [..., V] is the law drawn from: another token than the reference's is right only at the edge of the two."""
    assert ((got.token >= 0) & (got.token < law.shape[-1])).all()
    differ = (got.token != want.token) & ~want.log_z.isnan()  # of a broken row any token will do
    if differ.any():
        edge = law.cumsum(-1).gather(-1, torch.minimum(got.token, want.token)[..., None])[..., 0]
        assert (uniform - edge)[differ].abs().max() < tolerance
    agree = got.token == want.token
    for name in ("log_q", "log_z", "log_p", "log_left"):
        a, b = getattr(got, name), getattr(want, name)
        if name in ("log_q", "log_p"):
            a, b = a[agree], b[agree]
        assert torch.allclose(a, b, rtol=2e-6, atol=3e-6, equal_nan=True), (name, a, b)


def law_of(logits, temperature, exponent, allowed) -> torch.Tensor:
    log_p = log_softmax(logits, temperature)
    log_p = log_p if exponent is None else exponent[..., None] * log_p
    return (log_p if allowed is None else log_p.masked_fill(~allowed, -torch.inf)).softmax(-1).nan_to_num()


@pytest.mark.parametrize("mask", ["none", "flags", "bits"])
@pytest.mark.parametrize("power", [None, 0.4, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_draw_of_the_reference(mask, power, dtype):
    for size, temperature in ((1, 1.0), (97, 0.7), (2048, 1.0), (5000, 1.3)):
        x, u = rows(6, size, dtype), numbers(6)
        x[0, : size // 2] = -torch.inf
        exponent = None if power is None else torch.full((6,), power, dtype=torch.float64)
        allowed = None if mask == "none" else numbers(6, size, seed=2) < 0.5
        if allowed is not None:
            allowed[1] = False  # nothing
            allowed[2] = torch.arange(size) == size - 1  # one thing
            allowed[3] = True
        sent = packed(allowed) if allowed is not None and mask == "bits" else allowed
        want = power_draw(x, u, temperature, exponent, sent)
        got = drawn(x, u, temperature, exponent, sent)
        same(got, want, u, law_of(x, temperature, exponent, allowed))
        if allowed is not None:
            assert got.token[1] == 0
            assert got.log_q[1] == got.log_z[1] == -torch.inf
            assert got.token[2] == size - 1


def test_the_reference_is_the_draw_of_the_engine():
    x, u, allowed = rows(5, 300), numbers(5), numbers(5, 300, seed=3) < 0.4
    exponent = torch.tensor([0.5, 1.0, 2.0, 3.0, 1.5], dtype=torch.float64)
    for mask in (None, allowed):
        local = exponent[:, None] * log_softmax(x, 0.7)
        token, log_q, log_z = draw(local, u, mask)
        got = power_draw(x, u, 0.7, exponent, mask)
        assert torch.equal(got.token, token)
        assert torch.equal(got.log_q, log_q)
        assert torch.equal(got.log_z, log_z)
        assert torch.equal(got.log_p, score(x, token, 0.7))
        if mask is not None:
            assert torch.equal(got.log_left, log_z - local.logsumexp(-1))
        plain, one = power_draw(x, u, 0.7, None, mask), power_draw(x, u, 0.7, torch.ones(5, dtype=torch.float64), mask)
        assert torch.equal(plain.token, one.token)
        for a, b in zip(plain[1:], one[1:], strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_chunks_with_nothing_and_a_barred_token_with_all_the_mass():
    x = rows(3, 3 * gpu.CHUNK)
    x[0, : gpu.CHUNK] = -torch.inf  # a whole chunk
    x[1, 5] = 900.0
    x[2, 2 * gpu.CHUNK :] = -torch.inf
    allowed = torch.ones_like(x, dtype=torch.bool)
    allowed[1, 5] = False
    allowed[1, gpu.CHUNK : 2 * gpu.CHUNK] = False
    for u in (2.0**-54, 0.5, 1 - 2.0**-53):
        uniform = torch.full((3,), u, dtype=torch.float64)
        same(drawn(x, uniform, 1.0, None, allowed), power_draw(x, uniform, 1.0, None, allowed), uniform,
             law_of(x, 1.0, None, allowed))  # fmt: skip
        got = drawn(x, uniform)
        assert got.token[1] == 5
        assert x[2, got.token[2]] > -torch.inf


def test_a_broken_row_says_so_and_stays_in_range():
    x, u = rows(4, 3000), numbers(4)
    x[0, 2500] = torch.nan
    x[1, 100] = torch.inf
    x[2] = -torch.inf
    allowed = torch.ones_like(x, dtype=torch.bool)
    allowed[:, 2500] = allowed[:, 100] = False
    exponent = torch.full((4,), 2.0, dtype=torch.float64)
    for power in (None, exponent):
        for mask in (None, allowed):
            for got in (drawn(x, u, 1.0, power, mask), power_draw(x, u, 1.0, power, mask)):
                assert got.log_z[:3].isnan().all()
                assert got.log_z[3].isfinite()
                assert ((got.token >= 0) & (got.token < 3000)).all()
                assert not got.log_q[:3].isfinite().any()
    scores = gpu.score(x.to(DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)).cpu()
    assert scores[:3].isnan().all()
    assert scores[3].isfinite()


def test_padded_and_strided_rows_and_broadcast_masks():
    wide = rows(2 * 3 * 5, 128).view(2, 3, 5, 128)
    view = wide[:, :, :-1, :100]  # rows of a padded vocabulary, the last of every five left out
    tokens = torch.arange(24).view(2, 3, 4)
    got = gpu.score(view.to(DEVICE), tokens.to(DEVICE), 0.8).cpu()
    assert torch.allclose(got, score(view, tokens, 0.8), rtol=2e-6, atol=2e-6)
    u, allowed = numbers(2, 3, 4), numbers(100, seed=4) < 0.5
    exponent = torch.tensor([0.5, 2.0], dtype=torch.float64)[:, None, None]
    want = power_draw(view, u, 0.8, exponent, allowed)
    same(drawn(view, u, 0.8, exponent, allowed), want, u, law_of(view, 0.8, exponent, allowed))
    same(drawn(view, u, 0.8, exponent, packed(allowed)), want, u, law_of(view, 0.8, exponent, allowed))
    every = view.unflatten(0, (1, 2))[None].transpose(3, 4)  # five leading axes
    assert torch.equal(drawn(every, numbers(1, 1, 2, 4, 3)).log_p.isfinite(), torch.ones(1, 1, 2, 4, 3, dtype=torch.bool))
    one = power_draw(view[0, 0, 0], u[0, 0, 0], 0.8)
    assert one.token.shape == drawn(view[0, 0, 0], u[0, 0, 0], 0.8).token.shape == ()
    empty = drawn(view[:0], u[:0])
    assert empty.token.shape == (0, 3, 4)


@pytest.mark.parametrize("temperature", [1e-8, 1e-4, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores(temperature, dtype):
    x = rows(4, 4100, dtype)
    x[0, 7] = -torch.inf
    tokens = torch.tensor([7, 2, 4099, int(x[3].argmax())])
    got = gpu.score(x.to(DEVICE), tokens.to(DEVICE), temperature).cpu()
    assert torch.allclose(got, score(x, tokens, temperature), rtol=2e-6, atol=2e-6)
    assert got[0] == -torch.inf


def test_draws_follow_the_law():
    size, count = 12, 20_000 if CUDA else 400  # the interpreter takes 20 ms a row
    x = 2 * rows(1, size)[0]
    allowed = numbers(size, seed=5) < 0.7
    exponent = torch.tensor(1.7, dtype=torch.float64)
    got = drawn(x.expand(count, -1), numbers(count, seed=6), 1.4, exponent, packed(allowed))
    log_p = (x.double() / 1.4).log_softmax(-1)
    powered = (1.7 * log_p).masked_fill(~allowed, -torch.inf)
    law = powered.softmax(-1)
    counts = torch.bincount(got.token, minlength=size)
    assert counts[~allowed].sum() == 0
    common = law * count > 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([law[common], law[~common].sum()[None]]) * count
    statistic = ((observed - expected).square() / expected).sum().item()
    assert chi2.sf(statistic, len(expected) - 1) > 1e-4
    assert torch.allclose(got.log_q, law.log()[got.token], atol=1e-5)
    assert torch.allclose(got.log_p, log_p[got.token], atol=1e-5)
    assert torch.allclose(got.log_z, powered.logsumexp(0), atol=1e-5)
    assert torch.allclose(got.log_left, powered.logsumexp(0) - (1.7 * log_p).logsumexp(0), atol=1e-5)


@settings(max_examples=25)
@given(
    st.lists(st.floats(-60, 60, width=16) | st.just(float("-inf")), min_size=1, max_size=70),
    st.integers(0, 2**31),
    st.floats(0.2, 4),
    st.sampled_from([None, 0.3, 1.0, 2.5]),
    st.sampled_from(["none", "flags", "bits"]),
)
def test_any_row(logits, seed, temperature, power, mask):
    x, u = torch.tensor([logits]), numbers(1, seed=seed)
    exponent = None if power is None else torch.tensor([power], dtype=torch.float64)
    allowed = None if mask == "none" else numbers(1, len(logits), seed=seed + 1) < 0.5
    sent = packed(allowed) if allowed is not None and mask == "bits" else allowed
    want = power_draw(x, u, temperature, exponent, sent)
    with patch.object(gpu, "CHUNK", 16):  # several chunks
        got = drawn(x, u, temperature, exponent, sent)
    same(got, want, u, law_of(x, temperature, exponent, allowed))
    if got.log_q > -torch.inf:
        assert x[0, got.token] > -torch.inf
        assert allowed is None or allowed[0, got.token]
        assert got.log_q <= 1e-6
        assert np.isclose(got.log_q, (1.0 if power is None else power) * got.log_p - got.log_z, atol=1e-9)
    else:
        assert got.token == 0
    if allowed is not None:
        assert got.log_left.isnan() or got.log_left <= 1e-6
        assert torch.equal(unpack(packed(allowed), len(logits)), allowed)


@pytest.mark.parametrize(("marked", "dtype"), [
    pytest.param(True, dtype, marks=on_gpu) for dtype in (torch.float32, torch.float16, torch.bfloat16)
])  # fmt: skip
def test_a_real_vocabulary(marked, dtype):
    size, padded = 128_256, 128_512
    wide = rows(8, padded, dtype)
    x, u = wide[:, :size], numbers(8)
    exponent = torch.linspace(0.5, 4, 8, dtype=torch.float64)
    allowed = numbers(8, size, seed=2) < 0.3
    for power in (None, exponent):
        for mask in (None, allowed, packed(allowed)):
            want = power_draw(x, u, 0.8, power, mask)
            got = power_draw(wide.cuda()[:, :size], u.cuda(), 0.8, None if power is None else power.cuda(),
                             None if mask is None else mask.cuda())  # fmt: skip
            law = law_of(x, 0.8, power, None if mask is None else allowed)
            same(Drawn(*(y.cpu() for y in got)), want, u, law)
    tokens = torch.randint(size, (72,), generator=torch.Generator().manual_seed(0))
    many = rows(72, size, dtype)
    assert torch.allclose(score(many.cuda(), tokens.cuda(), 0.8).cpu(), score(many, tokens, 0.8), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("marked", [pytest.param(True, marks=on_gpu)])
def test_a_captured_draw_serves_other_logits(marked):
    x, u = rows(8, 128_256, torch.bfloat16).cuda(), numbers(8).cuda()
    power_draw(x, u)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = power_draw(x, u)
    for seed in (7, 8):
        x.copy_(rows(8, 128_256, torch.bfloat16, seed=seed))
        u.copy_(numbers(8, seed=seed))
        graph.replay()
        assert torch.equal(out.token, power_draw(x, u).token)
        assert torch.equal(out.log_q, power_draw(x, u).log_q)
