"""The record for genlm-control's viewer: its structure, and that both viewers rebuild the texts from it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import smcgen as sg
from smcgen.genlm_record import _escape
from tests.tables import T, tables

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
OPTIONS = [
    {},
    {"draft": SMALL, "block": 2},
    {"draft": SMALL, "block": 3, "leniency": 1.5},
]


def rebuilt(steps: list[dict], viewer: str) -> list[list[str]]:
    """The text of every particle at every step, as html/smc.html of genlm-control 0.4 or of llamppl rebuilds it."""
    rows: list[list[str]] = []
    for i, step in enumerate(steps):
        row = []
        for j, p in enumerate(step["particles"]):
            parent = "" if i == 0 else rows[-1][step["ancestors"][j] if step["mode"] == "resample" else j]
            if viewer == "llamppl":
                row.append(parent[: p["keep"]] + p["contents_incr"])
            else:
                row.append(parent + "|" + p["contents_incr"] if parent and p["contents_incr"] else parent + p["contents_incr"])
        rows.append(row)
    return rows


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_record(options, tmp_path):
    post = sg.sample(LM**2 * sg.regex("[ab]*c?"), "ca", particles=8, runs=2, max_tokens=T, seed=5, **options)
    text = post.to_genlm_json(tmp_path / "record.json", run=1)
    steps = json.loads(text)
    assert json.loads((tmp_path / "record.json").read_text(encoding="utf-8")) == steps
    rounds = post.rounds[1]
    assert [s["step"] for s in steps] == list(range(1, len(rounds) + 1))
    resampled = [False, *[r.resampled for r in rounds[:-1]]]
    assert [s["mode"] for s in steps] == ["init", *["resample" if r else "smc_step" for r in resampled[1:]]]
    assert any(resampled)
    last = [s for s in post.particles if s.run == 1]
    for viewer in ("genlm", "llamppl"):
        texts = rebuilt(steps, viewer)[-1]
        assert [t.replace("|", "").removesuffix("EOS") for t in texts] == [s.text for s in last]
    before = np.zeros(8)
    for step, r in zip(steps, rounds, strict=True):
        assert set(step) == {"step", "mode", "particles"} | ({"ancestors"} if step["mode"] == "resample" else set())
        before = before[step["ancestors"]] if step["mode"] == "resample" else before
        weights = np.array([float(p["logweight"].replace("Infinity", "inf")) for p in step["particles"]])
        changes = np.array([float(p["weight_incr"].replace("Infinity", "inf")) for p in step["particles"]])
        assert np.log(np.exp(weights).mean()) == pytest.approx(r.log_evidence)
        alive = np.isfinite(weights)
        assert changes[alive] == pytest.approx((weights - before)[alive])
        before = weights


def test_copies_made_in_the_last_round_are_a_step():
    post = sg.sample(LM**2, "ca", draft=SMALL, block=1, particles=8, max_tokens=T, seed=1, leniency=math.inf)
    assert post.rounds[0][-1].resampled
    steps = json.loads(post.to_genlm_json())
    assert len(steps) == len(post.rounds[0]) + 1
    for viewer in ("genlm", "llamppl"):
        assert [t.replace("|", "").removesuffix("EOS") for t in rebuilt(steps, viewer)[-1]] == [s.text for s in post.particles]
    assert {float(p["logweight"]) for p in steps[-1]["particles"]} == {post.log_evidence}


def test_only_a_run_that_exists():
    post = sg.sample(LM, "ca", particles=4, max_tokens=T, seed=5)
    assert json.loads(post.to_genlm_json()) == json.loads(sg.Posterior.from_json(post.to_json()).to_genlm_json())
    for run in (-1, 1, "0"):
        with pytest.raises(sg.UsageError, match="1 run"):
            post.to_genlm_json(run=run)


def test_without_survivors():
    @sg.potential
    def never(text: str) -> bool:
        return False

    post = sg.sample(LM * never, ["ca"], particles=4, max_tokens=3, seed=0)[0]
    steps = json.loads(post.to_genlm_json())
    assert {p["logweight"] for p in steps[-1]["particles"]} == {"-Infinity"}
    assert not any(math.isnan(float(p["weight_incr"].replace("Infinity", "inf"))) for s in steps for p in s["particles"])


def test_spelling():
    assert _escape(b" a\n") == "␣a\\n"
    assert _escape(b"") == "EOS"
    assert _escape("é你".encode()) == "é你"
    assert _escape(b"\xe4\xbd") == "\\xe4\\xbd"
    assert _escape(b">>> <<<") == "›››␣‹‹‹"
