"""Which tensors the Triton kernels take."""

from __future__ import annotations

import builtins
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smcgen.kernels import device


@pytest.fixture(autouse=True)
def fresh():
    device._triton.cache_clear()
    yield
    device._triton.cache_clear()


ON_CUDA: Any = SimpleNamespace(is_cuda=True)


def test_tensors_on_a_cpu_are_torchs():
    assert not device.on_triton(torch.zeros(1))


def test_tensors_on_a_gpu_are_tritons_unless_told_otherwise(monkeypatch):
    pytest.importorskip("triton")
    assert device.on_triton(ON_CUDA)
    device._triton.cache_clear()
    monkeypatch.setenv("SMCGEN_TRITON", "0")
    assert not device.on_triton(ON_CUDA)


def test_without_triton_torch_does_it_and_says_so(monkeypatch):
    original = builtins.__import__

    def missing(name, *arguments, **options):
        if name == "triton":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.warns(RuntimeWarning, match="Triton is not installed"):
        assert not device.on_triton(ON_CUDA)
