"""Joint masks and the steps of automata in Triton against torch: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from smcgen.kernels import automaton, masks

gpu_masks = pytest.importorskip("smcgen.kernels.gpu.masks")
gpu_automaton = pytest.importorskip("smcgen.kernels.gpu.automaton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("words", [1, 70, 1500])
def test_joint_masks(count, words):
    torch.manual_seed(count)
    given = [torch.randint(-(2**31), 2**31, (8, words), dtype=torch.int32) for _ in range(count)]
    for i, mask in enumerate(given):
        mask[i] = 0  # alone
    even, odd = 0x55555555, -0x55555556
    for mask, bits in zip(given, (even, odd, -1), strict=False):
        mask[5] = bits  # together, if there are two
    given[0][6] = 0
    active = torch.tensor([True] * 6 + [False, True])
    truth = masks.joint(given, active)
    assert truth[1].tolist() == [*(i if i < count else -1 for i in range(5)), count if count > 1 else -1, -1, -1]
    assert (truth[0][6] == -1).all()
    found = gpu_masks.joint([mask.to(DEVICE) for mask in given], active.to(DEVICE))
    for one, two in zip(found, truth, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one.cpu(), two)


@pytest.mark.parametrize("steps", [1, 3])
def test_walk(steps):
    torch.manual_seed(0)
    states, kinds, vocabulary, capacity = 7, 4, 50, 5
    classes = torch.randint(kinds, (vocabulary,), dtype=torch.int32)
    following = torch.randint(states, (states, kinds), dtype=torch.int32)
    following[-1] = states - 1
    one = [torch.randint(states, (2, 90)), torch.randint(20, (2, 90)), torch.zeros(2, 90, capacity + 1, dtype=torch.int64)]
    two = [x.clone().to(DEVICE) for x in one]
    for _ in range(4):
        tokens, counts = torch.randint(vocabulary, (2, 90, steps)), torch.randint(steps + 1, (2, 90))
        truth = automaton.walk(*one, tokens, counts, classes, following, states - 1)
        given = [x.to(DEVICE) for x in (tokens, counts, classes, following)]
        found = gpu_automaton.walk(*two, *given, states - 1)
        assert truth.dtype == found.dtype
        assert torch.equal(truth, found.cpu())
        assert set(truth.flatten().tolist()) == {0.0, -torch.inf}
        for x, y in zip(one, two, strict=True):
            assert torch.equal(x[..., :capacity] if x.ndim == 3 else x, y.cpu()[..., :capacity] if x.ndim == 3 else y.cpu())
