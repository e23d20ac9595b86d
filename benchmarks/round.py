"""Speed of whole rounds on a GPU: a large model with a small draft, random weights of real shapes, through `smcgen.sample`.

    python -m benchmarks.round [--only base,prompts,...] [-o benchmarks/results/round.json]
    python -m benchmarks.round --tiny        tiny shapes, also without a GPU, to see that everything runs

Around N = 8 particles, K = 8 drafted tokens, a prompt of 256 tokens and one group, one number is varied at a time. "roofline"
(`fraction_of_copy`) is the time that the weights read in a round take at the bandwidth of a large copy, measured in the same
run, over the time of the round. Rows that are in the file already, from the same machine and versions, are kept, so that a run
that was cut off goes on. Tokens per second count the tokens of one particle, as a user gets them. Rows under conditions have
the same round without one beside them (`unconstrained_milliseconds`, `of_unconstrained`: the ratio of tokens per second), and
what the host did in potentials for each round (`host_milliseconds`).

Rounds of one group and the usual prompt have `times_plain`, its tokens per second over those of plain decoding, and where K
alone is varied, `formula`: (K + 1) / (rho K + 1), what that would be if drafting and reading a token together cost rho plain
forwards and nothing else were to pay. rho is measured as the growth of a round from the smallest K to the largest.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import smcgen as sg
from benchmarks.about import about, same

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LLAMA: dict[str, Any] = {"max_position_embeddings": 32768, "eos_token_id": None, "bos_token_id": None}
SHAPES = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
}
BASE = {"particles": 8, "block": 8, "prompt": 256, "groups": 1}
VARIED = {
    "base": [{}],
    "particles": [{"particles": 4}, {"particles": 16}],
    "block": [{"block": 4}, {"block": 16}],
    "prompts": [{"prompt": 1024}, {"prompt": 4096}, {"prompt": 16384}],
    "groups": [{"groups": 4}, {"groups": 16}],
}
ROUNDS = 14
# One JSON text a line, without end: the texts that a model of random weights writes must not come to theirs.
JSON = """
start: (value "\\n")+
?value: object | array | ESCAPED_STRING | SIGNED_NUMBER | "true" | "false" | "null"
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: ESCAPED_STRING ":" value
%import common (ESCAPED_STRING, SIGNED_NUMBER, WS_INLINE)
%ignore WS_INLINE
"""
CONDITIONS: dict[str, Callable[[], sg.Potential]] = {
    "JSON grammar (host)": lambda: sg.lark(JSON),
    "avoids two strings (tables)": lambda: sg.avoids("@@", "free of charge"),
}


def model(shape: str) -> LlamaForCausalLM:
    """A Llama of random weights on the device."""
    config = LlamaConfig(rope_theta=5e5, **SHAPES[shape], **LLAMA)
    kind = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if CUDA else torch.float32)
    try:
        with DEVICE:
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(kind)


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A vocabulary of `size` byte strings: all bytes, what JSON is made of, numbers, and random words."""
    letters = dict(zip(range(256), _byte_letters(), strict=True))
    random.seed(0)
    pieces = [bytes([b]) for b in range(256)]
    pieces += [a + b for a in (b"", b" ", b"[", b"{", b", ", b": ") for b in (b'"', b'":', b'",', b'"}', b'"]', b"[", b"{")]
    pieces += [b"true", b"false", b"null", b"},", b"],", b"}}", b"]]", b", ", b": ", b"\n ", *(b"%d" % n for n in range(1000))]
    words = dict.fromkeys(pieces[:size])
    while len(words) < size:
        word = "".join(random.choices("etaoinshrdlucmfwypvbgk", k=random.randint(2, 9)))
        words[(" " * random.randint(0, 1) + word).encode()] = None
    ids = {"".join(letters[b] for b in word): i for i, word in enumerate(words)}
    backend = Tokenizer(BPE(ids, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself if it can be seen, else one beyond them all."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    letters = [chr(b if b in seen else next(hidden)) for b in range(256)]
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters


def read_bytes(shape: str, net: LlamaForCausalLM) -> int:
    """Weights that one forward reads; of an embedding that is not the output matrix as well, next to nothing."""
    weights = {id(p): p for p in net.parameters()}
    total = sum(p.numel() * p.element_size() for p in weights.values())
    embedding = net.get_input_embeddings().weight
    return total - (0 if net.config.tie_word_embeddings else embedding.numel() * embedding.element_size())


def copy_bandwidth() -> float:
    """Bytes per second that a large copy on the device moves, read and written."""
    if not CUDA:
        return 1e10
    a = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / milliseconds(lambda: b.copy_(a)) * 1e3


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    if not CUDA:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


class Bench:
    def __init__(self, tiny: bool):
        self.names = ("tiny", "tiny") if tiny else ("8b", "1b")
        self.tiny = tiny
        self.nets = [model(name) for name in self.names]
        self.words = tokenizer(self.nets[0].config.vocab_size)
        self.lms = [sg.LM(net, self.words) for net in self.nets]
        self.bytes = [read_bytes(name, net) for name, net in zip(self.names, self.nets, strict=True)]
        self.rounded = sg.LM(self.nets[1], self.words, weights="int8")  # a byte for each weight
        self.bytes_rounded = self.bytes[1] // next(self.nets[1].parameters()).element_size()
        self.bandwidth = copy_bandwidth()
        self.vocabulary = self.nets[0].config.vocab_size

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, self.vocabulary - 5, (length,), generator=generator).tolist()

    def round(
        self,
        particles: int,
        block: int,
        prompt: int,
        groups: int,
        condition: sg.Potential | None = None,
        times: int = 1,
        **options: Any,
    ) -> dict[str, Any]:
        """SMC with every drafted token kept, unless `options` say otherwise; the usual number of rounds, so many times."""
        options = {"leniency": float("inf"), "draft": self.lms[1], "block": block, **options}
        drafted = options["draft"] is not None
        tokens = times * (ROUNDS * (block + 1) if drafted else 64)
        if options["draft"] is None:
            options = {k: v for k, v in options.items() if k not in ("draft", "block", "leniency")}
        prompts = [self.prompt(20 if self.tiny else prompt, seed) for seed in range(groups)]
        begin = time.perf_counter()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        target = self.lms[0] ** 1.0
        posts = sg.sample(
            target if condition is None else target * condition,
            prompts,
            particles=particles,
            max_tokens=tokens,
            seed=0,
            groups=groups,
            progress=False,
            **options,
        )
        post = posts if hasattr(posts, "info") else posts[0]
        seconds = post.info["step_seconds"]["p50"]
        gained = post.info["tokens"] / (groups * particles) / post.info["rounds"]
        bytes_of_draft = self.bytes_rounded if options.get("draft") is self.rounded else self.bytes[1]
        read = self.bytes[0] + (block * bytes_of_draft if drafted else 0)
        return {
            "milliseconds": seconds * 1e3,
            "rounds": post.info["rounds"],
            "tokens_a_round": gained,
            "tokens_per_second": groups * gained / seconds,
            "bytes": read,
            "cuda_graph": post.info["cuda_graph"],
            "graphs_a_round": post.info["graphs_a_round"],
            "host_milliseconds": post.info["potential_seconds"] / post.info["rounds"] * 1e3,
            "whole_call_seconds": time.perf_counter() - begin,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0,
        }

    def condition(self, name: str, **setting: Any) -> dict[str, Any]:
        """A round under a condition, and the same without it just before."""
        plain = self.round(**setting)
        limited = self.round(**setting, condition=CONDITIONS[name]())
        return limited | {
            "unconstrained_milliseconds": plain["milliseconds"],
            "of_unconstrained": limited["tokens_per_second"] / plain["tokens_per_second"],
        }

    def rows(self) -> Iterator[tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]]:
        """(section, what it is, measurement)."""
        for section, changes in VARIED.items():
            for change in changes:
                setting = BASE | change
                yield section, {"what": "round", **setting}, lambda s=setting: self.round(**s)
        for length in (256, 4096):
            setting = BASE | {"particles": 1, "prompt": length}
            yield "plain", {"what": "plain decoding, one row", **setting}, lambda s=setting: self.round(**s, draft=None)
        setting = BASE | {}
        yield "plain", {"what": "plain decoding, 8 rows", **setting}, lambda s=setting: self.round(**s, draft=None)
        yield "modes", {"what": "leniency 2", **BASE}, lambda: self.round(**BASE, leniency=2.0)
        if CUDA:
            yield "modes", {"what": "int8 draft", **BASE}, lambda: self.round(**BASE, draft=self.rounded)
        one = BASE | {"particles": 1, "block": 4}
        yield "modes", {"what": "lossless, 1 chain", **one}, lambda: self.round(**one, leniency=1.0)
        for name in CONDITIONS:
            yield "conditions", {"what": name, **BASE}, lambda name=name: self.condition(name, **BASE)
            yield (
                "conditions",
                {"what": f"{name}, leniency 2", **BASE},
                lambda name=name: self.condition(name, **BASE, leniency=2.0),
            )
        yield "transformers", {"what": "generate, eager"}, lambda: self.generate(16)
        yield "transformers", {"what": "generate, assisted"}, lambda: self.generate(32, assistant_model=self.nets[1])
        if CUDA:
            yield "transformers", {"what": "generate, static cache, compiled"}, self.compiled

    def generate(self, tokens: int, **options: Any) -> dict[str, Any]:
        """transformers as it comes, batch 1."""
        for net in self.nets:
            net.set_attn_implementation("sdpa")
        ids = torch.tensor([self.prompt(20 if self.tiny else 256)], device=DEVICE)

        def run(count: int) -> float:
            if CUDA:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            out = self.nets[0].generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, min_new_tokens=count, max_new_tokens=count,
                pad_token_id=0, **options,
            )  # fmt: skip
            assert out.shape[1] == ids.shape[1] + count
            if CUDA:
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        run(2 * tokens)  # the longer one first: a static cache that has to grow is compiled for anew
        seconds = run(2 * tokens) - run(tokens)  # without the prompt
        return {"milliseconds": seconds / tokens * 1e3, "tokens_per_second": tokens / seconds, "bytes": self.bytes[0]}

    def compiled(self) -> dict[str, Any]:
        return self.generate(64, cache_implementation="static")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help=f"of {', '.join([*VARIED, 'plain', 'modes', 'conditions', 'transformers'])}")
    parser.add_argument("--minutes", type=float, default=8, help="begin no row after so long")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    head = about(DEVICE)
    old = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    kept = [row for row in old.get("rows", []) if "failed" not in row] if same(old, head) else []
    bench = Bench(args.tiny or not CUDA)
    result = head | {"copy_bandwidth": bench.bandwidth, "rows": kept}
    wanted = set(filter(None, args.only.split(",")))
    for section, what, measure in bench.rows():
        done = any(all(row.get(k) == v for k, v in what.items()) for row in kept)
        if (wanted and section not in wanted) or done or time.perf_counter() - began > 60 * args.minutes:
            continue
        try:
            row: dict[str, Any] = what | measure()
        except Exception as error:  # one row that fails does not cost the others
            row = what | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        row["fraction_of_copy"] = row["bytes"] / bench.bandwidth / (row["milliseconds"] / 1e3) if "bytes" in row else None
        kept.append(row)
        compare(kept)
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    table(kept)


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds `times_plain` and `formula` to rounds, once the rows that they need are there."""
    plain = next((row for row in rows if row["what"] == "plain decoding, one row" and row["prompt"] == BASE["prompt"]), None)
    if plain is None or "failed" in plain:
        return
    alike = {key: BASE[key] for key in ("prompt", "groups")}
    rounds = [row for row in rows if row["what"] == "round" and "failed" not in row and row | alike == row]
    for row in rounds:
        row["times_plain"] = row["tokens_per_second"] / plain["tokens_per_second"]
    of_as_many = (row for row in rounds if row["particles"] == BASE["particles"])
    by_block = sorted(of_as_many, key=lambda row: row["block"])
    if len(by_block) > 1:
        first, last = by_block[0], by_block[-1]
        rho = (last["milliseconds"] - first["milliseconds"]) / (last["block"] - first["block"]) / plain["milliseconds"]
        for row in by_block:
            row["formula"] = (row["block"] + 1) / (rho * row["block"] + 1)


def table(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'':34}{'N':>4}{'K':>4}{'prompt':>8}{'groups':>8}{'ms':>9}{'tokens/s':>10}{'roofline':>10}")
    for row in rows:
        if "failed" not in row:
            numbers = "".join(
                f"{row.get(k, ''):>{w}}" for k, w in (("particles", 4), ("block", 4), ("prompt", 8), ("groups", 8))
            )
            speed = f"{row['milliseconds']:9.2f}{row['tokens_per_second']:10.1f}{row['fraction_of_copy']:10.2f}"
            beside = f"  {row['of_unconstrained']:.3f} of the unconstrained" if "of_unconstrained" in row else ""
            beside += f"  {row['times_plain']:.2f} times plain" if "times_plain" in row else ""
            beside += f", {row['formula']:.2f} by the formula" if "formula" in row else ""
            print(f"{row['what']:34}{numbers}{speed}{beside}")


if __name__ == "__main__":
    main()
