"""Attention of new tokens over keys and values that lie in pages.

    out[b, t, h] = sum_s softmax_s(score)[s] * value[s],   score[s] = cap(scale * query[b, h, t] . key[s]),

over the positions s <= length[b] + t of row b (the last `window` of them), with cap(x) = softcap * tanh(x / softcap) if
there is a soft cap. An attention sink adds exp(sink[h]) to the denominator.
"""

from __future__ import annotations

from typing import Any

import torch

from smcgen.kernels.device import on_triton


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    length: torch.Tensor,
    scale: float,
    *,
    columns: int | None = None,
    shared: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    own: int | None = None,
) -> torch.Tensor:
    """The attention of T new tokens per row; their own keys and values already lie in the pages.

    Args:
        query: [rows, heads, T, dim]; token t of row b stands at position length[b] + t.
        keys, values: one layer of the pool, [pages, kv_heads, page, dim] (values may have another dim).
        table: int64 [rows, columns], the pages of each row in order.
        length: int64 [rows], tokens before the new ones.
        columns: how many columns of the table to read, if fewer are known to suffice (on a GPU the lengths say it).
        shared: int [groups], how many leading pages the rows of a group name alike and have all filled, or None. On a GPU they
            are read once for the group; the result does not depend on it beyond rounding.
        window: only the last `window` positions, the token's own included, are seen.
        sinks: [heads], or None.
        own: how many tokens of a row lie beyond the shared pages, at most. Only the speed depends on it.

    Returns:
        [rows, T, heads, dim of values] in the dtype of `query`; computed in float32.
    """
    if on_triton(query):
        from smcgen.kernels.gpu import attention as gpu

        return gpu.attend(
            query, keys, values, table, length, scale, shared=shared, window=window, softcap=softcap, sinks=sinks, own=own
        )
    rows, heads, steps, dim = query.shape
    kv_heads, page = keys.shape[1:3]
    table = table[:, :columns]
    span = table.shape[1] * page
    # Each head gathers its own part of a page, [rows, kv_heads, span, dim], so that the products need no other copy; heads
    # that share a key are folded into the rows of the product.
    part = table[:, None] * kv_heads + torch.arange(kv_heads, device=table.device)[:, None]
    k = keys.flatten(0, 1)[part].view(rows, kv_heads, span, -1).float()
    v = values.flatten(0, 1)[part].view(rows, kv_heads, span, -1).float()
    q = query.float().reshape(rows, kv_heads, heads // kv_heads * steps, dim)
    score = (q @ k.transpose(2, 3)).mul_(scale).view(rows, heads, steps, span)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    # padding tokens may stand past the end: they see something all the same, for NaN would spread through their writes
    position = (length[:, None] + torch.arange(steps, device=length.device)).clamp(max=span - 1)
    at = torch.arange(span, device=length.device)
    hidden = at > position[..., None]
    if window is not None:
        hidden |= at <= position[..., None] - window
    score.masked_fill_(hidden[:, None], float("-inf"))
    if sinks is None:
        weight = score.softmax(-1)
    else:
        sink = sinks.float().view(1, heads, 1, 1).expand(rows, heads, steps, 1)
        weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    out = weight.reshape(rows, kv_heads, -1, span) @ v
    return out.view(rows, heads, steps, -1).transpose(1, 2).to(query.dtype)


def write(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    length: torch.Tensor,
    counts: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    places: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Puts the keys and values of T new tokens per row into their pages, after rotating keys and queries if `rope` is given.

    Args:
        query: [rows, heads, T, dim], rotated in place; may be None without `rope`.
        key, value: [rows, kv_heads, T, dim] (values may have another dim); they are not changed.
        keys, values, table, length: as in `paged_attention`; changed are keys and values.
        counts: int64 [rows], how many of the T tokens are real; the others go to scratch, page 0.
        rope: cosines and sines, [positions, dim] each, for the rotation of halves (Su et al., "RoFormer", 2021); token t of
            row b is rotated by line length[b] + t.
        norms: weights [dim] for queries and for keys and epsilon: each head is RMS-normalised before its rotation.
        places: what `new_places` gives, if it is at hand (a GPU does not need it).
    """
    if on_triton(key):
        from smcgen.kernels.gpu import write as gpu

        return gpu.write(query, key, value, keys, values, table, length, counts, rope, norms)
    into, at = places or new_places(table, length, counts, key.shape[2], keys.shape[2])
    if rope is not None:
        assert query is not None
        position = length[:, None] + torch.arange(key.shape[2], device=key.device)
        cos, sin = (angles[position.clamp(max=len(angles) - 1)][:, None].float() for angles in rope)  # [rows, 1, T, dim]
        query_norm, key_norm, eps = norms or (None, None, 0.0)
        query.copy_(_rotate(query, cos, sin, query_norm, eps))
        key = _rotate(key, cos, sin, key_norm, eps)
    keys[into, :, at] = key.transpose(1, 2).to(keys.dtype)
    values[into, :, at] = value.transpose(1, 2).to(values.dtype)


def attend_new(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    length: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    *,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    places: tuple[torch.Tensor, torch.Tensor] | None = None,
    columns: int | None = None,
    shared: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    own: int | None = None,
) -> torch.Tensor:
    """`write` and then `paged_attention`, with their arguments; for a few tokens a GPU does both at once.

    `query` may be rotated in place or not. What padding tokens give means nothing, but it is finite."""
    rules: dict[str, Any] = {"shared": shared, "window": window, "softcap": softcap, "sinks": sinks, "own": own}
    if on_triton(key):
        from smcgen.kernels.gpu import attention as gpu

        if query.shape[2] <= gpu.FEW:
            new = gpu.New(key, value, counts, rope, norms)
            return gpu.attend(query, keys, values, table, length, scale, new=new, **rules)
    write(query, key, value, keys, values, table, length, counts, rope, norms, places)
    return paged_attention(query, keys, values, table, length, scale, columns=columns, **rules)


def new_places(
    table: torch.Tensor, length: torch.Tensor, counts: torch.Tensor, steps: int, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The page that each of `steps` new tokens per row goes into and its place there, int64 [rows, steps] each."""
    step = torch.arange(steps, device=length.device)
    real = step < counts[:, None]
    position = torch.where(real, length[:, None] + step, 0)
    return torch.where(real, table.gather(1, position // page), 0), position % page


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.float()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def shared_pages(table: torch.Tensor, length: torch.Tensor, groups: int, page: int) -> torch.Tensor:
    """How many leading pages all rows of each of `groups` equal groups name alike and have filled, int64 [groups]."""
    grouped, full = table.view(groups, -1, table.shape[1]), length.view(groups, -1).amin(1) // page
    column = torch.arange(table.shape[1], device=table.device)
    alike = (grouped == grouped[:, :1]).all(1) & (column < full[:, None])
    return alike.long().cumprod(1).sum(1)
