"""From texts to packed windows: the documents, the tokenizer, the training windows and the held-out documents.

A window holds WINDOW + 1 tokens and always begins with the beginning of a document, as a user's prompt does; documents
follow one another without padding, and the last one is cut.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.train_tiny import stories, tasks
from benchmarks.train_tiny.teacher import Text, story_wish

WINDOW = 512
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GSM8K_COPIES = 6
STORY_REQUESTS = ["Write a short story about {}.", "Tell me a story about {}.", "I would like a story about {}."]
SYSTEM_MESSAGES = ["You are a helpful assistant.", "Answer in short, simple sentences."]


def chat_prompt(prompt: str, system: str | None = None) -> str:
    """The text of one user turn as the chat template writes it, up to the answer."""
    head = f"{START}system\n{system}{END}\n" if system else ""
    return f"{head}{START}user\n{prompt}{END}\n{START}assistant\n"


def document(text: Text) -> str:
    """The text as the model sees it, its end token included."""
    return f"{text.text}{END_OF_TEXT}" if text.prompt is None else f"{chat_prompt(text.prompt)}{text.text}{END}"


def gsm8k_texts(path: str | Path) -> list[Text]:
    """GSM8K problems with their worked answers, the calculator marks taken out."""
    texts = []
    for line in Path(path).read_text().splitlines():
        item = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", item["answer"]).replace("\n#### ", "\nThe answer is ") + "."
        if answer.isascii() and item["question"].isascii():
            texts.append(Text("gsm8k", item["question"], answer))
    return texts


def is_held_out(text: Text) -> bool:
    """Two in a hundred prompts (or plain texts) are for evaluation."""
    return zlib.crc32((text.prompt or text.text).encode()) % 50 == 0


def _story_documents(rng: random.Random, count: int) -> list[tuple[Text, str]]:
    made = []
    for _ in range(count):
        about, text = stories.story(rng)
        prompt = rng.choice(STORY_REQUESTS).format(about) if rng.random() < 0.4 else None
        story = Text("story", prompt, text)
        made.append((story, document(story)))
    return made


def _task_documents(rng: random.Random, count: int) -> list[str]:
    made = []
    for _ in range(count):
        example = tasks.training_example(rng)
        system = rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.05 else None
        turns = chat_prompt(example.prompt, system) + example.answer + END
        while rng.random() < 0.15:
            example = tasks.training_example(rng)
            turns += "\n" + chat_prompt(example.prompt) + example.answer + END
        made.append(turns)
    return made


def build_documents(
    sampled: list[Text], gsm8k: list[Text], *, stories_count: int, tasks_count: int, seed: int
) -> tuple[list[str], dict[str, list[Text]]]:
    """Shuffled training documents, and the held-out texts by kind (at most 400 of each)."""
    rng = random.Random(seed)
    held: dict[str, list[Text]] = {}
    training: list[str] = []
    seen: set[str] = set()
    for text in sampled:
        if text.text in seen:
            continue
        seen.add(text.text)
        if text.kind == "scene" and rng.random() < 0.5:
            chosen = Text(text.kind, None, text.text)
        else:
            chosen = text
        (held.setdefault(text.kind, []) if is_held_out(text) else training).append(
            chosen if is_held_out(text) else document(chosen)
        )
    for story, written in _story_documents(rng, stories_count):
        if is_held_out(story):
            held.setdefault("story", []).append(story)
        else:
            training.append(written)
    for text in gsm8k:
        if is_held_out(text):
            held.setdefault("gsm8k", []).append(text)
        else:
            training.extend([document(text)] * GSM8K_COPIES)
    training.extend(_task_documents(rng, tasks_count))
    for generator, _ in tasks.MIX:
        examples = tasks.evaluation_set((generator,), 40 if generator is tasks.one_digit else 100, seed)
        for example in examples:
            held.setdefault(example.task.rsplit("_", 1)[0] if example.task[-1].isdigit() else example.task, []).append(
                Text(example.task, example.prompt, example.answer)
            )
    rng.shuffle(training)
    return training, {kind: texts[:400] for kind, texts in held.items()}


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits. The alphabet is all 256 bytes, so any text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, START, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=WINDOW,
        model_input_names=["input_ids", "attention_mask"],
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Token ids of each text; special tokens written in the text count as such."""
    return [item.ids for item in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def pack(sequences: list[list[int]]) -> np.ndarray:
    """Windows uint16 [n, WINDOW + 1], each beginning with the beginning of a sequence; a short last one is dropped."""
    windows, current = [], []
    for sequence in sequences:
        current.extend(sequence)
        if len(current) > WINDOW:
            windows.append(np.array(current[: WINDOW + 1], np.uint16))
            current = []
    return np.stack(windows)


def write_tokens(
    folder: Path,
    sampled: list[Text],
    gsm8k: list[Text],
    *,
    vocab_size: int,
    stories_count: int,
    tasks_count: int,
    seed: int,
) -> str:
    """Writes tokenizer/, train.npy and held_out.json into the folder; returns a line for the log."""
    training, held = build_documents(sampled, gsm8k, stories_count=stories_count, tasks_count=tasks_count, seed=seed)
    # A share of the documents is enough for the merges.
    tokenizer = train_tokenizer(training[:150_000], vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    windows = pack(
        [ids for start in range(0, len(training), 50_000) for ids in encode(tokenizer, training[start : start + 50_000])]
    )
    np.save(folder / "train.npy", windows)
    (folder / "held_out.json").write_text(json.dumps({kind: [list(text) for text in texts] for kind, texts in held.items()}))
    size = f"{len(windows)} windows, {windows.size / 1e6:.1f} M tokens"
    return f"{len(training)} documents, {size}, {len(tokenizer)} in the vocabulary"


def story_prompts(rng: random.Random, count: int) -> list[str]:
    """Beginnings for sampling from the base model: requests for stories and plain openings."""
    prompts = []
    for _ in range(count):
        if rng.random() < 0.5:
            prompts.append(chat_prompt(rng.choice(STORY_REQUESTS).format(story_wish(rng))))
        else:
            prompts.append(" ".join(stories.story(rng)[1].split(" ")[: rng.randrange(1, 8)]))
    return prompts


def read_held_out(path: Path) -> dict[str, list[Text]]:
    return {kind: [Text(*item) for item in items] for kind, items in json.loads(path.read_text()).items()}
