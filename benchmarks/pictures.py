"""The pictures of the README and the documentation that show a run: who descends from whom.

    python -m benchmarks.pictures [-o docs/images]

One run on the pair that ships inside: a list of three fruits, one of them a kiwi and none an apple, drafted by `tiny-draft`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

import smcgen as sg
from smcgen.plots import genealogy


def fruits(seed: int = 0) -> sg.Posterior:
    target = sg.LM("tiny") * sg.regex(r"(- [a-z]+\n?){3}") * sg.contains("kiwi") * sg.avoids("apple")
    prompt = "Write a list of three fruits."
    return sg.sample(target, prompt, draft="tiny-draft", particles=16, block=2, max_tokens=20, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/images"), help="folder of the pictures")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9, 5), layout="constrained")  # narrow, so that its letters are read on a page
    genealogy(fruits(options.seed), figure.add_subplot())
    figure.savefig(options.out / "genealogy.png", dpi=170)


if __name__ == "__main__":
    main()
