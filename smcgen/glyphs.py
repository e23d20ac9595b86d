"""Text as pictures can show it: on one line, of a given width, without a character that the fonts at hand lack."""

from __future__ import annotations

import unicodedata
from functools import cache

# Tried in this order for what matplotlib's own font lacks.
FALLBACKS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans", "WenQuanYi Zen Hei", "Hiragino Sans", "Microsoft YaHei",
    "Malgun Gothic", "Arial Unicode MS", "Noto Sans", "Noto Emoji", "Symbola", "Segoe UI Symbol",
)  # fmt: skip
SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍"}


@cache
def families() -> list[str]:
    """Font families for texts: a monospaced one, and fallbacks that are installed."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans Mono", *(name for name in FALLBACKS if name in installed)]


@cache
def drawable(character: str) -> bool:
    """Whether one of the `families` has it."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = (get_font(findfont(FontProperties(family=name))) for name in families())
    return any(font.get_char_index(ord(character)) for font in fonts)


def printable(text: str, width: int | None = None) -> str:
    """`text` with signs for line ends and escapes for what cannot be drawn, cut to `width` columns; safe from matplotlib's
    mathematics."""
    shown, used = [], 0
    for i, character in enumerate(text):
        sign = SIGNS.get(character, character)
        if not sign.isprintable() or not drawable(sign):
            sign = sign.encode("unicode_escape").decode("ascii")
        columns = 2 if unicodedata.east_asian_width(sign[0]) in "WF" else len(sign)
        room = columns + (i < len(text) - 1)  # for the sign of omission
        if width is not None and used + room > width:
            shown.append("…")
            break
        shown.append(sign)
        used += columns
    return "".join(shown).replace("$", r"\$")
