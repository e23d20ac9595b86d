"""Docstrings in this project's style, made fit for napoleon, which reads a little more into them than they say."""

from __future__ import annotations

import re
from typing import Any

from sphinx.pycode import ModuleAnalyzer


def setup(app: Any) -> dict[str, bool]:
    kept: dict[str, list[str]] = {}
    # Overloads leave the options out, which are what a reader looks for.
    sampling = ModuleAnalyzer.for_module("smcgen.sampling")
    sampling.analyze()
    sampling.overloads.clear()

    def before(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = raises_as_prose([several_names(line) for line in lines])
        kept[name] = list(lines)

    def after(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        if what == "property":  # "float64 [runs]: log Z-hat ..." is no type and its explanation
            lines[:] = kept[name]

    app.connect("autodoc-process-docstring", before, priority=400)
    app.connect("autodoc-process-docstring", after, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def several_names(line: str) -> str:
    """ "a, b: text" explains two arguments, and "a" is not the type of "b"."""
    found = re.match(r"\s+\w+(?:, \w+)+: ", line)
    return line[: found.end()].replace(", ", ",") + line[found.end() :] if found else line


def raises_as_prose(lines: list[str]) -> list[str]:
    """The section "Raises:" is a sentence, not a list."""
    out: list[str] = []
    inside = False
    for line in lines:
        if line.strip() == "Raises:":
            inside = True
            out += ["Raises"]
        elif inside and line.strip():
            out.append(line.strip())
        else:
            inside = False
            out.append(line)
    return out
