"""A posterior as HTML, for notebooks: texts with bars, the evidence, what the run tells about itself, and advice."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smcgen.posterior import Posterior

BAR = "background:#0072B2;height:0.8em;min-width:1px"


def to_html(post: Posterior, most: int = 10) -> str:
    """A table of the likeliest texts, diagnostics in one line and advice; every text escaped."""
    if post.failed:
        return f"<b>Posterior</b>: {escape(post.failure().args[0])}"
    error = "" if post.log_evidence_se is None else f" ± {post.log_evidence_se:.2g}"
    rows, summary = post.table(), post.diagnostics().summary()
    lines = [
        f"<b>Posterior</b>: {len(rows)} distinct text{'s' * (len(rows) != 1)}, log evidence {post.log_evidence:z.4f}{error}",
        "<table style='text-align:left'><tr><th>probability</th><th></th><th style='text-align:left'>text</th></tr>",
    ]
    for row in rows[:most]:
        bar = f"<div style='{BAR};width:{100 * row.probability:.1f}px'></div>"
        text = f"<pre style='margin:0;white-space:pre-wrap;text-align:left'>{escape(row.text)}</pre>"
        lines.append(f"<tr><td>{row.probability:.4f}</td><td style='min-width:100px'>{bar}</td><td>{text}</td></tr>")
    lines.append("</table>")
    if len(rows) > most:
        lines.append(f"<div>... {len(rows) - most} more</div>")
    lines.append(
        f"<div>{summary['rounds']} rounds, smallest ESS {summary['smallest_ess']:.1f} of {post.settings['particles']}, "
        f"{summary['resampled']:.0%} of rounds resampled</div>"
    )
    advice = post.advice()
    if advice:
        lines.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in advice) + "</ul>")
    return "\n".join(lines)
