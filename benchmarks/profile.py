"""Where the time of a round goes on a GPU: its kernels by name, with microseconds and launches a round.

    python -m benchmarks.profile [-o benchmarks/results/profile.json]
    python -m benchmarks.profile --tiny         tiny shapes, also without a GPU, to see that everything runs

Shapes and settings as in `benchmarks.round`. Kernels are launched one after the other here, none before the one before has
ended, for a kernel that waits would be counted as if it worked; so the sum may be more than the time of a round, which stands
beside it. Counted is a run of twice as many rounds less one of the usual number, so that prompts and recording drop out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from benchmarks import round as rounds
from benchmarks.about import about

SETTINGS: dict[str, dict[str, Any]] = {
    "round": {},
    "round, prompt 4096": {"prompt": 4096},
    "leniency 2": {"leniency": 2.0},
    "lossless, 1 chain": {"particles": 1, "block": 4, "leniency": 1.0},
    "plain decoding, one row": {"particles": 1, "draft": None},
}
SHOWN = 16


def counted(bench: rounds.Bench, setting: dict[str, Any], times: int) -> tuple[Counter[str], Counter[str], int]:
    """Microseconds and launches of every kernel, by name, and the number of rounds."""
    activity = ProfilerActivity.CUDA if rounds.CUDA else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        row = bench.round(**{**rounds.BASE, **setting, "times": times})
    micros: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in recorded.events() or []:
        if not rounds.CUDA or "CUDA" in str(event.device_type):
            name = event.name.split("(")[0][:100]
            micros[name] += int(event.device_time_total if rounds.CUDA else event.self_cpu_time_total)
            launches[name] += 1
    return micros, launches, row["rounds"]


def kernels(bench: rounds.Bench, setting: dict[str, Any]) -> dict[str, Any]:
    """The kernels of one round, the longest first."""
    few, many = counted(bench, setting, 1), counted(bench, setting, 2)
    count = many[2] - few[2]
    micros = {name: (total - few[0][name]) / count for name, total in many[0].items()}
    launches = {name: (total - few[1][name]) / count for name, total in many[1].items()}
    names = sorted(micros, key=lambda name: -micros[name])
    return {
        "kernels_microseconds": sum(micros.values()),
        "launches": sum(launches.values()),
        "kernels": [{"name": n, "microseconds": micros[n], "launches": launches[n]} for n in names[:SHOWN]],
    }


def in_turn() -> contextlib.AbstractContextManager[Any]:
    """No kernel begins before the one before it has ended."""
    if not rounds.CUDA:
        return contextlib.nullcontext()
    from smcgen.kernels.gpu import pdl

    return mock.patch.object(pdl, "_capable", return_value=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", type=int, default=len(SETTINGS), help="how many of the settings, in their order")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    bench = rounds.Bench(args.tiny or not rounds.CUDA)
    result: dict[str, Any] = about(rounds.DEVICE) | {"copy_bandwidth": bench.bandwidth}
    for name, setting in list(SETTINGS.items())[: args.only]:
        timed = bench.round(**{**rounds.BASE, **setting})  # also compiles what is still missing
        row = {**rounds.BASE, **{k: v for k, v in setting.items() if k in rounds.BASE}}
        with in_turn():
            row |= {"milliseconds": timed["milliseconds"]} | kernels(bench, setting)
        result[name] = row
        total = f"kernels {row['kernels_microseconds']:.0f} us, {row['launches']:.0f} launches"
        print(f"\n{name}: {row['milliseconds']:.2f} ms; {total}")
        for kernel in row["kernels"]:
            print(f"  {kernel['microseconds']:9.1f} us {kernel['launches']:7.1f} x  {kernel['name']}", flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
