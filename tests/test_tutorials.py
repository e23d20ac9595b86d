"""Every tutorial runs from top to bottom in a fresh kernel, and is kept with its outputs and checked answers."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")


def read(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_all_are_there():
    assert [path.name[0] for path in TUTORIALS] == list("1234567")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    folder = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(read(path), timeout=600, kernel_name="python3", resources=folder).execute()
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert used < 120, f"{used:.0f} CPU seconds: a tutorial has a minute on two cores"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_is_kept_with_its_outputs(path):
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum(bool(cell.outputs) for cell in code) > len(code) / 2
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_ends_with_exercises_whose_answers_are_checked(path):
    cells = read(path).cells
    headings = [i for i, cell in enumerate(cells) if cell.cell_type == "markdown" and "## Exercises" in cell.source]
    answers = [cell for cell in cells[headings[-1] :] if cell.cell_type == "code"]
    asked = sum(cell.source.count("\n**") + cell.source.startswith("**") for cell in cells[headings[-1] :])
    assert len(answers) == asked >= 3
    for cell in answers:
        assert "hide-cell" in cell.metadata.tags
        assert "assert " in cell.source
