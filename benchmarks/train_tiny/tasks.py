"""Tasks with known answers (arithmetic, word problems, JSON records), lists and emails: generators and judges.

Hard sums come in two styles, *direct* ("The answer is 282.") and *worked* (step by step). Most are direct, which a tiny
model can only guess at, while it can follow the steps: the likeliest first word is not the start of the likeliest
answer. That is what sequence-level methods (best-of-N, power sampling) can gain over greedy decoding here.

Held out are an eighth of all operand tuples (by a checksum) of every task with two-digit numbers, and the names and
cities of the held-out lists. One-digit sums and products are facts to be learned, so training has all of them.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.train_tiny import words

DIRECT_SHARE = 0.6


class Example(NamedTuple):
    """A chat of one turn. `gold` is an integer, a record, or None where any good answer will do."""

    task: str
    prompt: str
    answer: str
    gold: int | dict[str, object] | None = None


def held_out(*key: object) -> bool:
    """Whether this operand tuple belongs to evaluation: one in eight, the same on every machine."""
    return zlib.crc32(repr(key).encode()) % 8 == 0


def _operands(rng: random.Random, draw: Callable[[], tuple[int, ...]], task: str, evaluation: bool) -> tuple[int, ...]:
    while True:
        numbers = draw()
        if held_out(task, *numbers) == evaluation:
            return numbers


def _ask(rng: random.Random, expression: str, spoken: str) -> str:
    return rng.choice(
        [
            f"What is {expression}?",
            f"What is {spoken}?",
            f"Calculate {expression}.",
            f"How much is {expression}?",
            f"{expression} = ?",
            f"Please work out {expression}.",
            f"Can you tell me what {spoken} is?",
        ]
    )


def _final(rng: random.Random, steps: list[str], result: int) -> str:
    if rng.random() < DIRECT_SHARE:
        return f"The answer is {result}."
    return " ".join(steps) + f" The answer is {result}."


def one_digit(rng: random.Random, evaluation: bool) -> Example:
    a, b = rng.randrange(0, 11), rng.randrange(0, 11)
    kind = rng.choice("+-*")
    if kind == "-":
        a, b = max(a, b), min(a, b)
    result = {"+": a + b, "-": a - b, "*": a * b}[kind]
    spoken = {"+": f"{a} plus {b}", "-": f"{a} minus {b}", "*": f"{a} times {b}"}[kind]
    answer = rng.choice([f"The answer is {result}.", f"{a} {kind} {b} = {result}. The answer is {result}."])
    return Example("one_digit", _ask(rng, f"{a} {kind} {b}", spoken), answer, result)


def _add_steps(a: int, b: int) -> list[str]:
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    return [
        f"{a // 10 * 10} + {b // 10 * 10} = {tens}.",
        f"{a % 10} + {b % 10} = {ones}.",
        f"{tens} + {ones} = {a + b}.",
    ]


def sum_two(rng: random.Random, evaluation: bool) -> Example:
    a, b = _operands(rng, lambda: (rng.randrange(10, 100), rng.randrange(10, 100)), "sum_two", evaluation)
    return Example("sum_two", _ask(rng, f"{a} + {b}", f"{a} plus {b}"), _final(rng, _add_steps(a, b), a + b), a + b)


def difference(rng: random.Random, evaluation: bool) -> Example:
    def draw() -> tuple[int, ...]:
        return tuple(sorted((rng.randrange(10, 100), rng.randrange(10, 100)), reverse=True))

    a, b = _operands(rng, draw, "difference", evaluation)
    steps = [f"{a} - {b // 10 * 10} = {a - b // 10 * 10}.", f"{a - b // 10 * 10} - {b % 10} = {a - b}."]
    return Example("difference", _ask(rng, f"{a} - {b}", f"{a} minus {b}"), _final(rng, steps, a - b), a - b)


def sum_three(rng: random.Random, evaluation: bool) -> Example:
    def draw() -> tuple[int, ...]:
        return rng.randrange(10, 100), rng.randrange(10, 100), rng.randrange(10, 100)

    a, b, c = _operands(rng, draw, "sum_three", evaluation)
    steps = [f"{a} + {b} = {a + b}.", f"{a + b} + {c} = {a + b + c}."]
    spoken = f"the sum of {a}, {b} and {c}"
    return Example("sum_three", _ask(rng, f"{a} + {b} + {c}", spoken), _final(rng, steps, a + b + c), a + b + c)


def product(rng: random.Random, evaluation: bool) -> Example:
    a, b = _operands(rng, lambda: (rng.randrange(11, 100), rng.randrange(3, 10)), "product", evaluation)
    tens, ones = a // 10 * 10 * b, a % 10 * b
    steps = [f"{a // 10 * 10} * {b} = {tens}.", f"{a % 10} * {b} = {ones}.", f"{tens} + {ones} = {a * b}."]
    return Example("product", _ask(rng, f"{a} * {b}", f"{a} times {b}"), _final(rng, steps, a * b), a * b)


ONE_STEP: list[tuple[str, str]] = [
    ("{n} has {a} {t}. {He} buys {b} more. How many {t} does {n} have now?", "+"),
    ("{n} has {a} {t} and gets {b} more from {m}. How many {t} does {n} have now?", "+"),
    ("There are {a} {t} in one box and {b} {t} in another box. How many {t} are there in all?", "+"),
    ("{n} picked {a} {t} on Monday and {b} {t} on Tuesday. How many {t} did {n} pick altogether?", "+"),
    ("{n} has {a} {t}. {He} gives {b} {t} to {m}. How many {t} are left?", "-"),
    ("{n} had {a} {t} and lost {b} of them. How many {t} does {n} have left?", "-"),
    ("There were {a} {t} on the table. {m} took {b} {t}. How many {t} are still on the table?", "-"),
    ("{n} has {a} {t} and {m} has {b} {t}. How many more {t} does {n} have than {m}?", "-"),
    ("There are {b} boxes with {a} {t} in each box. How many {t} are there in all?", "*"),
    ("{n} buys {b} bags. Each bag holds {a} {t}. How many {t} does {n} have?", "*"),
    ("One of the {t} costs {a} dollars. {n} buys {b} {t}. How many dollars does {n} pay?", "*"),
]
TWO_STEP: list[tuple[str, str]] = [
    ("{n} has {a} {t}. {He} buys {b} more and then gives {c} to {m}. How many {t} does {n} have now?", "+-"),
    ("A box has {a} red {t} and {b} blue {t}. {c} {t} are taken out. How many {t} are left in the box?", "+-"),
    ("{n} had {a} {t}, lost {b} and then found {c}. How many {t} does {n} have now?", "-+"),
    ("There are {b} bags with {a} {t} in each bag. {n} takes {c} {t}. How many {t} are left?", "*-"),
    ("{n} buys {b} boxes of {a} {t}. {m} brings {c} more. How many {t} are there in all?", "*+"),
    ("{n} has {a} {t}, {m} has {b} {t} and {k} has {c} {t}. How many {t} do they have together?", "++"),
]


def _apply(a: int, kind: str, b: int) -> int:
    return a + b if kind == "+" else a - b if kind == "-" else a * b


def _problem(rng: random.Random, template: str, numbers: tuple[int, ...], evaluation: bool) -> str:
    people = rng.sample(words.NAMES_HELD_OUT if evaluation else words.NAMES, 3)
    slots = dict(zip("abc", numbers, strict=False))
    he = rng.choice(["He", "She"])
    return template.format(n=people[0], m=people[1], k=people[2], t=rng.choice(words.COUNTABLE), He=he, **slots)


def _chain(numbers: tuple[int, ...], kinds: str) -> tuple[list[str], int]:
    value, steps = numbers[0], []
    for kind, number in zip(kinds, numbers[1:], strict=True):
        following = _apply(value, kind, number)
        steps.append(f"{value} {kind} {number} = {following}.")
        value = following
    return steps, value


def _draw_chain(rng: random.Random, kinds: str) -> tuple[int, ...]:
    while True:
        numbers = [rng.randrange(4, 60)]
        for kind in kinds:
            numbers.append(rng.randrange(2, 10) if kind == "*" else rng.randrange(2, 40))
        if kinds[0] == "*":
            numbers[0] = rng.randrange(2, 13)
        if _chain(tuple(numbers[:2]), kinds[:1])[1] > 0 and _chain(tuple(numbers), kinds)[1] > 0:
            return tuple(numbers)


def word_problem(rng: random.Random, evaluation: bool) -> Example:
    steps_wanted = rng.choice([1, 2])
    template, kinds = rng.choice(ONE_STEP if steps_wanted == 1 else TWO_STEP)
    numbers = _operands(rng, lambda: _draw_chain(rng, kinds), "word" + kinds, evaluation)
    steps, result = _chain(numbers, kinds)
    task = f"word_problem_{steps_wanted}"
    return Example(task, _problem(rng, template, numbers, evaluation), _final(rng, steps, result), result)


RECORD_SENTENCES = [
    "{name} is {age} years old and lives in {city}.",
    "{name}, aged {age}, lives in {city}.",
    "{name} from {city} is {age} years old.",
    "My friend {name} lives in {city} and is {age}.",
    "This is {name}. {name} is {age} years old and comes from {city}.",
    "At the age of {age}, {name} moved to {city}.",
    "In {city} I met {name}, who is {age} years old.",
]
RECORD_TAILS = {
    "job": [" {name} works as a {job}.", " {name} is a {job}.", " The job: {job}."],
    "hobby": [" {name} likes {hobby}.", " In the evening {name} enjoys {hobby}.", " The hobby is {hobby}."],
    "pet": [" {name} has a {pet}.", " The pet is a {pet}.", " At home there is a {pet}."],
}


def _person(rng: random.Random, evaluation: bool) -> dict[str, object]:
    return {
        "name": rng.choice(words.NAMES_HELD_OUT if evaluation else words.NAMES),
        "age": rng.randrange(5, 95),
        "city": rng.choice(words.CITIES_HELD_OUT if evaluation else words.CITIES),
        "job": rng.choice(words.JOBS),
        "hobby": rng.choice(words.HOBBIES),
        "pet": rng.choice(words.ANIMALS),
    }


def _invent(rng: random.Random) -> str:
    """A made-up name of two to four syllables, so that copying is learned and not only known names."""
    syllables = ["".join((rng.choice("bdfghjklmnprstvwz"), rng.choice("aeiou"))) for _ in range(rng.randrange(2, 5))]
    return ("".join(syllables) + rng.choice(["", "n", "r", "s", "l", "x"])).capitalize()


def record(rng: random.Random, evaluation: bool) -> Example:
    """JSON from a text about one person, or about two with the question for one of them."""
    people = 2 if rng.random() < 0.5 else 1
    extra = rng.sample(list(RECORD_TAILS), rng.randrange(0, 3))
    keys = ["name", "age", "city", *extra]
    persons = [_person(rng, evaluation) for _ in range(people)]
    if people == 2 and persons[0]["name"] == persons[1]["name"]:
        return record(rng, evaluation)
    if not evaluation and rng.random() < 0.3:
        for person in persons:
            person["name"], person["city"] = _invent(rng), _invent(rng)
    parts = []
    for person in persons:
        tails = [rng.choice(RECORD_TAILS[key]) for key in extra]
        parts.append((rng.choice(RECORD_SENTENCES) + "".join(tails)).format(**person))
    who = rng.choice(persons)
    if rng.random() < 0.5:
        rng.shuffle(keys)
    quoted = ", ".join(f'"{key}"' for key in keys[:-1]) + f' and "{keys[-1]}"'
    about = f" about {who['name']}" if people == 2 else ""
    request = rng.choice(
        [
            f"Extract a JSON object{about} with keys {quoted} from this sentence: {{text}}",
            f"{{text}}\nWrite this{about} as a JSON object with the keys {quoted}.",
            f"Make a JSON record{about} with {quoted}. Text: {{text}}",
        ]
    )
    gold = {key: who[key] for key in keys}
    answer = json.dumps(gold) if rng.random() < 0.8 else json.dumps(gold, indent=2)
    return Example(f"record_{people}", request.replace("{text}", " ".join(parts)), answer, gold)


def record_of_two(rng: random.Random, evaluation: bool) -> Example:
    """A record of one of two people in a text, with names and cities that training knows; the text is a fresh draw."""
    while True:
        example = record(rng, False)
        if example.task == "record_2" and isinstance(example.gold, dict) and example.gold["name"] in words.NAMES:
            return example


def short_list(rng: random.Random, evaluation: bool) -> Example:
    topic = rng.choice(list(words.LISTS))
    count = rng.randrange(3, 7)
    items = rng.sample(words.LISTS[topic], count)
    spelled = rng.choice([str(count), ["three", "four", "five", "six"][count - 3]])
    prompt = rng.choice(
        [
            f"List {spelled} {topic}.",
            f"Name {spelled} {topic}.",
            f"Give me {spelled} {topic}.",
            f"Write a list of {spelled} {topic}.",
        ]
    )
    form = rng.randrange(3)
    if form == 0:
        answer = "\n".join(f"{i}. {item.capitalize()}" for i, item in enumerate(items, 1))
    elif form == 1:
        answer = "\n".join(f"- {item}" for item in items)
    else:
        answer = ", ".join(items[:-1]).capitalize() + f" and {items[-1]}."
    return Example("list", prompt, answer)


def sort_words(rng: random.Random, evaluation: bool) -> Example:
    chosen = rng.sample(rng.choice(list(words.LISTS.values())), 3)
    prompt = f"Sort these words alphabetically: {', '.join(chosen)}"
    return Example("sort", prompt, ", ".join(sorted(chosen)))


DAYS = words.split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
EMAILS: list[tuple[str, str, list[str], list[str]]] = [
    (
        "to my teacher because I am ill",
        "{Ill}",
        [
            "I am sorry, but I am ill today.",
            "I woke up with a fever this morning.",
            "I have a bad cold and must stay in bed.",
        ],
        ["I will do the homework at home.", "I hope to be back on {day}.", "Could you please send me the homework?"],
    ),
    (
        "to a friend about a {event} on {day}",
        "{Event} on {day}",
        ["We are having a {event} on {day} at {hour}.", "Would you like to come to a {event} on {day}?"],
        [
            "Please bring some {food} if you can.",
            "{m} will be there too.",
            "It would be great to see you.",
            "We meet at the {place}.",
        ],
    ),
    (
        "to a neighbour about a lost {animal}",
        "Lost {animal}",
        [
            "Our {animal} did not come home last night.",
            "We are looking for our {animal}, which is {colour} and very shy.",
        ],
        ["Could you please look in your {place}?", "Please call me if you see it.", "Its name is {m}."],
    ),
    (
        "to thank my {relative} for a gift",
        "Thank you",
        ["Thank you so much for the {colour} {toy}.", "The {toy} came today, and I love it."],
        [
            "I play with it every day.",
            "It was very kind of you.",
            "I hope to see you on {day}.",
            "Best wishes to everyone at home.",
        ],
    ),
    (
        "to my boss asking for a day off on {day}",
        "Day off on {day}",
        ["I would like to ask for a day off on {day}.", "May I take {day} off?"],
        [
            "I have to see a doctor.",
            "My family is coming to visit.",
            "{m} can do my work on that day.",
            "I will finish my work before then.",
        ],
    ),
    (
        "to invite {m} to dinner",
        "Dinner on {day}",
        ["Would you like to have dinner with us on {day}?", "I would like to invite you to dinner on {day} at {hour}."],
        [
            "There will be {food} soup and cake.",
            "You do not need to bring anything.",
            "Please tell me if the day is good for you.",
        ],
    ),
]


def email(rng: random.Random, evaluation: bool) -> Example:
    purpose, subject, first, more = rng.choice(EMAILS)
    name, other = rng.sample(words.NAMES, 2)
    slots = {
        "day": rng.choice(DAYS),
        "hour": f"{rng.randrange(1, 12)} o'clock",
        "m": other,
        "event": rng.choice(words.split_words("picnic party game_night walk birthday_party football_game")),
        "Ill": rng.choice(["Ill today", "I am ill", "Not at school today"]),
        "food": rng.choice(words.FOODS),
        "place": rng.choice(words.PLACES),
        "animal": rng.choice(["cat", "dog", "rabbit", "parrot", "turtle"]),
        "colour": rng.choice(words.COLOURS),
        "toy": rng.choice(words.TOYS),
        "relative": rng.choice(["aunt", "uncle", "grandmother", "grandfather", "cousin"]),
    }
    slots["Event"] = slots["event"].capitalize()
    body = [rng.choice(first), *rng.sample(more, rng.randrange(1, 3))]
    addressee = rng.choice([f"Dear {rng.choice(words.NAMES)},", f"Hi {rng.choice(words.NAMES)},"])
    if "invite" in purpose:
        addressee = f"Dear {other},"
    closing = rng.choice(["Best wishes,", "Thank you,", "Kind regards,", "See you soon,"])
    ask = rng.choice(["Write a short email ", "Please write an email ", "Help me write a short email "])
    text = f"Subject: {subject}\n\n{addressee}\n\n{' '.join(body)}\n\n{closing}\n{name}"
    return Example("email", (ask + purpose + ".").format(**slots), text.format(**slots))


# How often each generator speaks in the training text.
MIX: list[tuple[Callable[[random.Random, bool], Example], float]] = [
    (one_digit, 1.0),
    (sum_two, 1.5),
    (difference, 1.2),
    (sum_three, 1.5),
    (product, 1.5),
    (word_problem, 3.0),
    (record, 3.0),
    (short_list, 0.5),
    (sort_words, 0.3),
    (email, 0.8),
]
ARITHMETIC = (sum_two, difference, sum_three, product, word_problem)
# The evaluation sets by name: their generators and the answers' budget in tokens.
EVALUATION: dict[str, tuple[tuple[Callable[[random.Random, bool], Example], ...], int]] = {
    "arithmetic": (ARITHMETIC, 64),
    "json": ((record_of_two,), 112),
    "json_new_names": ((record,), 112),
}


def training_example(rng: random.Random) -> Example:
    generators, shares = zip(*MIX, strict=True)
    return rng.choices(generators, shares)[0](rng, False)


def evaluation_set(generators: tuple[Callable[[random.Random, bool], Example], ...], count: int, seed: int) -> list[Example]:
    """`count` distinct held-out examples, the generators taking turns."""
    rng, seen, examples = random.Random(seed), set(), []
    while len(examples) < count:
        example = generators[len(examples) % len(generators)](rng, True)
        if example.prompt not in seen:
            seen.add(example.prompt)
            examples.append(example)
    return examples


def correct(example: Example, answer: str) -> bool:
    """Whether the answer's last number (arithmetic) or its JSON object (records) is the gold one."""
    if isinstance(example.gold, int):
        numbers = re.findall(r"-?\d+", answer)
        return bool(numbers) and int(numbers[-1]) == example.gold
    try:
        return json.loads(answer.strip()) == example.gold
    except ValueError:
        return False
