"""How the documentation is built: `sphinx-build -W -n docs docs/_build/html`.

Parts are written when a build begins, each from what it describes, and included by the pages of the same names: `_made/cli.md`
from the command's own parser, `_made/messages.md` from the places that raise errors, `_made/benchmarks.md` from
`benchmarks/results/*.json`. The notebooks are copied to `tutorials/`; their stored outputs are shown.
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
MADE = HERE / "_made"
sys.path.insert(0, str(HERE / "_ext"))

from benchmark_page import benchmark_page  # noqa: E402
from cli_page import cli_page  # noqa: E402
from message_page import message_page  # noqa: E402
from tutorial_pages import tutorial_pages  # noqa: E402

import smcgen  # noqa: E402

project = "smcgen"
author = "the smcgen authors"
project_copyright = "the smcgen authors, Apache-2.0"
version = release = smcgen.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings", "mathml", "sphinx_copybutton"]
exclude_patterns = ["_build", "_ext", "_made", "_static"]
html_theme = "furo"
html_title = f"smcgen {version}"
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sphinx = False

myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
copybutton_prompt_text = "$ "
copybutton_exclude = ".go, .gp"  # prompts and outputs stay behind

smartquotes = False  # "--option" is no dash
default_role = "code"  # docstrings write names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
# Types of other packages, whose inventories would need the network, and of the engine's inside.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|collections|re|os|pathlib|lark|llguidance)\..*"),
    ("py:.*", r"Axes|Figure|Path|Vocabulary|smcgen\.(record|drafts)\..*"),
    ("py:.*", r"(tuple|list|dict)\[.*"),
]


def more_names(page: str) -> str:
    """Directives for the public names that the page on the API does not place by hand."""
    lines = []
    for name in smcgen.__all__:
        value = getattr(smcgen, name)
        if f"smcgen.{name}\n" not in page and value.__module__ != "smcgen.errors":
            lines.append(f".. auto{'class' if isinstance(value, type) else 'function'}:: smcgen.{name}")
    return "\n".join(lines) + "\n"


def write_pages() -> None:
    """Writes the generated parts where they differ, so that a second build has nothing to do."""
    pages = {
        MADE / "cli.md": cli_page(),
        MADE / "benchmarks.md": benchmark_page(ROOT / "benchmarks"),
        MADE / "messages.md": message_page(ROOT),
    }
    pages[MADE / "more_names.txt"] = more_names((HERE / "api.md").read_text(encoding="utf-8"))
    pages |= tutorial_pages(ROOT / "tutorials", HERE / "tutorials")
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for stale in {*MADE.iterdir(), *(HERE / "tutorials").glob("*.ipynb")} - set(pages):
        stale.unlink()


def links_inside(app: object, name: str, source: list[str]) -> None:
    """Links to the notebooks lead to their files in the repository, and to their pages here."""
    source[0] = source[0].replace("](../../tutorials/", "](")


def setup(app: Any) -> None:
    app.connect("source-read", links_inside)


write_pages()  # before Sphinx looks for documents
