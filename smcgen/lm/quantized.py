"""A copy of a model with rounded weights: a draft of known quality that needs no other model.

Every weight matrix is rounded to `bits` bits, symmetrically, with one scale for each group of inputs of an output:

    w' = s round(w / s),   s = max |w| / (2**(bits - 1) - 1)

Where layers are fused, on a GPU, 8 bits for all inputs of an output are kept as integers (`smcgen.lm.int8`): a copy reads half
the bytes of its model in bfloat16. All other rounded values are kept in the dtype of the model, so a copy takes the memory of
its matrices once more, and a forward takes as long as the model's own: what it saves is a second model, not time. Products on
packed 8-bit weights (torch's _weight_int8pack_mm) were slower on CPUs than bfloat16 at 8 rows and more. A copy that is faster
on a CPU with bfloat16 products is one of the model loaded with dtype="bfloat16".
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from smcgen.errors import UsageError
from smcgen.lm.base import LanguageModel
from smcgen.lm.compiled import uncompile
from smcgen.lm.fused import Rope, unfuse
from smcgen.lm.int8 import is_int8, round_linear
from smcgen.lm.paged import PagedLM

BITS = (8, 6, 5, 4, 3)
GROUP = 32  # inputs that share a scale, below 8 bits


@torch.no_grad()
def quantized(lm: LanguageModel, bits: int = 8, group: int | None = None) -> PagedLM:
    """A copy of `lm` whose weight matrices are rounded to `bits` bits; embeddings, norms and biases are shared with it.

    group: inputs that share a scale; default all inputs of an output at 8 bits, 32 below.
    Raises UsageError for other bits, and for a model that is not from transformers."""
    if bits not in BITS:
        raise UsageError(f"weights can be rounded to {', '.join(map(str, BITS))} bits, not {bits}")
    if group is not None and group < 1:
        raise UsageError(f"a group of {group} inputs cannot share a scale: give a number from 1 on, or None")
    if not isinstance(lm, PagedLM):
        raise UsageError(f"{lm.name} is no transformers model: it has no weights to round, name another draft")
    if is_int8(lm.model):
        raise UsageError(
            f"the weights of {lm.name} are int8 already: load it without weights='int8', give the model that it is a copy of, "
            "or name another draft"
        )
    shared = {id(tensor): tensor for tensor in chain(lm.model.parameters(), lm.model.buffers())}
    fused = isinstance(lm.fusion, Rope)
    if fused:  # what their `forward` knows, among it matrices merged into one, is of no use to a copy
        known = [lm.fusion, *(layer.forward.__self__ for layer in lm.model.base_model.layers)]
        shared |= {id(part): part for part in known}
    model = copy.deepcopy(lm.model, shared)
    if fused:
        unfuse(model)
    if lm.compiled is True:
        uncompile(model, lm.shape.layers)
    if fused and bits == 8 and group is None:
        round_linear(model, lm.device)
    else:
        _round(model, bits, group or (None if bits == 8 else GROUP))
    copied = PagedLM(f"{lm.name}:int{bits}", model, lm.vocabulary, lm.shape, lm.max_tokens, lm.ignored, lm.page)
    if fused:
        copied.fuse()
    if lm.compiled is True:
        copied.compile()
    return copied


def _round(model: nn.Module, bits: int, group: int | None) -> None:
    """Rounds every matrix of `model` and leaves the originals, which others hold, as they are."""
    for module, name in _matrices(model):
        weight = getattr(module, name)
        inputs_last = weight.T if isinstance(module, Conv1D) else weight
        rounded = round_weights(inputs_last, bits, group)
        rounded = rounded.T.contiguous() if isinstance(module, Conv1D) else rounded
        setattr(module, name, nn.Parameter(rounded, requires_grad=False))


def round_weights(weight: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """`weight` [..., inputs] rounded to 2**bits - 1 levels for every `group` inputs (all of them if None)."""
    inputs = weight.shape[-1]
    group = group or inputs
    values = nn.functional.pad(weight.float(), (0, -inputs % group)).unflatten(-1, (-1, group))
    scale = values.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    rounded = (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).round() * scale
    return rounded.flatten(-2)[..., :inputs].to(weight.dtype).contiguous()


def _matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every weight matrix that is not an embedding, as (module, name); experts may come stacked in one tensor."""
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            for name, weight in module.named_parameters(recurse=False):
                if weight.ndim >= 2:
                    yield module, name
