"""Triton attention and the write into pages against torch: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from smcgen.kernels.attention import new_places, paged_attention, shared_pages, write

gpu = pytest.importorskip("smcgen.kernels.gpu.attention")
writing = pytest.importorskip("smcgen.kernels.gpu.write")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# bf16 arithmetic means nothing in the interpreter
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3} | ({torch.bfloat16: 2e-2} if CUDA else {})
#         groups, particles, steps, kv heads, queries a head, dim, page, prompt
SHAPES = [(2, 4, 1, 2, 4, 16, 16, 50), (1, 4, 5, 1, 4, 32, 8, 35), (2, 3, 3, 2, 1, 16, 8, 24), (1, 1, 20, 2, 4, 24, 16, 70)]
SHAPES += [(1, 8, 1, 8, 4, 128, 16, 260), (1, 8, 9, 8, 4, 128, 16, 1000), (4, 16, 1, 8, 4, 64, 16, 3000)] if CUDA else []
RULES = {"plain": {}, "window": {"window": 24}, "softcap": {"softcap": 5.0}, "sinks": {"sinks": True}}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rows(shape, dtype, value_dim=None):
    """Queries, pools, table and lengths of groups that share the whole pages of their prompts, ragged behind."""
    groups, particles, steps, heads, queries, dim, page, prompt = shape
    columns = (prompt + 60) // page + 2
    count = 1 + groups * particles * columns
    keys, values = torch.randn(count, heads, page, dim), torch.randn(count, heads, page, value_dim or dim)
    free = iter((torch.randperm(count - 1) + 1).tolist())
    table = torch.zeros(groups * particles, columns, dtype=torch.int64)
    length = torch.zeros(groups * particles, dtype=torch.int64)
    for group in range(groups):
        common = prompt + 7 * group
        pages = [next(free) for _ in range(common // page)]
        for row in range(group * particles, (group + 1) * particles):
            length[row] = common + (5 if row % 2 else 21)
            table[row, : len(pages)] = torch.tensor(pages)
            for column in range(len(pages), -(-(int(length[row]) + steps) // page)):
                table[row, column] = next(free)
    query = torch.randn(groups * particles, heads * queries, steps, dim)
    return [x.to(DEVICE, dtype if x.is_floating_point() else x.dtype) for x in (query, keys, values, table, length)]


def reference(query, keys, values, table, length, scale, sinks=None, **rules):
    """In float32 on the CPU, where `paged_attention` is the torch reference."""
    query, keys, values = (x.float().cpu() for x in (query, keys, values))
    sinks = None if sinks is None else sinks.cpu()
    return paged_attention(query, keys, values, table.cpu(), length.cpu(), scale, sinks=sinks, **rules)


def error(a, b):
    return float((a.float().cpu() - b.float()).abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape, rule, dtype):
    rules = dict(RULES[rule])
    parts = rows(shape, dtype, value_dim=8 if rule == "plain" and not CUDA else None)
    if rule == "sinks":
        rules["sinks"] = torch.randn(parts[0].shape[1], device=DEVICE)
    truth = reference(*parts, 0.3, **rules)
    table, length, groups, page = parts[3], parts[4], shape[0], shape[6]
    shared = shared_pages(table, length, groups, page)
    if shape[1] > 1:
        assert shared.tolist() == [(shape[7] + 7 * g) // page for g in range(groups)]
    for common, splits in ((shared, None), (shared, (3, 2)), (0 * shared, (1, 1)), (None, None)):
        assert error(gpu.attend(*parts, 0.3, shared=common, splits=splits, **rules), truth) < TOLERANCE[dtype]
    if shape[1] > 1 and rule == "plain":  # a page too many is seen
        assert error(gpu.attend(*parts, 0.3, shared=shared + 1, **rules), truth) > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["plain", "rope", "rope and norms"])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 16), (3, 1, 24)])
def test_write(kind, dtype, heads, key_heads, dim):
    count, page, steps, groups = 9, 4, 5, 3
    tables = torch.tensor([[1, 2, 3], [4, 5, 6], [1, 7, 8]]), torch.tensor([3, 6, 4]), torch.tensor([5, 2, 0])
    qkv = torch.randn(groups, steps, heads + 2 * key_heads, dim).to(dtype).transpose(1, 2)
    rope = norms = None
    if kind != "plain":
        angles = torch.randn(20, dim // 2).repeat(1, 2)
        rope = angles.cos().to(dtype), angles.sin().to(dtype)
    if kind == "rope and norms":
        norms = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-5
    pools = torch.randn(2, count, key_heads, page, dim).to(dtype)

    def run(function, device, number):
        q, k, v = qkv.to(device, number, copy=True).split([heads, key_heads, key_heads], 1)
        keys, values = pools.to(device, number, copy=True)
        table, length, counts = (x.to(device) for x in tables)
        where = None if rope is None else tuple(x.to(device, number) for x in rope)
        weights = None if norms is None else (norms[0].to(device, number), norms[1].to(device, number), norms[2])
        function(q, k, v, keys, values, table, length, counts, where, weights)
        return q.cpu(), keys.cpu()[1:], values.cpu()[1:]  # page 0 is scratch

    for found, truth in zip(run(writing.write, DEVICE, dtype), run(write, "cpu", torch.float32), strict=True):
        # Queries beyond `counts` are padding.
        if found.shape[0] == groups:
            found, truth = found[0], truth[0]
        assert error(found, truth) < 4 * TOLERANCE[dtype]
    into, at = new_places(*tables, steps, page)
    assert into.tolist() == [[1, 2, 2, 2, 2], [5, 5, 0, 0, 0], [0] * 5]
    assert at[:2, :2].tolist() == [[3, 0], [2, 3]]
