"""Speed against exactness on a real model: N particles, M chains, K drafted tokens, leniency s, three drafts.

    python -m benchmarks.frontier models/SmolLM2-135M-Instruct.Q4_1.gguf
    python -m benchmarks.frontier --picture          draws what is in the file

The drafts are the model itself with weights rounded to 4, 5 and 8 bits, which are accepted at about 0.67, 0.82 and 0.97. For
each setting, over `--texts` texts of `--tokens` tokens, as many from each of eight prompts:

    tokens per pass   tokens of a text per forward of the target, until the slowest particle of its group has ended; it does
                      not depend on the machine
    bound             -mean(log Z-hat), in nats: KL(law of one text, model) is at most its expectation; 0 in exact mode
    particle          tokens per forward of one particle while it goes on, stragglers aside

Errors are standard errors of the mean over these prompts: from the spread of the texts of a prompt, where there are several.
Speed-up over plain decoding, if a drafted token costs rho forwards of the target and rows are free: tokens per pass /
(1 + rho K). "foretold" is what teacher forcing on texts of the model says of exact mode, without blocks that the budget cuts
short, which "uncut" leaves out as well. Results are written as they come; a second call adds the settings that are missing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import smcgen as sg
from benchmarks.about import SHARED, about

ROOT = Path(__file__).parent
PROMPTS = [
    "Write a short story about a fox who learns to swim.",
    "Explain why the sky is blue to a ten-year-old.",
    "Give me a recipe for a simple vegetable soup.",
    "What are the main causes of the First World War?",
    "Write a letter to a friend about a trip to the mountains.",
    "How does a bicycle stay upright?",
    "Describe a busy market in the morning.",
    "Explain how to save money as a student.",
]
BITS = (4, 5, 8)
# N particles, M chains, K drafted tokens, leniency s; s = 1 with N = 1 is exact.
SETTINGS = [
    (1, 1, 4, 1.0),
    (1, 8, 4, 1.0),
    (8, 1, 4, math.inf),
    (8, 1, 4, 2.0),
    (8, 1, 4, 1.5),
    (1, 1, 8, 1.0),
    (8, 1, 8, math.inf),
    (8, 1, 8, 2.0),
    (4, 1, 4, 2.0),
    (4, 1, 4, math.inf),
    (1, 8, 8, 1.0),
    (8, 1, 8, 1.5),
    (8, 1, 4, 3.0),
    (8, 1, 2, math.inf),
    (16, 1, 4, 2.0),
    (16, 1, 4, math.inf),
]
RHO = (0.07, 0.16)
# Tokens per forward of exact mode by (bits, M, K): acceptance of M candidates at each of 1,032 positions of texts of the model,
# forced along them, token by token. With one chain the mode judges whole blocks, and keeps a little more.
FORETOLD = {
    (4, 1, 4): 2.54, (4, 1, 8): 2.87, (4, 8, 4): 3.30, (4, 8, 8): 3.79,
    (5, 1, 4): 3.42, (5, 1, 8): 4.49, (5, 8, 4): 4.10, (5, 8, 8): 5.60,
}  # fmt: skip
# The picture: K -> colour (told apart by colour-blind readers), leniency -> mark and name.
COLOURS = {2: "#009E73", 4: "#0072B2", 8: "#D55E00"}
MARKS: dict[float | None, tuple[str, str]] = {
    1.5: ("v", "particles, s = 1.5"),
    2.0: ("o", "particles, s = 2"),
    3.0: ("^", "particles, s = 3"),
    None: ("*", "particles, s infinite"),
}


def measure(
    lm: sg.LM,
    draft: sg.LM,
    setting: tuple[int, int, int, float],
    tokens: int,
    prompts: list[str],
    repeats: int,
    rows: int,
    seed: int,
) -> dict[str, Any]:
    """One setting: means with standard errors. repeats: texts of each prompt.  rows: sequences that are read at a time."""
    n, m, k, s = setting
    exact = n == 1 and s == 1
    options: dict[str, Any] = {"mode": "exact"} if exact else {"particles": n, "leniency": s}
    began = time.perf_counter()
    posts = sg.sample(
        lm, [prompt for prompt in prompts for _ in range(repeats)], draft=draft, chains=m, block=k, max_tokens=tokens,
        groups=max(1, rows // (n * m)), seed=seed, progress=False, **options,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    assert isinstance(posts, sg.Posteriors)
    rounds = [post.rounds[0] for post in posts]
    # A text that ended early counts as it is: its tokens over its rounds.
    longest = posts.arrays()["length"].max(-1)
    per_pass = np.array([length / len(r) for length, r in zip(longest, rounds, strict=True)])
    judged, accepted = (sum(getattr(r, name) for rs in rounds for r in rs) for name in ("judged", "accepted"))
    row = {
        "particles": n,
        "chains": m,
        "block": k,
        "leniency": s if math.isfinite(s) else None,
        "texts": len(posts),
        "tokens_per_pass": mean(per_pass, repeats),
        "particle_tokens_per_pass": float(np.mean([post.tokens_per_round for post in posts])),
        "bound": [0.0, 0.0] if exact else mean(-posts.log_evidence[:, 0], repeats),
        "acceptance": accepted / judged if judged else None,
        "resampled": float(np.mean([sum(r.resampled for r in rs) for rs in rounds])),
        "seconds": seconds,
    }
    if exact:
        whole = [sum(r.counts) for rs in rounds for r in rs[:-1]]
        row["uncut_tokens_per_pass"] = float(np.mean(whole)) if whole else None
    row["speedup"] = {f"{rho:g}": row["tokens_per_pass"][0] / (1 + rho * k) for rho in RHO}
    return row


def mean(values: np.ndarray, repeats: int) -> list[float]:
    """Mean and standard error: float [prompts * repeats], the texts of a prompt side by side."""
    by_prompt = values.reshape(-1, repeats)
    if repeats == 1:
        error = by_prompt.std(ddof=1) / math.sqrt(len(by_prompt)) if len(by_prompt) > 1 else math.nan
    else:  # the prompts are what they are
        error = math.sqrt((by_prompt.var(1, ddof=1) / repeats).sum()) / len(by_prompt)
    return [float(values.mean()), float(error)]


def reproduction(model: str, rows: list[dict]) -> None:
    """Exact mode beside what was foretold of it."""
    if not model.startswith("SmolLM2-135M-Instruct"):
        return
    print("\nexact mode: tokens per forward of the target")
    print(f"{'bits':>4} {'M':>3} {'K':>3} {'measured':>14} {'uncut':>7} {'foretold':>9}")
    for row in rows:
        key = row["bits"], row["chains"], row["block"]
        if row["particles"] == 1 and row["leniency"] == 1 and key in FORETOLD:
            speed, error = row["tokens_per_pass"]
            uncut = row.get("uncut_tokens_per_pass")
            print(
                "{:4} {:3} {:3} ".format(*key)
                + f"{speed:8.2f} ± {error:.2f} {'' if uncut is None else f'{uncut:.2f}':>7} {FORETOLD[key]:9.2f}"
            )


def picture(data: dict, path: Path) -> None:
    """Tokens per pass against the bound: a panel for each draft, a colour for each K, a mark for each leniency.

    The scale is linear from 0 to 0.1 and logarithmic above, and linear throughout where no bound exceeds 1 nat.
    """
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, panels = plt.subplots(1, len(BITS), figsize=(9.6, 4.8), layout="constrained", sharex=True)
    for bits, axes in zip(BITS, panels, strict=True):
        rows = [row for row in data["rows"] if row["bits"] == bits]
        for row in rows:
            exact = row["particles"] == 1 and row["leniency"] == 1
            fill = "white" if row["chains"] > 1 else None
            (x, dx), (y, dy) = row["tokens_per_pass"], row["bound"]
            axes.errorbar(x, y, dy or None, dx, fmt="s" if exact else MARKS[row["leniency"]][0], color=COLOURS[row["block"]],
                          mfc=fill, ms=9 if row["leniency"] is None else 7, lw=1, zorder=3)  # fmt: skip
        join_particles(axes, rows)
        ones = [row for row in rows if row["particles"] == row["chains"] == 1 and row["block"] == 4]
        share = f"\n{ones[0]['acceptance']:.2f} of its tokens accepted" if ones else ""
        axes.set_title(f"draft: weights in {bits} bits{share}", fontsize=11)
        highest = max((row["bound"][0] + row["bound"][1] for row in rows), default=1.0)
        if highest > 1:
            axes.set_yscale("symlog", linthresh=0.1, linscale=0.6)
            axes.set_yticks([0, 0.1, 1, 10], ["0", "0.1", "1", "10"])
            axes.set_ylim(-0.04, 1.8 * max(row["bound"][0] for row in data["rows"]))
        else:
            axes.set_ylim(-0.06, max(0.1, 1.3 * highest))
            axes.text(0.96, 0.97, "linear scale", transform=axes.transAxes, fontsize=9, color="0.35", ha="right", va="top")
        axes.set_xlim(0.5, 8.7)
        axes.set_xticks(range(1, 9))
        axes.axvline(1, color="0.6", ls="--", lw=1, zorder=1)
        axes.grid(alpha=0.25)
    panels[0].text(1.1, 0.97, "plain decoding", transform=panels[0].get_xaxis_transform(), rotation=90, fontsize=9,
                   color="0.35", va="top")  # fmt: skip
    panels[0].set_ylabel(f"bound on the divergence of a text\nof {data['tokens']} tokens, nats")
    panels[len(BITS) // 2].set_xlabel("tokens per forward of the target")
    known = {row["leniency"] for row in data["rows"]}
    ink: dict[str, Any] = {"color": "0.35", "ls": "", "ms": 7}
    handles = [Line2D([], [], color=colour, lw=5, label=f"K = {k}") for k, colour in COLOURS.items()]
    handles += [Line2D([], [], marker="s", label="exact, one chain", **ink)]
    handles += [Line2D([], [], marker="s", mfc="white", label="exact, M = 8 chains", **ink)]
    handles += [Line2D([], [], ls="", label="a number: N, where it is not 8")]
    handles += [Line2D([], [], marker=mark, label=name, **ink) for s, (mark, name) in MARKS.items() if s in known]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9.5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=170)


def join_particles(axes: Any, rows: list[dict]) -> None:
    """Joins settings that differ in N alone, and says N where it is not 8."""
    for s, side in ((2.0, -1), (None, 1)):
        line = sorted((row for row in rows if row["block"] == 4 and row["leniency"] == s), key=lambda row: row["particles"])
        points = [(row["tokens_per_pass"][0], row["bound"][0]) for row in line]
        axes.plot([x for x, _ in points], [y for _, y in points], color=COLOURS[4], lw=1, alpha=0.5, zorder=2)
        for row, point in zip(line, points, strict=True):
            if row["particles"] != 8:
                axes.annotate(str(row["particles"]), point, (7 * side, 0), textcoords="offset points", fontsize=9,
                              color="0.2", ha="left" if side > 0 else "right", va="center")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="not needed with --picture alone")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--texts", type=int, help="all prompts together (default: 128 on a GPU, one of each on a CPU)")
    parser.add_argument("--rows", type=int, help="sequences that are read at a time (default: 1024 on a GPU, 256 on a CPU)")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="how many of the settings, in their order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no setting after so long")
    parser.add_argument("--output", type=Path, default=ROOT / "results/frontier.json")
    parser.add_argument("--picture", type=Path, nargs="?", const=ROOT.parent / "docs/images/frontier.png")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.model:
        run(arguments)
    if arguments.picture:
        picture(json.loads(arguments.output.read_text()), arguments.picture)


def run(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    lm = sg.LM(arguments.model, device=arguments.device, dtype=arguments.dtype)
    engine: Any = lm.load()
    cuda = engine.device.type == "cuda"
    prompts = PROMPTS[: arguments.prompts]
    repeats = max(1, (arguments.texts or (128 if cuda else len(prompts))) // len(prompts))
    head = {
        "model": Path(arguments.model).name,
        "dtype": str(engine.shape.dtype).removeprefix("torch."),
        "tokens": arguments.tokens,
        "prompts": len(prompts),
        "texts_of_a_prompt": repeats,
    }
    data = about(engine.device, SHARED) | head | {"rows": []}
    if arguments.output.exists():
        data = json.loads(arguments.output.read_text())
        changed = [key for key, value in head.items() if data.get(key) != value]
        if changed:
            raise SystemExit(f"{arguments.output} is of other settings ({', '.join(changed)}): move it away")
    known = {tuple(row[key] for key in ("bits", "particles", "chains", "block", "leniency")) for row in data["rows"]}
    drafts = {bits: lm.quantized(bits) for bits in BITS}
    print(f"{'bits':>4} {'N':>3} {'M':>3} {'K':>3} {'s':>4} {'tokens/pass':>14} {'bound':>14} {'accepted':>9} {'seconds':>8}")
    for setting in SETTINGS[: arguments.settings]:
        for bits in BITS:
            n, m, k, s = setting
            if (bits, n, m, k, s if math.isfinite(s) else None) in known:
                continue
            if time.perf_counter() - began > 60 * arguments.minutes:
                print("time is up: call again for the rest")
                return reproduction(data["model"], data["rows"])
            rows = arguments.rows or (1024 if cuda else 256)
            found = measure(lm, drafts[bits], setting, arguments.tokens, prompts, repeats, rows, arguments.seed)
            row = {"bits": bits, **found}
            data["rows"].append(row)
            (speed, speed_se), (bound, bound_se) = row["tokens_per_pass"], row["bound"]
            accepted = "" if row["acceptance"] is None else f"{row['acceptance']:.3f}"
            print(
                f"{bits:4} {n:3} {m:3} {k:3} {s:4g} {speed:8.2f} ± {speed_se:.2f} {bound:8.2f} ± {bound_se:.2f} "
                f"{accepted:>9} {row['seconds']:8.1f}",
                flush=True,
            )
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(data, indent=1) + "\n")
    return reproduction(data["model"], data["rows"])


if __name__ == "__main__":
    main()
