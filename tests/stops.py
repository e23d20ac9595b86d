"""Where a stop string cuts a text, straight from the definition: the measure of what the package does by automata."""

from __future__ import annotations

from collections.abc import Sequence


def cut(text: str, stops: Sequence[str]) -> str | None:
    """`text` before the stop string that is complete first, the longest of those complete there; None if it holds none."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return None
