"""A real model with rounded copies of itself as drafts: speed, effective sample size and noise of the evidence by N and K.

    python -m benchmarks.real_pair models/SmolLM2-135M-Instruct.Q4_1.gguf [--device cuda]
    python -m benchmarks.real_pair --tiny        the model that ships inside, a few tokens, to see that everything runs

The target is the model itself, all drafted tokens are kept (leniency infinity), and one text is made at a time. Per setting,
over `--runs` independent runs of one prompt:

    tokens per second    of a text: tokens of a particle in a round / median time of a round
    speed-up             over plain decoding by the same engine with the same N, in the same run; "one row": over N = 1
    formula              (K + 1) / (rho K + c): the speed-up if rounds cost their forwards alone. rho and c are the times of
                         the draft's forward and of the target's over K + 1 tokens, in plain forwards, measured here
    ess                  effective sample size before resampling, mean over rounds, as a share of N
    variance             of log Z-hat over the runs, whose expectation of Z-hat is 1
    bound                -mean(log Z-hat): an upper bound, in nats, on the divergence of the law of one text from the model's

A rounded copy takes as long as the model itself (rho is about 1): what is said of speed here is what the engine adds to its
forwards; what is said of ESS and evidence is true on any machine. Rows that are in the file already, from the same machine and
versions, are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import smcgen as sg
from benchmarks.about import about, same
from smcgen.drafts.costs import time_forward
from smcgen.lm.paged import PagedLM

OUT = Path(__file__).parent / "results/real_pair.json"
PROMPT = "Write a short story about a fox who learns to swim."
BITS = (8, 4)


def measure(lm: sg.LM, draft: sg.LM | None, particles: int, block: int | None, tokens: int, runs: int) -> dict[str, Any]:
    """Runs one after the other, so that a round is one group's."""
    options: dict[str, Any] = {} if draft is None else {"draft": draft, "block": block, "leniency": math.inf}
    post = sg.sample(
        lm, [PROMPT], particles=particles, max_tokens=tokens, runs=runs, groups=1, seed=0, progress=False, **options
    )[0]
    rounds = [r for run in post.rounds for r in run]
    step = post.info["step_seconds"]["p50"]
    made = np.mean([np.mean(r.counts) for r in rounds])
    row: dict[str, Any] = {"tokens_a_round": float(made), "milliseconds": 1e3 * step, "tokens_per_second": float(made / step)}
    if draft is not None:
        log_z = np.array([run[-1].log_evidence for run in post.rounds])
        row |= {
            "ess": float(np.mean([r.ess for r in rounds])) / particles,
            "resampled": float(np.mean([r.resampled for r in rounds])),
            "variance": float(log_z.var(ddof=1)) if runs > 1 else None,
            "bound": float(-log_z.mean()),
            "bound_se": float(log_z.std(ddof=1) / math.sqrt(runs)) if runs > 1 else None,
        }
    return row | {"pages_shared": post.info["memory"]["shared"]}


def costs(lm: sg.LM, draft: sg.LM, particles: int, block: int, prompt: int = 32) -> tuple[float, float]:
    """rho and c of the formula: the fastest of forwards that take turns, as other work on the machine only slows them."""
    cases = ((lm, 1), (draft, 1), (lm, block + 1))
    times = [[time_forward(model.load(), particles, width, prompt) for model, width in cases] for _ in range(3)]
    plain, drafted, judged = map(min, zip(*times, strict=True))
    return drafted / plain, judged / plain


def settings(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What plain decoding is first, so that the others have their baseline."""
    for particles in dict.fromkeys([1, *args.particles]):
        yield {"draft": None, "particles": particles, "block": None}
    for block in args.block:
        for particles in args.particles:
            for bits in BITS:
                yield {"draft": f"int{bits}", "particles": particles, "block": block}


def row_of(what: dict[str, Any], lm: sg.LM, rows: list[dict], args: argparse.Namespace) -> dict[str, Any]:
    particles, block = what["particles"], what["block"]
    if what["draft"] is None:
        return what | measure(lm, None, particles, None, args.tokens, 1)
    draft = lm.quantized(int(what["draft"].removeprefix("int")))
    found = what | measure(lm, draft, particles, block, args.tokens, args.runs)
    plain = {row["particles"]: row["tokens_per_second"] for row in rows if row["draft"] is None}
    rho, c = costs(lm, draft, particles, block)
    return found | {
        "speedup": found["tokens_per_second"] / plain[particles],
        "speedup_over_one_row": found["tokens_per_second"] / plain[1],
        "rho": rho,
        "c": c,
        "formula": (block + 1) / (rho * block + c),
    }


def table(rows: list[dict]) -> Iterator[str]:
    columns = [
        ("tokens/s", "tokens_per_second"),
        ("speed-up", "speedup"),
        ("one row", "speedup_over_one_row"),
        ("formula", "formula"),
        ("rho", "rho"),
        ("ess", "ess"),
        ("resampled", "resampled"),
        ("variance", "variance"),
        ("bound", "bound"),
    ]
    yield f"{'draft':6}{'N':>4}{'K':>4}" + "".join(f"{title:>10}" for title, _ in columns)
    for row in rows:
        cells = "".join(f"{row[key]:10.3f}" if row.get(key) is not None else " " * 10 for _, key in columns)
        yield f"{row['draft'] or 'none':6}{row['particles']:4}{row['block'] or '':>4}{cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--particles", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--block", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8, help="begin no row after so long")
    parser.add_argument("-o", "--out", type=Path, help=f"default {OUT.name} in results, nothing with --tiny")
    args = parser.parse_args()
    if args.model is None and not args.tiny:
        parser.error("name a model, or take --tiny")
    if args.tiny:
        args.tokens, args.runs, args.particles, args.block = 12, 3, [4], [3]
    torch.set_num_threads(args.threads)
    began = time.perf_counter()
    out = args.out or (None if args.tiny else OUT)
    lm = sg.LM(args.model or "tiny", device=args.device, dtype=args.dtype)
    engine = lm.load()
    assert isinstance(engine, PagedLM)
    head = about(engine.device, "shared with other work: read ratios") | {
        "model": Path(args.model).name if args.model else "tiny",
        "dtype": str(engine.shape.dtype).removeprefix("torch."),
        "tokens": args.tokens,
        "runs": args.runs,
    }
    old = json.loads(out.read_text()) if out is not None and out.exists() else {}
    rows = old.get("rows", []) if same(old, head) else []
    for what in settings(args):
        if any(all(row[k] == v for k, v in what.items()) for row in rows):
            continue
        if time.perf_counter() - began > 60 * args.minutes:
            print("time is up: call again for the rest")
            break
        rows.append(row_of(what, lm, rows, args))
        print(f"{len(rows)} rows, {time.perf_counter() - began:.0f} s", flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
