"""Pages of K/V cache that real runs with resampling use: against unshared caches, and against sharing the prompt only.

    python -m benchmarks.memory                             the pair that ships inside, positions stretched
    python -m benchmarks.memory MODEL.gguf --particles 16   any other model, with a copy of itself in 8 bits as its draft

One prompt of 256 tokens, from the model itself, and 1,024 tokens after it; end tokens are barred so that no text is shorter.
Pages are counted at the end of each round, the draft's with the model's:

    unshared       each particle keeps its prompt and its text
    prompt only    the whole pages of the prompt are kept once, each particle keeps all that comes after
    saved          1 - pages / unshared pages, over all rounds ("mean") and after the last ("end")
    saved of text  1 - pages / pages under prompt only, both without the pages of the prompt

What is saved depends on how often particles are resampled, so on the target, its model and its draft; not on the machine. The
small pair has learned 512 positions: its rotary base is raised for 2,048, which its texts do not get better by.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import smcgen as sg
import smcgen.batch
from benchmarks.about import about
from smcgen.lm.memory import Memory

OUT = Path(__file__).parent / "results/memory.json"
PROMPT, TEXT = 256, 1024
STRETCH = 4  # times the positions that the small pair has learned
BARS = {"saved": 0.72, "saved_of_text": 0.40}  # at N = 16
# Exponent of the target, and options of `sample`; without a block of drafted tokens the model proposes itself.
RUNS = {
    "power 2": {"alpha": 2.0},
    "draft, K = 8": {"alpha": 1.0, "block": 8, "leniency": math.inf},
}


class Recorder(Memory):
    """Keeps the counts of the last run."""

    last: Memory

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        Recorder.last = self


def stretched(name: str) -> sg.LM:
    """A model of the small pair that reads `STRETCH` times as many tokens.

    The base of the rotary angles is raised so that the slowest turns as far over all positions as it did before, and the
    fastest stays as it is (the "NTK-aware" rule: base * s**(d / (d - 2)))."""
    folder = str(files("smcgen") / "models" / name)
    config = AutoConfig.from_pretrained(folder)
    base = config.rope_parameters["rope_theta"] * STRETCH ** (config.head_dim / (config.head_dim - 2))
    config.rope_parameters = {"rope_type": "default", "rope_theta": base}
    config.max_position_embeddings *= STRETCH
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return sg.LM(model.eval(), AutoTokenizer.from_pretrained(folder))


def prompt_of(lm: sg.LM, tokens: int, seed: int) -> list[int]:
    """A text of the model, as token ids."""
    begin = lm.load().vocabulary.encode("Once upon a time, there was a", False).ids
    rest = tokens - len(begin)
    text = sg.sample(lm * sg.length(min=rest), list(begin), particles=1, max_tokens=rest, seed=seed, progress=False)
    assert isinstance(text, sg.Posterior)
    return [*begin, *text.particles[0].token_ids]


def measure(lm: sg.LM, draft: sg.LM, particles: int, prompt: list[int], text: int, seed: int, run: dict[str, Any]) -> dict:
    """One run: pages of all caches together by round."""
    options = dict(run)
    alpha = options.pop("alpha")
    if "block" in options:
        options["draft"] = draft
    post = sg.sample(
        lm**alpha * sg.length(min=text), prompt, particles=particles, max_tokens=text, seed=seed, progress=False, **options
    )
    assert isinstance(post, sg.Posterior)
    assert all(len(s.token_ids) == text for s in post.particles)
    counts = np.array(Recorder.last.counts, np.float64)  # [rounds, caches, 2]
    used, unshared = counts.sum(1).T
    page = post.info["memory"]["page_tokens"]
    whole = (len(prompt) - 1) // page * counts.shape[1]  # pages of the prompt; its last token is read with the text
    used_text, kept_text = used - whole, unshared - particles * whole
    return {
        "rounds": len(used),
        "resampled": float(np.mean([r.resampled for r in post.rounds[0]])),
        "pages": int(used[-1]),
        "prompt_only_pages": int(whole + kept_text[-1]),
        "unshared_pages": int(unshared[-1]),
        "saved": {"mean": 1 - used.sum() / unshared.sum(), "end": 1 - used[-1] / unshared[-1]},
        "saved_of_text": {"mean": 1 - used_text.sum() / kept_text.sum(), "end": 1 - used_text[-1] / kept_text[-1]},
    }


def average(rows: list[dict]) -> dict[str, Any]:
    """Means over seeds; of what is saved, the least as well."""
    out: dict[str, Any] = {}
    for key, value in rows[0].items():
        if isinstance(value, dict):
            out[key] = {name: float(np.mean([row[key][name] for row in rows])) for name in value}
            out[key]["least"] = min(min(row[key].values()) for row in rows)
        else:
            out[key] = float(np.mean([row[key] for row in rows]))
    return out


def table(rows: list[dict]) -> Iterator[str]:
    names = f"{'model':10} {'run':14} {'text':>5} {'N':>3} {'resampled':>9} {'pages':>7}"
    yield f"{names} {'prompt only':>11} {'unshared':>8}  saved mean, end  of text"
    for row in rows:
        saved, text = row["saved"], row["saved_of_text"]
        what = f"{row['model']:10.10} {row['run']:14} {row['text']:5} {row['particles']:3} {row['resampled']:9.2f}"
        yield (
            f"{what} {row['pages']:7.0f} {row['prompt_only_pages']:11.0f} {row['unshared_pages']:8.0f}  "
            f"{saved['mean']:9.1%} {saved['end']:6.1%}  {text['mean']:9.1%} {text['end']:6.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a GGUF file, folder or hub id; default: the small pair")
    parser.add_argument("--particles", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--text", type=int, default=TEXT)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    smcgen.batch.Memory = Recorder
    if args.model is None:
        lm, draft = stretched("tiny"), stretched("tiny-draft")
    else:
        lm = sg.LM(args.model, dtype=args.dtype)
        draft = lm.quantized(8)
    name = "tiny" if args.model is None else Path(args.model).name
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows = result.setdefault("rows", [])
    result |= about() | {
        "bars_at_16_particles": BARS,
        "rows": rows,
    }
    prompts = [prompt_of(lm, args.prompt, seed) for seed in range(args.seeds)]
    for run in args.only:
        for particles in args.particles:
            what = {"model": name, "run": run, "particles": particles, "prompt": args.prompt, "text": args.text}
            began = time.perf_counter()
            found = [measure(lm, draft, particles, p, args.text, seed, RUNS[run]) for seed, p in enumerate(prompts)]
            row = what | {"seeds": args.seeds} | average(found)
            if particles == 16:
                row["bars_met"] = all(row[key][when] >= bar for key, bar in BARS.items() for when in ("mean", "end"))
            rows[:] = [old for old in rows if any(old[key] != value for key, value in what.items())] + [row]
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{run}, N = {particles}: {time.perf_counter() - began:.0f} s", flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
