"""What the engine makes of the embedded pair on the CPU: power sampling's accuracy, and tokens per second.

    python -m benchmarks.train_tiny.measure --items 300 --out benchmarks/results/tiny_engine.json

Accuracy is that of one draw per prompt from p^alpha; standard errors are over prompts. A speed is the tokens of one
text over the time of the call, so that N particles count as one text; all settings take turns in one run on one thread,
and the median over the turns is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

import smcgen as sg
from benchmarks.train_tiny import tasks

BLOCK = 4
SPEED_SETTINGS = ((1, 4), (4, 4), (4, 8), (8, 4), (8, 8), (16, 8))  # (particles, block)
SPEED_PROMPTS = ("Once upon a time", "One day a fox", "There once was a brave")
SPEED_TOKENS = 64


def share_right(examples: list[tasks.Example], texts: list[str]) -> dict[str, float]:
    """Share of right answers and its standard error."""
    right = torch.tensor([tasks.correct(example, text) for example, text in zip(examples, texts, strict=True)]).double()
    return {"mean": right.mean().item(), "se": (right.std() / len(right) ** 0.5).item()}


def power_accuracy(
    name: str, items: int, seed: int, alphas: list[int], counts: list[int], leniency: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Accuracy of one draw for every exponent and number of particles on the first `items` of an evaluation set."""
    generators, max_tokens = tasks.EVALUATION[name]
    examples = tasks.evaluation_set(generators, 600, seed)[:items]
    lm = sg.LM("tiny")
    for alpha in alphas:
        for particles in counts:
            start = time.perf_counter()
            posts = sg.sample(
                lm**alpha,
                [example.prompt for example in examples],
                draft="tiny-draft",
                particles=particles,
                block=BLOCK,
                leniency=leniency,
                max_tokens=max_tokens,
                seed=seed,
                chat=True,
                progress=False,
            )
            found = share_right(examples, [post.text for post in posts])
            kept = "" if math.isinf(leniency) else f"_leniency_{leniency:g}"
            yield f"power_{alpha}_of_{particles}{kept}", found | {"seconds": time.perf_counter() - start}


def speeds(repeats: int, seed: int) -> dict[str, object]:
    """Tokens per second of plain decoding and of SMC with the draft, and their ratios."""
    lm, timed = sg.LM("tiny"), {}
    for turn in range(repeats + 1):
        for prompt in SPEED_PROMPTS:
            drafted = {"draft": "tiny-draft", "leniency": math.inf}
            settings = {f"smc_n{n}_k{k}": {"particles": n, "block": k, **drafted} for n, k in SPEED_SETTINGS}
            for label, options in {"plain": {"particles": 1}, **settings}.items():
                start = time.perf_counter()
                post = sg.sample(lm, prompt, max_tokens=SPEED_TOKENS, seed=seed + turn, chat=False, progress=False, **options)
                took = time.perf_counter() - start
                if turn:  # the first turn warms up
                    timed.setdefault(label, []).append(len(post.sample.token_ids) / took)
    found = {label: {"tokens_per_second": statistics.median(values)} for label, values in timed.items()}
    for entry in found.values():
        entry["ratio_to_plain"] = entry["tokens_per_second"] / found["plain"]["tokens_per_second"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", default=["speed", "arithmetic", "json"])
    parser.add_argument("--alphas", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--particles", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--leniency", type=float, default=math.inf, help="of power sampling")
    parser.add_argument("--out", required=True, help="JSON file; parts measured by other runs stay in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(options.out)

    def write(part: str, facts: dict[str, object]) -> None:
        found = json.loads(path.read_text()) if path.exists() else {}
        found[part] = found.get(part, {}) | facts
        found["machine"] = {"cpu": platform.machine(), "threads": 1, "python": platform.python_version()}
        found["machine"] |= {"torch": torch.__version__, "transformers": transformers.__version__}
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(part, facts, flush=True)

    path.parent.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        if part == "speed":
            write(part, speeds(options.repeats, options.seed))
            continue
        write(part, {"items": options.items, "block": BLOCK})
        grid = options.alphas, options.particles, options.leniency
        for label, facts in power_accuracy(part, options.items, options.seed, *grid):
            write(part, {label: facts})


if __name__ == "__main__":
    main()
