"""Decoder layers compiled by `torch.compile`, for models of a kind that `smcgen.lm.fused` does not know.

A layer is one graph. Attention through pages stands in it as one operator, `smcgen::attend`, which says that it changes the
keys and values of its layer, so that no copy of them is made; where rows lie in the pool is no part of the graph. Layers of one
kind share their graphs: one for any number of rows and tokens, and others for one row and for one token, which the compiler
takes for constants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import exc

from smcgen.errors import first_line
from smcgen.lm.attention import Reading

ROWS, TOKENS = 19, 23  # of a first reading: sizes that no model has, for equal sizes are taken to be one
GRAPHS = 64  # of a kind of layer: two kinds of attention, one row or one token or more, numbers of threads, a draft of the kind
_now = threading.local()  # the reading and the layer that this thread is in


@torch.library.custom_op(
    "smcgen::attend",
    mutates_args=("keys", "values"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, float scale, SymInt? window, "
    "float? softcap, Tensor? sinks) -> Tensor",
)
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`Reading.attend` of the reading under way. It changes `keys` and `values`, the layer's part of the pool."""
    return _now.reading.attend(_now.layer, query, key, value, scale, window, softcap, sinks).contiguous()


@attend.register_fake
def _(query, key, value, keys, values, scale, window, softcap, sinks):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@dataclass
class _Declared:
    """What a compiled layer knows of a `Reading`: the memory that it changes."""

    keys: Tensor
    values: Tensor

    def attend(self, _: Any, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Tensor:
        return attend(query, key, value, self.keys, self.values, *how)


def compile_layers(model: Any, layers: int, give_up: Callable[[str], None], backend: Any = "inductor") -> None:
    """Every decoder layer of `model`, which has `layers` of them, is compiled when it next reads something.

    give_up: called with the reason where a layer cannot be compiled, after which it runs as it was; it should `uncompile`.
    backend: of `torch.compile`."""
    stack = _stack(model, layers)
    if stack is None:
        return give_up("they are in no list")
    limits: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"  # its name before torch 2.7
    setattr(limits, limit, max(getattr(limits, limit), GRAPHS))
    # Graphs depend on shapes alone, and not on those that came before: so they are general from the first.
    runs = {kind: torch.compile(kind.forward, fullgraph=True, dynamic=True, backend=backend) for kind in set(map(type, stack))}
    for i, layer in enumerate(stack):
        layer.forward = _compiled(i, layer, runs[type(layer)], give_up)


def uncompile(model: Any, layers: int) -> None:
    """The layers as transformers has them."""
    for layer in _stack(model, layers) or ():
        vars(layer).pop("forward", None)


def _compiled(i: int, layer: nn.Module, run: Callable[..., Any], give_up: Callable[[str], None]) -> Callable[..., Any]:
    def forward(*arguments: Any, reading: Any, **options: Any) -> Any:
        if isinstance(reading, Reading):
            _now.reading, _now.layer = reading, i
            pool = _Declared(reading.pages.keys[i], reading.pages.values[i])
            try:
                return run(layer, *arguments, reading=pool, **options)
            except Exception as error:
                if not _of_the_compiler(error):
                    raise
                give_up(_reason(error))  # it is raised before anything has run
            finally:
                _now.reading = None  # a pool must not be kept for longer than its context
        return type(layer).forward(layer, *arguments, reading=reading, **options)

    return forward


def _stack(model: Any, layers: int) -> nn.ModuleList | None:
    """The list of decoder layers."""
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    return next((found for found in lists if len(found) == layers), None)


def _of_the_compiler(error: Exception) -> bool:
    """Whether a layer could not be compiled; there is no one class for that."""
    return isinstance(error, exc.TorchDynamoException) or type(error).__module__ == exc.__name__


def _reason(error: BaseException) -> str:
    return first_line(getattr(error, "inner_exception", error))
