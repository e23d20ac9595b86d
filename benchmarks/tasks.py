"""What an approximate mode costs in accuracy: short questions with known answers, beside tokens per forward of the target.

    python benchmarks/tasks.py tiny --tasks tiny_tasks.jsonl
    python benchmarks/tasks.py models/SmolLM2-135M-Instruct.Q4_1.gguf --draft int5 --tasks tiny_tasks.jsonl --items 100

The file has one question per line: {"task": ..., "prompt": ..., "gold": ...}. An answer is right if its last number is the
number asked for, or if it holds every string asked for. One text is drawn for each item and mode; the error is that of a
share of independent items. Items are taken in turn from all tasks, the same for every mode.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import time
from datetime import date
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import smcgen as sg

ROOT = Path(__file__).parent
MODES: dict[str, dict[str, Any]] = {
    "plain decoding": {"mode": "exact", "draft": None},
    "exact, M=1": {"mode": "exact"},
    "exact, M=8": {"mode": "exact", "chains": 8},
    **{f"s=2, N={n}": {"particles": n, "leniency": 2.0} for n in (4, 8, 16)},
    **{f"s infinite, N={n}": {"particles": n, "leniency": math.inf} for n in (4, 8, 16)},
}


def right(answer: str, gold: Any) -> bool:
    """Whether an answer holds what was asked for."""
    if isinstance(gold, list):
        return all(str(part).lower() in answer.lower() for part in gold)
    wanted = str(gold)
    if re.fullmatch(r"-?\d+", wanted):
        numbers = re.findall(r"-?\d+", answer)
        return bool(numbers) and int(numbers[-1]) == int(wanted)
    return re.search(rf"(?<!\w){re.escape(wanted.lower())}(?!\w)", answer.lower()) is not None


def choose(tasks: Path, items: int) -> list[dict]:
    """`items` questions, in turn from all tasks."""
    by_task: dict[str, list[dict]] = {}
    for line in tasks.read_text().splitlines():
        item = json.loads(line)
        by_task.setdefault(item["task"], []).append(item)
    return [item for item in chain(*zip_longest(*by_task.values())) if item][:items]


def measure(lm: sg.LM, options: dict[str, Any], questions: list[dict]) -> dict:
    """Accuracy, tokens per forward of the target and bound, each with its error."""
    began = time.perf_counter()
    prompts = [[{"role": "user", "content": q["prompt"]}] for q in questions]
    posts = sg.sample(lm, prompts, progress=False, **options)
    hits = np.array([right(post.text, q["gold"]) for post, q in zip(posts, questions, strict=True)], float)
    longest = posts.arrays()["length"].max(-1)
    per_pass = np.array([n / len(post.rounds[0]) for n, post in zip(longest, posts, strict=True)])
    log_z = posts.log_evidence[:, 0]
    return {
        "accuracy": [float(hits.mean()), float(hits.std(ddof=1) / math.sqrt(len(hits)))],
        "hits": "".join("01"[int(hit)] for hit in hits),
        "tokens_per_pass": [float(per_pass.mean()), float(per_pass.std(ddof=1) / math.sqrt(len(per_pass)))],
        "bound": [float(-log_z.mean()), float(log_z.std(ddof=1) / math.sqrt(len(log_z)))],
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", help="int8 ... int3, or a model (default: tiny-draft)", default="tiny-draft")
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    output = arguments.output or ROOT / f"results/tasks_{Path(arguments.model).stem.split('.')[0].lower()}.json"
    lm = sg.LM(arguments.model).at(temperature=arguments.temperature)
    bits = re.fullmatch(r"int(\d)", arguments.draft)
    draft = lm.quantized(int(bits[1])).at(temperature=1.0) if bits else sg.LM(arguments.draft)
    questions = choose(arguments.tasks, arguments.items)
    data = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()} CPU, 1 thread, shared with other work: seconds are no speeds",
        "versions": {"smcgen": sg.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "model": Path(arguments.model).name,
        "draft": arguments.draft,
        "items": len(questions),
        "tokens": arguments.tokens,
        "block": arguments.block,
        "temperature": arguments.temperature,
        "modes": {},
    }
    if output.exists():  # a run that was cut short goes on
        known = json.loads(output.read_text())
        if any(known[key] != data[key] for key in ("model", "draft", "items", "tokens", "block", "temperature")):
            raise SystemExit(f"{output} is of other settings: move it away")
        data = known
    base: np.ndarray | None = None
    print(f"{len(questions)} items")
    print(f"{'mode':18} {'accuracy':>16} {'less plain':>16} {'tokens/pass':>14} {'bound':>14} {'seconds':>8}")
    for name in arguments.modes:
        options = {"draft": draft, "max_tokens": arguments.tokens, "seed": arguments.seed, **MODES[name]}
        if options["draft"] is not None:
            options["block"] = arguments.block
        row = data["modes"].get(name) or measure(lm, options, questions)
        hits = np.array([int(c) for c in row["hits"]])
        base = hits if base is None else base
        gap = hits - base  # paired: the same questions
        row["less_plain"] = [float(gap.mean()), float(gap.std(ddof=1) / math.sqrt(len(gap)))]
        data["modes"][name] = row
        cells = [f"{m:.3f} ± {e:.3f}" for m, e in (row["accuracy"], row["less_plain"])]
        cells += [f"{m:.2f} ± {e:.2f}" for m, e in (row["tokens_per_pass"], row["bound"])]
        print(f"{name:18} {cells[0]:>16} {cells[1]:>16} {cells[2]:>14} {cells[3]:>14} {row['seconds']:8.1f}", flush=True)
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
