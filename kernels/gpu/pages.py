"""Page moves in Triton: `grow`, a fork, a trim, and the page copies of one model or two are one launch each.

`grow` runs in a single program, for what it decides is one decision about all rows; its shape is the shape of the table, and
what it reads on the device decides only how far its loops run.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

POOLS = 4  # keys and values of two models
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _grow(
    Table,
    Length,
    Counts,
    Mark,
    Order,
    Before,
    Source,
    Target,
    Short,
    rows,
    columns,
    stride,
    pages,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    SCAN: tl.constexpr,
    FILL: tl.constexpr,
    KEEP: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    real = row < rows
    length = tl.load(Length + row, mask=real, other=0)
    count = tl.load(Counts + row, mask=real, other=0)
    short = tl.max(tl.where(length + count > columns * PAGE, 1, 0), 0)
    tail = tl.minimum(length // PAGE, columns - 1)
    source = tl.load(Table + row * stride + tail, mask=real, other=0)
    partial = (count > 0) & (length % PAGE != 0) & real

    # A row loses its partial last page to one that holds more of it, or as much and stands lower. Rows share a page in the
    # same column only, so that one column of the table says who they are.
    held = tl.minimum(tl.maximum(length - tail * PAGE, 0), PAGE)
    lost = tl.zeros([ROWS], tl.int32)
    for first in range(0, rows, OTHERS):
        other = first + tl.arange(0, OTHERS)
        there = other < rows
        has = tl.load(Length + other, mask=there, other=0)[None, :] - (tail * PAGE)[:, None]
        has = tl.minimum(tl.maximum(has, 0), PAGE)
        at = Table + other[None, :] * stride + tail[:, None]
        theirs = tl.load(at, mask=partial[:, None] & there[None, :] & (has > 0), other=-1)
        more = (has > held[:, None]) | ((has == held[:, None]) & (other[None, :] < row[:, None]))
        wins = (theirs == source[:, None]) & more
        lost = tl.maximum(lost, tl.max(tl.where(wins, 1, 0), 1))
    copied = partial & (lost > 0)

    # What a row needs are neighbouring columns, so a first column and a number say it.
    named = tl.minimum((length + PAGE - 1) // PAGE, columns)
    wanted = tl.minimum((length + count + PAGE - 1) // PAGE, columns)
    begin = tl.where(copied, tail, named)
    need = tl.where((count > 0) & real, tl.maximum(wanted - begin, 0), 0).to(tl.int32)
    rank = tl.cumsum(need, 0) - need
    total = tl.sum(need, 0)
    target = tl.zeros([ROWS], tl.int64)

    if total > 0:
        for first in range(0, pages, SCAN):
            page = first + tl.arange(0, SCAN)
            tl.store(Mark + page, tl.zeros([SCAN], tl.int8), mask=page < pages)
        tl.debug_barrier()
        for first in range(0, rows, TILE_ROWS):
            r = first + tl.arange(0, TILE_ROWS)
            names = tl.minimum((tl.load(Length + r, mask=r < rows, other=0) + PAGE - 1) // PAGE, columns)
            for start in range(0, tl.max(names, 0), TILE_COLUMNS):
                c = start + tl.arange(0, TILE_COLUMNS)
                ok = c[None, :] < names[:, None]
                page = tl.load(Table + r[:, None] * stride + c[None, :], mask=ok, other=0)
                tl.store(Mark + page, tl.full([TILE_ROWS, TILE_COLUMNS], 1, tl.int8), mask=ok)
        tl.debug_barrier()
        found = total * 0
        first_page = found
        while (found < total) & (first_page < pages):
            page = first_page + tl.arange(0, SCAN)
            mark = tl.load(Mark + page, mask=page < pages, other=1)
            free = ((mark == 0) & (page > 0)).to(tl.int32)
            place = found + tl.cumsum(free, 0) - 1
            tl.store(Order + place, page, mask=(free > 0) & (place < total))
            found += tl.sum(free, 0)
            first_page += SCAN
        tl.debug_barrier()
        short = tl.maximum(short, tl.where(found < total, 1, 0))
        for start in range(0, tl.max(need, 0), FILL):
            i = start + tl.arange(0, FILL)
            ok = i[None, :] < need[:, None]
            place = rank[:, None] + i[None, :]
            page = tl.load(Order + place, mask=ok & (place < found), other=0).to(tl.int64)
            tl.store(Table + row[:, None] * stride + begin[:, None] + i[None, :], page, mask=ok)
        target = tl.load(Order + rank, mask=copied & (rank < found), other=0).to(tl.int64)
    tl.debug_barrier()  # all have read the lengths that are now overwritten
    tl.store(Before + row, length, mask=real)
    tl.store(Length + row, length + count, mask=real)
    tl.store(Source + row, tl.where(copied, source, 0), mask=real)
    tl.store(Target + row, target, mask=real)
    if KEEP:
        short = tl.maximum(short, tl.load(Short).to(tl.int32))
    tl.store(Short, short > 0)


def grow(
    table: torch.Tensor, length: torch.Tensor, counts: torch.Tensor, page: int, pages: int, short: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`smcgen.kernels.pages.grow`, in one launch."""
    rows, columns = table.shape
    device = table.device
    before, source, target = torch.empty(3, rows, dtype=torch.int64, device=device)
    keep = short is not None
    if short is None:
        short = torch.empty((), dtype=torch.bool, device=device)
    mark = torch.empty(pages, dtype=torch.int8, device=device)
    order = torch.empty(pages, dtype=torch.int32, device=device)
    padded = triton.next_power_of_2(rows)
    across = triton.next_power_of_2(columns)
    tile_columns = min(across, 256)
    tile_rows = min(padded, max(1, 4096 // tile_columns))
    _grow[(1,)](
        table,
        length,
        counts,
        mark,
        order,
        before,
        source,
        target,
        short,
        rows,
        columns,
        table.stride(0),
        pages,
        PAGE=page,
        ROWS=padded,
        OTHERS=min(padded, max(1, 4096 // padded)),
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
        SCAN=min(triton.next_power_of_2(pages), 4096),
        FILL=min(across, max(1, 4096 // padded)),
        KEEP=keep,
        num_warps=16 if padded > 64 else 8 if padded * across > 1024 or pages > 1024 else 4,
    )
    return before, source, target, short


@triton.jit
def _fork(
    Table, Length, Shared, Ancestors, particles, columns, stride,
    PAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per group, column by column: all rows are read before any is written."""
    group = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    real, at = row < particles, group * particles + row
    source = tl.load(Ancestors + at, mask=real, other=0)
    length = tl.load(Length + source, mask=real, other=0)
    head = tl.load(Ancestors + group * particles)
    full = tl.min(tl.where(real, length, 1 << 62), 0) // PAGE
    named = tl.minimum((tl.max(length, 0) + PAGE - 1) // PAGE, columns)
    shared = full * 0
    for start in range(0, named, COLUMNS):
        inside = real[:, None] & (start + column < named)[None, :]
        names = tl.load(Table + source[:, None] * stride + (start + column)[None, :], mask=inside, other=0)
        first = tl.load(Table + head * stride + start + column, mask=start + column < named, other=0)
        tl.debug_barrier()
        tl.store(Table + at[:, None] * stride + (start + column)[None, :], names, mask=inside)
        differs = tl.max(tl.where(inside & (names != first[None, :]), 1, 0), 0)
        alike = tl.min(tl.where((differs == 0) & (start + column < full), COLUMNS, column), 0)
        shared += tl.where(shared == start, alike, 0)
    tl.debug_barrier()
    tl.store(Length + at, length, mask=real)
    tl.store(Shared + group, shared)


def fork(table: torch.Tensor, length: torch.Tensor, shared: torch.Tensor, ancestors: torch.Tensor, page: int) -> None:
    """`smcgen.kernels.pages.fork`, in one launch; entries of the table that no row names stay as they are."""
    particles, columns = len(table) // len(shared), table.shape[1]
    padded = triton.next_power_of_2(particles)
    width = min(triton.next_power_of_2(columns), max(1, 4096 // padded))
    _fork[(len(shared),)](
        table, length, shared, ancestors, particles, columns, table.stride(0),
        PAGE=page, ROWS=padded, COLUMNS=width, num_warps=4 if padded < 64 else 8,
    )  # fmt: skip


@triton.jit
def _trim(Length, Shared, Keep, particles, PAGE: tl.constexpr, ROWS: tl.constexpr):
    """One program per group."""
    group = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    keep = tl.load(Keep + group * particles + row, mask=row < particles, other=1 << 62)
    tl.store(Length + group * particles + row, keep, mask=row < particles)
    tl.store(Shared + group, tl.minimum(tl.load(Shared + group), tl.min(keep, 0) // PAGE))


def trim(length: torch.Tensor, shared: torch.Tensor, keep: torch.Tensor, page: int) -> None:
    """`smcgen.kernels.pages.trim`, in one launch."""
    particles = len(length) // len(shared)
    _trim[(len(shared),)](length, shared, keep, particles, PAGE=page, ROWS=triton.next_power_of_2(particles), num_warps=4)


@triton.jit
def _copy_page(Pool, Source, Target, rows, pages, size, BLOCK: tl.constexpr):
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if row < rows:
        target = tl.load(Target + row)
        if target > 0:
            source = tl.load(Source + row)
            into = Pool + (layer * pages + target) * size
            out_of = Pool + (layer * pages + source) * size
            for start in range(0, size, BLOCK):
                i = start + tl.arange(0, BLOCK)
                tl.store(into + i, tl.load(out_of + i, mask=i < size, other=0), mask=i < size)


@triton.jit
def _copy(
    Pool0, Pool1, Pool2, Pool3,
    Source0, Source1, Source2, Source3,
    Target0, Target1, Target2, Target3,
    rows0, rows1, rows2, rows3,
    layers0, layers1, layers2, layers3,
    pages0, pages1, pages2, pages3,
    size0, size1, size2, size3,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer, pool = tl.program_id(1), tl.program_id(2)
    if pool == 0:
        if layer < layers0:
            _copy_page(Pool0, Source0, Target0, rows0, pages0, size0, BLOCK)
    if COUNT > 1:
        if pool == 1:
            if layer < layers1:
                _copy_page(Pool1, Source1, Target1, rows1, pages1, size1, BLOCK)
    if COUNT > 2:
        if pool == 2:
            if layer < layers2:
                _copy_page(Pool2, Source2, Target2, rows2, pages2, size2, BLOCK)
    if COUNT > 3:
        if pool == 3:
            if layer < layers3:
                _copy_page(Pool3, Source3, Target3, rows3, pages3, size3, BLOCK)


def copy_pools(pools: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """`smcgen.kernels.pages.copy_pools`, in one launch; most of its programs have nothing to do and leave at once."""
    count = len(pools)
    if not 1 <= count <= POOLS or not len(sources) == len(targets) == count:
        raise ValueError(f"1 to {POOLS} pools with a source and a target each, got {count}, {len(sources)}, {len(targets)}")
    for pool in pools:
        if not pool.is_contiguous():
            raise ValueError("a pool of pages must be contiguous")

    pools = [pool.view(WORDS[pool.itemsize]) for pool in pools]  # bits are copied, whatever they mean

    def fill(values: list) -> list:
        return values + values[:1] * (POOLS - count)

    rows = [len(target) for target in targets]
    layers = [pool.shape[0] for pool in pools]
    size = [pool[0, 0].numel() for pool in pools]
    _copy[(max(rows), max(layers), count)](
        *fill(pools),
        *fill(list(sources)),
        *fill(list(targets)),
        *fill(rows),
        *fill(layers),
        *fill([pool.shape[1] for pool in pools]),
        *fill(size),
        COUNT=count,
        BLOCK=min(triton.next_power_of_2(max(size)), 8192),
        num_warps=8,
    )
