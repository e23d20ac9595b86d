"""What it brings not to wait for the slowest particle: tokens per forward of the model, with and without collapse.

    python -m benchmarks.collapse [--groups 200] [--tokens 96]

Plain text from the pair of models that ships inside, N = 8 particles. Each row is a mean over many groups, half of them after
each of two prompts, the same with and without:

    tokens per pass   tokens of the text that is drawn / forwards of the model until its group had it; where a text goes on
                      alone, the forward that reads it again counts too. Ratio of the means over groups, with standard error
    bound             -mean(log Z-hat), in nats: KL(law of one text, model) is at most its expectation
    passes            forwards of the model, mean
    alone             share of the groups whose text went on alone

`exact` is lossless decoding with 8 chains: as many rows. Counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import smcgen as sg
from benchmarks.about import about

OUT = Path(__file__).parent / "results/collapse.json"
PROMPTS = ("Once upon a time", "One day")
SETTINGS = [(k, s) for k in (4, 8) for s in (1.5, 2.0, math.inf)]  # K tokens drafted, leniency s
PARTICLES = 8


def measure(lm: sg.LM, groups: int, tokens: int, **options: Any) -> dict[str, Any]:
    """One row."""
    prompts = [prompt for prompt in PROMPTS for _ in range(groups // len(PROMPTS))]
    posts = sg.sample(lm, prompts, draft="tiny-draft", chat=False, max_tokens=tokens, seed=0, progress=False, **options)
    passes, made, alone = [], [], []
    for post in posts:
        rounds = len(post.rounds[0])
        went_on = post.collapsed is not None and rounds > post.collapsed[0]
        alone.append(went_on)
        passes.append(rounds + went_on)
        made.append(len(post.sample.token_ids))
    x, y = np.array(made, float), np.array(passes, float)
    ratio = x.mean() / y.mean()
    log_z = posts.log_evidence[:, 0]
    return {
        "tokens_per_pass": [ratio, float((x - ratio * y).std(ddof=1) / y.mean() / math.sqrt(len(y)))],
        "bound": [float(-log_z.mean()), float(log_z.std(ddof=1) / math.sqrt(len(log_z)))],
        "passes": float(y.mean()),
        "alone": float(np.mean(alone)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lm = sg.LM("tiny", device="cpu")
    rows = []
    print(f"{'K':>3} {'s':>5} {'':>9} {'tokens/pass':>14} {'bound':>15} {'passes':>7} {'alone':>6}")
    for block, leniency in [(4, 1.0), (8, 1.0), *SETTINGS]:
        exact: dict[str, Any] = {"mode": "exact", "chains": PARTICLES}
        weighted: dict[str, Any] = {"particles": PARTICLES, "leniency": leniency}
        ways = {"exact": exact} if leniency == 1 else {"waiting": weighted, "collapse": {**weighted, "collapse": True}}
        for way, options in ways.items():
            found = measure(lm, arguments.groups, arguments.tokens, block=block, **options)
            rows.append({"block": block, "leniency": leniency if math.isfinite(leniency) else None, "way": way, **found})
            (speed, speed_se), (bound, bound_se) = found["tokens_per_pass"], found["bound"]
            print(
                f"{block:3} {leniency:5g} {way:>9} {speed:6.2f} ± {speed_se:.2f} {bound:6.3f} ± {bound_se:.3f} "
                f"{found['passes']:7.1f} {found['alone']:6.2f}",
                flush=True,
            )
    head = {**about("cpu", "counts only"), "model": "tiny", "draft": "tiny-draft", "particles": PARTICLES}
    data = {**head, "tokens": arguments.tokens, "groups": arguments.groups, "rows": rows}
    arguments.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
