"""Runs a script that compiles kernels, none needed to run them: what the interpreter forgives, the compiler may not. In another
process, for in this one Triton may be interpreting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def built(script: str, folder: Path) -> list[str]:
    """The names that `script` printed, a kernel and the size of its code a line; fails where one is no code."""
    path = folder / "build.py"
    path.write_text(script)
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    clean |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(path)], env=clean, capture_output=True, text=True, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(int(size) > 1000 for _, size in lines)
    return [name for name, _ in lines]
