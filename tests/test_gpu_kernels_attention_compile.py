"""Attention compiles for a device (sm_90), none needed: what the interpreter forgives, the compiler may not. In another
process, for in this one Triton may be interpreting."""

from __future__ import annotations

import pytest

from tests.compiling import built

pytest.importorskip("triton")

SCRIPT = """
import triton
from smcgen.kernels.gpu import attention, join, write
from tests.compiling import compiled

def build(kernel, types, constants):
    aligned = [name for name in kernel.arg_names if types.get(name, "")[:1] == "*"]
    print(kernel.__name__, len(compiled(kernel, types, constants, 4, stages=2, aligned=aligned).asm["cubin"]))

pointers = ("Query", "Key", "Value", "Cos", "Sin", "QueryNorm", "KeyNorm", "Keys", "Values")
numbers = dict.fromkeys(("scale", "softcap", "eps"), "fp32") | dict.fromkeys(("Table", "Length", "Shared", "Counts"), "*i64")
sums = {"Out": "*fp32", "Lse": "*fp32"}
for dtype, dim, steps, norm, shared, rope in (
    ("*bf16", 64, 1, False, True, True), ("*bf16", 128, 9, True, True, True), ("*fp32", 128, 5, False, False, True),
    ("*fp16", 64, 2, False, False, False), ("*bf16", 64, 64, False, True, None),
):
    types = dict.fromkeys(pointers, dtype) | numbers | sums
    rows = min(64, max(16, triton.next_power_of_2(8 * steps * 4)))
    constants = {
        "PARTICLES": 8, "STEPS": steps, "QUERIES": 4, "HEADS": 8, "DIM": dim, "VALUE_DIM": dim, "BLOCK_D": dim, "BLOCK_V": dim,
        "PAGE": 16, "SPLITS": 16 * shared, "OWN_SPLITS": 2, "TILES": -(-32 * steps // rows), "OWN_TILES": -(-4 * steps // rows),
        "NEW": 0 if rope is None else 16, "ROPE": bool(rope), "NORM": norm, "SOFTCAP": False, "WINDOW": norm, "DIRECT": False,
        "BLOCK_M": rows if dtype != "*fp32" else 32, "BLOCK_N": 64 if dtype != "*fp32" else 32, "PDL": dtype == "*bf16",
    }
    build(attention._attend, types, constants)
    write_types = dict.fromkeys(pointers, dtype) | numbers
    constants = {
        "STEPS": steps, "QUERY_BLOCKS": 4 * bool(rope), "KEY_BLOCKS": 1, "BLOCK_H": 8, "HEADS": 8, "DIM": dim, "HALF": dim // 2,
        "BLOCK_D": dim // 2 if rope else dim, "VALUE_DIM": dim, "BLOCK_V": dim, "PAGE": 16, "ROPE": bool(rope), "NORM": norm,
        "PDL": dtype == "*bf16",
    }
    build(write._write, write_types, constants)
constants = {"PIECES": 18, "BLOCK_P": 32, "DIM": 64, "BLOCK_D": 64, "SINKS": False, "BLOCK_R": 1, "PDL": True}
build(join._join, sums | {"Sinks": "*fp32", "Final": "*bf16"}, constants)
"""


def test_they_compile(tmp_path):
    assert built(SCRIPT, tmp_path) == ["_attend", "_write"] * 5 + ["_join"]
