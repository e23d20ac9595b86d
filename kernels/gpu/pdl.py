"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits only before it touches what that
one made (CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0 and later).

A forward of a small model is many kernels of a few microseconds each, between which the memory stands idle. A kernel that is
launched with `early(x)` calls `release` first, asks for weights that nobody changes, then calls `wait`: after it, everything
that kernels before it in the stream have written is there. Every program has to call `wait`, so that waiting for one kernel is
waiting for all before it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOptionalCall=false

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def release(PDL: tl.constexpr):
    """The next kernel may be launched: it waits by itself."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(pointers, bytes_):
    """Asks for the `bytes_` that lie from each of `pointers` on, both multiples of 16: they come into the second-level
    cache."""
    tl.inline_asm_elementwise(
        "{ .reg .pred %p; setp.gt.s32 %p, $2, 0; @%p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, bytes_],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask(Matrix, first, last, lines, width, SIZE: tl.constexpr, LINES: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr):
    """Asks for AHEAD columns, from `first` on and before `last`, of the LINES lines of a program: one request a thread, each
    for a part of a line. SIZE: bytes of a number."""
    EACH: tl.constexpr = AHEAD * LINES // THREADS
    j = tl.arange(0, THREADS)
    line = tl.program_id(0) * LINES + j * EACH // AHEAD
    begin = first + j * EACH % AHEAD
    asked = tl.where(line < lines, tl.minimum(EACH, last - begin), 0) * SIZE
    prefetch(Matrix + line.to(tl.int64) * width + begin, asked)


def early(x: torch.Tensor) -> dict[str, Any]:
    """Arguments of a launch on the device of `x`."""
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and _capable(x.get_device()) else {"PDL": False}


@functools.cache
def _capable(device: int) -> bool:
    return gdc_wait is not None and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9
