"""The write of new keys and values into pages, with the rotation of keys and queries, in Triton: `smcgen.kernels.attention` has
the meaning."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.pdl import early, release, wait


@triton.jit
def _write(
    Query,
    Key,
    Value,
    Keys,
    Values,
    Table,
    Length,
    Counts,
    Cos,
    Sin,
    QueryNorm,
    KeyNorm,
    q_row,
    q_step,
    q_head,
    k_row,
    k_step,
    k_head,
    v_row,
    v_step,
    v_head,
    columns,
    eps,
    STEPS: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr,  # of query heads; 0 without rope, where queries stay as they are
    KEY_BLOCKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    row = tl.program_id(0) // STEPS
    step = tl.program_id(0) % STEPS
    block = tl.program_id(1)
    length = tl.load(Length + row).to(tl.int32)
    real = step < tl.load(Counts + row).to(tl.int32)
    at = tl.where(real, length + step, 0)
    page = tl.where(real, tl.load(Table + row.to(tl.int64) * columns + at // PAGE), 0).to(tl.int64)  # padding: scratch
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    if block < QUERY_BLOCKS + KEY_BLOCKS:
        if ROPE:
            is_query = block < QUERY_BLOCKS
            head = tl.where(is_query, block, block - QUERY_BLOCKS) * BLOCK_H + h
            source = tl.where(
                is_query,
                row.to(tl.int64) * q_row + step * q_step,
                row.to(tl.int64) * k_row + step * k_step,
            ) + head * tl.where(is_query, q_head, k_head)
            inside = (d < HALF)[None, :] & (h >= 0)[:, None]
            if is_query:
                x = tl.load(Query + source[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
                y = tl.load(Query + source[:, None] + HALF + d[None, :], mask=inside, other=0.0).to(tl.float32)
            else:
                x = tl.load(Key + source[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
                y = tl.load(Key + source[:, None] + HALF + d[None, :], mask=inside, other=0.0).to(tl.float32)
            if NORM:
                scale = 1 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)
                if is_query:
                    a = tl.load(QueryNorm + d, mask=d < HALF, other=0.0)
                    b = tl.load(QueryNorm + HALF + d, mask=d < HALF, other=0.0)
                else:
                    a = tl.load(KeyNorm + d, mask=d < HALF, other=0.0)
                    b = tl.load(KeyNorm + HALF + d, mask=d < HALF, other=0.0)
                x = x * scale[:, None] * a.to(tl.float32)[None, :]
                y = y * scale[:, None] * b.to(tl.float32)[None, :]
            angle = at.to(tl.int64) * DIM + d
            cos = tl.load(Cos + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
            sin = tl.load(Sin + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
            cos2 = tl.load(Cos + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
            sin2 = tl.load(Sin + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
            left = x * cos - y * sin
            right = y * cos2 + x * sin2
            if is_query:
                tl.store(Query + source[:, None] + d[None, :], left, mask=inside)
                tl.store(Query + source[:, None] + HALF + d[None, :], right, mask=inside)
            else:
                target = ((page * HEADS + head) * PAGE + at % PAGE) * DIM
                tl.store(Keys + target[:, None] + d[None, :], left, mask=inside)
                tl.store(Keys + target[:, None] + HALF + d[None, :], right, mask=inside)
        else:
            head = block * BLOCK_H + h
            source = row.to(tl.int64) * k_row + step * k_step + head * k_head
            inside = (d < DIM)[None, :] & (h >= 0)[:, None]
            target = ((page * HEADS + head) * PAGE + at % PAGE) * DIM
            key = tl.load(Key + source[:, None] + d[None, :], mask=inside, other=0.0)
            tl.store(Keys + target[:, None] + d[None, :], key, mask=inside)
    else:
        e = tl.arange(0, BLOCK_V)
        v_at = (block - QUERY_BLOCKS - KEY_BLOCKS) * BLOCK_H + h
        v_from = row.to(tl.int64) * v_row + step * v_step + v_at * v_head
        v_to = ((page * HEADS + v_at) * PAGE + at % PAGE) * VALUE_DIM
        v_inside = (e < VALUE_DIM)[None, :] & (h >= 0)[:, None]
        v = tl.load(Value + v_from[:, None] + e[None, :], mask=v_inside, other=0.0)
        tl.store(Values + v_to[:, None] + e[None, :], v, mask=v_inside)


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
) -> None:
    """`smcgen.kernels.attention.write` on a GPU."""
    rows, key_heads, steps, dim = key.shape
    value_dim = value.shape[3]
    if key.stride(3) != 1 or value.stride(3) != 1:
        key, value = key.contiguous(), value.contiguous()
    heads = 0 if rope is None or query is None else query.shape[1]
    block_h = next(size for size in (8, 4, 2, 1) if key_heads % size == 0 and heads % size == 0)
    half = dim // 2
    q = query if heads and query is not None else key
    cos, sin = rope or (key, key)
    query_norm, key_norm, eps = norms or (key, key, 0.0)
    _write[(rows * steps, (heads + 2 * key_heads) // block_h)](
        q,
        key,
        value,
        keys,
        values,
        table,
        length,
        counts,
        cos,
        sin,
        query_norm,
        key_norm,
        *(q.stride(0), q.stride(2), q.stride(1)),
        *(key.stride(0), key.stride(2), key.stride(1)),
        *(value.stride(0), value.stride(2), value.stride(1)),
        table.shape[1],
        eps,
        STEPS=steps,
        QUERY_BLOCKS=heads // block_h,
        KEY_BLOCKS=key_heads // block_h,
        BLOCK_H=block_h,
        HEADS=key_heads,
        DIM=dim,
        HALF=half,
        BLOCK_D=triton.next_power_of_2(half if rope is not None else dim),
        VALUE_DIM=value_dim,
        BLOCK_V=triton.next_power_of_2(value_dim),
        PAGE=keys.shape[2],
        ROPE=rope is not None,
        NORM=norms is not None,
        num_warps=4 if block_h >= 4 else 1,
        **early(key),
    )
