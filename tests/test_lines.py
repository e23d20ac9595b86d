"""The file of results of the command: what -o has written of a run that was cut off is kept, and the rest is as it would have
been."""

from __future__ import annotations

import json

import pytest

import smcgen as sg
from tests.test_cli import model, run  # noqa: F401

OPTIONS = ("--prompt-file", "p.txt", "--max-tokens", "6", "--samples", "2", "--groups", "3")


@pytest.fixture
def call(run, model, tmp_path):  # noqa: F811
    (tmp_path / "p.txt").write_text("ab\ncd\nef\nfa\n")  # eight samples: parcels of 3, 3 and 2
    return lambda *more, **options: run("sample", "-m", model, *OPTIONS, *more, cwd=tmp_path, **options)


@pytest.fixture
def whole(call, tmp_path):
    assert call("-o", "a.jsonl", "--seed", "5").returncode == 0
    text = (tmp_path / "a.jsonl").read_text()
    assert [json.loads(line)["key"] for line in text.splitlines()] == list(range(8))
    return text


@pytest.mark.parametrize("lines", [0, 2, 3, 7, 8])
@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.part"])
def test_it_goes_on_where_it_was(call, whole, tmp_path, monkeypatch, lines, name):
    cut = "".join(whole.splitlines(keepends=True)[:lines])
    (tmp_path / name).write_text(cut + (whole[len(cut) :][:40] if lines < 8 else ""))
    drawn, sample = [], sg.sample
    monkeypatch.setattr(sg, "sample", lambda *a, **o: (drawn.extend(o["keys"]), sample(*a, **o))[1])
    done = call("-o", "b.jsonl", "--resume", *(["--seed", "5"] if lines == 0 else []))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "b.jsonl").read_text() == whole
    assert drawn == list(range(lines // 3 * 3 if lines < 8 else 8, 8))
    assert not list(tmp_path.glob("*.part"))


def test_what_is_drawn_is_kept_when_a_run_breaks_off(call, whole, tmp_path, monkeypatch):
    sample = sg.sample

    def breaking(*arguments, **options):
        if 6 in options["keys"]:
            raise KeyboardInterrupt
        return sample(*arguments, **options)

    monkeypatch.setattr(sg, "sample", breaking)
    done = call("-o", "b.jsonl", "--seed", "5")
    assert done.returncode == 130
    assert "6 of the results are in b.jsonl.part: the same command with --resume goes on" in done.stderr
    assert whole.startswith((tmp_path / "b.jsonl.part").read_text())
    assert not (tmp_path / "b.jsonl").exists()
    done = call("-o", "b.jsonl", "--seed", "5")
    assert (done.returncode, "b.jsonl.part holds results of a run that was cut off, 6 of them" in done.stderr) == (2, True)
    monkeypatch.setattr(sg, "sample", sample)
    assert call("-o", "b.jsonl", "--seed", "5", "--resume").returncode == 0
    assert (tmp_path / "b.jsonl").read_text() == whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "6"], "drawn with another seed"),
        (["--max-tokens", "7", "--threshold", "0.5"], "drawn with another max_tokens, threshold"),
        (["--samples", "1"], "a result of another prompt, or of more samples"),
        (["--mode", "auto"], "not with --mode auto"),
    ],
)
def test_another_run_does_not_go_on(call, whole, tmp_path, more, message):
    (tmp_path / "b.jsonl").write_text("".join(whole.splitlines(keepends=True)[:3]))
    before = (tmp_path / "b.jsonl").read_text()
    done = call("-o", "b.jsonl", "--resume", *more)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert (tmp_path / "b.jsonl").read_text() == before
    assert not list(tmp_path.glob("*.part"))


def test_what_is_no_file_of_results(call, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"key": 0}\n')
    done = call("-o", "b.jsonl", "--resume")
    assert (done.returncode, "no file of results" in done.stderr) == (2, True)
    assert "file of -o" in call("--resume").stderr


def test_another_seed_is_refused_though_all_is_there(call, whole):
    done = call("-o", "a.jsonl", "--resume", "--seed", "6")
    assert (done.returncode, "drawn with another seed" in done.stderr) == (2, True)
    assert "all results are there" in call("-o", "a.jsonl", "--resume", "--seed", "5").stderr
