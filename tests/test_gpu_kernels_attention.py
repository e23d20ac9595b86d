"""Triton attention and the write into pages against torch: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smcgen.kernels.attention import attend_new, new_places, paged_attention, shared_pages, write
from smcgen.lm.pages import CacheShape, Pages

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


def angles(dim, dtype, norms=False) -> tuple[Any, Any]:
    """Arguments `rope` and `norms` for heads of `dim`."""
    angle = torch.randn(100, dim // 2).repeat(1, 2)
    weights = torch.rand(2, dim).add(0.5).to(DEVICE, dtype)
    return (angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)), (weights[0], weights[1], 1e-5) if norms else None


#            rope, norms, value dim, rules
NEW_RULES = {
    "rope": (True, False, 16, {}),
    "norms": (True, True, 16, {"window": 24}),
    "window": (True, False, 16, {"window": 3}),
    "value dim": (False, False, 8, {}),
    "softcap": (False, False, 16, {"softcap": 5.0}),
    "sinks": (True, False, 16, {"sinks": True}),
}
#            steps, rule, groups, particles
NEW_CASES = [(1, "rope", 1, 1), (2, "norms", 2, 3), (5, "rope", 2, 2), (9, "norms", 1, 2), (5, "window", 1, 1)]
NEW_CASES += [(2, "value dim", 1, 3), (5, "softcap", 1, 2), (9, "sinks", 1, 1)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("steps", "rule", "groups", "particles"), NEW_CASES)
def test_new_tokens(steps, rule, groups, particles, dtype):
    """What no page holds yet: the same outputs and pages as written first, ragged, and padding is neither read nor written."""
    has_rope, has_norms, value_dim, rules = NEW_RULES[rule]
    heads, queries, dim = (2, 4, 16) if steps < 9 else (1, 8, 24)  # of 9 tokens two tiles of queries
    query, keys, values, table, length = rows((groups, particles, steps, heads, queries, dim, 8, 26), dtype, value_dim)
    rules = rules | ({"sinks": torch.randn(heads * queries, device=DEVICE)} if "sinks" in rules else {})
    rope, norms = angles(dim, dtype, has_norms) if has_rope else (None, None)
    count = groups * particles
    counts = torch.tensor([steps, *torch.randint(0, steps + 1, (count - 1,)).tolist()], device=DEVICE)
    key, value = (torch.randn(count, steps, heads, d).to(DEVICE, dtype).transpose(1, 2) for d in (dim, value_dim))
    shared = shared_pages(table, length, groups, 8) if particles > 1 else None
    real = (torch.arange(steps, device=DEVICE) < counts[:, None]).cpu()

    def spoil(x):
        """Padding of any content, for it must go nowhere."""
        return x.masked_fill_(~real.to(DEVICE)[:, None, :, None], float("nan"))

    q, k, v, *pools = (x.to("cpu", torch.float32, copy=True) for x in (query, key, value, keys, values))
    rope32 = None if rope is None else (rope[0].float().cpu(), rope[1].float().cpu())
    norms32 = None if norms is None else (norms[0].float().cpu(), norms[1].float().cpu(), norms[2])
    plain: dict[str, Any] = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in rules.items()}
    where = table.cpu(), length.cpu(), counts.cpu()
    truth = attend_new(q, k, v, pools[0], pools[1], *where, 0.3, rope=rope32, norms=norms32, **plain)
    before = query.clone()
    for splits, common in ((None, shared), ((2, 3), shared), ((0, 1), None)):
        new, found = gpu.New(spoil(key), spoil(value), counts, rope, norms), (keys.clone(), values.clone())
        out = gpu.attend(query, *found, table, length, 0.3, shared=common, splits=splits, new=new, **rules)
        assert error(out[real.to(DEVICE)], truth[real]) < 2 * TOLERANCE[dtype]
        assert bool(out[real.to(DEVICE)].isfinite().all())
        for pool, should in zip(found, pools, strict=True):
            assert error(pool[1:], should[1:]) < 4 * TOLERANCE[dtype]
        assert torch.equal(found[0][0], keys[0])  # scratch
        assert torch.equal(query, before)
        # Bit by bit what a write of its own leaves, but for the order of a sum.
        first = keys.clone(), values.clone()
        writing.write(query.clone(), key.nan_to_num(), value.nan_to_num(), *first, table, length, counts, rope, norms)
        for pool, should in zip(found, first, strict=True):
            assert error(pool[1:], should[1:].cpu()) <= (1e-6 if dtype == torch.float32 else 4e-3 if norms else 0)


@pytest.mark.parametrize("steps", [gpu.FEW, gpu.FEW + 1])
def test_many_new_tokens_are_written_first(steps, monkeypatch):
    query, keys, values, table, length = rows((1, 1, steps, 1, 2, 16, 8, 10), torch.float32)
    key, value = (torch.randn(1, 1, steps, 16, device=DEVICE) for _ in range(2))
    rope, norms = angles(16, torch.float32, True)
    counts, launches, write = torch.full_like(length, steps), [], writing.write
    monkeypatch.setattr(writing, "write", lambda *arguments: (launches.append(1), write(*arguments)))

    def run(on_gpu):
        monkeypatch.setattr("smcgen.kernels.attention.on_triton", lambda x: on_gpu)
        k, v = keys.clone(), values.clone()
        return attend_new(query.clone(), key, value, k, v, table, length, counts, 0.3, rope=rope, norms=norms), k, v

    for found, truth in zip(run(True), run(False), strict=True):
        assert error(found, truth.cpu()) < 1e-5
    assert len(launches) == (steps > gpu.FEW)


def test_new_tokens_after_forks():
    """Against sums over each row's own history, over forks that leave rows inside a common page."""
    torch.manual_seed(1)
    heads, queries, dim, page = 2, 2, 16, 4
    shape = CacheShape(1, heads, dim, dim, torch.float32)
    pages = Pages.reserve(shape, 2, 3, 11, 20, torch.device(DEVICE), "a model", page)
    (cos, sin), _ = angles(dim, torch.float32)
    history = [(torch.zeros(heads, 0, dim), torch.zeros(heads, 0, dim)) for _ in range(6)]
    forks = [0, 0, 0, 3, 3, 3], [1, 1, 0, 4, 3, 5], [2, 0, 1, 3, 3, 3], [0, 1, 2, 3, 4, 5]
    for counts, fork in zip(
        ([11, 0, 0, 10, 0, 0], [3, 1, 0, 2, 3, 3], [1, 1, 1, 0, 1, 1], [2, 5, 5, 1, 4, 5]), forks, strict=True
    ):
        steps, on_device = max(counts), torch.tensor(counts, device=DEVICE)
        query, key, value = (torch.randn(6, n, steps, dim) for n in (heads * queries, heads, heads))
        before = pages.grow(on_device)
        new = gpu.New(key.to(DEVICE), value.to(DEVICE), on_device, (cos, sin), None)
        pools = pages.keys[0], pages.values[0]
        out = gpu.attend(query.to(DEVICE), *pools, pages.table, before, 0.3, shared=pages.shared, own=pages.own, new=new)

        def turn(x, at):
            left, right = x.chunk(2, -1)
            return x * cos.cpu()[at : at + x.shape[1]] + torch.cat([-right, left], -1) * sin.cpu()[at : at + x.shape[1]]

        for row, real in enumerate(counts):
            k, v = history[row]
            at = k.shape[1]
            k, v = torch.cat([k, turn(key[row, :, :real], at)], 1), torch.cat([v, value[row, :, :real]], 1)
            history[row] = k, v
            q = turn(query[row, :, :real], at).view(heads, queries, real, dim)
            mask = torch.ones(real, at + real, dtype=torch.bool).tril(at)
            truth = torch.nn.functional.scaled_dot_product_attention(q, k[:, None], v[:, None], mask, scale=0.3)
            assert real == 0 or error(out[row, :real].transpose(0, 1), truth.view(-1, real, dim)) < 1e-5
        pages.fork(torch.tensor(fork, device=DEVICE))
        history = [history[ancestor] for ancestor in fork]
    assert not pages.short
