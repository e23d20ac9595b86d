"""Pictures: every kind of run is drawn without a warning, trees agree with the ancestry, and texts stay what they are."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
from matplotlib import image

import smcgen as sg
from smcgen import plots
from smcgen.genealogy import branches, lost
from smcgen.glyphs import printable
from tests.tables import T, tables

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@sg.potential
def never(text: str) -> bool:
    return False


@sg.potential
def even(text: str) -> bool:
    return len(text) % 2 == 0


def spelled(post: sg.Posterior, pieces: list[bytes]) -> sg.Posterior:
    """The same run, its tokens spelled otherwise."""
    record = post._record
    record.piece_of = lambda token: pieces[token]
    count = len(record.texts_of(0))
    record.texts_of = lambda item: [
        b"".join(pieces[t] for t in row[:length]).decode("utf-8", "replace")
        for row, length in zip(record.fields["tokens"][item].tolist(), record.fields["length"][item].tolist(), strict=True)
    ][:count]
    return sg.Posterior(record, 0)


RUNS = {
    "plain": lambda: sg.sample(LM**2, "ca", draft=SMALL, block=1, particles=8, max_tokens=T, seed=1),
    "one particle": lambda: sg.sample(LM**2, "ca", particles=1, max_tokens=T, seed=1),
    "many": lambda: sg.sample(LM * sg.regex("[ab]*c?"), "ca", particles=64, runs=3, max_tokens=T, seed=1),
    "one text": lambda: sg.sample(LM * sg.choice(["ab"]), "ca", particles=4, max_tokens=T, seed=1),
    "ended by copies": lambda: sg.sample(LM**2, "ca", draft=SMALL, block=1, particles=8, max_tokens=T, seed=1, leniency=np.inf),
    "failed": lambda: sg.sample(LM * never, ["ca"], particles=4, max_tokens=3, seed=0)[0],
    "some runs failed": lambda: sg.sample(LM * even, ["ca"], particles=1, runs=8, max_tokens=T, seed=1)[0],
    "odd spelling": lambda: spelled(
        sg.sample(LM, "ca", particles=8, max_tokens=T, seed=2),
        ["你好，世界".encode(), b"$x_1$\n\t" + b"long " * 60, "😀".encode()[:2], b""],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_drawn(name, tmp_path):
    post = RUNS[name]()
    if name == "some runs failed":
        assert 0 < np.isfinite(post.run_log_evidence).sum() < 8
    post.plot(tmp_path / "run.png")
    pixels = image.imread(tmp_path / "run.png")
    assert pixels.shape[1] == 1760
    assert pixels[..., :3].std() > 0.02


@pytest.mark.parametrize("suffix", [".pdf", ".svg"])
def test_other_formats(suffix, tmp_path):
    RUNS["plain"]().plot(tmp_path / f"run{suffix}")
    assert (tmp_path / f"run{suffix}").stat().st_size > 1000


def test_each_picture_by_itself():
    post = RUNS["plain"]()
    for draw in (plots.ess_trace, plots.evidence_trace, plots.genealogy, plots.weight_histogram, plots.text_bars):
        ax = draw(post)
        assert draw(post, ax) is ax
        assert ax.get_title()
    assert plots.token_strip(post, sample=post.particles[0]).get_title()


@pytest.mark.parametrize("name", ["plain", "many", "ended by copies", "one particle"])
def test_the_tree_is_the_ancestry(name):
    post = RUNS[name]()
    rounds, particles = post.rounds[0], [s for s in post.particles if s.run == 0]
    weights = np.array([s.weight for s in particles])
    tree = branches(rounds, weights, post.piece)
    first = [b for b in tree if b.begin == 0]
    assert len(first) == len({s.root for s in particles})
    assert sum(b.share for b in first) == pytest.approx(weights.sum())
    ends = [b for b in tree if b.ends]
    assert sorted(b.y for b in ends) == list(range(len(ends)))  # no two share a line
    assert {b.end for b in ends} == {len(rounds)}
    assert all(b.end > b.begin for b in tree)
    texts: dict[tuple[int, float], str] = {}
    for b in tree:  # parents come before their children
        texts[b.end, b.y] = (texts[b.begin, b.parent_y] if b.parent_y is not None else "") + b.text
    assert {texts[b.end, b.y].rstrip("∎") for b in ends} == {s.text for s in particles}
    for b in tree:
        children = [c for c in tree if c.begin == b.end and c.parent_y == b.y]
        assert b.ends or sum(c.share for c in children) == pytest.approx(b.share)
        assert b.ends or min(c.y for c in children) <= b.y <= max(c.y for c in children)
    assert all((gone == 0) or r.resampled for gone, r in zip(lost(rounds), rounds, strict=True))


def test_printable():
    assert printable("a\nb\tc") == "a↵b⇥c"
    assert printable("cost $5") == r"cost \$5"
    assert printable("abcdef", 4) == "abc…"
    assert printable("abcd", 4) == "abcd"
    assert printable("\x00\u200b") == r"\x00\u200b"
    assert "\U0001f9ff" not in printable("\U0001f9ff")
    assert printable("") == ""


def test_html_escapes_texts():
    post = spelled(RUNS["plain"](), [b"<b>&", b"b", b"c", b""])
    shown = post._repr_html_()
    assert "<b>&<" not in shown
    assert "&lt;b&gt;&amp;" in shown
    assert "log evidence" in shown
    assert "no particle survived" in RUNS["failed"]()._repr_html_()


@pytest.mark.parametrize(("path", "message"), [("run.jpeg", ".png, .pdf"), ("run", ".png"), ("no/folder/run.png", "no folder")])
def test_a_bad_path(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sg.UsageError, match=message):
        RUNS["plain"]().plot(path)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(sg.UsageError, match=r"smcgen\[plots\]"):
        RUNS["plain"]().plot()
    with pytest.raises(sg.UsageError, match=r"smcgen\[plots\]"):
        plots.ess_trace(RUNS["plain"]())
