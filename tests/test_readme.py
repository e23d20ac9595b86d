"""What the README says of itself; its code blocks run in `test_docs.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_files_it_names_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert "docs/images/genealogy.png" in links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).is_file(), link


def test_scripts_it_names_exist():
    names = re.findall(r"`((?:benchmarks|tests)/[\w/.]+)`", README)
    assert len(names) >= 3
    for name in names:
        assert (ROOT / name).exists(), name


def test_the_blocks_that_ci_takes_are_there():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for word in ("pytest", "sphinx-build"):
        assert sum(word in block for block in blocks) == 1


def test_figures_on_the_frontier_are_those_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "frontier.json").read_text())["rows"]

    def row(bits: int, particles: int) -> dict:
        leniency = 1 if particles == 1 else None
        found = [
            r
            for r in rows
            if (r["bits"], r["particles"], r["chains"], r["block"], r["leniency"]) == (bits, particles, 1, 8, leniency)
        ]
        assert len(found) == 1
        return found[0]

    text = " ".join(README.split())
    for bits, sentence in ((8, "makes {:.1f} tokens, and keeping every draft (stars) {:.1f} at {:.1f} nats"),
                           (4, "makes {:.1f}, and keeping every draft {:.1f} at {:.1f} nats")):  # fmt: skip
        exact, smc = row(bits, 1), row(bits, 8)
        assert sentence.format(exact["tokens_per_pass"][0], smc["tokens_per_pass"][0], smc["bound"][0]) in text
