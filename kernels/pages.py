"""Pages of a K/V pool shared by many rows: which are in use, who may write where, what must be copied first.

    table   int64 [rows, columns]   column c of a row holds the page of its tokens c*page .. c*page + page - 1
    length  int64 [rows]            tokens that a row holds

The table is the only truth. A row *names* its first ceil(length / page) entries, a page is free iff no row names it, and
entries beyond mean nothing. Page 0 is scratch: no row names it, and what must go nowhere is written there. Rows share a
page by naming it, always in the same column. So a fork copies table rows and moves no data, a trim changes a length, and
nothing can leak; a row that is about to write into a page that another row reads copies that page first (`grow`).

Nothing here waits for the device, and shapes depend on shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smcgen.kernels.attention import shared_pages
from smcgen.kernels.device import on_triton

MOST_ROWS = 1024  # that one program of a kernel holds


def named(table: torch.Tensor, length: torch.Tensor, page: int) -> torch.Tensor:
    """bool [rows, columns]: the entries that mean something."""
    column = torch.arange(table.shape[1], device=table.device)
    return column < ((length + page - 1) // page)[:, None]


def used(table: torch.Tensor, length: torch.Tensor, page: int, pages: int) -> torch.Tensor:
    """bool [pages]: the pages that some row names (scratch is not one of them)."""
    names = torch.where(named(table, length, page), table, 0).flatten()
    return (
        torch.zeros(pages, dtype=torch.bool, device=table.device)
        .index_fill_(0, names, True)
        .index_fill_(0, names.new_zeros(1), False)
    )


def grow(
    table: torch.Tensor, length: torch.Tensor, counts: torch.Tensor, page: int, pages: int, short: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes room for `counts` more tokens in each row: `table` is changed in place, and so is `length`, which counts them.

    A row with a partial last page that another row names too gets a copy of its own, unless it is the one that holds
    most of that page (of several, the lowest row): what it writes lies beyond what any other row reads. Free pages are
    handed out lowest first. Rows with counts 0 get nothing.

    Args:
        counts: int64 [rows], at least 0.
        page: tokens in a page.  pages: pages in the pool, scratch included.
        short: bool [], changed in place if given: once True it stays so.

    Returns:
        before: int64 [rows], the lengths as they were.
        source, target: int64 [rows], the page to copy and where to (0 and 0 for rows that need no copy).
        short: bool [], True if a row ran out of columns or the pool out of pages; then the table is not to be used.
    """
    if on_triton(table) and len(table) <= MOST_ROWS:
        from smcgen.kernels.gpu import pages as gpu

        return gpu.grow(table, length, counts, page, pages, short)
    rows, columns = table.shape
    row = torch.arange(rows, device=table.device)
    column = torch.arange(columns, device=table.device)
    names = named(table, length, page)
    in_use = used(table, length, page, pages)

    # Who may keep a shared page: the row that holds most tokens of it, the lowest of those.
    held = (length[:, None] - column * page).clamp(0, page)
    claim = torch.where(names, held * rows + (rows - 1 - row)[:, None], -1)
    best = torch.full((pages,), -1, dtype=torch.int64, device=table.device)
    best.scatter_reduce_(0, torch.where(names, table, 0).flatten(), claim.flatten(), "amax")
    tail = (length // page).clamp(max=columns - 1)[:, None]
    source = table.gather(1, tail)[:, 0]
    keeper = rows - 1 - best[source] % rows
    copied = (counts > 0) & (length % page != 0) & (keeper != row)

    wanted = ((length + counts + page - 1) // page)[:, None]
    need = (~names & (column < wanted) & (counts > 0)[:, None]) | ((column == tail) & copied[:, None])
    rank = need.flatten().cumsum(0) - 1
    free = (~in_use).index_fill_(0, row.new_zeros(1), False)
    place = torch.where(free, free.cumsum(0) - 1, pages)  # the n-th free page goes to n, used ones past the end
    order = torch.zeros(pages + 1, dtype=torch.int64, device=table.device)
    order.scatter_(0, place, torch.arange(pages, device=table.device))
    order[pages:].zero_()
    fresh = order[rank.clamp(0, pages)].view(rows, columns)
    ran_out = (need.sum() > free.sum()) | ((length + counts) > columns * page).any()
    short = ran_out if short is None else short.logical_or_(ran_out)

    table.copy_(torch.where(need, fresh, table))
    target = torch.where(copied, table.gather(1, tail)[:, 0], 0)
    before = length.clone()
    length.add_(counts)
    return before, torch.where(copied, source, 0), target, short


def fork(table: torch.Tensor, length: torch.Tensor, shared: torch.Tensor, ancestors: torch.Tensor, page: int) -> None:
    """In place: row r of the table and of the lengths becomes what row ancestors[r] was.

    Args:
        table: int64 [rows, columns].  length: int64 [rows].
        shared: int64 [groups], set to the leading pages that all rows of a group name alike and have filled.
        ancestors: int64 [rows], any map of rows to rows of the same group, or to rows that are their own ancestors.
    """
    if on_triton(table) and len(table) // len(shared) <= MOST_ROWS:
        from smcgen.kernels.gpu import pages as gpu

        return gpu.fork(table, length, shared, ancestors, page)
    table.copy_(table[ancestors])
    length.copy_(length[ancestors])
    shared.copy_(shared_pages(table, length, len(shared), page))


def trim(length: torch.Tensor, shared: torch.Tensor, keep: torch.Tensor, page: int) -> None:
    """In place: row r holds `keep[r]` tokens, int64 [rows], of what it held; no group shares more pages than are full."""
    if on_triton(length) and len(length) // len(shared) <= MOST_ROWS:
        from smcgen.kernels.gpu import pages as gpu

        return gpu.trim(length, shared, keep, page)
    length.copy_(keep)
    shared.copy_(torch.minimum(shared, keep.view(len(shared), -1).amin(1) // page))


def copy_pools(pools: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """pool[:, target[r]] = pool[:, source[r]] for each row r of up to four pools (the keys and values of two models); where
    target is 0 nothing is due.

    Args:
        pools: [layers, pages, heads, page, dim], contiguous; all numbers may differ from pool to pool.
        sources, targets: int64 [rows], as `grow` returns them. No target may be another row's source.
    """
    if on_triton(pools[0]):
        from smcgen.kernels.gpu import pages as gpu

        return gpu.copy_pools(pools, sources, targets)
    for pool, source, target in zip(pools, sources, targets, strict=True):
        due = target > 0  # on a CPU it costs nothing to look first, and copying scratch onto itself does
        pool[:, target[due]] = pool[:, source[due]]
