"""Questions of reasoning-gym for `benchmarks/tasks.py`, written down so that no other machine needs the package.

    python -m benchmarks.reasoning                        writes benchmarks/reasoning_gym.jsonl anew, the same each time
    python -m benchmarks.reasoning --check TEXTS.jsonl    judges texts that tasks.py kept by the package's own scorers

reasoning-gym (Apache-2.0, https://github.com/open-thought/reasoning-gym) makes questions with answers from a seed; here are
forty each of ten easy kinds, which a model of 135 million parameters answers now and then. Needs the extra `benchmarks`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "reasoning_gym.jsonl"
SEED, ITEMS = 20_261, 40
KINDS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_value": 2, "max_value": 20},
    "lcm": {"min_value": 1, "max_value": 10},
    "letter_counting": {"min_words": 1, "max_words": 2},
    "prime_factorization": {"min_value": 2, "max_value": 20},
    "count_primes": {"min_n": 1, "max_n": 12},
    "calendar_arithmetic": {"tasks": ["is_leap_year"]},
    "syllogism": {},
}


def dataset(kind: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(kind, seed=SEED, size=ITEMS, **KINDS[kind])


def write(path: Path) -> None:
    """One question per line; `index` finds it in its dataset again."""
    with path.open("w", encoding="utf-8") as out:
        for kind in KINDS:
            for i, entry in enumerate(dataset(kind)):
                line = {"task": kind, "index": i, "prompt": entry["question"].strip(), "gold": entry["answer"]}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")


def check(path: Path) -> None:
    """Share of texts whose answer the package's scorers give full marks, beside ours, by mode."""
    from benchmarks.tasks import answer_in

    sets = {kind: dataset(kind) for kind in KINDS}
    entries = {kind: list(items) for kind, items in sets.items()}
    ours, theirs, count, apart = Counter(), Counter(), Counter(), 0
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["tasks"] != OUT.stem:
            continue
        mode = tuple(row[key] or "none" for key in ("draft", "mode"))
        for item, texts, hits in zip(row["items"], row["texts"], row["hits"], strict=True):
            kind, index = item
            entry = entries[kind][index]
            for text, hit in zip(texts, hits, strict=True):
                full = sets[kind].score_answer(answer_in(text, entry["answer"]), entry) == 1
                ours[mode], theirs[mode], count[mode] = ours[mode] + hit, theirs[mode] + full, count[mode] + 1
                apart += full != bool(hit)
    print(f"{'draft':6} {'mode':18} {'ours':>7} {'theirs':>7}")
    for (draft, name), n in count.items():
        print(f"{draft:6} {name:18} {ours[draft, name] / n:7.3f} {theirs[draft, name] / n:7.3f}")
    print(f"{apart} of {sum(count.values())} texts judged differently")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path)
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.check)
    else:
        write(OUT)


if __name__ == "__main__":
    main()
