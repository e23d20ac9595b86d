"""Text from SmolLM2-135M-Instruct (Apache-2.0): what it is asked, the examples that set the tone, the filter.

The model is small: asked plainly it rambles, and its longer stories go in circles. Shown two short answers it keeps to
their length and words, so it is asked for short answers to everyday questions and for scenes of two or three sentences.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.train_tiny import stories, words
from benchmarks.train_tiny.generate import generate
from benchmarks.train_tiny.gguf import digit_bpe_tokenizer, llama_config, llama_weights, read_gguf
from benchmarks.train_tiny.llama import Llama, Shape


class Text(NamedTuple):
    """A document: `prompt` is None for plain text."""

    kind: str
    prompt: str | None
    text: str


ANSWER_EXAMPLES = [
    ("What is a kettle used for?", "A kettle is used to boil water. People often use it to make tea or coffee."),
    (
        "Why do leaves fall in autumn?",
        "In autumn there is less light and it gets cold. Trees drop their leaves to save water and energy for the winter.",
    ),
    (
        "How do I peel an orange?",
        "Make a small cut in the skin with your thumb. Then pull the skin off piece by piece.",
    ),
    ("What do camels eat?", "Camels eat grass, leaves and thorny plants. They can go a long time without water."),
    (
        "Tell me one fact about bridges.",
        "Bridges help people cross rivers and roads. Some bridges can open so that ships can pass.",
    ),
    (
        "What does a postman do?",
        "A postman brings letters and parcels to people. He walks or drives from house to house every day.",
    ),
    ("Why should I wear a helmet?", "A helmet protects your head if you fall. Wear it every time you ride a bike."),
    (
        "Describe a beach in two sentences.",
        "The sand is warm, and the waves roll in one after another. Children build castles while the gulls cry above them.",
    ),
    (
        "Where do squirrels live?",
        "Squirrels live in trees in forests and parks. They build nests out of twigs and leaves.",
    ),
    (
        "Give me one tip to sleep better.",
        "Go to bed at the same time every night. Keep the room dark and quiet, and put your phone away.",
    ),
]
SCENE_EXAMPLES = [
    (
        "Write two sentences about a fox and a kite.",
        "The little fox ran over the hill with her kite. When the wind took it, she laughed and ran even faster.",
    ),
    (
        "Write three sentences about an old sailor who lives by the lake.",
        "The old sailor lives in a small house by the lake. Every evening he lights a lamp and looks at the water. "
        "The children like to sit with him and hear about the sea.",
    ),
    (
        "Write two sentences about a baker and a lost key.",
        "The baker looked for his key in every bag of flour. At last he found it inside a loaf of warm bread.",
    ),
    (
        "Write three sentences about a girl named Anna and a goat.",
        "Anna wanted to brush the goat, but the goat wanted to eat the brush. They ran around the yard three times. "
        "In the end Anna gave the goat a carrot, and it stood still.",
    ),
    (
        "Write two sentences about a rainy day in the village.",
        "Rain fell on the roofs of the village all day long. Inside, people sat by the fire and drank hot soup.",
    ),
    (
        "Write three sentences about a brave mouse.",
        "A big cat sat in front of the kitchen door. The mouse was afraid, but her brother was hungry. "
        "So she crept past the cat and came back with a piece of cheese.",
    ),
]
LENGTHS = {"answer": (8, 70), "scene": (12, 75)}  # in words
EXAMPLES = {"answer": ANSWER_EXAMPLES, "scene": SCENE_EXAMPLES}
SAMPLER_TEMPERATURE, SAMPLER_MIN_P = 0.65, 0.05
_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"


def question(rng: random.Random) -> str:
    """A question about an everyday thing."""
    family = rng.randrange(12)
    if family < 4:
        thing = rng.choice(words.THINGS)
        form = rng.choice(
            [
                "What is a {} used for?",
                "What is a {}?",
                "Where do people keep a {}?",
                "How do I clean a {}?",
                "Why do people need a {}?",
                "Tell me about a {}.",
                "How do I choose a good {}?",
                "What is a {} made of?",
            ]
        )
        return stories.fix_articles(form.format(thing))
    if family < 7:
        form = rng.choice(
            [
                "Tell me one fact about {}.",
                "Explain {} to a child.",
                "Describe {} in two sentences.",
                "What do you know about {}?",
                "Why do people like {}?",
                "Say something nice about {}.",
            ]
        )
        return form.format(rng.choice(words.TOPICS))
    if family == 7:
        animal = rng.choice(words.ANIMALS)
        plural = {"mouse": "mice", "sheep": "sheep", "fish": "fish", "fox": "foxes", "wolf": "wolves"}
        many = plural.get(animal, animal[:-1] + "ies" if animal.endswith("ly") or animal == "donkey" else animal + "s")
        form = rng.choice(["What do {} eat?", "Where do {} live?", "Tell me one fact about {}.", "Why do people like {}?"])
        return form.format("donkeys" if animal == "donkey" else many)
    if family < 10:
        form = rng.choice(["How do I {}?", "How can I {}?", "Give me one tip to {}.", "What do I need to {}?"])
        return form.format(rng.choice(words.ACTIVITIES))
    if family == 10:
        form = rng.choice(["What does a {} do?", "Why is the work of a {} important?", "How do I become a {}?"])
        return stories.fix_articles(form.format(rng.choice(words.JOBS)))
    first, second = rng.sample(words.FOODS, 2)
    form = rng.choice(["What can I make with a {} and a {}?", "Which is better, a {} or a {}?"])
    return stories.fix_articles(form.format(first, second))


def story_wish(rng: random.Random) -> str:
    """What a story or a scene is to be about."""
    if rng.random() < 0.3:
        return stories.story(rng)[0]
    form = rng.choice(
        [
            "a {adj} {animal} and a {toy}",
            "a {adj} {animal} in the {place}",
            "a {animal} and a {animal2}",
            "a {job} and a {toy}",
            "a girl named {name} and a {animal}",
            "a boy named {name} and a {toy}",
            "a {weather} day in the {place}",
            "a child who finds a {toy} in the {place}",
            "an old {job} who lives by the {place}",
        ]
    )
    animal, animal2 = rng.sample(words.ANIMALS, 2)
    wish = form.format(
        adj=rng.choice(words.ADJECTIVES),
        animal=animal,
        animal2=animal2,
        toy=rng.choice(words.TOYS),
        place=rng.choice(words.PLACES),
        job=rng.choice(words.JOBS),
        name=rng.choice(words.NAMES),
        weather=rng.choice(stories.WEATHER),
    )
    return stories.fix_articles(" " + wish).strip()


def acceptable(text: str, kind: str) -> bool:
    """Plain, finished, free of loops, and not about being a language model."""
    if not text.isascii() or not text or text[-1] not in '.!?"' or not (text[0].isupper() or text[0] == '"'):
        return False
    if re.search(r"[<>\[\]{}|*#_\\/@]|http|language model|\bAI\b|assistant|SmolLM|as an|I'm sorry|I cannot", text):
        return False
    if re.search(r"\b(kill|blood|gun|drug|alcohol|wine|beer|sex|nude|die|dead|death|murder|suicide|hell)", text.lower()):
        return False
    tokens = re.findall(r"[a-z']+", text.lower())
    low, high = LENGTHS[kind]
    if not low <= len(tokens) <= high:
        return False
    trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    content = [token for token in tokens if len(token) > 3]
    return len(set(trigrams)) >= 0.97 * len(trigrams) and len(set(content)) >= 0.7 * len(content)


class Teacher:
    """SmolLM2-135M-Instruct on one device, and its tokenizer."""

    def __init__(self, path: str | Path, device: torch.device) -> None:
        gguf = read_gguf(path)
        settings = llama_config(gguf.metadata) | {"max_position_embeddings": 1024}
        self.model = Llama(Shape(**settings))
        self.model.load_state_dict({name: torch.tensor(value) for name, value in llama_weights(gguf).items()})
        self.model = self.model.to(device, torch.bfloat16).eval()
        self.tokenizer = digit_bpe_tokenizer(gguf.metadata)
        self.end_id = self.tokenizer.token_to_id("<|im_end|>")

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def batch(self, kind: str, rows: int, rng: random.Random, generator: torch.Generator) -> tuple[list[Text], int]:
        """The acceptable texts of one batch, and how many tokens were drawn for it."""
        examples = rng.sample(EXAMPLES[kind], 2)
        if kind == "answer":
            prompts = [question(rng) for _ in range(rows)]
        else:
            prompts = [f"Write {rng.choice(['two', 'three'])} sentences about {story_wish(rng)}." for _ in range(rows)]
        shared = "".join(_CHAT.format(asked, said) + "<|im_end|>\n" for asked, said in examples)
        drawn = generate(
            self.model,
            [self._ids(_CHAT.format(prompt, "")) for prompt in prompts],
            max_tokens=88,
            end_ids=[self.end_id],
            generator=generator,
            temperature=SAMPLER_TEMPERATURE,
            min_p=SAMPLER_MIN_P,
            shared=self._ids(shared),
        )
        finished = [row[:-1] if row and row[-1] == self.end_id else [] for row in drawn]
        texts = self.tokenizer.decode_batch(finished)
        found = []
        for prompt, ids, text in zip(prompts, finished, texts, strict=True):
            text = text.strip()
            if not ids or not acceptable(text, kind):
                continue
            if kind == "scene":  # ask for as many sentences as came
                count = len(re.findall(r"[.!?]+(?=[\s\"]|$)", text))
                asked = {1: "one sentence", 2: "two sentences", 3: "three sentences"}.get(count, "some sentences")
                prompt = re.sub("(two|three) sentences", asked, prompt, count=1)
            found.append(Text(kind, prompt, text))
        return found, sum(map(len, drawn))


def sample_texts(
    teacher: Teacher, *, rows: int, batches: int, seconds: float, seed: int, device: torch.device
) -> Iterator[tuple[list[Text], str]]:
    """Batches of texts, answers and scenes in turn, until either limit is reached; with a line for the log."""
    rng, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    start = time.perf_counter()
    for number in range(batches):
        began = time.perf_counter()
        if began - start > seconds:
            return
        kind = ("answer", "scene")[number % 2]
        texts, drawn = teacher.batch(kind, rows, rng, generator)
        took = time.perf_counter() - began
        yield texts, f"batch {number} {kind}: kept {len(texts)} of {rows}, {drawn} tokens in {took:.1f} s"
