"""Triton norms and matrix products of few rows against torch: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from smcgen.kernels.layers import Rounded, add_linear, embed_norm, gated_linear, linear, rms_norm, rounded

layers = pytest.importorskip("smcgen.kernels.gpu.layers")
layers_of_integers = pytest.importorskip("smcgen.kernels.gpu.rounded")
pdl = pytest.importorskip("smcgen.kernels.gpu.pdl")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# bf16 arithmetic means nothing in the interpreter
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2} | ({torch.bfloat16: 2e-1} if CUDA else {})


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(dtype, *shape):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def whole(*tensors):
    return [Rounded(*(part.cpu() for part in x)) if isinstance(x, Rounded) else x.float().cpu() for x in tensors]


def error(a, b):
    return float((a.float().cpu() - b.float()).abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [48, 128, 2200, *([4096, 14336] if CUDA else [])])
def test_norms(dtype, dim):
    x, weight = randn(dtype, 5, dim), randn(dtype, dim)
    assert error(layers.rms_norm(x, weight, 1e-5), rms_norm(*whole(x, weight), 1e-5)) < TOLERANCE[dtype]
    parts = torch.randn(3, 5, dim, device=DEVICE)
    truth = rms_norm(*whole(x + parts.sum(0).to(dtype), weight), 1e-5)
    total = x + parts.sum(0)
    assert error(layers.rms_norm(x, weight, 1e-5, parts), truth) < 2 * TOLERANCE[dtype]
    assert error(x, total.float().cpu()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [48, 2200])
def test_lines_of_a_table_and_their_norms(dtype, dim):
    table, weight = randn(dtype, 30, dim), randn(dtype, dim)
    tokens = torch.tensor([[3, 0, 9], [29, 1, 9], [7, 2, 9], [-5, 3, 9], [30, 4, 9], [2**40, 5, 9]], device=DEVICE)[:, 0]
    lines = table[[3, 29, 7, 0, 29, 29]]
    for embed in (layers.embed_norm, embed_norm):
        into = torch.empty_like(lines)
        assert error(embed(into, tokens, table, weight, 1e-5), rms_norm(*whole(lines, weight), 1e-5)) < TOLERANCE[dtype]
        assert torch.equal(into, lines)


def products(rows, dim, dtype, int8=False):
    """The largest errors of all products, and the number of parts (0: there were none)."""
    x, weight, bias = randn(dtype, rows, dim), (torch.randn(2 * 72, dim) * dim**-0.5).to(DEVICE, dtype), randn(dtype, 2 * 72)
    weight = rounded(weight) if int8 else weight
    truth = linear(*whole(x, weight))
    errors = [
        error(layers.gated_linear(x, weight), gated_linear(*whole(x, weight))),
        error(layers.linear(x, weight), truth),
        error(layers.linear(x, weight, bias), truth + bias.float().cpu()),
    ]
    parts = layers.linear_parts(x, weight)
    if parts is None:
        return max(errors), 0
    assert parts.shape[1:] == truth.shape
    return max(*errors, error(parts.sum(0), truth)), len(parts)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [24, 64, 1100, *([4096, 14336] if CUDA else [])])
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_products(dtype, dim, rows):
    worst, parts = products(rows, dim, dtype)
    assert worst < TOLERANCE[dtype]
    few = rows <= layers.FEW[dtype.itemsize]
    assert parts > 1 if few and dim > 1024 else parts == few


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [17, 32, 40, 72, 80])
def test_products_of_more_rows(monkeypatch, dtype, rows):
    monkeypatch.setattr(layers, "FEW", {2: 80, 4: 80})
    for dim in (24, 1100, *([4096] if CUDA else [])):
        worst, parts = products(rows, dim, dtype)
        assert worst < TOLERANCE[dtype]
        assert parts > 1 or dim == 24


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 16, 72, 80, 81])
def test_products_with_rounded_weights(dtype, rows):
    for dim in (24, 48, 1100, *([4096, 14336] if CUDA else [])):
        worst, parts = products(rows, dim, dtype, int8=True)
        assert worst < TOLERANCE[dtype]
        assert parts > 1 if rows <= 80 and dim > 1024 else parts == (rows <= 80)


def test_which_kernel_reads_integers(monkeypatch):
    """Tensor cores multiply what has 16 bits; float32 stays exact, in the kernel that says so."""
    weight = rounded(randn(torch.float32, 70, 40))
    launched, launch = [], layers._rounded_linear.__class__.__getitem__
    monkeypatch.setattr(
        layers._rounded_linear.__class__, "__getitem__", lambda self, grid: launched.append(self) or launch(self, grid)
    )
    for rows, dtype, own in (
        (1, torch.float16, True),
        (16, torch.float16, True),
        (17, torch.float16, False),
        (1, torch.float32, False),
    ):
        launched.clear()
        layers.linear(randn(dtype, rows, 40), weight)
        assert launched == [layers._rounded_linear if own else layers._linear]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_weights(monkeypatch, dtype):
    """Each is off by half a step at most, of 127 to the largest of its output; many lines are rounded as few are."""
    weight = torch.randn(10, 70).mul(torch.logspace(-3, 3, 10)[:, None]).to(dtype)
    weight[4] = 0
    numbers, scale = made = rounded(weight)
    assert (numbers.dtype, scale.dtype, numbers.shape, scale.shape) == (torch.int8, torch.float32, (10, 70), (10,))
    assert numbers.abs().amax(1).tolist() == [127] * 4 + [0] + [127] * 5
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert torch.all((numbers * scale[:, None] - weight.float()).abs() <= 0.5001 * step)
    assert torch.equal(made.widened(dtype), (numbers * scale[:, None]).to(dtype))
    monkeypatch.setattr("smcgen.kernels.layers.LINES", 3)
    assert all(map(torch.equal, rounded(weight), made))


def test_the_reference_takes_rounded_weights():
    x, weight, bias, into = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6), torch.randn(3, 6)
    made, total = rounded(weight), into.clone()
    plain = made.widened(torch.float32)
    assert torch.equal(linear(x, made, bias), linear(x, plain, bias))
    assert torch.equal(gated_linear(x, made), gated_linear(x, plain))
    assert add_linear(into, x, made) is None
    assert add_linear(total, x, plain) is None
    assert torch.equal(into, total)


def test_powers_that_hold_the_rows():
    held = [layers._powers(rows) for rows in range(1, 300)]
    assert all(main + rest >= rows for rows, (main, rest) in enumerate(held, 1))
    assert [held[rows - 1] for rows in (1, 16, 17, 32, 33, 40, 49, 72, 81, 96, 97, 144)] == [
        *((16, 0), (16, 0), (32, 0), (32, 0), (32, 16), (32, 16), (64, 0)),
        *((64, 16), (64, 32), (64, 32), (128, 0), (128, 16)),
    ]


def asked_for(monkeypatch, call, weight):
    """How often each byte of `weight` is asked for before the wait in `call`, [outputs, bytes]."""
    seen = torch.zeros(weight.numel() * weight.element_size(), dtype=torch.int64)

    def ask(pointers, bytes_):
        for address, size in zip(pointers.handle.data.tolist(), bytes_.handle.data.tolist(), strict=True):
            if size > 0:
                first = address - weight.data_ptr()
                assert 0 <= first <= first + size <= len(seen)
                assert address % 16 == size % 16 == 0
                seen[first : first + size] += 1

    monkeypatch.setattr(pdl, "prefetch", ask)
    monkeypatch.setattr(layers, "early", lambda x: {"PDL": True})
    for module in (layers, layers_of_integers):
        for name in ("wait", "release"):
            monkeypatch.setattr(module, name, lambda early: None)
    call()
    return seen.view(len(weight), -1)


@pytest.mark.skipif(CUDA, reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
@pytest.mark.parametrize("rows", [5, 16, 17])
@pytest.mark.parametrize(("inputs", "off"), [(48, 0), (48, 1), (1040, 0), (1100, 0)])
def test_weights_asked_for_before_the_wait(monkeypatch, dtype, rows, inputs, off):
    """The first of each line of every program once, in parts of 16 bytes; none where lines do not begin at such."""
    x, numbers = torch.zeros(rows, inputs).half(), torch.zeros(off + 70 * inputs, dtype=dtype)[off:].view(70, inputs)
    weight = Rounded(numbers, torch.ones(70)) if dtype == torch.int8 else numbers
    for wanted, call in (("linear", layers.linear), ("gated", layers.gated_linear), ("parts", layers.linear_parts)):
        tiles = layers._tiles(dtype.itemsize, wanted, rows)
        found = asked_for(monkeypatch, lambda call=call: call(x, weight), numbers)
        if off or inputs * dtype.itemsize % 16:
            assert not found.any()
        else:
            assert found[:, : tiles.ahead * dtype.itemsize].eq(1).all()
            if wanted != "parts":
                assert not found[:, tiles.ahead * dtype.itemsize :].any()
