"""The code blocks of the README and of the documentation, run page by page on the small pair.

- `python` blocks of one page run in order in one namespace and in one empty folder.
- `console` blocks: each line that begins with `$ smcgen` is run through the command's own entry point, and what follows it is
  what it prints, with `...` for what may differ.
- A comment in the line before a block says what else it is: `<!-- output -->`: what the `python` block before it prints;
  `<!-- file: NAME -->`: a file that the blocks after it read; `<!-- not run: REASON -->`: left out, and counted below.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from smcgen.cli import main

ROOT = Path(__file__).parent.parent
GENERATED = {"cli.md", "messages.md", "benchmarks.md", "model_card.md"}
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("**/*.md") if p.name not in GENERATED)]
PAGES = [p for p in PAGES if "_build" not in p.parts and "tutorials" not in p.parts]
FENCE = re.compile(r"(?:^<!-- (?P<note>.*?) -->\n)?^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("python", "console", "sh")
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
benchmark_page, cli_page, message_page = (importlib.import_module(n) for n in ("benchmark_page", "cli_page", "message_page"))
REASONS = {"installs packages", "needs a GPU", "needs the network", "needs SmolLM2", "needs genlm-control"}


class Block(NamedTuple):
    line: int
    language: str
    note: str
    body: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, m.start("body")), m["language"], m["note"] or "", m["body"]) for m in FENCE.finditer(text)
    ]


def same(expected: str, printed: str, where: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, printed, flags), f"{where} prints\n{printed}\nand not\n{expected}"


def run_command(arguments: list[str]) -> str:
    """What a terminal would show."""
    screen = io.StringIO()
    before = sys.argv
    sys.argv = arguments
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = before
    return screen.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "docs"}
    printed = ""
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.note.startswith("file: "):
            Path(block.note.removeprefix("file: ")).write_text(block.body, encoding="utf-8")
        elif block.note == "output":
            same(block.body, printed, where)
        elif block.note or block.language not in RUN:
            assert block.note == "" or block.note.startswith("not run: "), f"{where}: {block.note!r} means nothing"
        elif block.language == "python":
            screen = io.StringIO()
            with contextlib.redirect_stdout(screen), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile("\n" * block.line + block.body, str(page), "exec"), names)
            printed = screen.getvalue()
        elif block.language == "console":
            for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.body, re.MULTILINE):
                arguments = shlex.split(command)
                assert arguments[0] == "smcgen", f"{where}: {command}"
                shown = run_command(arguments)
                assert "Traceback" not in shown, where
                if expected.strip():
                    same(expected, shown, f"{where}: {command}")
        else:
            raise AssertionError(f"{where}: mark this {block.language} block as not run, or write it as console")


def test_few_blocks_are_left_out():
    left_out = [(p.name, b.note) for p in PAGES for b in blocks(p) if b.note.startswith("not run: ")]
    run = [b for p in PAGES for b in blocks(p) if b.language in RUN and not b.note.startswith("not run: ")]
    assert {note.removeprefix("not run: ") for _, note in left_out} <= REASONS
    assert len(left_out) <= 16, left_out
    assert len(run) >= 40


def test_links_lead_to_files_that_no_build_has_to_make():
    pages = [ROOT / "README.md", *(p for p in (ROOT / "docs").glob("**/*.md") if not {"_build", "_made"} & set(p.parts))]
    found = [(p, link) for p in pages for link in re.findall(r"\]\(([^)#\s]+)", p.read_text(encoding="utf-8"))]
    links = [(page, link) for page, link in found if "://" not in link]
    assert len(links) > 60
    for page, link in links:
        target = (page.parent / link).resolve()
        assert target.is_file(), f"{page.relative_to(ROOT)}: {link}"
        assert target.parent.name != "_made"
        assert (target.suffix, target.parent) != (".ipynb", ROOT / "docs" / "tutorials")
    included = {page.name for page in pages if "\n```{include} _made/" in page.read_text(encoding="utf-8")}
    assert included == GENERATED - {"model_card.md"}


def test_the_messages_explained_are_those_raised():
    known = {text for texts in message_page.messages(ROOT).values() for text in texts}
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) > 30
    assert [heading for heading in headings if heading not in known] == []


def test_the_page_on_the_command_has_every_option():
    text = cli_page.cli_page()
    for command in ("sample", "check"):
        shown = run_command(["smcgen", command, "--help"])
        assert f"## smcgen {command}" in text
        for option in set(re.findall(r"--[a-z][a-z-]+", shown)) - {"--help"}:
            assert f"`{option}`" in text, option


def test_the_page_of_measurements_has_every_file():
    text = benchmark_page.benchmark_page(ROOT / "benchmarks")
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(files) >= 4
    for path in files:
        assert f"`benchmarks/results/{path.name}`" in text


def test_measurements_of_any_shape_become_tables(tmp_path):
    (tmp_path / "results").mkdir()
    shapes = {
        "machine": {"gpu": "G", "torch": "2"},
        "versions": {"torch": "2"},
        "rows": [{"n": 1, "speed": 0.123456}, {"n": 2, "other": float("inf")}],
        "by_name": {"a": {"x": 1}, "b": {"x": 2, "y": {"z": 3}}},
        "deep": {"c": {"list": [{"q": 1}]}},
        "number": 7,
        "kinds": [{"what": kind, f"of_{kind}": 1.5} | {f"c{i}": i + n for i in range(12)} for kind in "pq" for n in (0, 1)],
    }
    (tmp_path / "results" / "any.json").write_text(json.dumps(shapes))
    (tmp_path / "results" / "list.json").write_text(json.dumps([{"u": 1}]))
    text = benchmark_page.benchmark_page(tmp_path)
    for line in ("- machine: gpu G, torch 2", "- number: 7", "| 1 | 0.1235 | – |", "| b | 2 | 3 |", "| q |", "| u |", "**p**"):
        assert line in text, line
