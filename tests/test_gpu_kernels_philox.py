"""Philox in Triton, bit for bit as in torch: through the interpreter on the CPU, and on a device (-m gpu)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smcgen.kernels import philox
from smcgen.smc.keys import BONUS, DRAFT, Keys

gpu = pytest.importorskip("smcgen.kernels.gpu.philox")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TOP = 2**32 - 1
KEYS = [(0, 0), (7, 0), (1, TOP), (0x9E3779B9, 0x80000000)]


def words(*shape: int, seed: int = 0, below: int = 2**32) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def both_keys(key: tuple[int, int]) -> list:
    return [key, torch.tensor(key, device=DEVICE)]


@pytest.mark.parametrize("key", KEYS)
def test_the_bits_of_torch(key):
    counter = (words(3, 1, 1), words(5, 1, seed=1), words(7, seed=2), words(3, 1, 7, seed=3))
    counter[2][:2] = torch.tensor([0, TOP])
    want = philox.uniforms(counter, key)
    for given_key in both_keys(key):
        got = gpu.uniforms(tuple(w.to(DEVICE) for w in counter), given_key)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(philox.uniforms(counter, torch.tensor(key)), want, strict=True))


def test_a_number_is_never_0_and_never_1():
    low, high = (torch.zeros(1, dtype=torch.int64), torch.full((1,), TOP))
    assert 0 < philox._uniform(low, low).item() < philox._uniform(high, high).item() < 1
    assert philox._uniform(high, high).item() == 1 - 2.0**-53


def groups(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return words(count, seed=seed), words(count, seed=seed + 1), words(count, seed=seed + 2, below=2**24)


@pytest.mark.parametrize("slots", [1, 8, 37, 300])
@pytest.mark.parametrize("key", KEYS)
def test_one_number_a_slot(slots, key):
    fields = groups(3)
    wide = torch.stack([fields[2], fields[0]], 1)  # a strided field
    for purpose, step in ((0, 0), (6, 1), (255, 65535)):
        want = philox.per_slot(*fields, purpose, step, slots, key)
        assert torch.equal(want, philox.per_slot(fields[0], fields[1], wide[:, 0], purpose, step, slots, key))
        for given_key in both_keys(key):
            moved = (fields[0].to(DEVICE), fields[1].to(DEVICE), wide.to(DEVICE)[:, 0])
            assert torch.equal(gpu.per_slot(*moved, purpose, step, slots, given_key).cpu(), want)


@pytest.mark.parametrize("slots", [1, 37, 300])
@pytest.mark.parametrize("key", KEYS)
def test_one_number_a_slot_and_step(slots, key):
    fields = groups(3)
    want = philox.per_step(*fields, 4, 5, slots, key)
    assert torch.equal(want[..., 3], philox.per_slot(*fields, 4, 3, slots, key))
    for given_key in both_keys(key):
        assert torch.equal(gpu.per_step(*(x.to(DEVICE) for x in fields), 4, 5, slots, given_key).cpu(), want)


def strata(fields, purpose, step, history, key):
    return gpu.stratified(*(x.to(DEVICE) for x in fields), purpose, step, history.to(DEVICE), key).cpu()


@pytest.mark.parametrize(("slots", "kinds"), [(1, 1), (2, 1), (8, 1), (8, 3), (8, 100), (33, 5), (200, 9)])
def test_strata(slots, kinds):
    fields = groups(2, seed=slots)
    history = words(2, slots, seed=9, below=kinds) * 0x5851F42D4C957F2D - 2**40
    for purpose, step, key in ((0, 0, (3, 4)), (2, 9, (TOP, TOP))):
        want = philox.stratified(*fields, purpose, step, history, key)
        for given_key in both_keys(key):
            assert torch.equal(strata(fields, purpose, step, history, given_key), want)


@settings(max_examples=25)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, -1]), min_size=1, max_size=40), st.integers(0, 2**31))
def test_any_families(history, seed):
    fields, table = groups(1, seed), torch.tensor([history])
    got = strata(fields, 1, 3, table, (seed, 5))
    assert torch.equal(got, philox.stratified(*fields, 1, 3, table, (seed, 5)))
    for kind in set(history):
        family = got[0, table[0] == kind]
        assert (family * len(family)).long().sort().values.tolist() == list(range(len(family)))


def test_the_keys_of_a_run():
    item, run, round = groups(4)
    keys, split = Keys(2**40 + 17, item, run), (17, 2**8)
    history = words(4, 9, below=3)
    assert torch.equal(philox.per_slot(item, run, round, DRAFT, 3, 9, split), keys.uniform(DRAFT, round, 3, 9))
    assert torch.equal(philox.stratified(item, run, round, BONUS, 0, history, split), keys.stratified(BONUS, round, 0, history))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_a_real_batch_and_another_seed_in_a_captured_graph():
    fields = groups(16)
    for slots in (8, 1024):
        history = words(16, slots, seed=5, below=slots // 4)
        (item, run, round), families = (x.cuda() for x in fields), history.cuda()
        seed = torch.tensor([1, 2], device="cuda")
        philox.stratified(item, run, round, DRAFT, 1, families, seed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            spread = philox.stratified(item, run, round, DRAFT, 1, families, seed)
            plain = philox.per_slot(item, run, round, DRAFT, 1, 2 * slots, seed)
        for key in ((1, 2), (TOP, 77)):
            seed.copy_(torch.tensor(key))
            graph.replay()
            assert torch.equal(spread.cpu(), philox.stratified(*fields, DRAFT, 1, history, key))
            assert torch.equal(plain.cpu(), philox.per_slot(*fields, DRAFT, 1, 2 * slots, key))
