"""The notebooks as pages of the documentation; `docs/tutorials/index.md` lists them."""

from __future__ import annotations

from pathlib import Path


def tutorial_pages(source: Path, where: Path) -> dict[Path, str]:
    """Path -> text of the notebooks of `source`, copied into the folder `where`."""
    return {where / path.name: path.read_text(encoding="utf-8") for path in sorted(source.glob("*.ipynb"))}
