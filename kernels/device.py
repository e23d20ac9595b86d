"""Whether the Triton kernels take a tensor, or the torch references do."""

from __future__ import annotations

import functools
import os
import warnings

import torch


def on_triton(x: torch.Tensor) -> bool:
    """Whether `x` lies on a CUDA device and Triton is there. SMCGEN_TRITON=0 in the environment leaves everything to torch,
    which is slower and has no CUDA graphs: for a GPU on which a kernel does not compile."""
    return x.is_cuda and _triton()


@functools.cache
def _triton() -> bool:
    if os.environ.get("SMCGEN_TRITON", "1") == "0":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn("Triton is not installed: the GPU runs plain torch, more slowly", RuntimeWarning, stacklevel=3)
        return False
    return True
