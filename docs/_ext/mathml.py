"""Formulas as MathML, which browsers draw by themselves: the pages need no script from the network."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml

# What docutils does not know and what says the same.
SAME = (
    (r"\\(?:mathrel|mathbin|mathop|mathord)\b\s*", ""),
    (r"\\operatorname\*?\s*\{", r"\\mathrm{"),
    (r"\\dots\b", r"\\ldots"),
    (r"\\tfrac\b|\\dfrac\b", r"\\frac"),
    (r"\\lvert\b|\\rvert\b|\\vert\b", "|"),
    (r"(\\(?:hat|tilde|bar)\s*(?:[A-Za-z]|\{[A-Za-z]\}))_", r"\1{}_"),  # the index would stand below the letter
    (r"\\(?:big|Big|bigg|Bigg)[lrm]?(?![a-zA-Z])", ""),
)


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def mathml(tex: str, block: bool) -> str:
    """The formula as HTML; one that cannot be drawn is shown as it was written."""
    for pattern, other in SAME:
        tex = re.sub(pattern, other, tex)
    try:
        return str(tex2mathml(tex, as_block=block))
    except (MathError, SyntaxError, IndexError, KeyError, AttributeError):
        return f"<code>{escape(tex)}</code>"


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node.astext(), block=False))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{mathml(node.astext(), block=True)}</div>')
    raise nodes.SkipNode
