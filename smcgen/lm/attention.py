"""The one function through which a transformers model reads and writes pages.

transformers calls it in place of its own attention in every layer, with whatever keyword arguments the model was called
with. `reading` is ours: where the new tokens go and what each row may see. No mask and no cache of transformers exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from smcgen.kernels.attention import attend_new
from smcgen.lm.pages import Pages

NAME = "smcgen_paged"  # under a name without a mask function, transformers builds no mask


@dataclass
class Reading:
    """One forward: T new tokens for each of some rows.

    Attributes:
        table: int64 [rows, columns]; length: int64 [rows], tokens before the new ones.
        counts: int64 [rows], how many of the T tokens are real.
        columns: columns of the table that hold all that the rows may see, None if only the lengths tell.
        shared: int64 [groups], leading pages that the rows of a group share, or None.
        places: the page that each new token goes into and its place there, int64 [rows, T] each; None where the kernel finds
            them itself.
    """

    pages: Pages
    table: torch.Tensor
    length: torch.Tensor
    counts: torch.Tensor
    columns: int | None
    shared: torch.Tensor | None
    places: tuple[torch.Tensor, torch.Tensor] | None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        """Query, key and value are [rows, heads, T, dim] as projected; returns [rows, T, heads, dim].

        `rope` and `norms` as in `smcgen.kernels.attention.write`, for queries and keys that are not rotated yet."""
        keys, values = self.pages.keys[layer], self.pages.values[layer]
        return attend_new(
            query,
            key,
            value,
            keys,
            values,
            self.table,
            self.length,
            self.counts,
            scale,
            rope=rope,
            norms=norms,
            places=self.places,
            columns=self.columns,
            shared=self.shared,
            window=window,
            softcap=softcap,
            sinks=sinks,
            own=self.pages.own,
        )


@dataclass
class Probe:
    """Stands in for a `Reading` when a model is loaded, and notes how the model calls us."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self.calls.append(
            {"layer": layer, "key": key, "value": value, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        )
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    reading: Reading | Probe,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function as transformers defines it: [rows, heads, T, dim] in, [rows, T, heads, dim] out."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return reading.attend(layer, query, key, value, scale, sliding_window, softcap, s_aux), None


AttentionInterface.register(NAME, attention)
