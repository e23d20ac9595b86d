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
    for bits, sentence in ((8, "makes {:.1f} tokens, and keeping every draft (stars) {:.1f} at less than 0.1 nats"),
                           (4, "makes {:.1f}, and keeping every draft {:.1f} at {:.1f} nats")):  # fmt: skip
        exact, smc = row(bits, 1), row(bits, 8)
        assert sentence.format(exact["tokens_per_pass"][0], smc["tokens_per_pass"][0], smc["bound"][0]) in text
    assert row(8, 8)["bound"][0] < 0.1


def test_figures_of_rounds_are_those_measured():
    results = ROOT / "benchmarks" / "results"
    measured = json.loads((results / "round.json").read_text())
    rows = {(row["what"], *(row.get(k) for k in ("particles", "block", "prompt", "groups"))): row for row in measured["rows"]}

    def line(particles: int, block: int | str, prompt: int, groups: int) -> tuple[str, dict]:
        plain = block == "plain decoding"
        row = rows["plain decoding, one row" if plain else "round", particles, 8 if plain else block, prompt, groups]
        speed = f"{row['milliseconds']:.1f} | {row['tokens_per_second']:,.0f} | {row['fraction_of_copy']:.2f}"
        return f"| {particles} | {block} | {prompt:,} | {groups} | {speed} |", row

    table = re.findall(r"^\| (\d+) \| (plain decoding|\d+) \| ([\d,]+) \| (\d+) \|.*\|$", README, re.MULTILINE)
    assert len(table) >= 5
    found = [line(int(n), int(k) if k.isdigit() else k, int(p.replace(",", "")), int(g)) for n, k, p, g in table]
    for text, _ in found:
        assert text in README
    text = " ".join(README.split())
    assert f"a large copy, {measured['copy_bandwidth'] / 1e12:.2f} TB/s in the same run" in text
    plain = found[-1][1]["tokens_per_second"]
    way = {row["what"].removeprefix("generate, "): row for row in measured["rows"] if row["what"].startswith("generate, ")}
    eager, assisted, compiled = (way[name]["tokens_per_second"] for name in ("eager", "assisted", "static cache, compiled"))
    assert compiled > max(eager, assisted)
    best = found[0][1]["tokens_per_second"]
    assert f"give {best / plain:.2f} times" in text
    assert f"and {best / compiled:.2f} times those of transformers" in text
    assert f"({compiled:.0f} tokens/s; as it comes {eager:.0f}, assisted by the same draft {assisted:.0f})" in text
    small = rows["int8 draft", 8, 8, 256, 1]
    assert f"takes {small['milliseconds']:.1f} ms and gives {small['tokens_per_second']:.0f} tokens/s" in text
    tables, host = (
        rows[name, 8, 8, 256, 1]["of_unconstrained"] for name in ("avoids two strings (tables)", "JSON grammar (host)")
    )
    assert f"keeps {tables:.2f} of its speed" in text
    assert f"come from the CPU, {host:.2f}" in text
    lossless = json.loads((results / "exact_8b_cuda.json").read_text())["rows"]
    exact = {(row["draft"], row["chains"]): row for row in lossless if row["batch"] == 1 and row.get("chains")}
    one, eight, small_one, small_eight = (
        f"{exact[draft, chains]['speedup']:.2f}"
        for draft in ("acceptance 0.75", "acceptance 0.75, int8 draft")
        for chains in (1, 8)
    )
    assert f"makes {one} times" in text
    assert f"{eight} times with eight" in text
    assert f"and with an int8 draft {small_one} and {small_eight} times" in text
    assert max(row["verification_ms"] / row["step_ms"]["p50"] for row in exact.values()) < 0.01
