"""Each kernel against its torch reference in the same run, and against the time that its bytes alone would take.

    python -m benchmarks.kernels [--only NAME] [-o benchmarks/results/kernels.json]
    python -m benchmarks.kernels --tiny      small shapes, also without a GPU, to see that everything runs

Every measurement is a CUDA graph of many calls on different inputs, together larger than the cache, timed by CUDA events; the
figure is the median over replays, by call. "cached" is the same with one input over and over, which is what logits that a
product has just written look like (for `grow`: rows that have their own pages already, so that nothing is shared). "floor" is
the bytes that must move, at the bandwidth of a large copy measured before. Torch runs the reference functions on the same
device, in a graph as well. Results are written as they come, and a second call adds what is missing.
"""
# ruff: noqa: E402  (Triton reads its environment when it is imported)

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from benchmarks.about import about, same
from benchmarks.round import copy_bandwidth
from smcgen.kernels import attention, categorical, pages, philox, resample, verify
from smcgen.kernels.gpu import attention as gpu_attention
from smcgen.kernels.gpu import categorical as gpu_categorical
from smcgen.kernels.gpu import pages as gpu_pages
from smcgen.kernels.gpu import philox as gpu_philox
from smcgen.kernels.gpu import verify as gpu_verify

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
CACHE = 128e6  # bytes of different inputs that no cache holds
CALLS = 64  # in one graph, at most, and half as many at least: starting a graph takes microseconds itself
REPLAYS = 25
Thunk = Callable[[], object]
ON_CUDA = vars(torch._C.TensorBase)["is_cuda"].__get__


class OnTorch(TorchFunctionMode):
    """Inside, the functions of `smcgen.kernels` take every tensor for one on a CPU, so that their torch part runs on it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return False if func == ON_CUDA else func(*args, **(kwargs or {}))


def plainly(function: Callable[..., object], *values: Any, **options: Any) -> Thunk:
    """A call of a kernel's torch reference."""

    def call() -> object:
        with OnTorch():
            return function(*values, **options)

    return call


@dataclass
class Case:
    """One kernel at one shape: `make(i)` is the i-th pair (kernel, torch) of calls, each on inputs of its own."""

    kernel: str
    shape: str
    moved: float  # bytes that one call must read and write
    make: Callable[[int], tuple[Thunk, Thunk]]
    held: float | None = None  # bytes of one input, if not `moved`
    reset: Thunk | None = None  # once per replay: what calls change is put back


def once(thunks: Sequence[Thunk], reset: Thunk | None) -> None:
    if reset is not None:
        reset()
    for thunk in thunks:
        thunk()


def microseconds(thunks: Sequence[Thunk], reset: Thunk | None) -> float:
    """Median time of one call."""
    if not CUDA:
        began = time.perf_counter()
        once(thunks, reset)
        return 1e6 * (time.perf_counter() - began) / len(thunks)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        once(thunks[:2], reset)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once(thunks, reset)
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return sorted(1e3 * before.elapsed_time(after) for before, after in events)[REPLAYS // 2] / len(thunks)


def measure(case: Case, bandwidth: float, tiny: bool) -> dict:
    held = case.moved if case.held is None else case.held
    inputs = 2 if tiny else min(CALLS, max(2, int(CACHE / max(held, 1)) + 1))
    calls = 2 if tiny else max(inputs, CALLS // 2)
    made = [case.make(i) for i in range(inputs)]
    ours = microseconds([made[i % inputs][0] for i in range(calls)], case.reset)
    cached = microseconds([made[0][0]] * calls, case.reset)
    torchs = microseconds([made[i % inputs][1] for i in range(calls)], case.reset)
    floor = 1e6 * case.moved / bandwidth
    return {
        "kernel": case.kernel, "shape": case.shape, "us": ours, "us_cached": cached, "us_torch": torchs,
        "times_faster": torchs / ours, "bytes": case.moved, "us_floor": floor, "of_copy_bandwidth": floor / ours,
    }  # fmt: skip


def normal(*shape: int, seed: int = 0, scale: float = 2.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.rand(*shape, generator=generator, device=DEVICE, dtype=torch.float64)


def draws(tiny: bool) -> Iterator[Case]:
    size = 300 if tiny else 128_256
    width = DTYPE.itemsize
    for rows, kind in ((1, "plain"), (8, "plain"), (64, "plain"), (8, "power, mask")):

        def make(i: int, rows=rows, kind=kind) -> tuple[Thunk, Thunk]:
            x, u = normal(rows, size, seed=i), uniform(rows, seed=i)
            exponent = bits = None
            if kind != "plain":
                exponent = 1.0 + uniform(rows, seed=i + 1)
                bits = torch.randint(-(2**31), 2**31, (rows, -(-size // 32)), device=DEVICE).int()
            return (
                lambda: gpu_categorical.power_draw(x, u, 0.8, exponent, bits),
                plainly(categorical.power_draw, x, u, 0.8, exponent, bits),
            )

        yield Case("power_draw", f"{rows} x {size}, {kind}", rows * size * (width + (kind != "plain") / 8), make)
    for rows in (1, 9, 72):

        def make_score(i: int, rows=rows) -> tuple[Thunk, Thunk]:
            x, tokens = normal(rows, size, seed=i), torch.arange(rows, device=DEVICE)
            return lambda: gpu_categorical.score(x, tokens, 0.8), plainly(categorical.score, x, tokens, 0.8)

        yield Case("score", f"{rows} x {size}", rows * size * width, make_score)


def acceptance(tiny: bool) -> Iterator[Case]:
    size = 300 if tiny else 128_256
    one, many = (1, 1, 4), (8, 1, 8)  # rows, M, K
    shapes = [(*one, 1.0, False), (*one, 1.0, True), (*one, 2.0, False), (*many, 1.0, False), (*many, 2.0, False)]
    shapes.append((1, 8, 4, 1.0, False))
    if tiny:
        shapes = [(1, 1, 2, 1.0, True), (2, 1, 2, 2.0, False), (1, 2, 2, 1.0, False)]
    for rows, chains, drafted, leniency, block in shapes:

        def make(i: int, rows=rows, chains=chains, drafted=drafted, leniency=leniency, block=block) -> tuple[Thunk, Thunk]:
            target = normal(rows, 1, drafted + 1, size, seed=i).repeat(1, chains, 1, 1)
            away = normal(rows, 1, drafted, size, seed=i + 1000, scale=0.5).repeat(1, chains, 1, 1)
            draft = target[:, :, :drafted] + away  # about 0.8 of the tokens are accepted
            law = draft.float().softmax(-1)
            tokens = torch.multinomial(law.view(-1, size), 1).view(rows, chains, drafted)
            u, last = uniform(rows, chains, drafted, seed=i), uniform(rows, seed=i)
            given = (target, draft, tokens, u, last)
            return (
                lambda: gpu_verify.verify(*given, 1.0, 1.0, None, leniency, None, None, block),
                plainly(verify.verify, *given, leniency=leniency, block=block),
            )

        moved = rows * chains * (2 * drafted + 1) * size * DTYPE.itemsize
        yield Case(
            "verify", f"{rows} rows, M={chains}, K={drafted}, {'block' if block else f's={leniency:g}'}, V={size}", moved, make
        )


def randomness(tiny: bool) -> Iterator[Case]:
    for groups, count in ((1, 1), (1, 8), (16, 16), (1, 4 if tiny else 1024)):

        def make_resample(i: int, groups=groups, count=count) -> tuple[Thunk, Thunk]:
            weights, u = normal(groups, count, seed=i, dtype=torch.float64), uniform(groups, 2 * count, seed=i)
            go = torch.ones(groups, dtype=torch.bool, device=DEVICE)
            return (
                lambda: resample.resample(weights, u, "systematic", 0.5, go),  # many particles are torch's
                plainly(resample.resample, weights, u, "systematic", 0.5, go),
            )

        yield Case("resample", f"{groups} x {count}, systematic", groups * (count * 24 + 25), make_resample)

        def make_slots(i: int, groups=groups, count=count) -> tuple[Thunk, Thunk]:
            item = torch.arange(groups, device=DEVICE) + i
            return (
                lambda: gpu_philox.per_slot(item, item, item, 1, 0, count, (1, 2)),
                plainly(philox.per_slot, item, item, item, 1, 0, count, (1, 2)),
            )

        yield Case("philox.per_slot", f"{groups} x {count}", groups * (count * 8 + 24), make_slots)

        def make_strata(i: int, groups=groups, count=count) -> tuple[Thunk, Thunk]:
            item = torch.arange(groups, device=DEVICE) + i
            history = torch.arange(count, device=DEVICE).expand(groups, -1).contiguous() // 3
            return (
                lambda: gpu_philox.stratified(item, item, item, 1, 0, history, (1, 2)),
                plainly(philox.stratified, item, item, item, 1, 0, history, (1, 2)),
            )

        yield Case("philox.stratified", f"{groups} x {count}", groups * (count * 16 + 24), make_strata)


def attending(tiny: bool) -> Iterator[Case]:
    """One layer of the 8B shape; the prompt is shared, 24 tokens of each row are its own."""
    heads, kv_heads, dim, page = (4, 2, 16, 4) if tiny else (32, 8, 128, 16)
    shapes = (
        ((1, 1, 16), (2, 3, 16)) if tiny else ((1, 1, 256), (8, 1, 256), (8, 9, 256), (8, 1, 4096), (8, 9, 4096), (16, 9, 1024))
    )
    for rows, steps, prompt in shapes:
        own = 24 + steps
        common, each = prompt // page, -(-own // page)

        def make(i: int, rows=rows, steps=steps, prompt=prompt, common=common, each=each, new=False) -> tuple[Thunk, Thunk]:
            count = 1 + common + rows * each
            keys, values = (normal(count, kv_heads, page, dim, seed=i + j, scale=1.0) for j in (0, 500))
            query = normal(rows, heads, steps, dim, seed=i, scale=1.0)
            table = torch.cat(
                [
                    (1 + torch.arange(common, device=DEVICE)).expand(rows, -1),
                    1 + common + torch.arange(rows * each, device=DEVICE).view(rows, each),
                ],
                1,
            )
            length = torch.full((rows,), prompt + 24, device=DEVICE)
            shared = torch.full((1,), common, dtype=torch.int32, device=DEVICE) if rows > 1 else None
            scale = dim**-0.5
            if new:
                key, value = (normal(rows, kv_heads, steps, dim, seed=i + j, scale=1.0) for j in (1000, 1500))
                angle = uniform(table.shape[1] * page, dim // 2).repeat(1, 2)
                rope = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
                counts = torch.full_like(length, steps)
                tokens = gpu_attention.New(key, value, counts, rope, None)
                where = (keys, values, table, length)
                return (
                    lambda: gpu_attention.attend(query, *where, scale, shared=shared, new=tokens),
                    plainly(attention.attend_new, query, key, value, *where, counts, scale, rope=rope),
                )
            return (
                lambda: gpu_attention.attend(query, keys, values, table, length, scale, shared=shared),
                plainly(attention.paged_attention, query, keys, values, table, length, scale),
            )

        moved = 2 * (prompt + rows * own) * kv_heads * dim * DTYPE.itemsize + 2 * rows * steps * heads * dim * DTYPE.itemsize
        shape = f"{rows} rows x {steps}, {prompt} shared + {own} tokens"
        yield Case("attention", shape, moved, make)
        moved += 2 * rows * steps * kv_heads * dim * DTYPE.itemsize
        yield Case("attend_new", shape, moved, partial(make, new=True))


def page_moves(tiny: bool) -> Iterator[Case]:
    page, span = 16, 320 if tiny else 1280
    for rows, counts in ((1, 1), (8, 1), (8, 9), (64, 9)):
        columns, count = span // page, 1 + 16 + rows * (span - 256 + page) // page
        tables = torch.zeros(CALLS, rows, columns, dtype=torch.int64, device=DEVICE)
        tables[:, :, :17] = 1 + torch.arange(17, device=DEVICE)  # all rows name the prompt's pages and one partial page
        before = tables.clone()
        lengths = torch.full((CALLS, rows), 16 * page + 5, device=DEVICE)
        more = torch.full((rows,), counts, device=DEVICE)

        def make(i: int, tables=tables, lengths=lengths, more=more, count=count) -> tuple[Thunk, Thunk]:
            return (
                lambda: gpu_pages.grow(tables[i], lengths[i], more, page, count),
                plainly(pages.grow, tables[i], lengths[i], more, page, count),
            )

        def reset(tables=tables, before=before, lengths=lengths) -> None:
            tables.copy_(before)
            lengths.fill_(16 * page + 5)

        yield Case(
            "grow", f"{rows} rows, {columns} columns, {count} pages, {counts} tokens, all but one copied",
            rows * (17 + counts // page + 5) * 8 + count, make, reset=reset,
        )  # fmt: skip
    sizes = ((2, 2, 16, 8), (1, 2, 16, 4)) if tiny else ((32, 8, 16, 128), (16, 8, 16, 64))
    for rows, due in ((8, 0), (8, 1), (8, 7), (16, 15)):
        pools = [normal(layers, 2 * rows + 1, *rest, scale=1.0) for layers, *rest in sizes for _ in range(2)]
        source = torch.where(torch.arange(rows, device=DEVICE) < due, 1 + torch.arange(rows, device=DEVICE), 0)
        target = torch.where(source > 0, source + rows, 0)

        def make_copies(_: int, pools=pools, source=source, target=target) -> tuple[Thunk, Thunk]:
            def plain() -> None:
                for pool in pools:
                    pool[:, target] = pool[:, source]

            return lambda: gpu_pages.copy_pools(pools, [source] * 4, [target] * 4), plain

        moved = 2 * due * sum(pool[:, 0].nbytes for pool in pools)
        yield Case("copy_pools", f"{rows} rows, {due} pages of two models", moved, make_copies, held=CACHE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes; no file is written unless -o is given")
    parser.add_argument("--only", help="kernels whose name contains this")
    parser.add_argument("--minutes", type=float, default=8, help="begin no measurement after so long")
    parser.add_argument("-o", "--output", type=Path, help="default: results/kernels.json beside this file")
    arguments = parser.parse_args()
    if not CUDA and not arguments.tiny:
        parser.error("no CUDA device: only --tiny runs here, and its times mean nothing")
    began = time.perf_counter()
    output = arguments.output or (None if arguments.tiny else Path(__file__).parent / "results" / "kernels.json")
    head = about(DEVICE, "Triton interpreted") | {"dtype": str(DTYPE).removeprefix("torch.")}
    old = json.loads(output.read_text()) if output is not None and output.exists() else {}
    rows: list[dict] = [row for row in old["rows"] if "error" not in row] if same(old, head) else []
    bandwidth = copy_bandwidth()
    head["copy_bandwidth_tb_per_s"] = round(bandwidth / 1e12, 3)
    print(f"copy bandwidth {bandwidth / 1e12:.3f} TB/s; times in microseconds")
    print(f"{'kernel':18}{'shape':58}{'ours':>9}{'cached':>9}{'torch':>10}{'faster':>8}{'MB':>9}{'floor':>9}{'of copy':>9}")
    for case in (case for cases in (draws, acceptance, randomness, attending, page_moves) for case in cases(arguments.tiny)):
        if arguments.only and arguments.only not in case.kernel:
            continue
        if any((row["kernel"], row["shape"]) == (case.kernel, case.shape) for row in rows):
            continue
        if time.perf_counter() - began > 60 * arguments.minutes:
            print("time is up: call again for the rest")
            break
        try:
            row = measure(case, bandwidth, arguments.tiny)
        except Exception as error:  # one kernel must not take the others' figures with it
            rows.append({"kernel": case.kernel, "shape": case.shape, "error": f"{type(error).__name__}: {error}"[:400]})
            print(f"{case.kernel:18}{case.shape:58}{rows[-1]['error'][:200]}", flush=True)
            continue
        rows.append({key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in row.items()})
        print(
            f"{case.kernel:18}{case.shape:58}{row['us']:9.1f}{row['us_cached']:9.1f}{row['us_torch']:10.1f}"
            f"{row['times_faster']:8.1f}{row['bytes'] / 1e6:9.3f}{row['us_floor']:9.2f}{row['of_copy_bandwidth']:9.3f}",
            flush=True,
        )
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    failed = sum("error" in row for row in rows)
    if failed:
        raise SystemExit(f"{failed} of {len(rows)} measurements failed")


if __name__ == "__main__":
    main()
