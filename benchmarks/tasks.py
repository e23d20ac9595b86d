"""What an approximate mode costs in accuracy: short questions with known answers, beside tokens per forward of the target.

    python -m benchmarks.tasks tiny --tasks tiny_tasks.jsonl
    python -m benchmarks.tasks models/SmolLM2-135M-Instruct.Q4_1.gguf --drafts int4 int5 int8 \\
        --tasks tiny_tasks.jsonl benchmarks/reasoning_gym.jsonl --repeats 4 --temperature 0.5

A file has one question per line: {"task": ..., "prompt": ..., "gold": ...}. Items are taken in turn from all its tasks, the
same for every mode. An answer is right if its last number is the number asked for, if the first of its words yes and no is the
one asked for, or if it holds all that was asked for; the questions of reasoning-gym are from `benchmarks/reasoning.py`. Each
mode answers each item `--repeats` times, one text at a time. "less plain" is the difference to plain decoding on the same
items. Errors are standard errors over items, each taken as the mean of its repeats.

Tokens per pass: tokens of a text per forward of the target, until the slowest particle of its group has ended. Results are
added as they come, and a second call goes on where the first ended; `--minutes` ends it in time. Texts go into a file of their
own beside the results (`*_texts.jsonl`).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

import smcgen as sg
from benchmarks.about import SHARED, about

ROOT = Path(__file__).parent
PLAIN = "plain decoding"
MODES: dict[str, dict[str, Any]] = {
    PLAIN: {"mode": "exact"},
    "exact, M=8": {"mode": "exact", "chains": 8},
    **{f"s=2, N={n}": {"particles": n, "leniency": 2.0} for n in (4, 8, 16)},
    **{f"s infinite, N={n}": {"particles": n, "leniency": math.inf} for n in (4, 8, 16)},
    "exact, M=1": {"mode": "exact"},
}


def answer_in(text: str, gold: Any) -> str | None:
    """The part of a text that answers a question whose answer is of the kind of `gold` ("" if there is none): the last number
    or product, or the first yes or no. None for an answer of no such kind."""
    if re.fullmatch(r"-?\d+", str(gold)):
        found = [str(int(number)) for number in re.findall(r"-?\d+", text)]
    elif re.fullmatch(r"\d+( × \d+)+", str(gold)):
        found = re.findall(r"\d+(?: × \d+)*", text)
    elif gold in ("Yes", "No"):
        found = [word.capitalize() for word in re.findall(r"\b(?:yes|no)\b", text.lower())][:1]
    else:
        return None
    return found[-1] if found else ""


def right(text: str, gold: Any) -> bool:
    """Whether a text holds what was asked for."""
    if isinstance(gold, list):
        return all(str(part).lower() in text.lower() for part in gold)
    found = answer_in(text, gold)
    if found is None:
        return re.search(rf"(?<!\w){re.escape(str(gold).lower())}(?!\w)", text.lower()) is not None
    return found == str(gold)


def choose(tasks: Path, items: int) -> list[dict]:
    """`items` questions, in turn from all tasks."""
    by_task: dict[str, list[dict]] = {}
    for line in tasks.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        by_task.setdefault(item["task"], []).append(item)
    return [item for item in chain(*zip_longest(*by_task.values())) if item][:items]


def mean(values: np.ndarray) -> list[float]:
    """Mean and standard error over items: float [items, repeats] or [items]."""
    values = values.reshape(len(values), -1).mean(1)
    return [float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))]


def measure(lm: sg.LM, options: dict[str, Any], questions: Sequence[dict], repeats: int, rows: int) -> tuple[dict, dict]:
    """Accuracy, tokens per forward of the target and bound with their errors; and the texts, whether each is right.

    rows: sequences that are read at a time."""
    began = time.perf_counter()
    width = options.get("particles", 1) * options.get("chains", 1)
    prompts = [[{"role": "user", "content": q["prompt"]}] for q in questions for _ in range(repeats)]
    posts = sg.sample(lm, prompts, progress=False, groups=max(1, rows // width), **options)
    assert isinstance(posts, sg.Posteriors)
    shape = len(questions), repeats
    texts = [post.text for post in posts]
    hits = np.array(
        [right(text, q["gold"]) for text, q in zip(texts, [q for q in questions for _ in range(repeats)], strict=True)]
    )
    rounds = [len(post.rounds[0]) for post in posts]
    per_pass = posts.arrays()["length"].max(-1) / np.array(rounds)
    found = {
        "accuracy": mean(hits.reshape(shape)),
        "less_plain": None,
        "tokens_per_pass": mean(per_pass.reshape(shape)),
        "bound": mean(-posts.log_evidence.reshape(shape)) if "particles" in options else [0.0, 0.0],
        "seconds": time.perf_counter() - began,
    }
    kept = [texts[i : i + repeats] for i in range(0, len(texts), repeats)]
    return found, {"texts": kept, "hits": hits.reshape(shape).astype(int).tolist()}


def settings(arguments: argparse.Namespace) -> Iterator[tuple[Path, str | None, str]]:
    """(questions, draft, mode), plain decoding first, so that the others have what they are compared with."""
    modes = [mode for mode in arguments.modes if mode != PLAIN]
    for tasks in arguments.tasks:
        yield tasks, None, PLAIN
    for draft in arguments.drafts:
        yield from ((tasks, draft, mode) for tasks in arguments.tasks for mode in modes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafts", nargs="+", help="int8 ... int3, or models (default: tiny-draft)", default=["tiny-draft"])
    parser.add_argument("--tasks", type=Path, nargs="+", required=True)
    parser.add_argument("--items", type=int, default=400, help="of each file")
    parser.add_argument("--repeats", type=int, default=1, help="texts for each item and mode")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--rows", type=int, help="sequences that are read at a time (default: 1024 on a GPU, 256 on a CPU)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mode after so long")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    lm = sg.LM(arguments.model, device=arguments.device, dtype=arguments.dtype).at(temperature=arguments.temperature)
    engine: Any = lm.load()
    device, arguments.dtype = engine.device, str(engine.shape.dtype).removeprefix("torch.")
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows_at_once = arguments.rows or (1024 if device.type == "cuda" else 256)
    name = Path(arguments.model).stem.split(".")[0].lower()
    output = arguments.output or ROOT / f"results/tasks_{name}.json"
    texts_file = output.with_name(f"{output.stem}_texts.jsonl")
    given = ("items", "repeats", "tokens", "block", "temperature", "dtype", "seed")
    head = about(device, SHARED) | {"model": Path(arguments.model).name} | {key: getattr(arguments, key) for key in given}
    data: dict[str, Any] = head | {"rows": []}
    hits: dict[tuple, np.ndarray] = {}
    if output.exists():  # a run that was cut short goes on
        data = json.loads(output.read_text())
        changed = [key for key in ("model", *given) if data.get(key) != head[key]]
        if changed or not texts_file.exists():
            raise SystemExit(f"{output} is of other settings ({', '.join(changed) or 'its texts are missing'}): move it away")
        for line in map(json.loads, texts_file.read_text(encoding="utf-8").splitlines()):
            hits[line["tasks"], line["draft"], line["mode"]] = np.array(line["hits"])
    drafts: dict[str, sg.LM] = {}
    show = "{:15} {:6} {:18} {:>16} {:>16} {:>14} {:>14} {:>8}"
    print(show.format("questions", "draft", "mode", "accuracy", "less plain", "tokens/pass", "bound", "seconds"), flush=True)
    for tasks, draft, mode in settings(arguments):
        key = {"tasks": tasks.stem, "draft": draft, "mode": mode}
        row = next((row for row in data["rows"] if all(row[k] == v for k, v in key.items())), None)
        if row is None:
            if time.perf_counter() - began > 60 * arguments.minutes:
                print("time is up: call again for the rest")
                break
            questions = choose(tasks, arguments.items)
            options = {"max_tokens": arguments.tokens, "seed": arguments.seed, **MODES[mode]}
            if draft is not None:
                bits = re.fullmatch(r"int(\d)", draft)
                if draft not in drafts:
                    other = lm.quantized(int(bits[1])) if bits else sg.LM(draft, device=arguments.device, dtype=arguments.dtype)
                    drafts[draft] = other.at(temperature=1.0)
                options |= {"draft": drafts[draft], "block": arguments.block}
            found, kept = measure(lm, options, questions, arguments.repeats, rows_at_once)
            hits[tuple(key.values())] = np.array(kept["hits"])
            gap = hits[tuple(key.values())] - hits[tasks.stem, None, PLAIN]
            found["less_plain"] = mean(gap) if draft is not None else None
            row = key | found
            data["rows"].append(row)
            output.parent.mkdir(parents=True, exist_ok=True)
            with texts_file.open("a", encoding="utf-8") as out:
                which = [[q["task"], q.get("index", i)] for i, q in enumerate(questions)]
                out.write(json.dumps(key | {"items": which} | kept, ensure_ascii=False) + "\n")
            output.write_text(json.dumps(data, indent=1) + "\n")
        cells = [f"{m:.3f} ± {e:.3f}" for m, e in (row["accuracy"], row["less_plain"] or (0, 0))]
        cells += [f"{m:.2f} ± {e:.2f}" for m, e in (row["tokens_per_pass"], row["bound"])]
        print(show.format(tasks.stem[:15], draft or "", mode, *cells, f"{row['seconds']:.1f}"), flush=True)


if __name__ == "__main__":
    main()
