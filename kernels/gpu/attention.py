"""Attention over pages in Triton: `smcgen.kernels.attention` has the meaning.

The rows of a group that name the same leading pages read them once: one *piece* of work holds the queries of every row of a
group over a part of the shared pages, another those of one row over a part of its own. Pieces are joined by their log-sum-exp
(Dao et al., "Flash-Decoding", 2023; Zheng et al., "SGLang", 2024, for shared prefixes). The grid follows from shapes alone and
the work from device tensors, so that a captured graph serves any length.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.pdl import early, release, wait

PROGRAMS = 264  # two for each of the 132 processors of an H100 or H200


@triton.jit
def _join(
    Out,
    Lse,
    Sinks,
    Final,
    total,
    heads,
    PIECES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """The pieces of BLOCK_R outputs together, by their log-sum-exp. (Joined by whichever piece comes last, a launch less, they
    took longer on an H200.)"""
    release(PDL)
    i = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = i < total
    p = tl.arange(0, BLOCK_P)
    wait(PDL)
    lse = tl.load(Lse + p[:, None] * total + i[None, :], mask=(p < PIECES)[:, None] & inside[None, :], other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    if SINKS:
        sink = tl.load(Sinks + i % heads, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(top, sink)
    mass = tl.sum(tl.exp(lse - top[None, :]), 0)
    if SINKS:
        mass += tl.exp(sink - top)
    d = tl.arange(0, BLOCK_D)
    whole = inside[:, None] & (d < DIM)[None, :]
    sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for piece in tl.static_range(PIECES):  # unrolled, so that all are asked for at once
        part = tl.load(Lse + piece * total + i, mask=inside, other=float("-inf"))
        where = (piece * total + i).to(tl.int64)[:, None] * DIM + d[None, :]
        sums += tl.load(Out + where, mask=whole, other=0.0) * tl.exp(part - top)[:, None]
    result = sums / tl.where(mass == 0, 1.0, mass)[:, None]
    tl.store(Final + i.to(tl.int64)[:, None] * DIM + d[None, :], result, mask=whole)


@triton.jit
def _attend(
    Query,
    Keys,
    Values,
    Table,
    Length,
    Shared,
    Out,
    Lse,
    scale,
    softcap,
    window,
    columns,
    q_row,
    q_step,
    q_head,
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
    last_step = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // QUERIES, STEPS - 1)
    # What this piece reads: shared pages lie before every query of the group, own ones end at the tile's last query.
    low = tl.where(common, 0, shared)
    high = tl.where(common, shared, tl.minimum(length + last_step + 1, columns * PAGE))
    position = tl.load(Length + row).to(tl.int32) + step
    if WINDOW:
        seen = length + (tile * BLOCK_M) // QUERIES + 1 - window  # of a tile of one row
        low = tl.where(common, low, tl.maximum(low, seen))
    size = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), splits), BLOCK_N) * BLOCK_N
    begin = low + split * size
    end = tl.minimum(begin + size, high)

    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    at_query = row.to(tl.int64) * q_row + step * q_step + query * q_head
    q = tl.load(Query + at_query[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    line = Table + first.to(tl.int64) * columns
    n = tl.arange(0, BLOCK_N)
    page = tl.load(line + (begin + n) // PAGE, mask=begin + n < end, other=0)
    for start in range(begin, end, BLOCK_N):
        at = start + n
        real = at < end
        token = (page.to(tl.int64) * HEADS + head) * PAGE + at % PAGE
        # Pages are looked up a block ahead, so that keys and values wait for no look-up.
        page = tl.load(line + (at + BLOCK_N) // PAGE, mask=at + BLOCK_N < end, other=0)
        k = tl.load(Keys + token[None, :] * DIM + d[:, None], mask=real[None, :] & (d < DIM)[:, None], other=0.0)
        # Values are asked for with the keys: where a piece is one block, waiting for memory is all there is.
        v = tl.load(Values + token[:, None] * VALUE_DIM + e[None, :], mask=real[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
        keep = real[None, :] & (at[None, :] <= position[:, None])
        if WINDOW:
            keep = keep & (at[None, :] > position[:, None] - window)
        score = tl.where(keep, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a query with nothing to see yet
        p = tl.exp(score - base[:, None])
        fade = tl.exp(top - base)
        mass = mass * fade + tl.sum(p, 1)
        sums = sums * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new
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
) -> torch.Tensor:
    """`smcgen.kernels.attention.paged_attention` on a GPU.

    Args:
        shared: int [groups], leading pages that all rows of a group name alike and all have filled; None: nothing is shared.
        own: see there.
        splits: pieces of the shared pages and of each row's own; default by shape.
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
        splits = _splits(span, own, rows * key_heads * own_tiles, 0 if particles == 1 else groups * key_heads * tiles)
    elif particles == 1:
        splits = 0, splits[1]
    pieces, total = sum(splits), rows * steps * heads
    direct = pieces == 1 and sinks is None
    final = torch.empty(rows, steps, heads, value_dim, dtype=query.dtype, device=query.device)
    out = final if direct else torch.empty(pieces, total, value_dim, dtype=torch.float32, device=query.device)
    lse = final if direct else torch.empty(pieces, total, dtype=torch.float32, device=query.device)
    common = groups * splits[0] * tiles if splits[0] else 0
    _attend[(key_heads, common + rows * splits[1] * own_tiles)](
        query,
        keys,
        values,
        table,
        length,
        length if shared is None else shared,
        out,
        lse,
        scale,
        softcap or 0.0,
        window or 0,
        columns,
        query.stride(0),
        query.stride(2),
        query.stride(1),
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
        block_r = 1 if total <= 4 * PROGRAMS else 4
        _join[(triton.cdiv(total, block_r),)](
            out,
            lse,
            lse if sinks is None else sinks,
            final,
            total,
            heads,
            PIECES=pieces,
            BLOCK_P=triton.next_power_of_2(pieces),
            DIM=value_dim,
            BLOCK_D=block_v,
            SINKS=sinks is not None,
            BLOCK_R=block_r,
            num_warps=4,
            **early(query),
        )
    return final


def _splits(span: int, own: int, own_programs: int, programs: int) -> tuple[int, int]:
    """How many pieces: enough programs for the device, none much shorter than a block if the rows are full.

    Args:
        span, own: tokens that a row has room for, and those of them that are no other row's.
        own_programs, programs: for each piece of rows and of groups; `programs` is 0 if nothing is shared."""
    if programs == 0:
        return 0, min(16, max(1, span // 128), max(1, PROGRAMS // own_programs))
    shared = min(16, max(1, span // 64), max(1, PROGRAMS // programs))
    return shared, min(4, max(1, own // 256), max(1, PROGRAMS // own_programs))
