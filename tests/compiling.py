"""Runs a script that compiles kernels, none needed to run them: what the interpreter forgives, the compiler may not. In another
process, for in this one Triton may be interpreting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    *,
    stages: int | None = None,
    aligned: Sequence[str] = (),
    capability: int = 90,
) -> Any:
    """The code of a kernel, for such a script. Arguments that are no constants are of `types` or int32; those `aligned` are
    multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = {"num_warps": warps} | ({} if stages is None else {"num_stages": stages})
    return triton.compile(ASTSource(kernel, signature, values, attributes), GPUTarget("cuda", capability, 32), options)
