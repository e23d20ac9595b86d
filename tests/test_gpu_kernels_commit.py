"""The end of a round in Triton against the engine's torch: through the interpreter on the CPU, and on a device (-m gpu)."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from smcgen.kernels import commit
from smcgen.kernels.resample import resample
from smcgen.potentials.base import ALIVE, BUDGET, DEAD, END
from smcgen.smc.particles import Block, Particles

gpu = pytest.importorskip("smcgen.kernels.gpu.commit")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy: log 0, inf - inf
L, B = 300, 5  # more than one program for each row of tokens
SHAPES = [(1, 1, 1), (3, 5, 2), (2, 33, 1)]


def moved(x):
    """A dataclass or tuple of tensors on the device."""
    if x is None:
        return None
    if isinstance(x, tuple):
        return type(x)(*(y.to(DEVICE) for y in x))
    return replace(x, **{f.name: getattr(x, f.name).to(DEVICE) for f in fields(x) if f.name != "reading"})


def state(groups: int, n: int, factors: int, seed: int = 0) -> tuple[Particles, Block]:
    """Particles of every kind, and a block of theirs whose fields are parts of larger tensors."""
    generator = torch.Generator().manual_seed(seed)

    def real(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    def whole(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    shape = (groups, n)
    particles = replace(
        Particles.empty(groups, n, L, factors, torch.device("cpu")),
        tokens=whole(0, 99, *shape, L),
        length=whole(0, L - B, *shape),
        reason=torch.where(whole(0, 4, *shape) > 0, ALIVE, whole(1, 5, *shape)),
        log_weight=5 * real(*shape),
        log_p=real(*shape, factors),
        log_phi=real(*shape),
        token_log_p=real(*shape, L, factors).float(),
        token_log_q=real(*shape, L).float(),
        root=whole(0, n, *shape),
        history=whole(-(2**62), 2**62, *shape),
        log_evidence=real(groups),
        soft_scale=real(groups).exp(),
        log_z=real(groups),
        drawn=whole(0, 9, groups),
    )
    alive = particles.alive
    particles.log_weight[particles.reason == DEAD] = -math.inf
    counts = torch.where(alive, whole(0, B + 1, *shape), 0)
    reason = torch.where(alive, torch.tensor([ALIVE, ALIVE, END, BUDGET, DEAD])[whole(0, 5, *shape)], particles.reason)
    block = Block(
        tokens=whole(0, 99, *shape, B + 1)[..., :-1],
        counts=counts,
        log_weight=torch.where(alive, torch.where(reason == DEAD, -math.inf, real(*shape)), 0.0),
        token_log_p=real(*shape, B, factors),
        token_log_q=real(*shape, B),
        reason=reason,
        stop_state=whole(0, 3, *shape),
        history=whole(0, 9, *shape),
        cause=whole(-1, 2, *shape),
        log_z=real(*shape, 2)[..., 0],
        log_left=-real(*shape, B + 1)[..., :-1].abs(),
        judged=torch.zeros(1, 1, dtype=torch.int64).expand(shape),
        accepted=counts,
    )
    return particles, block


def said(particles: Particles, seed: int) -> commit.Said:
    generator = torch.Generator().manual_seed(seed)
    change = torch.randn(particles.length.shape, dtype=torch.float64, generator=generator)
    zero = torch.rand(change.shape, generator=generator) < 0.3
    return commit.Said(torch.where(zero, -math.inf, change), torch.where(zero, 1, -1))


def agree(got, want) -> None:
    for name in getattr(want, "_fields", None) or [f.name for f in fields(want)]:
        a, b = getattr(got, name).cpu(), getattr(want, name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13, equal_nan=True), name


@pytest.mark.parametrize("shape", SHAPES)
def test_the_block_stands_behind_the_tokens(shape):
    particles, block = state(*shape)
    for got, want in zip(gpu.append(moved(particles), moved(block)), commit.append(particles, block), strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", ["none", "soft", "last", "both"])
def test_the_weights_of_the_engine(shape, which):
    particles, block = state(*shape, seed=len(which))
    block.log_weight[0, 0], block.reason[0, 0] = -math.inf, ALIVE  # a token that a model gives probability 0
    soft = said(particles, 1) if which in ("soft", "both") else None
    last = said(particles, 2) if which in ("last", "both") else None
    got = gpu.weigh(moved(particles), moved(block), moved(soft), moved(last), 7)
    agree(got, commit.weigh(particles, block, soft, last, 7))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hard", [True, False])
def test_a_round_is_measured_alike(shape, hard):
    before, block = state(*shape, seed=3)
    after = replace(before, **commit.weigh(before, block, None, None, 1)._asdict(), length=before.length + block.counts)
    if shape[0] > 1:
        before.log_weight[1] = -math.inf
    penalty, active = torch.linspace(0, 1, shape[0], dtype=torch.float64), torch.arange(shape[0]) != 2
    got = gpu.measure(moved(after), moved(before), moved(block), penalty.to(DEVICE), active.to(DEVICE), hard)
    agree(got, commit.measure(after, before, block, penalty, active, hard))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_descendants_of_the_engine(shape):
    particles, _ = state(*shape, seed=4)
    uniforms = torch.rand(shape[0], 2 * shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = particles.log_weight - 0.1 * particles.length
    done = resample(score, uniforms, "systematic", 1.0, torch.arange(shape[0]) != 2)
    assert shape[1] == 1 or done.go.any()
    agree(gpu.inherit(moved(particles), score.to(DEVICE), moved(done)), commit.inherit(particles, score, done))
