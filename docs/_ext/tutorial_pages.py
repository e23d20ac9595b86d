"""The notebooks as pages, and their table of contents."""

from __future__ import annotations

from pathlib import Path

INTRODUCTION = """# Tutorials

Notebooks on the small pair of models that ships inside, each with exercises and checked answers. Each runs in under a minute on
two cores; what is shown here are their stored outputs. To run one: `pip install -e '.[plots]' jupyterlab` in the repository and
`OMP_NUM_THREADS=1 jupyter lab tutorials`.

```{toctree}
:maxdepth: 1

"""


def tutorial_pages(source: Path, where: Path) -> dict[Path, str]:
    """Path -> text of what belongs into the folder `where`: the notebooks of `source`, in the order of their names."""
    notebooks = sorted(source.glob("*.ipynb"))
    pages = {where / path.name: path.read_text(encoding="utf-8") for path in notebooks}
    return pages | {where / "index.md": INTRODUCTION + "\n".join(path.stem for path in notebooks) + "\n```\n"}
