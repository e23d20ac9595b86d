"""Lossless decoding with a draft against plain decoding, in tokens per second and in tokens per forward of the model.

    python -m benchmarks.exact --model models/SmolLM2-135M-Instruct.Q4_1.gguf       rounded copies as drafts, transformers too
    python -m benchmarks.exact --shapes 8b                                          random weights of real shapes, on a GPU
    python -m benchmarks.exact --shapes tiny                                        tiny shapes, to see that everything runs

With --shapes, forwards of both models run in full, and then their logits are replaced by two fixed laws: p falls by a factor of
0.5 from token to token (1.4 nats), and q = a p + (1 - a) r with r elsewhere, so that one candidate is accepted with
probability a (--acceptance); after `--draft-weights given int8` also with a draft that keeps its matrices as integers. With
--model, the drafts are copies of the model with rounded weights. In both, transformers' own `generate`, plain and assisted by
the same draft, is measured in the same run, one prompt at a time.

Speeds are medians of --repeats runs after one that does not count. "steady" is tokens per forward times texts over the median
time of a round, which leaves out what a call does once (on a GPU, recording its graph); "times plain" compares steady speeds.
With --shapes, "forwards" is the time of a round's forwards by themselves and "verification" that of `kernels.verify` by itself,
both as CUDA graphs on a GPU. Every row has its plain baseline from the same machine and versions. Rows that are in the file
already, from these, are kept; `--minutes` ends a run in time. Files: exact_8b_cuda.json, exact_model_cuda.json,
exact_model_cpu.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import smcgen as sg
from benchmarks.about import about, same
from benchmarks.frontier import PROMPTS
from smcgen.kernels.verify import verify
from smcgen.lm.base import Context, LanguageModel
from smcgen.proposals import judged

ROOT = Path(__file__).parent
# What is asked of shapes 8b at acceptance 0.75, K = 4 and one text at a time: times plain decoding by M, verification's share.
BARS, MOST_VERIFICATION = {1: 1.8, 8: 2.1}, 0.03
CALLS = 16  # of a kernel in one recording
WEIGHTS = {"given": None, "int8": "int8"}  # of a draft, by --draft-weights


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
        self.law = self.law.to(logits.dtype)
        return logits.copy_(self.law)

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


class FixedHead(torch.nn.Module):
    """An output layer of a transformers model that costs what it costs and says log `law`."""

    def __init__(self, head: torch.nn.Module, law: torch.Tensor, like: torch.Tensor):
        super().__init__()
        self.head, self.law = head, law.log().clamp(min=-40).to(like)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        return logits.copy_(self.law.expand_as(logits))


@dataclass
class Pair:
    """A model and its draft. hf: transformers' model and draft for the same, and token ids of a prompt, made when called; None
    for a draft that transformers does not have."""

    draft: str
    lm: sg.LM
    helper: sg.LM
    prompts: list[Any]
    hf: Callable[[], tuple[Any, Any, torch.Tensor]] | None
    laws: tuple[torch.Tensor, torch.Tensor] | None = None


def pairs(arguments: argparse.Namespace) -> Iterator[Pair]:
    """What is measured, one after the other."""
    if arguments.model:
        lm = sg.LM(arguments.model, device=arguments.device, dtype=arguments.dtype)
        prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
        for bits in arguments.bits:
            helper = lm.quantized(bits)
            yield Pair(f"{bits} bits", lm, helper, prompts, lambda helper=helper: both(arguments, lm, helper, prompts[0]))
        return
    import benchmarks.round as shapes

    if arguments.device:
        shapes.DEVICE, shapes.CUDA = torch.device(arguments.device), arguments.device.startswith("cuda")
    names = ("tiny", "tiny") if arguments.shapes == "tiny" else ("8b", "1b")
    nets = [shapes.model(name) for name in names]
    size = nets[0].config.vocab_size
    words = shapes.tokenizer(size)
    lm = sg.LM(nets[0], words).load()
    helpers = {kept: sg.LM(nets[1], words, weights=WEIGHTS[kept]).load() for kept in arguments.draft_weights}
    ids = [[1 + (7 * i + 3 * j) % (size - 2) for j in range(arguments.prompt)] for i in range(max(arguments.batch))]
    for acceptance in arguments.acceptance:
        found = laws(len(lm.vocabulary), acceptance)

        def fixed(found: tuple[torch.Tensor, ...] = found) -> tuple[Any, Any, torch.Tensor]:
            made = []
            for net, law in zip(nets, found, strict=True):
                own: Any = copy.deepcopy(net, {id(tensor): tensor for tensor in chain(net.parameters(), net.buffers())})
                own.set_attn_implementation("sdpa")
                own.lm_head = FixedHead(own.lm_head, law, own.lm_head.weight)
                made.append(own)
            return made[0], made[1], torch.tensor([ids[0]], device=shapes.DEVICE)

        base = sg.LM(FixedLaw(lm, found[0]))
        for kept, helper in helpers.items():
            name = f"acceptance {acceptance:g}" + (f", {kept} draft" if WEIGHTS[kept] else "")
            yield Pair(name, base, sg.LM(FixedLaw(helper, found[1])), ids, None if WEIGHTS[kept] else fixed, found)


def speed(lm: sg.LM, prompts: list[Any], arguments: argparse.Namespace, **options: Any) -> dict[str, Any]:
    """Tokens per second of all texts together, and what a round makes."""
    rates, steps, passes, tested = [], [], [], []
    for repeat in range(arguments.repeats + 1):
        posts = sg.sample(lm, prompts, mode="exact", max_tokens=arguments.tokens, seed=repeat, progress=False, **options)
        if repeat or not arguments.repeats:
            assert isinstance(posts, sg.Posteriors)
            rates.append(posts.info["tokens_per_second"])
            steps.append(posts.info["step_seconds"])
            passes += [post.tokens_per_round for post in posts]
            tested += [round for post in posts for rounds in post.rounds for round in rounds]
    judged, accepted = (sum(getattr(round, x) for round in tested) for x in ("judged", "accepted"))
    per_pass, p50 = statistics.mean(passes), statistics.median(s["p50"] for s in steps)
    return {
        "tokens_per_second": statistics.median(rates),
        "steady_tokens_per_second": len(prompts) * per_pass / p50,
        "step_ms": {"p50": 1000 * p50, "p95": 1000 * statistics.median(step["p95"] for step in steps)},
        "tokens_per_pass": per_pass,
        "tokens_per_pass_error": statistics.stdev(passes) / len(passes) ** 0.5 if len(passes) > 1 else None,
        "acceptance": accepted / judged if judged else None,
    }


def both(arguments: argparse.Namespace, lm: sg.LM, helper: sg.LM, prompt: Any) -> tuple[Any, Any, torch.Tensor]:
    """The file's model and a rounded copy as transformers has them, and the token ids of a prompt."""
    from smcgen.lm import gguf

    engine: Any = lm.load()
    net, _ = gguf.load(Path(arguments.model), engine.shape.dtype, with_tokenizer=False)
    net = net.to(engine.device).eval()
    rounded: Any = helper.load()
    assistant = copy.deepcopy(net)
    assistant.load_state_dict(rounded.model.state_dict(), strict=False)
    return net, assistant, torch.tensor([engine.vocabulary.encode(prompt, None).ids], device=engine.device)


def generating(net: Any, assistant: Any, ids: torch.Tensor, tokens: int, block: int) -> Callable[[], float]:
    """A call that generates with transformers, assisted unless `assistant` is None, and returns tokens per second."""
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = block
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = assistant

    def call() -> float:
        began = time.perf_counter()
        made = net.generate(ids, attention_mask=torch.ones_like(ids), **options).shape[1] - ids.shape[1]
        if ids.is_cuda:
            torch.cuda.synchronize()
        return made / (time.perf_counter() - began)

    return call


def recorded(call: Callable[[], object]) -> float:
    """Milliseconds of a call, replayed from a CUDA graph on a GPU."""
    import benchmarks.round as shapes

    if not shapes.CUDA:
        call()
        return shapes.milliseconds(call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return shapes.milliseconds(graph.replay)


@torch.inference_mode()
def parts(pair: Pair, batch: int, block: int, chains: int, tokens: int) -> dict[str, float]:
    """Milliseconds of a round's forwards by themselves, and of its verification by itself."""
    assert pair.laws is not None
    base, draft = pair.lm.load(), pair.helper.load()
    rows, device, size = batch * chains, base.device, len(base.vocabulary)
    prompt = len(pair.prompts[0])
    contexts = [lm.open(batch, chains, prompt, tokens) for lm in (base, draft)]
    for lm, context in zip((base, draft), contexts, strict=True):
        lm.prefill(context, range(batch), [prompt[:-1] for prompt in pair.prompts[:batch]])
    length = contexts[0].length.clone()
    token = torch.ones(rows, block + 1, dtype=torch.int64, device=device)
    counts = [torch.full((rows,), n, dtype=torch.int64, device=device) for n in (1, 2, block + 1)]

    def forwards() -> None:
        draft.extend(contexts[1], token[:, :2], counts[1])  # what it is behind, and the last token
        for _ in range(block - 1):
            draft.extend(contexts[1], token[:, :1], counts[0])
        base.extend(contexts[0], token, counts[2])
        for lm, context in zip((base, draft), contexts, strict=True):
            lm.trim(context, length)

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    p, q = (law.log().clamp(min=-40).to(device, dtype) for law in pair.laws)
    target, drafted = p.expand(batch, chains, block + 1, size).contiguous(), q.expand(batch, chains, block, size).contiguous()
    ids = torch.multinomial(pair.laws[1].to(device), CALLS * rows * block, replacement=True).view(CALLS, batch, chains, block)
    uniform = torch.rand(CALLS, batch, chains, block, dtype=torch.float64, device=device)
    last = torch.rand(CALLS, batch, dtype=torch.float64, device=device)

    def verification() -> None:
        for i in range(CALLS):  # the logits are in the cache, as those that a product has just written
            verify(target, drafted, ids[i], uniform[i], last[i], block=chains == 1)

    return {"forwards_ms": recorded(forwards), "verification_ms": recorded(verification) / CALLS}


def measure(pair: Pair, arguments: argparse.Namespace, add: Callable[..., None]) -> None:
    """All rows of a pair: add(draft, batch, rule, call) measures one."""
    for batch in arguments.batch:
        some = (pair.prompts * batch)[:batch]
        add("none", batch, "plain", lambda some=some: speed(pair.lm, some, arguments))
        for block in arguments.block:
            for chains in arguments.chains:

                def row(some=some, block=block, chains=chains) -> dict[str, Any]:
                    found = {"block": block, "chains": chains}
                    found |= speed(pair.lm, some, arguments, draft=pair.helper, block=block, chains=chains)
                    return found | (parts(pair, len(some), block, chains, 2 * block) if pair.laws else {})

                add(pair.draft, batch, f"exact K={block} M={chains}", row)
    hf = pair.hf
    if 1 in arguments.batch and not arguments.no_transformers and hf is not None:
        for assisted in (False, True):

            def rate(assisted=assisted) -> dict[str, Any]:
                net, assistant, ids = hf()
                call = generating(net, assistant if assisted else None, ids, arguments.tokens, arguments.block[0])
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call()
                    repeats = max(1, arguments.repeats if arguments.model else 1)  # slow, and steady
                    return {"tokens_per_second": statistics.median(call() for _ in range(repeats))}

            draft, rule = (pair.draft, "transformers assisted") if assisted else ("none", "transformers plain")
            add(draft, 1, rule, rate)


def bars(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What was asked for, and whether it is there."""
    for row in rows:
        if row["draft"].split(",")[0] == "acceptance 0.75" and row["batch"] == 1 and row.get("block") == 4:
            wanted, share = BARS.get(row["chains"]), row["verification_ms"] / row["step_ms"]["p50"]
            if wanted is not None:
                met = "met" if row["speedup"] >= wanted else "MISSED"
                yield f"{row['draft']}, K=4, M={row['chains']}: {row['speedup']:.2f} times plain, {wanted} wanted: {met}"
            met, most = "met" if share <= MOST_VERIFICATION else "MISSED", f"{MOST_VERIFICATION:.0%}"
            yield f"{row['draft']}, K=4, M={row['chains']}: verification {share:.1%} of a round, {most} wanted at most: {met}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 5, 8])
    parser.add_argument("--shapes", choices=["8b", "tiny"])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.75])
    parser.add_argument("--draft-weights", choices=WEIGHTS, nargs="+", default=["given"], help="with --shapes")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--dtype", help="with --model; default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--block", type=int, nargs="+", default=[4])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=256, help="tokens, with --shapes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--minutes", type=float, default=8, help="begin no row after so long")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.shapes is None):
        parser.error("give --model or --shapes")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    began = time.perf_counter()
    cuda = arguments.device != "cpu" and torch.cuda.is_available()
    head = about(arguments.device) | {
        "what": Path(arguments.model).name if arguments.model else f"random weights, shapes {arguments.shapes}",
        "tokens": arguments.tokens,
        "prompt": arguments.prompt if arguments.shapes else None,
        "dtype": arguments.dtype or ("bfloat16" if cuda else "float32"),
        "judged_by": "kernels.verify" if ("cuda" if cuda else "cpu") in judged.DEVICES else "proposals.lenient",
    }
    name = "model" if arguments.model else arguments.shapes
    output = arguments.output or ROOT / f"results/exact_{name}_{'cuda' if cuda else 'cpu'}.json"
    old = json.loads(output.read_text()) if output.exists() else {}
    rows: list[dict[str, Any]] = old["rows"] if same(old, head) else []
    line = f"{'draft':28} {'batch':>5} {'rule':>22} {'tokens/s':>9} {'steady':>9} {'times plain':>11} {'tokens/pass':>11}"
    print(f"{line} {'accepted':>8} {'ms':>7} {'forwards':>8} {'verified':>8}")

    def add(draft: str, batch: int, rule: str, call: Callable[[], dict[str, Any]]) -> None:
        """Measures a row unless it is there, and shows it."""
        row = next((r for r in rows if (r["draft"], r["batch"], r["rule"]) == (draft, batch, rule)), None)
        if row is None:
            if time.perf_counter() - began > 60 * arguments.minutes:
                raise TimeoutError("time is up: call again for the rest")
            found = call()
            found.setdefault("steady_tokens_per_second", found["tokens_per_second"])
            plain = next((r for r in rows if (r["rule"], r["batch"]) == ("plain", batch)), found)
            times = found["steady_tokens_per_second"] / plain["steady_tokens_per_second"]
            row = {"draft": draft, "batch": batch, "rule": rule, "speedup": times, **found}
            rows.append(row)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
        cells = [row.get("tokens_per_pass"), row.get("acceptance"), row.get("step_ms", {}).get("p50")]
        cells += [row.get("forwards_ms"), row.get("verification_ms")]
        shown = [("" if x is None else f"{x:{f}}") for x, f in zip(cells, (".2f", ".3f", ".2f", ".2f", ".3f"), strict=True)]
        speeds = f"{row['tokens_per_second']:9.1f} {row['steady_tokens_per_second']:9.1f} {row['speedup']:11.2f}"
        line = f"{draft:28} {batch:5} {rule:>22} {speeds} {shown[0]:>11} {shown[1]:>8}"
        print(line, *(f"{cell:>{w}}" for cell, w in zip(shown[2:], (7, 8, 8), strict=True)), flush=True)

    try:
        for pair in pairs(arguments):
            measure(pair, arguments, add)
    except TimeoutError as stop:
        print(stop)
    print("\n".join(bars(rows)))


if __name__ == "__main__":
    main()
