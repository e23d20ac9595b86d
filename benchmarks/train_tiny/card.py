"""Writes the model card of the embedded pair from the measured results, so that no figure is typed by hand.

python -m benchmarks.train_tiny.card --results benchmarks/results --out docs/model_card.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.train_tiny.data import GSM8K_COPIES
from benchmarks.train_tiny.run import Sizes
from benchmarks.train_tiny.tasks import DIRECT_SHARE
from benchmarks.train_tiny.teacher import SAMPLER_TEMPERATURE

KINDS = {
    "story": "stories (grammar)",
    "scene": "scenes (SmolLM2)",
    "answer": "everyday answers (SmolLM2)",
    "email": "emails",
    "list": "lists",
    "sort": "sorting words",
    "one_digit": "one-digit sums",
    "sum_two": "two-digit sums",
    "difference": "two-digit differences",
    "sum_three": "sums of three numbers",
    "product": "two-digit times one-digit",
    "word_problem": "word problems",
    "record": "JSON records, new names",
    "gsm8k": "GSM8K",
}
OBJECTIVES = {"forward_kl": "forward KL", "reverse_kl": "reverse KL", "renyi2": "Rényi-2"}
SETS = {
    "arithmetic": "arithmetic and word problems",
    "json": "JSON, one of two people",
    "json_new_names": "JSON, new names and cities",
}
METHODS = ["greedy", "temperature_1", "temperature_0.5", "temperature_0.25", "best_of_8", "best_of_16", "best_of_32"]
METHODS += [f"power_{alpha}_of_{count}" for alpha in (2, 4) for count in (8, 16, 32)]
METHODS += [f"power_2_of_{count}_leniency_2" for count in (8, 16)]


def with_error(entry: dict[str, float] | None, digits: int = 3) -> str:
    """`mean ± se`, or a dash where nothing was measured."""
    return "–" if entry is None else f"{entry['mean']:.{digits}f} ± {entry['se']:.{digits}f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def method_name(method: str) -> str:
    kind, *rest = method.split("_")
    if kind == "power":
        kept = f", leniency {rest[4]}" if len(rest) > 3 else ""
        return f"power sampling, exponent {rest[0]}, N = {rest[2]}{kept}"
    if kind == "best":
        return f"likeliest of {rest[1]} draws"
    return f"temperature {rest[0]}" if rest else "greedy"


def training_size(facts: dict[str, Any]) -> str:
    return f"{facts['tokens'] / 1e6:,.0f} M ({facts['steps']:,})"


def draft_rows(objectives: dict[str, Any]) -> list[list[str]]:
    keys = ["acceptance", "ess_share_4", "ess_share_8", "log_evidence_variance_4", "log_evidence_variance_8"]
    return [
        [name, *(with_error(objectives[kind][key], 3 if "variance" not in key else 1) for key in keys)]
        for kind, name in OBJECTIVES.items()
    ]


BLOCK = 4  # of power sampling, as in measure.py
KIND_HEAD = ["text", "held-out texts", "perplexity `tiny`", "`tiny-draft`", "acceptance", "ESS / N, K = 4", "K = 8"]
DRAFT_HEAD = ["objective", "acceptance", "ESS / N, K = 4", "K = 8", "variance of log Z, K = 4", "K = 8"]


def card(training: dict[str, Any], engine: dict[str, Any]) -> str:
    base, draft, accuracy = training["base"], training["draft"], training["accuracy"]
    kept = draft["objectives"][draft["kept"]]
    perplexity, texts, overlap = training["perplexity"], training["texts"], training["overlap"].values()
    asked, seen = sum(entry["items"] for entry in overlap), sum(entry["seen"] for entry in overlap)
    kind_rows = []
    for kind, name in KINDS.items():
        quality = kept["by_kind"].get(kind)
        kind_rows.append(
            [
                name,
                str(perplexity["base"][kind]["texts"]),
                f"{perplexity['base'][kind]['perplexity']:.2f}",
                f"{perplexity['draft'][kind]['perplexity']:.2f}",
                with_error(quality and quality["acceptance"], 2),
                with_error(quality and quality["ess_share_4"], 2),
                with_error(quality and quality["ess_share_8"], 2),
            ]
        )
    method_rows = [
        [
            method_name(method),
            *(with_error(accuracy[name].get(method) or engine.get(name, {}).get(method)) for name in SETS),
        ]
        for method in METHODS
    ]
    tasks = list(accuracy["arithmetic"]["greedy_by_task"])
    task_rows = [
        [
            task.replace("_", " "),
            with_error(accuracy["arithmetic"]["greedy_by_task"][task]),
            with_error(accuracy["arithmetic"]["best_of_32_by_task"][task]),
        ]
        for task in tasks
    ]
    speed = engine.get("speed")
    if speed:
        speed_rows = [
            [label.replace("_", " "), f"{entry['tokens_per_second']:.0f}", f"{entry['ratio_to_plain']:.2f}"]
            for label, entry in speed.items()
        ]
        speed_text = table(["setting", "tokens/s of one text", "ratio to plain"], speed_rows)
    else:
        speed_text = "Not measured yet: `python -m benchmarks.train_tiny.measure --parts speed` does it."
    machine = training["machines"]["base"]
    items = accuracy["arithmetic"]["items"]
    power_items = next((engine[name]["items"] for name in SETS if name in engine), None)
    power_text = (
        f"Power sampling: the first {power_items} of them, block {BLOCK}, the draft as proposal, one draw by weight; "
        "every drafted token kept unless a leniency is named (the default of `sample` is 2)."
        if power_items
        else "Power sampling has not been measured yet."
    )
    return f"""# The embedded pair: `tiny` and `tiny-draft`

Two small language models that come with the package, so that every feature can be tried without a download. They
write short simple English (stories, answers about everyday things, emails, lists), do one- and two-digit arithmetic
step by step, and turn a sentence into a JSON record. **They are for trying things out, testing and teaching. What they
say about the world is often wrong.**

| | `tiny` | `tiny-draft` |
| --- | --- | --- |
| parameters | {base["parameters"]:,} | {draft["parameters"]:,} |
| layers, hidden size, MLP | 8, 256, 768 | 2, 128, 384 |
| heads (key/value heads), head size | 4 (2), 64 | 2 (1), 64 |
| training tokens (steps) | {training_size(base)} | {training_size(draft)} |
| last training loss, nats per token | {base["loss"]:.3f} | {draft["loss_" + draft["kept"]]:.3f} (from `tiny`) |
| seconds on one {machine["gpu"]} | {base["seconds"]:.0f} | {draft["seconds"]:.0f} (three drafts at once) |

Both are ordinary transformers Llama folders in bf16 (`AutoModelForCausalLM.from_pretrained`), with tied embeddings
and a context of 512 tokens. They share one byte-level BPE tokenizer: 4,096 tokens, single digits, every byte a token,
ChatML chat template, no token put in front. A text ends with `<|endoftext|>` (plain) or `<|im_end|>` (chat). The
licence is Apache-2.0, as is that of SmolLM2, whose output is part of the training text.

**How to prompt.** The opening of a story goes in plain ("Once upon a time", without the chat template); questions,
sums, records and requests go in as chat. A story opening given as a chat message is outside the training text and is
answered with nonsense.

## Training text

- **SmolLM2-135M-Instruct** (Apache-2.0, 4-bit weights): {texts["answer"]:,} answers to everyday questions and
  {texts["scene"]:,} scenes of a few sentences, sampled at temperature {SAMPLER_TEMPERATURE} after two example answers,
  kept if finished, plain, and free of loops.
- **Generators of this project** (`benchmarks/train_tiny`): {Sizes().stories:,} stories from a story grammar;
  {Sizes().tasks:,} tasks: sums, differences, products, word problems, JSON records, lists, sorted words, emails.
- **GSM8K** (MIT): 500 training problems, each {GSM8K_COPIES} times.

In all {training["tokens"]}. Sums of two-digit numbers and
word problems are answered directly in {DIRECT_SHARE:.0%} of the training text and step by step in the rest, on purpose:
the direct start is the likelier one, the worked answer the better one, so that there is something to gain over greedy
decoding.

## What it is worth on held-out text

Held out: two prompts in a hundred of the sampled text, an eighth of all operand tuples, and lists of names and cities.
Of the {asked} prompts of the accuracy table, {seen} stand in the training text (counted token by token). Perplexity is
per token of the answers; acceptance is the mean of sum min(p, q) on the base model's own samples at temperature 1;
ESS / N is that of 16 blocks of K tokens drawn from the draft after one prefix
({kept["prefixes"]} prefixes, at most 40 per kind). ± is one standard error.

{table(KIND_HEAD, kind_rows)}

Over all kinds: acceptance {with_error(kept["acceptance"])}, ESS / N {with_error(kept["ess_share_4"])} at K = 4
and {with_error(kept["ess_share_8"])} at K = 8.

## The draft's objective

Three drafts from the same start on the same windows in the same order, equal steps (p the base, q the draft):

{table(DRAFT_HEAD, draft_rows(draft["objectives"]))}

Kept: **{OBJECTIVES[draft["kept"]]}**, by ESS at K = 8. Forward KL and Rényi-2 are within two standard errors of each
other in ESS, and in the variance of the evidence, where Rényi-2 is ahead; reverse KL drops what the base model says and
pays for it. The variance of log Z is that of the evidence estimate of one block over prefixes; it is large because the
draft misses, at some prefixes, what the base model is sure of.

## Accuracy

{items} held-out prompts per set, one answer each (greedy: the last number, or the JSON object, must be right; the
temperatures average over several draws per prompt).
{power_text}

{table(["method", *SETS.values()], method_rows)}

By task, arithmetic:

{table(["task", "greedy", "likeliest of 32 draws"], task_rows)}

## Speed on one CPU thread

The tokens of one text over the time of the call, all settings in turns in one run of `measure.py`. Other programs ran
on the same cores: read the ratios.

{speed_text}

## Limits

- The base model has seen its text many times ({base["tokens"] / 1e6:,.0f} M tokens of training on the amount above) and
  has learned part of it by heart: on SmolLM2's texts and on GSM8K its held-out perplexity is above that of the far
  smaller draft, and there the draft's weights vary most. Fewer passes over more text would be better.
- Names made of tokens that training did not combine are not copied right ("JSON, new names").
- Held-out operands are held out in their order: 36 + 47 can be in training when 47 + 36 is not.
- GSM8K problems are beyond it. Answers about the world are those of a 135 M model, filtered for form, not for truth.
- English only; 512 tokens; no safety training.

Made with Python {machine["python"]}, torch {machine["torch"]}, transformers {machine["transformers"]} by
`python -m benchmarks.train_tiny.run` (stages of under nine minutes; `--smoke` tries all of it on a CPU). Figures:
`benchmarks/results/tiny_*.json`. This page is written by `python -m benchmarks.train_tiny.card`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", required=True, help="folder with tiny_training.json and perhaps tiny_engine.json")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    folder = Path(options.results)
    engine = folder / "tiny_engine.json"
    found = json.loads(engine.read_text()) if engine.exists() else {}
    Path(options.out).write_text(card(json.loads((folder / "tiny_training.json").read_text()), found))


if __name__ == "__main__":
    main()
