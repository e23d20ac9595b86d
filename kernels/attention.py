"""Attention of new tokens over keys and values that lie in pages.

    out[b, t, h] = sum_s softmax_s(score)[s] * value[s],   score[s] = cap(scale * query[b, h, t] . key[s]),

over the positions s <= length[b] + t of row b (the last `window` of them), with cap(x) = softcap * tanh(x / softcap) if
there is a soft cap. An attention sink adds exp(sink[h]) to the denominator.
"""

from __future__ import annotations

import torch


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    length: torch.Tensor,
    scale: float,
    *,
    columns: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention of T new tokens per row; their own keys and values already lie in the pages.

    Args:
        query: [rows, heads, T, dim]; token t of row b stands at position length[b] + t.
        keys, values: one layer of the pool, [pages, kv_heads, page, dim] (values may have another dim).
        table: int64 [rows, columns], the pages of each row in order.
        length: int64 [rows], tokens before the new ones.
        columns: how many columns of the table to read, if fewer are known to suffice.
        window: only the last `window` positions, the token's own included, are seen.
        sinks: [heads], or None.

    Returns:
        [rows, T, heads, dim of values] in the dtype of `query`; computed in float32.
    """
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
