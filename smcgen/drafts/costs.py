"""What a forward costs on this machine: a table measured before a run, so that nothing in the run waits for a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smcgen.lm.base import LanguageModel

REPEATS = 3
PROMPT = 16  # tokens read before a forward is timed


@dataclass(frozen=True)
class Costs:
    """Seconds of a forward of the target for (rows, tokens of each row), and of each draft for rows (of one token each)."""

    target: dict[tuple[int, int], float]
    drafts: list[dict[int, float]]

    def round(self, draft: int, rows: int, block: int) -> float:
        """Seconds of a round that drafts `block` tokens in `rows` rows and reads them."""
        widths = sorted(width for r, width in self.target if r == rows)
        return block * self.drafts[draft][rows] + _between(widths, [self.target[rows, w] for w in widths], block + 1)

    def plain(self, rows: int) -> float:
        """Seconds of a token of plain decoding."""
        return self.target[rows, 1]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "target": {f"{rows}x{width}": seconds for (rows, width), seconds in self.target.items()},
            "drafts": [{str(rows): seconds for rows, seconds in draft.items()} for draft in self.drafts],
        }


def _between(x: Sequence[int], y: Sequence[float], at: int) -> float:
    """Linear between known points, and beyond the last along the last stretch."""
    if len(x) == 1:
        return y[0]
    i = min(max(sum(k < at for k in x), 1), len(x) - 1)
    slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
    return max(y[i - 1] + slope * (at - x[i - 1]), 0.0)


def measure(target: LanguageModel, drafts: Sequence[LanguageModel], rows: Sequence[int], widths: Sequence[int]) -> Costs:
    """Times forwards for every number of rows; medians of three, after one that does not count."""
    costs = {(r, w): time_forward(target, r, w) for r in rows for w in widths}
    return Costs(costs, [{r: time_forward(draft, r, 1) for r in rows} for draft in drafts])


@torch.inference_mode()
def time_forward(lm: LanguageModel, rows: int, tokens: int, prompt: int = PROMPT, repeats: int = REPEATS) -> float:
    """Seconds of one forward of `lm` that reads `tokens` tokens in each of `rows` rows."""
    token = next(t for t in range(len(lm.vocabulary)) if t not in lm.vocabulary.special)
    context = lm.open(rows, 1, prompt, tokens + 1)
    lm.prefill(context, list(range(rows)), [[token] * prompt] * rows)
    block = torch.full((rows, tokens), token, device=lm.device)
    counts = torch.full((rows,), tokens, device=lm.device)
    length = context.length.clone()
    seconds = []
    for _ in range(repeats + 1):
        _wait(lm.device)
        began = time.perf_counter()
        lm.extend(context, block, counts)
        _wait(lm.device)
        seconds.append(time.perf_counter() - began)
        lm.trim(context, length)
    return statistics.median(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
