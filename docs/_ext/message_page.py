"""Every message that smcgen raises, read from the places that raise it; `…` stands for what differs from case to case."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CLASSES = ("NoSurvivors", "Impossible", "UsageError", "CallError", "ModelError", "PotentialError")
LITTLE = 1  # word that is the same each time


def messages(root: Path) -> dict[str, list[str]]:
    """Class -> templates of its messages, sorted, from all modules of the package."""
    found: dict[str, set[str]] = {name: set() for name in CLASSES}
    files = [*(root / "smcgen").rglob("*.py"), *(root / "potentials").rglob("*.py"), *(root / "kernels").rglob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in found and node.args:
                text = re.sub(r"…+", "…", _template(node.args[0]))
                if len(re.findall(r"[a-zA-Z]{2,}", text)) > LITTLE:
                    found[node.func.id].add(text)
    return {name: sorted(texts, key=lambda text: re.sub(r"\W", "", text).lower()) for name, texts in found.items()}


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "…"


def message_page(root: Path) -> str:
    """MyST text for `docs/messages.md`: the messages by class."""
    lines: list[str] = []
    for name, texts in messages(root).items():
        lines += [f"## {name}", "", *(f"- `` {text} ``" for text in texts), ""]
    return "\n".join(lines)
