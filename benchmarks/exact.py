"""Lossless decoding with a draft against plain decoding, in tokens per second and in tokens per forward of the model.

    python -m benchmarks.exact --model models/SmolLM2-135M-Instruct.Q4_1.gguf       rounded copies as drafts, transformers too
    python -m benchmarks.exact --shapes 8b                                          random weights of real shapes, on a GPU
    python -m benchmarks.exact --shapes tiny                                        tiny shapes, to see that everything runs

With --shapes, forwards of both models run in full, and then their logits are replaced by two fixed laws: p falls by a factor of
0.5 from token to token (1.4 nats), and q = a p + (1 - a) r with r elsewhere, so that one candidate is accepted with
probability a (--acceptance). With --model, the drafts are copies of the model with rounded weights, and transformers' own
`generate`, plain and assisted by the same copy, is measured in the same run.

Speeds are medians of --repeats runs after one that does not count. "steady" is tokens per forward times texts over the median
time of a round, which leaves out what a call does once (on a GPU, recording its graph); "times plain" compares steady speeds.
Every row has its plain baseline from the same call.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

import smcgen as sg
from benchmarks.frontier import PROMPTS
from smcgen.lm.base import Context, LanguageModel

ROOT = Path(__file__).parent


class FixedLaw:
    """A model whose forwards cost what they cost, and whose logits are then replaced by log `law` float [V]."""

    def __init__(self, lm: LanguageModel, law: torch.Tensor):
        self.lm, self.law = lm, law.log().clamp(min=-40).to(lm.device)
        self.name, self.vocabulary, self.device, self.max_tokens = lm.name, lm.vocabulary, lm.device, lm.max_tokens

    def open(self, *args: Any, **options: Any) -> Context:
        return self.lm.open(*args, **options)

    def prefill(self, *args: Any) -> None:
        self.lm.prefill(*args)

    def extend(self, *args: Any) -> torch.Tensor:
        logits = self.lm.extend(*args)
        return logits.copy_(self.law.to(logits.dtype))

    def fork(self, *args: Any) -> None:
        self.lm.fork(*args)

    def trim(self, *args: Any) -> None:
        self.lm.trim(*args)


def laws(size: int, acceptance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q over `size` tokens, with sum min(p, q) = acceptance."""
    fall = 0.5 ** torch.arange(min(20, size // 3)).double()
    p, r = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    p[5 : 5 + len(fall)] = fall / fall.sum()
    r[5 + len(fall) : 5 + 2 * len(fall)] = fall / fall.sum()
    return p, acceptance * p + (1 - acceptance) * r


def pairs(arguments: argparse.Namespace) -> Iterator[tuple[str, sg.LM, sg.LM, list[Any]]]:
    """(what the draft is, model, draft, prompts)."""
    if arguments.model:
        lm = sg.LM(arguments.model, device=arguments.device, dtype=arguments.dtype)
        for bits in arguments.bits:
            prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
            yield f"{bits} bits", lm, lm.quantized(bits), prompts
        return
    import benchmarks.round as shapes

    if arguments.device:
        shapes.DEVICE, shapes.CUDA = torch.device(arguments.device), arguments.device.startswith("cuda")
    names = ("tiny", "tiny") if arguments.shapes == "tiny" else ("8b", "1b")
    nets = [shapes.model(name) for name in names]
    size = nets[0].config.vocab_size
    words = shapes.tokenizer(size)
    loaded = [sg.LM(net, words).load() for net in nets]
    ids = [[1 + (7 * i + 3 * j) % (size - 2) for j in range(arguments.prompt)] for i in range(max(arguments.batch))]
    for acceptance in arguments.acceptance:
        p, q = laws(len(loaded[0].vocabulary), acceptance)
        base, draft = (sg.LM(FixedLaw(lm, law)) for lm, law in zip(loaded, (p, q), strict=True))
        yield f"acceptance {acceptance:g}", base, draft, ids


def speed(lm: sg.LM, prompts: list[Any], arguments: argparse.Namespace, **options: Any) -> dict[str, Any]:
    """Tokens per second of all texts together, and what a round makes."""
    rates, steps = [], []
    posts = None
    for repeat in range(arguments.repeats + 1):
        posts = sg.sample(lm, prompts, mode="exact", max_tokens=arguments.tokens, seed=repeat, progress=False, **options)
        if repeat or not arguments.repeats:
            rates.append(posts.info["tokens_per_second"])
            steps.append(posts.info["step_seconds"])
    assert isinstance(posts, sg.Posteriors)
    judged, accepted = (sum(getattr(r, x) for p in posts for rs in p.rounds for r in rs) for x in ("judged", "accepted"))
    per_pass, p50 = statistics.mean(post.tokens_per_round for post in posts), statistics.median(s["p50"] for s in steps)
    return {
        "tokens_per_second": statistics.median(rates),
        "steady_tokens_per_second": len(posts) * per_pass / p50,
        "step_ms": {"p50": 1000 * p50, "p95": 1000 * statistics.median(step["p95"] for step in steps)},
        "tokens_per_pass": per_pass,
        "acceptance": accepted / judged if judged else None,
    }


def transformers_speed(
    arguments: argparse.Namespace, bits: int, prompts: list[Any], assisted: bool, block: int
) -> Callable[[], float]:
    """A call that generates with transformers, and returns tokens per second."""
    from smcgen.lm import gguf

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    lm = sg.LM(arguments.model, device=arguments.device, dtype=arguments.dtype)
    kind = torch.float32 if device.type == "cpu" and arguments.dtype is None else torch.bfloat16
    kind = getattr(torch, arguments.dtype) if arguments.dtype else kind
    net, _ = gguf.load(Path(arguments.model), kind, with_tokenizer=False)
    net = net.to(device).eval()
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    options |= {"max_new_tokens": arguments.tokens, "min_new_tokens": arguments.tokens, "pad_token_id": 0}
    if assisted:
        helper = copy.deepcopy(net)
        rounded: Any = lm.quantized(bits).load()
        helper.load_state_dict(rounded.model.state_dict(), strict=False)
        helper.generation_config.num_assistant_tokens = block
        helper.generation_config.num_assistant_tokens_schedule = "constant"
        helper.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = helper
    vocabulary = lm.load().vocabulary
    encoded = [torch.tensor([vocabulary.encode(prompt, None).ids], device=device) for prompt in prompts]

    def call() -> float:
        made, began = 0, time.perf_counter()
        for ids in encoded:  # assisted generation takes one prompt at a time
            made += net.generate(ids, attention_mask=torch.ones_like(ids), **options).shape[1] - ids.shape[1]
        return made / (time.perf_counter() - began)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 5, 8])
    parser.add_argument("--shapes", choices=["8b", "tiny"])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.75, 0.9])
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--block", type=int, nargs="+", default=[4])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=256, help="tokens, with --shapes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.shapes is None):
        parser.error("give --model or --shapes")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    cuda = arguments.device != "cpu" and torch.cuda.is_available()
    data: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)",
        "versions": {"smcgen": sg.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "what": Path(arguments.model).name if arguments.model else f"random weights, shapes {arguments.shapes}",
        "tokens": arguments.tokens,
        "prompt": arguments.prompt if arguments.shapes else None,
        "rows": [],
    }
    name = "model" if arguments.model else arguments.shapes
    output = arguments.output or ROOT / f"results/exact_{name}_{'cuda' if cuda else 'cpu'}.json"
    head = f"{'draft':16} {'batch':>5} {'rule':>22} {'tokens/s':>9} {'steady':>9} {'times plain':>11} {'tokens/pass':>11}"
    print(f"{head} {'accepted':>8} {'ms':>7}")

    def add(draft: str, batch: int, rule: str, row: dict[str, Any]) -> None:
        steady = row.setdefault("steady_tokens_per_second", row["tokens_per_second"])
        row = {
            "draft": draft,
            "batch": batch,
            "rule": rule,
            "speedup": steady / plains[batch]["steady_tokens_per_second"],
            **row,
        }
        data["rows"].append(row)
        cells = [row.get("tokens_per_pass"), row.get("acceptance"), row.get("step_ms", {}).get("p50")]
        shown = [("" if x is None else f"{x:{f}}") for x, f in zip(cells, (".2f", ".3f", ".1f"), strict=True)]
        head = f"{draft:16} {batch:5} {rule:>22} {row['tokens_per_second']:9.1f} {steady:9.1f} {row['speedup']:11.2f}"
        print(f"{head} {shown[0]:>11} {shown[1]:>8} {shown[2]:>7}", flush=True)
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(data, indent=1) + "\n")

    plains: dict[int, dict[str, Any]] = {}
    for draft, lm, helper, prompts in pairs(arguments):
        for batch in arguments.batch:
            some = (prompts * batch)[:batch]
            if batch not in plains:
                plains[batch] = speed(lm, some, arguments)
                add("none", batch, "plain", plains[batch])
            for block in arguments.block:
                for chains in arguments.chains:
                    row = speed(lm, some, arguments, draft=helper, block=block, chains=chains)
                    add(draft, batch, f"exact K={block} M={chains}", row)
        if arguments.model and 1 in plains and not arguments.no_transformers:
            for assisted in (False, True):
                call = transformers_speed(arguments, int(draft[0]), prompts[:1], assisted, arguments.block[0])
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    rate = statistics.median([call() for _ in range(arguments.repeats + 1)][1:] or [call()])
                rule = f"transformers {'assisted' if assisted else 'plain'}"
                add(draft, 1, rule, {"tokens_per_second": rate})


if __name__ == "__main__":
    main()
