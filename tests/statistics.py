"""Statistics of many independent groups, set against enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import chi2

import smcgen as sg
from tests.tables import END, Exact, T, text_of

GROUPS = 20_000
RADIX = 10  # more than the tokens of any fixture
PROMPT = "ca"  # token ids (2, 0)

# Eight functions of a sample, for expectations.
FUNCTIONS: dict[str, Callable[[tuple[int, ...]], float]] = {
    "length": len,
    "full length": lambda x: len(x) == T,
    "starts with a": lambda x: x[0] == 0,
    "starts with bc": lambda x: x[:2] == (1, 2),
    "ends": lambda x: x[-1] == END,
    "count of b": lambda x: x.count(1),
    "contains ab": lambda x: "ab" in text_of(x),
    "second to last is c": lambda x: len(x) > 1 and x[-2] == 2,
}


def many(target: sg.Target, groups: int = GROUPS, prompt: str = PROMPT, **options: Any) -> sg.Posteriors:
    """Independent runs of one prompt as the groups of one batched call."""
    defaults = {"particles": 4, "max_tokens": T, "seed": 1, "groups": groups}
    if options.get("draft") is not None and options.get("mode") != "exact":
        defaults["leniency"] = math.inf  # the plain draft proposal, unless a test asks for another
    return sg.sample(target, [prompt] * groups, **{**defaults, **options})


def z_score(values: np.ndarray, truth: float) -> float:
    """How many standard errors the mean of `values` is from the truth."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    return float((values.mean() - truth) / max(error, 1e-7 * abs(truth), 1e-300))


def evidence_z(posts: sg.Posteriors, exact: Exact) -> float:
    """z of the mean evidence; a group without survivors counts as zero."""
    return z_score(np.exp(posts.log_evidence[:, 0]), exact.z)


def coefficient_of_variation(posts: sg.Posteriors) -> float:
    z = np.exp(posts.log_evidence[:, 0])
    return float(z.std() / z.mean())


def measure(posts: sg.Posteriors, samples: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Z-hat times the weight that each group gives to each sample: float64 [groups, samples]."""
    arrays = posts.arrays()
    place = np.full(RADIX**T, -1)
    place[[_code(np.array(x), len(x)) for x in samples]] = np.arange(len(samples))
    index = place[_code(arrays["tokens"], arrays["length"])]
    log_weight = arrays["log_weight"]
    top = log_weight.max(-1, keepdims=True)
    weight = np.exp(log_weight - np.where(np.isfinite(top), top, 0))
    weight *= np.exp(posts.log_evidence) / np.maximum(weight.sum(-1, keepdims=True), 1e-300)
    assert (index[weight > 0] >= 0).all(), "a particle with weight holds a sample outside the target"
    out = np.zeros((len(index), len(samples)))
    np.add.at(out, (np.arange(len(index))[:, None], np.maximum(index, 0)), weight)
    return out


def _code(tokens: np.ndarray, length: np.ndarray | int) -> np.ndarray:
    """A number for a padded token sequence; unequal sequences have unequal numbers."""
    width = tokens.shape[-1]
    used = np.arange(width) < np.asarray(length)[..., None]
    return np.where(used, (tokens + 1) * RADIX ** np.arange(width), 0).sum(-1)


def law_p_value(posts: sg.Posteriors, exact: Exact, rows: slice = slice(None)) -> float:
    """Of a chi-square test that the samples of one-particle runs (those in `rows`) follow `exact`; cells are joined until
    each expects 5."""
    support = sorted(exact.gamma, key=exact.gamma.__getitem__)
    drawn = measure(posts, support)[rows]
    seen = (drawn > 0).sum(0)
    cells: list[list[float]] = [[0.0, 0.0]]
    for share, count in zip([exact.gamma[x] / exact.z for x in support], seen, strict=True):
        if cells[-1][0] >= 5:
            cells.append([0.0, 0.0])
        cells[-1][0] += share * len(drawn)
        cells[-1][1] += count
    if len(cells) > 1 and cells[-1][0] < 5:
        last = cells.pop()
        cells[-1] = [cells[-1][0] + last[0], cells[-1][1] + last[1]]
    if len(cells) == 1:
        return 1.0
    return float(chi2.sf(sum((seen - want) ** 2 / want for want, seen in cells), len(cells) - 1))
