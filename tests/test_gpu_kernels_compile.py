"""The kernels of draws, their bookkeeping, random numbers and resampling compile for a device (sm_90), none needed: what the
interpreter forgives, the compiler may not. In another process, for in this one Triton may be interpreting."""

from __future__ import annotations

import pytest

from tests.compiling import built

pytest.importorskip("triton")

SCRIPT = """
import math
import triton
from smcgen.kernels.gpu import append, automaton, categorical, commit, layers, masks, pages, philox, resample, rounded
from smcgen.kernels.gpu import totals, unread, watch
from tests.compiling import compiled

def build(kernel, types, constants, warps, sixteen=()):
    made = compiled(kernel, types, constants, warps, aligned=sixteen)
    print(kernel.__name__, len(made.asm["cubin"]))
    return made.asm["ptx"]

for dtype, mask, power in (("*bf16", 2, True), ("*fp16", 1, False), ("*fp32", 0, True)):
    types = {"X": dtype, "Mask": (dtype, "*u8", "*i32")[mask], "Exponent": "*fp64" if power else dtype, "Parts": "*fp64",
             "Uniform": "*fp64", "Token": "*i64", "Tokens": "*i64", "Out": "*fp64", "temperature": "fp32"}
    build(categorical._masses, types, {"CHUNK": 2048, "MASK": mask, "POWER": power}, 4)
    build(categorical._draw, types, {"CHUNK": 2048, "P": 64, "MASK": mask, "POWER": power}, 8)
build(categorical._score, types, {"P": 64}, 1)
ones = dict.fromkeys(("V", "chunks", "rows", "d1", "d2", "x0", "m0", "e0", "u0"), 1)  # Triton makes a 1 a constant
build(categorical._draw, types, {"CHUNK": 2048, "P": 1, "MASK": 0, "POWER": True} | ones, 8)

types = dict.fromkeys(("Item", "Run", "Round", "History", "Key", "A", "B", "C", "D"), "*i64")
types |= dict.fromkeys(("U", "W", "Out"), "*fp64") | {"k0": "i64"}
for device_key in (False, True):
    fixed = {"STEP": 16, "PURPOSE": 24, "DEVICE_KEY": device_key}
    build(philox._uniforms, types, {"BLOCK": 128, "DEVICE_KEY": device_key}, 4)
    build(philox._per_slot, types, {"BLOCK": 16, **fixed}, 1)
    build(philox._stratified, types, {"BLOCK": 32, "OTHERS": 64, **fixed}, 4)

pointers = [name for name in append._append.arg_names if name[0].isupper() and not name.isupper() and name != "BLOCK"]
types = dict.fromkeys(pointers, "*i64") | dict.fromkeys(("Active", "End", "Taken", "Going"), "*u8")
types |= {"Next": "*i32", "factor": "i64"} | dict.fromkeys(("LogQs", "Weight", "LogQ", "NewWeight"), "*fp64")
numbers = {"ALIVE": 0, "ENDED": 1, "STOPPED": 2, "BUDGET": 3, "DEAD": 4, "BLOCK": 128}
for steps, stops, more in ((1, False, True), (9, False, False), (9, True, True)):
    build(append._append, types, {"STEPS": steps, "STOPS": stops, "BLAMED": more, "LIMITED": more, **numbers}, 4)

types = dict.fromkeys(("Score", "Uniforms", "Ess", "LogMean"), "*fp64") | {"Eligible": "*u8", "Go": "*u8", "Ancestors": "*i64"}
for scheme in ("multinomial", "residual", "stratified", "systematic", "ssp", "killing"):
    for n, warps, more in ((1, 1, {"N": 1}), (8, 1, {}), (1024, 8, {})) if scheme == "systematic" else ((8, 1, {}),):
        constants = {"LIMIT": 0.5 * n, "LOG_N": math.log(n), "SCHEME": scheme, "P": n, "J": min(16, n)}
        build(resample._resample, types, constants | more, warps)

def signature(kernel, real, small=()):
    pointers = [name for name in kernel.arg_names if name[0].isupper() and not name.isupper()]
    return dict.fromkeys(pointers, "*i64") | dict.fromkeys(real, "*fp64") | dict.fromkeys(small, "*u8")

ends = commit._put, commit._weigh, commit._measure, commit._inherit
reals = ["NewLogP", "NewLogQ"], [], ["LogWeight", "Before", "Penalty", "LogLeft", "Score", "ChiSquare", "OutLeft"], []
reals[1][:] = [name for name in commit._weigh.arg_names if "Log" in name] + ["SoftScale", "BlockWeight", "Soft", "Last"]
reals[3][:] = [name for name in commit._inherit.arg_names if "Log" in name] + ["Score"]
for kernel, real in zip(ends, reals, strict=True):
    types = signature(kernel, real, [name for name in ("Active", "Eligible", "Go") if name in kernel.arg_names])
    if kernel is commit._put:
        types |= dict.fromkeys(("LogP", "LogQ", "OutLogP", "OutLogQ"), "*fp32")
    for flag in (True, False):
        constants = {"J": 1, "BLOCK": 256, "P": 8, "SOFT": flag, "LAST": flag, "HARD": flag, "by_models": 1, "N": 8}
        build(kernel, types, {name: value for name, value in constants.items() if name in kernel.arg_names}, 1)

for rows in (1, 8, 64):
    build(pages._fork, signature(pages._fork, []), {"PAGE": 16, "ROWS": rows, "COLUMNS": 64}, 4)
    build(pages._trim, signature(pages._trim, []), {"PAGE": 16, "ROWS": rows}, 4)
for width, size, new in ((1, 8, True), (1, 0, True), (2, 0, False)):
    types = signature(unread._unread, [], ["Alive"])
    build(unread._unread, types, {"WIDTH": width, "T": size, "NEW": new, "P": 16}, 1)
build(totals._totals, signature(totals._totals, ("Target", "Law", "LogP", "LogZ", "Gain", "SumZ", "Out")), {"K": 5, "P": 8}, 1)
build(watch._watch, signature(watch._watch, ["Values"], ["Used", "Broken"]), {"BLOCK": 256}, 4)

for number, last in ((0, True), (0, False), (1, True)):
    types = {"Mask": "*i32", "Active": "*u8", "Out": "*i32", "Cause": "*i64"}
    build(masks._joint, types, {"NUMBER": number, "LAST": last, "BLOCK": 1024}, 4)
types = dict.fromkeys(("Now", "Depth", "Past", "Tokens", "Counts"), "*i64") | {"Classes": "*i32", "Following": "*i32"}
build(automaton._walk, types | {"Out": "*fp64"}, {"STEPS": 2, "BLOCK": 128}, 4)

for early in (True, False):
    for dtype, size in (("*bf16", 2), ("*fp32", 4)):
        types = dict.fromkeys(("X", "Weight", "Bias", "Scale"), dtype)
        numbers = {"SIZE": size, "SCALED": False, "BLOCK_N": 32, "BLOCK_K": 64, "AHEAD": 256, "WARPS": 4, "PDL": early}
        for gated, splits, main, rest in ((True, 1, 16, 0), (False, 4, 16, 0), (True, 1, 32, 16), (False, 2, 64, 16)):
            out = {"Out": "*fp32" if splits > 1 else dtype}
            constants = numbers | {"BIAS": not gated and splits == 1, "GATED": gated, "SPLITS": splits}
            ptx = build(layers._linear, types | out, constants | {"BLOCK_M": main, "REST": rest}, 4)
            assert ("griddepcontrol.wait" in ptx) == ("bulk.prefetch" in ptx) == early
            if early:
                # Rounded weights are copied a step ahead as bytes, and widened in registers on the way to the tensor cores.
                small = types | out | {"Weight": "*i8", "Scale": "*fp32"}
                more = {"BLOCK_M": main, "REST": rest, "SCALED": True, "SIZE": 1}
                more |= {} if size == 4 else {"BLOCK_N": 64, "BLOCK_K": 128}
                ptx = build(layers._linear, small, constants | more, 4, ["X", "Weight", "inputs"])
                if size == 2:
                    products = [line for line in ptx.splitlines() if "wgmma.mma_async" in line]
                    assert products and all(line.count("{") == 2 for line in products)  # sums and weights
                    assert "cp.async.c" in ptx
        types = dict.fromkeys(("X", "Bias", "Out"), dtype) | {"Weight": "*i8", "Scale": "*fp32"}
        for most, outputs, gated, splits in ((8, 16, False, 2), (8, 32, True, 1), (16, 32, False, 1)) if size == 2 else ():
            constants = {"BIAS": not gated and splits == 1, "GATED": gated, "SPLITS": splits, "BLOCK_M": most, "PDL": early}
            constants |= {"BLOCK_N": outputs, "BLOCK_K": 128, "AHEAD": 512, "WARPS": 4}
            out = {"Out": "*fp32" if splits > 1 else dtype}
            ptx = build(rounded._rounded_linear, types | out, constants, 4, ["X", "Weight", "inputs"])
            # 16 bytes at a time, as `_order` promises.
            assert "ld.shared.v4.b32" in ptx and "ld.shared.v2.b8" not in ptx and "cp.async.c" in ptx
        if size == 2:
            constants |= {"outputs": 1, "GATED": True, "BIAS": False, "SPLITS": 1}  # Triton makes a 1 a constant
            build(rounded._rounded_linear, types, constants, 4)
            build(layers._linear, types, constants | {"BLOCK_M": 16, "REST": 0, "SIZE": 1, "SCALED": True}, 4)
        types = {"X": dtype, "Weight": dtype, "Out": dtype, "Parts": "*fp32", "eps": "fp32"}
        for parts in (0, 4):
            build(layers._rms_norm, types, {"PARTS": parts, "BLOCK": 2048, "PDL": early}, 4)
        types = dict.fromkeys(("Table", "Weight", "Into", "Out"), dtype) | {"Tokens": "*i64", "eps": "fp32"}
        build(layers._embed_norm, types, {"BLOCK": 2048, "PDL": early}, 4)
"""


# The products of few rows, for devices with less shared memory than those for which their tiles were chosen.
SMALLER = """
from smcgen.kernels.gpu import layers
from smcgen.kernels.gpu.rounded import _rounded_linear
from tests.compiling import compiled

for arch, room in ((80, 163 * 1024), (89, 99 * 1024)):
    for (size, wanted, most), tiles in layers.TILES.items():
        gated, of_warps = wanted == "gated", size == 1 and most <= 16
        main, rest = (most, 0) if of_warps else layers._powers(most)
        inputs = tiles.inputs * (tiles.warps if of_warps else 1)
        stages = layers.fitting(tiles, gated, inputs, main + rest, (size, max(2, size)), room, arch // 10)
        assert stages > 1
        if stages == tiles.stages:
            continue
        dtype = "*fp32" if size == 4 else "*bf16"
        types = {"X": dtype, "Weight": "*i8" if size == 1 else dtype, "Scale": "*fp32", "Bias": dtype, "Out": dtype}
        constants = {"BIAS": False, "GATED": gated, "SPLITS": 1, "BLOCK_M": main, "BLOCK_N": tiles.outputs, "AHEAD": 0}
        constants |= {"BLOCK_K": tiles.inputs, "WARPS": tiles.warps, "PDL": False}
        constants |= {} if of_warps else {"SCALED": size == 1, "REST": rest, "SIZE": size}
        kernel, aligned = _rounded_linear if of_warps else layers._linear, ["X", "Weight", "inputs"]
        made = compiled(kernel, types, constants, tiles.warps, stages=stages, aligned=aligned, capability=arch)
        assert made.metadata.shared <= room, (arch, size, wanted, most)
        print(wanted, len(made.asm["cubin"]))
"""


def test_products_fit_into_smaller_devices(tmp_path):
    assert len(built(SMALLER, tmp_path)) > 5


def test_they_compile(tmp_path):
    assert set(built(SCRIPT, tmp_path)) == {
        *("_append", "_masses", "_draw", "_score", "_uniforms", "_per_slot", "_stratified", "_resample"),
        *("_put", "_weigh", "_measure", "_inherit", "_joint", "_walk", "_linear", "_rms_norm", "_embed_norm", "_fork", "_trim"),
        *("_rounded_linear", "_unread", "_totals", "_watch"),
    }
