"""What the README says of itself; its code blocks run in `test_docs.py`."""

from __future__ import annotations

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
