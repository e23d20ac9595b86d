"""Pictures of a run. Colours are Okabe & Ito's, told apart by colour-blind readers; marks and line widths serve grey print.

Each function draws into the matplotlib Axes that it is given, or into a figure of its own, and returns the Axes.
"""

from __future__ import annotations

import importlib.util
import io
import math
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smcgen.diagnostics import NARROW
from smcgen.errors import UsageError
from smcgen.genealogy import branches, lost
from smcgen.glyphs import families, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from smcgen.posterior import Posterior, Sample

BLUE, ORANGE, VERMILION, GREY, BLACK = "#0072B2", "#E69F00", "#D55E00", "#9A9A9A", "#222222"
SUFFIXES = (".png", ".pdf", ".svg")
MONO = 0.602  # width of a character of the monospaced font, in font sizes
MOST_TOKENS = 160
PAGE = 11.0  # inches: letters of 8 points are still read when the page is scaled to the width of a text
STRIP = PAGE - 0.8  # inches of a line of tokens


def check_plot(path: str | Path | None) -> None:
    """Raises UsageError if a picture could not be drawn, or not be written to `path`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("pictures need matplotlib: pip install 'smcgen[plots]'")
    if path is None:
        return
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{str(path)!r}: give a file name that ends with one of {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{str(path)!r}: there is no folder {str(path.absolute().parent)!r}")


def plot(post: Posterior, path: str | Path | None = None) -> Figure:
    """All pictures of a posterior on one page, written to `path` (.png, .pdf or .svg) if one is given."""
    check_plot(path)
    run = _best_run(post)
    leaves = len(post.rounds[run][-1].ancestors)
    tokens = 0.0 if post.failed else 0.5 + 0.42 * len(_lines(post, post.sample))
    heights = [2.3, _tree_height(leaves), 2.5, tokens] if tokens else [2.3, _tree_height(leaves)]
    figure = _figure(PAGE, sum(heights) + 0.75 * len(heights))
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    ess_trace(post, figure.add_subplot(grid[0, 0]))
    evidence_trace(post, figure.add_subplot(grid[0, 1]))
    genealogy(post, figure.add_subplot(grid[1, :]), run)
    if tokens:
        weight_histogram(post, figure.add_subplot(grid[2, 0]))
        text_bars(post, figure.add_subplot(grid[2, 1]))
        token_strip(post, figure.add_subplot(grid[3, :]))
    if path is not None:
        figure.savefig(path, dpi=160)
    return figure


def ess_trace(post: Posterior, ax: Axes | None = None) -> Axes:
    """Effective sample size before resampling, by round; rounds that were resampled are marked."""
    ax = ax or _axes(7, 2.8)
    n, best = post.settings["particles"], _best_run(post)
    for run, rounds in enumerate(post.rounds):
        x, y = np.arange(1, len(rounds) + 1), np.array([r.ess for r in rounds])
        ax.plot(x, y, **_line(run == best, len(post.rounds)))
        if run == best:
            again = np.array([r.resampled for r in rounds])
            ax.plot(x[again], y[again], "o", mfc="white", mec=VERMILION, ms=6, zorder=3, label="resampled")
    ax.axhline(
        post.settings["threshold"] * n, color=GREY, ls="--", lw=1, label=f"resampled below {post.settings['threshold']:g} N"
    )
    ax.set(title="Effective sample size", xlabel="round", ylabel=f"ESS of {n}", ylim=(0, 1.06 * n))
    return _finish(ax)


def evidence_trace(post: Posterior, ax: Axes | None = None) -> Axes:
    """log Z-hat of the prefixes, by round; steps at which the masks left less than a tenth of the mass are marked."""
    ax = ax or _axes(7, 2.8)
    best = _best_run(post)
    for run, rounds in enumerate(post.rounds):
        x, y = np.arange(len(rounds) + 1), np.array([0.0, *(r.log_evidence for r in rounds)])
        ax.plot(x, np.where(np.isfinite(y), y, np.nan), **_line(run == best, len(post.rounds)))
        if run == best:
            steps = np.array(
                [np.max(-np.diff([0.0, *r.log_left]), initial=0) if np.isfinite(r.log_left).all() else 0 for r in rounds]
            )
            narrow = np.r_[False, (steps > NARROW) & np.isfinite(y[1:])]
            if narrow.any():
                ax.plot(x[narrow], y[narrow], "v", color=VERMILION, ms=7, zorder=3, label="masks left less than a tenth")
    if post.log_evidence_se is not None and not post.failed:
        ax.errorbar([max(map(len, post.rounds))], [post.log_evidence], [2 * post.log_evidence_se], color=BLACK, capsize=4,
                    fmt="s", ms=4, zorder=4, label="all runs, ± 2 standard errors")  # fmt: skip
    final = "no particle survived" if post.failed else f"{post.log_evidence:.2f}"
    ax.set(title=f"log evidence: {final}", xlabel="round", ylabel="log evidence, nats")
    return _finish(ax)


def genealogy(post: Posterior, ax: Axes | None = None, run: int | None = None) -> Axes:
    """Who descends from whom: the ancestry of the particles at the end of one run (default: that with the most evidence), with
    what was written on each branch. Thick branches carry much of the answer, grey ones nothing."""
    run = _best_run(post) if run is None else run
    rounds, particles = post.rounds[run], [s for s in post.particles if s.run == run]
    n, weights = len(particles), np.array([s.weight for s in particles])
    weights = weights / max(weights.sum(), 1e-300)
    ax = ax or _axes(PAGE, _tree_height(n) + 0.9)
    last = len(rounds)
    width = 1.2 * ax.bbox.width / ax.figure.dpi  # inches: the layout will make the axes wider than they begin
    column = width / (last * 1.12)  # inches a round
    size = 8 if n <= 24 else 6.5 if n <= 40 else 5
    tree = branches(rounds, weights, post.piece)
    lowest = max(b.y for b in tree)
    for b in tree:
        colour = BLUE if b.share > 0 else GREY
        if b.parent_y is not None:
            ax.plot([b.begin, b.begin], [b.parent_y, b.y], color=colour, lw=0.8, zorder=1)
        ax.plot([b.begin, b.end], [b.y, b.y], color=colour, lw=0.8 + 4 * b.share, solid_capstyle="butt", zorder=1)
        room = int(((b.end - b.begin) * column - 0.08) / (size / 72 * MONO))
        if room >= 2:
            ax.text(b.begin + 0.05 / column, b.y - 0.1 - 0.03 * b.share, printable(b.text, room), fontsize=size,
                    family=families(), color=BLACK if b.share > 0 else "#707070", va="bottom", zorder=2)  # fmt: skip
        if b.ends:
            if b.share > 0:
                ax.scatter([last], [b.y], s=12 + 120 * b.share, color=BLUE, edgecolor="white", lw=0.6, zorder=3)
                ax.text(last + 0.16 / column, b.y, f"{b.share:.1%}", fontsize=size, va="center")
            else:
                ax.plot([last], [b.y], "x", color=GREY, ms=4, zorder=3)
    for t, gone in enumerate(lost(rounds), 1):
        if rounds[t - 1].resampled:
            ax.axvline(t, color=GREY, ls=":", lw=0.8, zorder=0)
            ax.text(t, lowest + 0.75, f" −{gone}", fontsize=7, color="#707070")
    which = f" of run {run + 1} of {len(post.rounds)}" if len(post.rounds) > 1 else ""
    ax.set(title=f"Genealogy{which} (dotted: resampled; −k: particles left without offspring)", xlabel="round")
    ax.set(xlim=(-0.02 * last, last * 1.1), ylim=(lowest + 1.0, -0.9), yticks=[])
    return _finish(ax, grid=False)


def weight_histogram(post: Posterior, ax: Axes | None = None) -> Axes:
    """Weights of all particles relative to an equal share, on a logarithmic scale."""
    ax = ax or _axes(7, 2.8)
    weights = np.array([s.weight for s in post.particles])
    relative = np.log10(weights[weights > 0] * len(weights))
    low, high = (math.floor(min(relative.min(), -0.5)), math.ceil(max(relative.max(), 0.5))) if len(relative) else (-1, 1)
    low = max(low, high - 12)
    ax.hist(relative.clip(low), bins=(low + (high - low) / 30 * (np.arange(32) - 0.5)).tolist(), color=BLUE, edgecolor="white")
    ax.axvline(0, color=VERMILION, ls="--", lw=1.2, label="an equal share")
    dead = int((weights == 0).sum())
    ax.set(
        title="Weights" + f" ({dead} of {len(weights)} are 0)" * bool(dead), ylabel="particles", xlim=(low - 0.1, high + 0.1)
    )
    ax.set_xlabel("weight / equal share, powers of ten")
    ax.locator_params(axis="y", integer=True)
    return _finish(ax)


def text_bars(post: Posterior, ax: Axes | None = None, most: int = 8) -> Axes:
    """Probabilities of the likeliest texts; what is left is one bar."""
    ax = ax or _axes(7, 2.8)
    rows = post.table()
    common = len(commonprefix([row.text for row in rows[:most]])) if len(rows) > 1 else 0  # noqa: RUF071 characters are meant
    skipped = max(common - 8, 0) if common > 24 else 0  # of what all begin with
    labels = [printable("…" * bool(skipped) + row.text[skipped:], 66) or "(empty)" for row in rows[:most]]
    values = [row.probability for row in rows[:most]]
    if len(rows) > most:
        labels.append(f"{len(rows) - most} others")
        values.append(sum(row.probability for row in rows[most:]))
    ax.barh(range(len(values)), values, color=[BLUE] * min(len(rows), most) + [GREY] * (len(rows) > most), height=0.4)
    for place, (value, label) in enumerate(zip(values, labels, strict=True)):
        ax.text(value, place, f" {value:.3f}", va="center", fontsize=8)
        ax.text(0, place - 0.25, f" {label}", fontsize=8, family=families(), va="bottom")
    ax.set(title=f"{len(rows)} distinct text{'s' * (len(rows) != 1)}", xlabel="probability", yticks=[])
    ax.set(xlim=(0, 1.15 * max(values, default=1)), ylim=(max(len(values), 3) - 0.6, -0.8))
    return _finish(ax, grid=False)


def token_strip(post: Posterior, ax: Axes | None = None, sample: Sample | None = None) -> Axes:
    """The tokens of one sample (default: `post.sample`), coloured by what each added to the log weight: sum_j alpha_j log p_j
    of it less the log probability with which it was drawn. Blue: more target than proposal; orange: less."""
    sample = sample or post.sample
    lines = _lines(post, sample)
    ax = ax or _axes(PAGE, 0.5 + 0.42 * len(lines) + 0.5)
    most = max((abs(value) for line in lines for _, _, _, value in line), default=0.0)
    for row, line in enumerate(lines):
        for x, columns, shown, value in line:
            share = min(abs(value) / max(most, 1e-9), 1.0) if abs(value) > 5e-3 else 0.0
            colour = _tint(BLUE if value > 0 else ORANGE, 0.85 * share)
            ax.barh(row, columns - 0.15, left=x, height=0.5, color=colour, edgecolor="#D0D0D0", lw=0.5)
            ax.text(x + 0.35, row, shown, fontsize=9, family=families(), va="center", color=BLACK)
            if abs(value) >= 0.05:
                ax.text(x + 0.35, row + 0.27, f"{value:+.1f}".replace("-", "−"), fontsize=7, va="top", color="#505050")
    note = f", first {MOST_TOKENS} of {len(sample.token_ids)} tokens" if len(sample.token_ids) > MOST_TOKENS else ""
    ax.set(title=f"One draw: what each token added to the log weight, in nats{note}")
    ax.set(xlim=(0, STRIP / (9 / 72 * MONO)), ylim=(len(lines) - 0.3, -0.6))
    ax.set_axis_off()
    return ax


def _lines(post: Posterior, sample: Sample) -> list[list[tuple[float, float, str, float]]]:
    """The sample's tokens broken into lines: (column, columns, text shown, contribution)."""
    most = int(STRIP / (9 / 72 * MONO))
    exponents = post.settings["exponents"]
    lines: list[list[tuple[float, float, str, float]]] = [[]]
    x = 0.0
    for token, log_p, log_q in list(zip(sample.token_ids, sample.token_log_p, sample.token_log_q, strict=True))[:MOST_TOKENS]:
        shown = printable(post.piece(token).decode("utf-8", "replace").replace(" ", "·"), 40) or "∎"
        value = sum(a * p for a, p in zip(exponents, log_p, strict=True)) - log_q
        columns = max(len(shown.replace("\\$", "$")), 3.0) + 0.9
        if x + columns > most and lines[-1]:
            lines.append([])
            x = 0.0
        lines[-1].append((x, columns, shown, value))
        x += columns
        if "\n" in post.piece(token).decode("utf-8", "replace"):
            lines.append([])
            x = 0.0
    return [line for line in lines if line]


def _best_run(post: Posterior) -> int:
    return int(np.argmax(post.run_log_evidence))


def _tree_height(leaves: int) -> float:
    return max(2.0, leaves * (0.27 if leaves <= 24 else 0.2 if leaves <= 40 else 0.15))


def _line(best: bool, runs: int) -> dict[str, Any]:
    """How the run with the most evidence is drawn, and how the others."""
    if best:
        return {
            "color": BLUE,
            "lw": 2,
            "marker": ".",
            "zorder": 2,
            "label": None if runs == 1 else "run with the most evidence",
        }
    return {"color": GREY, "lw": 0.9, "zorder": 1}


def _tint(colour: str, share: float) -> tuple[float, ...]:
    """From white (0) to the colour (1)."""
    return tuple(1 - share * (1 - int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))


def _figure(width: float, height: float) -> Figure:
    check_plot(None)
    return _page()(figsize=(width, height), layout="constrained")


@cache
def _page() -> type[Figure]:
    """A Figure that notebooks show, whether or not pyplot has been imported (which is what teaches them otherwise)."""
    from matplotlib.figure import Figure

    class Page(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=110)
            return picture.getvalue()

    return Page


def _axes(width: float, height: float) -> Axes:
    return _figure(width, height).add_subplot()


def _finish(ax: Axes, grid: bool = True) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_xlabel() == "round":
        ax.locator_params(axis="x", integer=True)
    if grid:
        ax.grid(axis="y", color="#E5E5E5", lw=0.8)
        ax.set_axisbelow(True)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, edgecolor="none", framealpha=0.85)  # read on top of lines, too
    return ax
