"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: str | Path, text: str) -> None:
    """The file holds the text whole, or is not touched. Raises OSError or ValueError."""
    temporary = Path(f"{path}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
