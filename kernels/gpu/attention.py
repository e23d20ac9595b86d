"""Attention over pages in Triton: `smcgen.kernels.attention` has the meaning.

The rows of a group that name the same leading pages read them once: one *piece* of work holds the queries of every row of a
group over a part of the shared pages, another those of one row over a part of its own. Pieces are joined by their log-sum-exp
(Dao et al., "Flash-Decoding", 2023; Zheng et al., "SGLang", 2024, for shared prefixes). The grid follows from shapes alone and
the work from device tensors, so that a captured graph serves any length.

A few new tokens are rotated by the pieces that read them: the last of a row's own pieces has their keys and values from the
projections and writes them into their pages, a launch less than to write them first.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.join import PROGRAMS, join
from smcgen.kernels.gpu.pdl import early, release, wait

# New tokens of a row that pieces rotate and write by themselves. (With more a launch that does it first was the faster on an
# H200: each of several tiles would rotate them again.)
FEW = 8


class New(NamedTuple):
    """New tokens that lie in no page yet; see `smcgen.kernels.attention.write`."""

    key: torch.Tensor
    value: torch.Tensor
    counts: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor] | None
    norms: tuple[torch.Tensor, torch.Tensor, float] | None


@triton.jit
def _heads(
    X, at, live, line, Cos, Sin, Norm, eps, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr
):
    """The heads that begin at X + `at`, normalised and turned by `line` of the tables of angles, where asked."""
    d = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (d < DIM)[None, :]
    x = tl.load(X + at[:, None] + d[None, :], mask=inside, other=0.0)
    if ROPE:
        half = DIM // 2
        other = tl.where(d < half, d + half, d - half)
        y = tl.load(X + at[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        if NORM:
            size = 1 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps)
            x = x * size[:, None] * tl.load(Norm + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
            y = y * size[:, None] * tl.load(Norm + other, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        angle = line.to(tl.int64)[:, None] * DIM + d[None, :]
        cos = tl.load(Cos + angle, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(Sin + angle, mask=inside, other=0.0).to(tl.float32)
        x = (x * cos + tl.where(d < half, -1.0, 1.0)[None, :] * y * sin).to(X.dtype.element_ty)
    return x


@triton.jit
def _add(q, k, v, keep, top, mass, sums, scale, softcap, SOFTCAP: tl.constexpr):
    """A block of keys [BLOCK_D, n] and values [n, BLOCK_V] into the sums of each query, kept relative to `top`."""
    score = tl.dot(q, k, input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
    score = tl.where(keep, score, float("-inf"))
    new = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # a query with nothing to see yet
    p = tl.exp(score - base[:, None])
    fade = tl.exp(top - base)
    sums = sums * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new, mass * fade + tl.sum(p, 1), sums


@triton.jit
def _attend(
    Query,
    Key,
    Value,
    Counts,
    Cos,
    Sin,
    QueryNorm,
    KeyNorm,
    Keys,
    Values,
    Table,
    Length,
    Shared,
    Out,
    Lse,
    scale,
    softcap,
    eps,
    window,
    columns,
    lines,  # of the tables of angles
    q_row,
    q_step,
    q_head,
    k_row,
    k_step,
    k_head,
    v_row,
    v_step,
    v_head,
    total,
    shared_programs,
    PARTICLES: tl.constexpr,
    STEPS: tl.constexpr,
    QUERIES: tl.constexpr,  # query heads that share a key head
    HEADS: tl.constexpr,  # key heads
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,  # of shared pages
    OWN_SPLITS: tl.constexpr,
    TILES: tl.constexpr,  # of the queries of a group
    OWN_TILES: tl.constexpr,
    NEW: tl.constexpr,  # how many new tokens lie in no page yet, rounded up to a block; 0: all lie in pages
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,  # one piece only: write the result
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    head = tl.program_id(0)
    program = tl.program_id(1)
    common = program < shared_programs
    own = program - shared_programs
    if SPLITS > 0:
        group = program // (SPLITS * TILES)
        first = tl.where(common, group * PARTICLES, own // (OWN_SPLITS * OWN_TILES))
        piece = tl.where(common, (program // TILES) % SPLITS, SPLITS + (own // OWN_TILES) % OWN_SPLITS)
        split = tl.where(common, piece, piece - SPLITS)
        splits = tl.where(common, SPLITS, OWN_SPLITS)
        tile = tl.where(common, program % TILES, own % OWN_TILES)
        queries = tl.where(common, PARTICLES * STEPS * QUERIES, STEPS * QUERIES)
        shared = tl.load(Shared + first // PARTICLES).to(tl.int32) * PAGE
    else:
        first = own // (OWN_SPLITS * OWN_TILES)
        piece = (own // OWN_TILES) % OWN_SPLITS
        split = piece
        splits = OWN_SPLITS
        tile = own % OWN_TILES
        queries = STEPS * QUERIES
        shared = 0
    j = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = j < queries
    row = tl.where(live, first + j // (STEPS * QUERIES), first)
    step = (j // QUERIES) % STEPS
    query = head * QUERIES + j % QUERIES
    length = tl.load(Length + first).to(tl.int32)
    # What this piece reads: shared pages lie before every query of the group, own ones end at the tile's last query or, where
    # new tokens come from elsewhere, before them.
    if NEW:
        ahead = 0
    else:
        ahead = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // QUERIES, STEPS - 1) + 1
    low = tl.where(common, 0, shared)
    high = tl.where(common, shared, tl.minimum(length + ahead, columns * PAGE))
    position = tl.load(Length + row).to(tl.int32) + step
    if WINDOW:
        seen = length + (tile * BLOCK_M) // QUERIES + 1 - window  # of a tile of one row
        low = tl.where(common, low, tl.maximum(low, seen))
    size = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), splits), BLOCK_N) * BLOCK_N
    begin = low + split * size
    end = tl.minimum(begin + size, high)

    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    line = Table + first.to(tl.int64) * columns
    n = tl.arange(0, BLOCK_N)
    page = tl.load(line + (begin + n) // PAGE, mask=begin + n < end, other=0)
    at_query = row.to(tl.int64) * q_row + step * q_step + query * q_head
    angle = tl.minimum(position, lines - 1)  # padding may stand past the end
    q = _heads(Query, at_query, live, angle, Cos, Sin, QueryNorm, eps, DIM, BLOCK_D, ROPE, NORM)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if NEW:
        if (program >= shared_programs) & (split == OWN_SPLITS - 1):
            t = tl.arange(0, NEW)
            here = length + t
            fresh = (t < tl.minimum(tl.load(Counts + first).to(tl.int32), STEPS)) & (here < columns * PAGE)
            at_key = first.to(tl.int64) * k_row + t * k_step + head * k_head
            k = _heads(Key, at_key, fresh, here, Cos, Sin, KeyNorm, eps, DIM, BLOCK_D, ROPE, NORM).to(Keys.dtype.element_ty)
            at_value = first.to(tl.int64) * v_row + t * v_step + head * v_head
            v_inside = fresh[:, None] & (e < VALUE_DIM)[None, :]
            v = tl.load(Value + at_value[:, None] + e[None, :], mask=v_inside, other=0.0).to(Values.dtype.element_ty)
            if tile == 0:  # one program for each row and head
                place = tl.load(line + here // PAGE, mask=fresh, other=0).to(tl.int64)
                place = (place * HEADS + head) * PAGE + here % PAGE
                tl.store(Keys + place[:, None] * DIM + d[None, :], k, mask=fresh[:, None] & (d < DIM)[None, :])
                tl.store(Values + place[:, None] * VALUE_DIM + e[None, :], v, mask=v_inside)
            keep = fresh[None, :] & (t[None, :] <= step[:, None])
            if WINDOW:
                keep = keep & (t[None, :] > step[:, None] - window)
            top, mass, sums = _add(q, tl.trans(k), v, keep, top, mass, sums, scale, softcap, SOFTCAP)
    for start in range(begin, end, BLOCK_N):
        at = start + n
        real = at < end
        token = (page.to(tl.int64) * HEADS + head) * PAGE + at % PAGE
        # Pages are looked up a block ahead, so that keys and values wait for no look-up.
        page = tl.load(line + (at + BLOCK_N) // PAGE, mask=at + BLOCK_N < end, other=0)
        k = tl.load(Keys + token[None, :] * DIM + d[:, None], mask=real[None, :] & (d < DIM)[:, None], other=0.0)
        # Values are asked for with the keys: where a piece is one block, waiting for memory is all there is.
        v = tl.load(Values + token[:, None] * VALUE_DIM + e[None, :], mask=real[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
        keep = real[None, :] & (at[None, :] <= position[:, None])
        if WINDOW:
            keep = keep & (at[None, :] > position[:, None] - window)
        top, mass, sums = _add(q, k, v, keep, top, mass, sums, scale, softcap, SOFTCAP)
    out = ((row * STEPS + step) * HEADS * QUERIES + query).to(tl.int64)
    inside = live[:, None] & (e < VALUE_DIM)[None, :]
    result = sums / tl.where(mass == 0, 1.0, mass)[:, None]
    if DIRECT:
        tl.store(Out + out[:, None] * VALUE_DIM + e[None, :], result, mask=inside)
    else:
        out += piece.to(tl.int64) * total
        tl.store(Out + out[:, None] * VALUE_DIM + e[None, :], result, mask=inside)
        tl.store(Lse + out, top + tl.log(mass), mask=live)  # log 0 = -inf: an empty piece


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    length: torch.Tensor,
    scale: float,
    *,
    shared: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    own: int | None = None,
    splits: tuple[int, int] | None = None,
    new: New | None = None,
) -> torch.Tensor:
    """`smcgen.kernels.attention.paged_attention` on a GPU.

    Args:
        shared: int [groups], leading pages that all rows of a group name alike and all have filled; None: nothing is shared.
        own: see there.
        splits: pieces of the shared pages and of each row's own; default by shape.
        new: the new tokens if they lie in no page yet, at most `FEW`; they do afterwards, as by `write`, but for padding, which
            goes nowhere. `query` stays as it is.
    """
    rows, heads, steps, dim = query.shape
    key_heads, page, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    if query.stride(3) != 1:
        query = query.contiguous()
    queries, columns = heads // key_heads, table.shape[1]
    groups = rows if shared is None else shared.shape[0]
    particles = rows // groups
    block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (dim, value_dim))
    wide = query.dtype == torch.float32 or max(block_d, block_v) > 128
    block_m = min(32 if wide else 64, max(16, triton.next_power_of_2(particles * steps * queries)))
    few = block_m <= 32 and max(block_d, block_v) <= 64
    block_n = 32 if wide else 128 if few and columns * page > 1024 else 64
    tiles, own_tiles = triton.cdiv(particles * steps * queries, block_m), triton.cdiv(steps * queries, block_m)
    if splits is None:
        span = columns * page
        own = span if particles == 1 or own is None else min(own, span)
        programs = 0 if particles == 1 else groups * key_heads * tiles
        # Several new tokens are more work a piece, and more outputs to join.
        splits = _splits(span, own, rows * key_heads * own_tiles, programs, 64 if steps == 1 else 128)
        if new is not None and steps == 1 and sum(splits) > 1:
            splits = splits[0], splits[1] + 1  # one more, so that the new token has a piece to itself
    elif particles == 1:
        splits = 0, splits[1]
    pieces, total = sum(splits), rows * steps * heads
    direct = pieces == 1 and sinks is None
    final = torch.empty(rows, steps, heads, value_dim, dtype=query.dtype, device=query.device)
    out = final if direct else torch.empty(pieces, total, value_dim, dtype=torch.float32, device=query.device)
    lse = final if direct else torch.empty(pieces, total, dtype=torch.float32, device=query.device)
    common = groups * splits[0] * tiles if splits[0] else 0
    key, value, counts, rope, norms = new or (query, query, length, None, None)
    if key.stride(3) != 1 or value.stride(3) != 1:
        key, value = key.contiguous(), value.contiguous()
    cos, sin = rope or (query, query)
    query_norm, key_norm, eps = norms or (query, query, 0.0)
    _attend[(key_heads, common + rows * splits[1] * own_tiles)](
        query,
        key,
        value,
        counts,
        cos,
        sin,
        query_norm,
        key_norm,
        keys,
        values,
        table,
        length,
        length if shared is None else shared,
        out,
        lse,
        scale,
        softcap or 0.0,
        eps,
        window or 0,
        columns,
        cos.shape[0],
        *(query.stride(0), query.stride(2), query.stride(1)),
        *(key.stride(0), key.stride(2), key.stride(1)),
        *(value.stride(0), value.stride(2), value.stride(1)),
        total,
        common,
        PARTICLES=particles,
        STEPS=steps,
        QUERIES=queries,
        HEADS=key_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK_D=block_d,
        BLOCK_V=block_v,
        PAGE=page,
        SPLITS=splits[0],
        OWN_SPLITS=splits[1],
        TILES=tiles,
        OWN_TILES=own_tiles,
        NEW=0 if new is None else max(16, triton.next_power_of_2(steps)),
        ROPE=rope is not None,
        NORM=norms is not None,
        SOFTCAP=softcap is not None,
        WINDOW=window is not None,
        DIRECT=direct,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=2,
        **early(query),
    )
    if not direct:
        join(out, lse, sinks, final, total, heads)
    return final


def _splits(span: int, own: int, own_programs: int, programs: int, least: int) -> tuple[int, int]:
    """How many pieces: enough programs for the device, none much shorter than worth while if the rows are full.

    Args:
        span, own: tokens that a row has room for, and those of them that are no other row's, as long as nothing is resampled.
        own_programs, programs: for each piece of rows and of groups; `programs` is 0 if nothing is shared.
        least: tokens of a shared piece."""
    if programs == 0:
        return 0, min(16, max(1, span // 64), max(1, PROGRAMS // own_programs))
    likely = max(span - own, span // 2)
    shared = min(16, max(1, likely // least), max(1, PROGRAMS // programs))
    return shared, min(4, max(1, own // 256), max(1, PROGRAMS // own_programs))
