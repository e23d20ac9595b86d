"""Makes the pair that ships inside the package, stage by stage; a finished stage is skipped on the next run.

    python -m benchmarks.train_tiny.run --work WORK --gguf SmolLM2-135M-Instruct.Q4_1.gguf --gsm8k gsm8k_train.jsonl

Stages, each under nine minutes on one H200, in this order:

    texts      SmolLM2 writes answers and scenes           WORK/texts.jsonl
    tokens     documents, tokenizer, training windows      WORK/tokenizer, WORK/train.npy, WORK/held_out.json
    base       trains the base model                       WORK/tiny
    draft      distils three drafts, keeps the best        WORK/tiny-draft, WORK/drafts
    evaluate   perplexity, accuracy                        WORK/results.json
    overlap    counts evaluation prompts seen in training  WORK/results.json
    export     copies the pair                             EXPORT/tiny, EXPORT/tiny-draft (with --export)

`--smoke` runs all of it with tiny sizes on the CPU in about two minutes. Without `--gguf` (smoke only) the texts are
those of the generators alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.train_tiny import data, distill, evaluate, tasks, train
from benchmarks.train_tiny.generate import generate
from benchmarks.train_tiny.llama import Llama, Shape, load_folder, save_folder
from benchmarks.train_tiny.teacher import Teacher, Text, sample_texts

STAGES = ("texts", "tokens", "base", "draft", "evaluate", "overlap", "export")
END_TOKENS = (data.END_OF_TEXT, data.END)


@dataclass(frozen=True)
class Sizes:
    """All that differs between the run of record and the smoke run.

    The run of record fixed its steps from minutes (6.2 and 1.5, measured over early steps); here they are numbers.
    """

    teacher_rows: int = 12_288
    teacher_batches: int = 1000
    teacher_seconds: float = 210.0
    vocab_size: int = 4096
    stories: int = 90_000
    tasks: int = 450_000
    base_steps: int | None = 18_612
    base_minutes: float = 6.5
    base_rows: int = 128
    draft_steps: int | None = 2_818
    draft_minutes: float = 2.0
    draft_rows: int = 96
    own_samples: int = 160_000
    own_rows: int = 16_384
    per_kind: int = 40
    items: int = 600


SMOKE = Sizes(
    teacher_rows=4,
    teacher_batches=2,
    vocab_size=512,
    stories=150,
    tasks=600,
    base_steps=12,
    base_rows=4,
    draft_steps=6,
    draft_rows=4,
    own_samples=16,
    own_rows=16,
    per_kind=2,
    items=6,
)
SMOKE_BASE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMOKE_DRAFT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


class Run:
    """The stages over one work folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work, self.device = options, Path(options.work), torch.device(options.device)
        self.sizes = SMOKE if options.smoke else Sizes()
        overrides = {"base_minutes": options.base_minutes, "draft_minutes": options.draft_minutes}
        overrides |= {"teacher_seconds": options.teacher_seconds}
        overrides |= {"base_steps": options.base_steps, "draft_steps": options.draft_steps}
        for name in ("base", "draft"):  # minutes asked for replace the number of steps
            if overrides[f"{name}_minutes"] is not None:
                self.sizes = replace(self.sizes, **{f"{name}_steps": None})
        given = {name: value for name, value in overrides.items() if value is not None}
        self.sizes = replace(self.sizes, **given)
        self.work.mkdir(parents=True, exist_ok=True)
        self.start = time.perf_counter()

    def log(self, line: str) -> None:
        line = f"[{time.perf_counter() - self.start:7.1f} s] {line}"
        print(line, flush=True)
        with (self.work / "log.txt").open("a") as file:
            file.write(line + "\n")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(self.work / "tokenizer")

    def end_ids(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        return [tokenizer.convert_tokens_to_ids(token) for token in END_TOKENS]

    def shape(self, shape: Shape, smoke: dict[str, int]) -> Shape:
        return replace(shape, **smoke) if self.options.smoke else shape

    def note(self, name: str, facts: object) -> None:
        """Adds facts to WORK/results.json under the name."""
        path = self.work / "results.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        found[name] = facts
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else "none"
        found.setdefault("machines", {})[name] = {
            "gpu": gpu,
            "cpu": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        path.write_text(json.dumps(found, indent=1) + "\n")

    def save(self, model: Llama, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        save_folder(model, folder, end_ids=self.end_ids(tokenizer), pad_id=tokenizer.pad_token_id)
        tokenizer.save_pretrained(folder)

    def texts(self) -> None:
        path = self.work / "texts.jsonl"
        if path.exists():
            return
        partial, kept = path.with_suffix(".partial"), {"answer": 0, "scene": 0}
        with partial.open("w") as file:
            if self.options.gguf:
                sizes = self.sizes
                teacher = Teacher(self.options.gguf, self.device)
                self.log("SmolLM2 is loaded")
                for texts, line in sample_texts(
                    teacher,
                    rows=sizes.teacher_rows,
                    batches=sizes.teacher_batches,
                    seconds=sizes.teacher_seconds,
                    seed=self.options.seed,
                    device=self.device,
                ):
                    self.log(line)
                    for text in texts:
                        kept[text.kind] += 1
                        file.write(json.dumps(text) + "\n")
        partial.rename(path)
        self.note("texts", kept)

    def tokens(self) -> None:
        if (self.work / "held_out.json").exists():
            return
        sampled = [Text(*json.loads(line)) for line in (self.work / "texts.jsonl").open()]
        gsm8k = data.gsm8k_texts(self.options.gsm8k) if self.options.gsm8k else []
        sizes = self.sizes
        line = data.write_tokens(
            self.work,
            sampled,
            gsm8k,
            vocab_size=sizes.vocab_size,
            stories_count=sizes.stories,
            tasks_count=sizes.tasks,
            seed=self.options.seed,
        )
        self.log(line)
        self.note("tokens", line)

    def base(self) -> None:
        if (self.work / "tiny" / "config.json").exists():
            return
        tokenizer, sizes = self.tokenizer(), self.sizes
        model, facts = train.train_base(
            np.load(self.work / "train.npy"),
            len(tokenizer),
            shape=self.shape(train.base_shape(len(tokenizer)), SMOKE_BASE),
            device=self.device,
            steps=sizes.base_steps,
            minutes=sizes.base_minutes,
            rows=sizes.base_rows,
            learning_rate=3e-3,
            seed=self.options.seed,
            checkpoint=self.work / "base.pt",
            log=self.log,
        )
        self.note("base", facts)
        self.save(model, self.work / "tiny", tokenizer)

    def own_samples(self, base: Llama, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
        """Whole documents by the base model after task prompts, questions and story openings."""
        sizes, rng = self.sizes, random.Random(self.options.seed)
        asked = [json.loads(line) for line in (self.work / "texts.jsonl").open()]
        questions = [data.chat_prompt(item[1]) for item in asked if item[0] == "answer"]
        prompts = data.story_prompts(rng, sizes.own_samples // 3)
        prompts += [data.chat_prompt(tasks.training_example(rng).prompt) for _ in range(sizes.own_samples // 3)]
        prompts += rng.sample(questions, min(len(questions), sizes.own_samples // 3))
        ids = sorted(data.encode(tokenizer, prompts), key=len)
        generator, written = torch.Generator(self.device).manual_seed(self.options.seed), []
        for start in range(0, len(ids), sizes.own_rows):
            chunk = ids[start : start + sizes.own_rows]
            answers = generate(base, chunk, max_tokens=256, end_ids=self.end_ids(tokenizer), generator=generator)
            written += [prompt + answer for prompt, answer in zip(chunk, answers, strict=True)]
        rng.shuffle(written)
        return written

    def draft(self) -> None:
        if (self.work / "tiny-draft" / "config.json").exists():
            return
        tokenizer, sizes = self.tokenizer(), self.sizes
        ends, half = self.end_ids(tokenizer), torch.bfloat16 if self.device.type == "cuda" else torch.float32
        base = load_folder(self.work / "tiny", self.device, half)
        own = data.pack(self.own_samples(base, tokenizer))
        self.log(f"the base model wrote {own.size / 1e6:.2f} M tokens")
        given = np.load(self.work / "train.npy")
        chosen = np.random.default_rng(self.options.seed).permutation(len(given))[: len(own)]
        drafts, facts = distill.distil(
            base,
            np.concatenate([own, given[chosen]]),
            shape=self.shape(train.draft_shape(len(tokenizer)), SMOKE_DRAFT),
            device=self.device,
            steps=sizes.draft_steps,
            minutes=sizes.draft_minutes,
            rows=sizes.draft_rows,
            learning_rate=4e-3,
            seed=self.options.seed,
            log=self.log,
        )
        for name, model in drafts.items():
            self.save(model, self.work / "drafts" / name, tokenizer)
        # What is judged is what ships: the folders' bf16 weights.
        drafts = {name: load_folder(self.work / "drafts" / name, self.device) for name in drafts}
        table = evaluate.draft_quality(
            load_folder(self.work / "tiny", self.device),
            drafts,
            tokenizer,
            data.read_held_out(self.work / "held_out.json"),
            per_kind=sizes.per_kind,
            end_ids=ends,
            seed=self.options.seed,
        )
        best = max(table, key=lambda name: table[name]["ess_share_8"]["mean"])
        self.note("draft", facts | {"own_tokens": own.size, "kept": best, "objectives": table})
        self.log(f"kept {best}")
        shutil.copytree(self.work / "drafts" / best, self.work / "tiny-draft")

    def evaluate(self) -> None:
        tokenizer, sizes, seed = self.tokenizer(), self.sizes, self.options.seed + 1
        base = load_folder(self.work / "tiny", self.device)
        draft = load_folder(self.work / "tiny-draft", self.device)
        ends, held = self.end_ids(tokenizer), data.read_held_out(self.work / "held_out.json")
        self.note(
            "perplexity",
            {
                "base": evaluate.perplexity(base, tokenizer, held),
                "draft": evaluate.perplexity(draft, tokenizer, held),
            },
        )
        found = {}
        for name, (generators, max_tokens) in tasks.EVALUATION.items():
            examples = tasks.evaluation_set(generators, sizes.items, seed)
            found[name] = evaluate.accuracy(base, tokenizer, examples, max_tokens=max_tokens, end_ids=ends, seed=seed)
            self.log(f"{name}: greedy {found[name]['greedy']['mean']:.3f}")
        self.note("accuracy", found)

    def overlap(self) -> None:
        tokenizer, windows, seed = self.tokenizer(), np.load(self.work / "train.npy"), self.options.seed + 1
        found = {}
        for name, (generators, _) in tasks.EVALUATION.items():
            examples = tasks.evaluation_set(generators, self.sizes.items, seed)
            found[name] = {"items": len(examples), "seen": evaluate.occurrences(tokenizer, examples, windows)}
        self.log(f"evaluation prompts that stand in the training windows: {found}")
        self.note("overlap", found)

    def export(self) -> None:
        """Copies the pair to its place in the package, without what a tokenizer folder says about its own loading."""
        if self.options.export is None:
            return
        for name in ("tiny", "tiny-draft"):
            folder = Path(self.options.export) / name
            shutil.copytree(self.work / name, folder, dirs_exist_ok=True)
            path = folder / "tokenizer_config.json"
            settings = json.loads(path.read_text())
            kept = {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only")}
            path.write_text(json.dumps(kept, indent=2) + "\n")
            for file in folder.iterdir():
                file.chmod(0o644)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="folder for everything the stages write")
    parser.add_argument("--gguf", help="SmolLM2-135M-Instruct as a GGUF file")
    parser.add_argument("--gsm8k", help="GSM8K training problems, one JSON object a line")
    parser.add_argument("--export", help="folder for the finished pair, e.g. smcgen/models")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--teacher-seconds", type=float)
    parser.add_argument("--base-minutes", type=float)
    parser.add_argument("--draft-minutes", type=float)
    parser.add_argument("--base-steps", type=int, help="a fixed number instead of what fits the minutes")
    parser.add_argument("--draft-steps", type=int)
    options = parser.parse_args(arguments)
    if not options.smoke and not (options.gguf and options.gsm8k):
        parser.error("--gguf and --gsm8k are needed (or --smoke)")
    if options.smoke:
        torch.set_num_threads(1)
    # The cached step has a new length at every position, for which cuDNN would build a new plan each time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    run = Run(options)
    for stage in options.stages:
        run.log(f"stage {stage}")
        getattr(run, stage)()


if __name__ == "__main__":
    main()
