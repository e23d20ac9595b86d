"""Weights kept as 8-bit integers: a model in half the memory of bfloat16.

The matrices of linear layers are rounded much as `smcgen.lm.quantized` does it at 8 bits, w' = s round(w / s) with one s for
each output, and stay integers. Embeddings, norms, biases and the K/V cache are as they were.

Where layers are fused (`smcgen.lm.fused`), `round_linear` makes modules that these know, and the kernels read the integers:
half the bytes for each token. A head that shares its matrix with the embedding gets integers of its own there. Elsewhere
torchao (https://github.com/pytorch/ao) turns one matrix at a time into the dtype of the model when it is multiplied, which
saves memory, not time, and leaves a shared head as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from smcgen.errors import ModelError, UsageError
from smcgen.kernels.layers import Rounded, rounded


class RoundedLinear(nn.Module):
    """A linear layer of rounded weights, of which a forward makes one matrix in the dtype of its inputs."""

    def __init__(self, linear: nn.Linear, device: torch.device):
        super().__init__()
        numbers, scale = rounded(linear.weight.to(device))
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.scale = nn.Buffer(scale)
        self.bias = linear.bias

    @property
    def whole(self) -> Rounded:
        return Rounded(self.weight, self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.whole.widened(x.dtype), self.bias)


@torch.no_grad()
def round_linear(model: nn.Module, device: torch.device) -> None:
    """The linear layers of `model` in place, one matrix after the other, each moved to `device` before it is rounded; the other
    parts stay where they are."""
    # A list of all modules would hold all matrices until the end.
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear:
                setattr(parent, name, RoundedLinear(module, device))


@torch.no_grad()
def to_int8(model: Any, name: str, device: torch.device) -> None:
    """The linear layers of `model` in place, each moved to `device` before; the other parts stay where they are. A head that
    shares its matrix with the embedding stays as it is.

    Raises UsageError without torchao, ModelError for a model most of whose matrices are in no linear layer."""
    with _quiet():
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UsageError(f"weights='int8' needs torchao: pip install 'smcgen[int8]' ({error})") from error
    embedding = model.get_input_embeddings().weight
    _plain_linear(model)
    matrices = {id(w): w for w in _matrices(model) if w is not embedding}
    linear = {id(m.weight): m.weight for m in model.modules() if _is_linear(m, embedding)}
    share = sum(w.numel() for w in linear.values()) / max(1, sum(w.numel() for w in matrices.values()))
    if share < 0.5:
        raise ModelError(
            f"{name}: {1 - share:.0%} of its weights are in no linear layers (experts in one tensor, say), which torchao's "
            "int8 weights leave as they are: leave weights='int8' out"
        )
    # Not `set_inductor_config`: it would turn on TF32 products for the whole process.
    config = Int8WeightOnlyConfig(set_inductor_config=False)
    with _quiet():
        quantize_(model, config, filter_fn=lambda module, _: _is_linear(module, embedding), device=device)


def is_int8(model: Any) -> bool:
    """Whether `round_linear` or `to_int8` has been at work (or torchao elsewhere): its matrices are of a kind of their own."""
    if any(isinstance(module, RoundedLinear) for module in model.modules()):
        return True
    return any(type(module.weight) is not nn.Parameter for module in model.modules() if isinstance(module, nn.Linear))


def _is_linear(module: nn.Module, embedding: torch.Tensor) -> bool:
    return isinstance(module, nn.Linear) and module.weight is not embedding


def _matrices(model: Any) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            yield from (weight for weight in module.parameters(recurse=False) if weight.ndim >= 2)


def _plain_linear(model: Any) -> None:
    """GPT-2 writes its linear layers with transposed matrices, which torchao does not know."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, Conv1D):
                inputs, outputs = module.weight.shape
                linear = nn.Linear(inputs, outputs, device="meta")
                linear.weight = nn.Parameter(module.weight.T.contiguous(), requires_grad=False)
                linear.bias = module.bias
                setattr(parent, name, linear)


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao tells of kernels that it does not find, none of which are needed here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
