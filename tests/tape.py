"""A stand-in for CUDA graphs on the CPU: what is launched is written on tapes, and played again with the same tensors.

While it is taped nothing has a value: whoever asks for one fails, as it does while a CUDA graph is captured, and what the
operations of the taping itself have written is taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "item", "equal")
MAKING = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class Tape(TorchDispatchMode):
    """Operations with their arguments and the tensors that they returned."""

    def __init__(self, kept: dict[int, tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, list[torch.Tensor | None]]] = []
        self.own: set[int] = set()  # storages made here
        self.kept, self.closed = kept, False

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        name = function.overloadpacket.__name__
        given = [x for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)]
        if name in ASKING or (name.startswith("index") and any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])):
            raise RuntimeError(f"{name} waits for the device")
        for slot, value in zip(function._schema.arguments, arguments, strict=False):
            if slot.alias_info is not None and slot.alias_info.is_write:
                for x in tree_leaves(value):
                    self._keep(x)
        result = function(*arguments, **options)
        inside = {x.untyped_storage()._cdata for x in given}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        # What shares memory with an argument is as it must be when the argument is.
        fresh = [x if x.untyped_storage()._cdata not in inside else None for x in made]
        self.own |= {x.untyped_storage()._cdata for x in fresh if x is not None}
        if name not in MAKING:
            self.operations.append((function, arguments, options, fresh))
        return result

    def _keep(self, value: torch.Tensor) -> None:
        key = value.untyped_storage()._cdata
        if key not in self.own and key not in self.kept:
            whole = value.detach().as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
            self.kept[key] = whole, whole.clone()

    def play(self) -> None:
        for function, arguments, options, fresh in self.operations:
            made = [x for x in tree_leaves(function(*arguments, **options)) if isinstance(x, torch.Tensor)]
            for there, here in zip(fresh, made, strict=True):
                if there is not None:
                    there.copy_(here)


class Capture:
    """In the place of `smcgen.smc.graph.Capture`."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.tapes: list[Tape] = []

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        try:
            yield
        finally:
            for whole, before in self.kept.values():
                whole.copy_(before)

    def begin(self) -> None:
        self.tapes.append(Tape(self.kept))
        self.tapes[-1].__enter__()

    def end(self) -> Callable[[], None]:
        if self.tapes[-1].closed:
            raise RuntimeError("no graph is being made")
        self.tapes[-1].closed = True
        self.tapes[-1].__exit__(None, None, None)
        return self.tapes[-1].play
