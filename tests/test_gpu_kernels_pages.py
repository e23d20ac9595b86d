"""Page moves in Triton against their torch reference: interpreted on a CPU, compiled on a CUDA device with -m gpu."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from smcgen.kernels import pages as reference
from smcgen.kernels.gpu import pages as gpu

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")], id="cuda"
)
INTERPRETED = pytest.param(
    "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, see the other case"), id="cpu"
)
DEVICES = pytest.mark.parametrize("device", [INTERPRETED, CUDA])


def compare(table, length, counts, page, pages, device="cpu"):
    """`grow` by both: the same table, moves and verdict. Returns the reference's."""
    want_table, want_length = table.clone(), length.clone()
    table, after = table.clone().to(device), length.clone().to(device)
    want = reference.grow(want_table, want_length, counts, page, pages)
    got = gpu.grow(table, after, counts.to(device), page, pages)
    assert bool(got[3]) == bool(want[3])
    assert torch.equal(table.cpu(), want_table)
    assert torch.equal(want[0], length)
    assert torch.equal(after.cpu(), length + counts)
    assert torch.equal(want_length, length + counts)
    for a, b in zip(got[:3], want[:3], strict=True):
        assert torch.equal(a.cpu(), b)
    return want_table, *want[1:]


@DEVICES
@pytest.mark.parametrize(
    ("groups", "particles", "page", "columns"), [(1, 1, 1, 9), (1, 4, 4, 6), (2, 3, 3, 9), (1, 13, 16, 3), (3, 5, 5, 300)]
)
def test_random_histories(groups, particles, page, columns, device):
    """Rows grow, fork inside their group, and are trimmed, time and again; unlike a test on tables made up at random this
    meets only what can occur, and shared pages at every offset."""
    random = torch.Generator().manual_seed(groups + 10 * particles + 100 * page)
    rows, most = groups * particles, min(columns * page, 60)
    pages = 1 + rows * -(-most // page)
    table, length = torch.zeros(rows, columns, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    group = torch.arange(rows) // particles * particles
    copied = offsets = 0
    for step in range(60):
        counts = torch.randint(0, 2 * page + 2, (rows,), generator=random) * torch.randint(0, 2, (rows,), generator=random)
        counts = torch.minimum(counts, most - length)
        table, _, target, short = compare(table, length, counts, page, pages, device)
        assert not short
        copied += int((target > 0).sum())
        offsets |= sum({1 << int(n) for n in (length % page)[target > 0]})
        length = length + counts
        ancestors = group + torch.randint(0, particles, (rows,), generator=random)
        table, length = table[ancestors], length[ancestors]
        length = (length - torch.randint(0, 1 + page, (rows,), generator=random) * (step % 3 == 0)).clamp(min=0)
        if step % 10 == 9:
            length = torch.where(torch.randint(0, 3, (rows,), generator=random) == 0, 0, length)
    if particles > 1:
        assert copied > 10
        assert offsets.bit_count() >= min(page - 1, 4)  # copies began at several places of the page


@DEVICES
def test_every_offset_of_source_and_destination(device):
    """Row 0 holds a + 1 tokens, the rest are forks of it trimmed to every shorter length; all of them write."""
    page, columns = 4, 5
    for a in range(9):
        for writer in range(4):
            table = torch.zeros(4, columns, dtype=torch.int64)
            length = torch.zeros(4, dtype=torch.int64)
            table, _, _, _ = compare(table, length, torch.tensor([a + 1, 0, 0, 0]), page, 40, device)
            table = table[[0, 0, 0, 0]]
            length = torch.tensor([a + 1, a, max(a - 1, 0), max(a - 5, 0)])
            counts = torch.where(torch.arange(4) == writer, 0, 1 + torch.arange(4))
            table, _, _, short = compare(table, length, counts, page, 40, device)
            assert not short
            compare(table, length + counts, torch.full((4,), 3), page, 40, device)


@DEVICES
def test_room_runs_out(device):
    table, length = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    *_, short = compare(table, length, torch.tensor([4, 4, 8]), 2, 7, device)  # 8 pages wanted, 6 there
    assert short
    *_, short = compare(table, length, torch.tensor([0, 9, 0]), 2, 30, device)  # 5 columns wanted, 4 there
    assert short
    *_, short = compare(table, length, torch.tensor([4, 4, 4]), 2, 7, device)  # to the last page
    assert not short
    *_, short = compare(table, length, torch.zeros(3, dtype=torch.int64), 2, 1, device)  # nothing wanted, nothing there
    assert not short


@DEVICES
def test_a_verdict_stays(device):
    for short, wanted in ((True, 0), (False, 9), (False, 2)):
        kept = [torch.tensor(short), torch.tensor(short, device=device)]
        for module, flag in zip((reference, gpu), kept, strict=True):
            where = "cpu" if module is reference else device
            table = torch.zeros(1, 4, dtype=torch.int64, device=where)
            zero = torch.zeros(1, dtype=torch.int64, device=where)
            assert module.grow(table, zero, zero + wanted, 2, 9, flag)[3] is flag
        assert bool(kept[0]) == bool(kept[1]) == (short or wanted == 9)


@DEVICES
def test_wide_tables_and_large_pools(device):
    """More rows, columns and pages than one tile of any loop, with the free pages far up."""
    rows, columns, page, pages = (256, 2048, 16, 100_000) if device == "cuda" else (70, 600, 4, 9000)
    random = torch.Generator().manual_seed(1)
    length = torch.randint(0, columns * page // 4, (rows,), generator=random)
    table = torch.zeros(rows, columns, dtype=torch.int64)
    names = reference.named(table, length, page)
    low = torch.cat([1 + torch.arange(pages // 2), pages // 2 + 1 + torch.randperm(pages // 2 - 1, generator=random)])
    table[names] = low[: int(names.sum())]
    # every third row is a copy of the one before it, one token behind
    for r in range(2, rows, 3):
        table[r], length[r] = table[r - 1], (length[r - 1] - 1).clamp(min=0)
    fits = torch.minimum(torch.randint(0, 40, (rows,), generator=random), columns * page - length)
    compare(table, length, fits, page, pages, device)


def pool(shape, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random).to(dtype)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_copies_for_two_models(dtype, device):
    shapes = [(3, 11, 2, 4, 8), (3, 11, 2, 4, 6), (2, 9, 1, 3, 5), (2, 9, 1, 3, 5)]
    before = [pool(shape, dtype, i) for i, shape in enumerate(shapes)]
    one = (torch.tensor([3, 3, 0, 10]), torch.tensor([7, 1, 0, 2]))
    two = (torch.tensor([0, 8, 5, 8, 0]), torch.tensor([0, 1, 2, 7, 0]))
    sources, targets = [one[0], one[0], two[0], two[0]], [one[1], one[1], two[1], two[1]]
    for count in (1, 2, 4):
        want = [x.clone() for x in before]
        got = [x.clone().to(device) for x in before]
        reference.copy_pools(want[:count], sources[:count], targets[:count])
        on = [[x.to(device) for x in xs[:count]] for xs in (sources, targets)]
        gpu.copy_pools(got[:count], *on)
        for i in range(4):
            assert torch.equal(got[i].cpu().view(torch.uint8), want[i].view(torch.uint8))
            same = torch.equal(want[i].view(torch.uint8), before[i].view(torch.uint8))
            assert same == (i >= count)


@DEVICES
def test_what_is_written_is_what_is_read(device):
    """Tokens by number through both kernels, row by row, against lists; forks at every pair of offsets."""
    page, rows, columns, pages = 4, 3, 5, 30
    for long in range(2, 7):
        for short in range(5):
            table = torch.zeros(rows, columns, dtype=torch.int64, device=device)
            length = torch.zeros(rows, dtype=torch.int64, device=device)
            keys = torch.zeros(1, pages, 1, page, 1, device=device)
            texts: list[list[int]] = [[] for _ in range(rows)]
            written = 0
            for counts, ancestors in (([long, short, 2], [0, 0, 1]), ([1, 2, 0], [1, 1, 0]), ([3, 1, 2], [0, 1, 2])):
                _, source, target, ran_out = gpu.grow(table, length, torch.tensor(counts, device=device), page, pages)
                assert not ran_out
                gpu.copy_pools([keys], [source], [target])
                for row, count in enumerate(counts):
                    for _ in range(count):
                        written += 1
                        at = len(texts[row])
                        keys[0, int(table[row, at // page]), 0, at % page] = written
                        texts[row].append(written)
                for row, text in enumerate(texts):
                    own = table[row, : -(-len(text) // page)]
                    assert keys[0, own].flatten()[: len(text)].tolist() == text
                table, length = table[ancestors], length[ancestors]
                texts = [list(texts[a]) for a in ancestors]


@DEVICES
@pytest.mark.parametrize(
    ("groups", "particles", "columns", "page"), [(1, 1, 1, 4), (3, 4, 7, 3), (2, 13, 300, 16), (1, 70, 90, 1)]
)
def test_forks_and_trims(groups, particles, columns, page, device):
    """Any map of rows to rows of their group, permutations and chains of copies included; groups begin with pages in common,
    some with all of them."""
    random = torch.Generator().manual_seed(columns)
    rows = groups * particles
    group = (torch.arange(rows) // particles)[:, None]
    seen = set()
    for kind in ("permutation", "any", "one", "none in common"):
        alike = 0 if kind == "none in common" else int(torch.randint(0, columns + 1, (1,), generator=random))
        own = torch.randint(1000, 9999, (rows, columns), generator=random)
        table = torch.where(torch.arange(columns) < alike, 1 + group * columns + torch.arange(columns), own)
        length = torch.randint(columns * page // 2, columns * page + 1, (rows,), generator=random)
        chosen = {
            "permutation": torch.cat([torch.randperm(particles, generator=random) for _ in range(groups)]),
            "one": torch.zeros(rows, dtype=torch.int64),
        }.get(kind, torch.randint(0, particles, (rows,), generator=random))
        ancestors = group[:, 0] * particles + chosen
        keep = (length[ancestors] - torch.randint(0, 2 * page, (rows,), generator=random)).clamp(min=0)
        want = [x.clone() for x in (table, length, torch.full((groups,), 99))]
        got = [x.clone().to(device) for x in want]
        reference.fork(*want, ancestors=ancestors, page=page)
        gpu.fork(*got, ancestors=ancestors.to(device), page=page)
        assert torch.equal(want[0], table[ancestors])
        named = reference.named(want[0], want[1], page)
        assert torch.equal(got[0].cpu()[named], want[0][named])
        for trimmed in (False, True):
            if trimmed:
                reference.trim(*want[1:], keep=keep, page=page)
                gpu.trim(*got[1:], keep=keep.to(device), page=page)
            assert torch.equal(got[1].cpu(), want[1])
            assert torch.equal(got[2].cpu(), want[2])
            seen.update(want[2].tolist())
    assert columns == 1 or (0 in seen and max(seen) > 0)


@DEVICES
def test_a_fork_across_groups_onto_rows_that_stay(device):
    """As a prompt that several groups begin with: one row has read it."""
    table, length = torch.arange(1, 19).view(6, 3), torch.tensor([5, 0, 0, 0, 4, 2])
    ancestors = torch.tensor([0, 0, 0, 0, 4, 4])
    want = [table.clone(), length.clone(), torch.zeros(2, dtype=torch.int64)]
    got = [x.to(device) for x in (table, length, torch.zeros(2, dtype=torch.int64))]
    reference.fork(*want, ancestors=ancestors, page=2)
    gpu.fork(*got, ancestors=ancestors.to(device), page=2)
    named = reference.named(want[0], want[1], 2)
    assert torch.equal(got[0].cpu()[named], want[0][named])
    assert got[1].tolist() == want[1].tolist() == [5, 5, 5, 5, 4, 4]
    assert got[2].tolist() == want[2].tolist() == [2, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_round_of_moves_in_a_graph():
    """Growth, copies and forks, captured once and replayed; nothing waits for the device."""
    page, rows, columns, pages = 16, 8, 20, 170
    random = torch.Generator().manual_seed(0)
    ours, want = (
        [
            torch.zeros(rows, columns, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),  # counts
            torch.arange(rows, device=device),  # ancestors
            torch.randn(2, pages, 2, page, 8, generator=torch.Generator().manual_seed(1)).to(device),
            torch.zeros((), dtype=torch.bool, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),  # shared pages
        ]
        for device in ("cuda", "cpu")
    )

    def moves(table, length, counts, ancestors, keys, short, shared):
        _, source, target, _ = reference.grow(table, length, counts, page, pages, short)
        reference.copy_pools([keys, keys.clone()], [source] * 2, [target] * 2)
        reference.fork(table, length, shared, ancestors, page)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        moves(*ours)  # compiles; with counts 0 it changes nothing
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moves(*ours)
    for _ in range(30):
        counts = torch.minimum(torch.randint(0, 12, (rows,), generator=random), columns * page - want[1])
        ancestors = torch.randint(0, rows, (rows,), generator=random)
        for buffers in (ours, want):
            buffers[2].copy_(counts)
            buffers[3].copy_(ancestors)
        graph.replay()
        moves(*want)
        named = reference.named(want[0], want[1], page)
        assert torch.equal(ours[0].cpu()[named], want[0][named])
        for a, b in zip(ours[1:], want[1:], strict=True):
            assert torch.equal(a.cpu(), b)


def test_pools_that_cannot_be_copied():
    x, none = torch.zeros(1, 2, 1, 1, 4), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="must be contiguous"):
        gpu.copy_pools([x[..., :2]], [none], [none])
    with pytest.raises(ValueError, match="1 to 4 pools"):
        gpu.copy_pools([x] * 5, [none] * 5, [none] * 5)
