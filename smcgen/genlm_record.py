"""A run in the record format of genlm-control, for its viewer (`InferenceVisualizer`) and that of llamppl.

A record is a list of steps. Each has a `mode` ("init", "smc_step", or "resample" with the `ancestors` drawn after the step
before) and, per particle, what it appended (`contents_incr`, tokens joined by "|"), its log weight, evidence included, and how
much that changed. genlm-control 0.4 rebuilds texts by joining the increments along the ancestry with "|"; llamppl keeps the
first `keep` characters of the ancestor's text and appends the increment. One record serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from smcgen.record import Round

END_TOKEN = "EOS"


def genlm_record(rounds: list[Round], piece_of: Callable[[int], bytes]) -> list[dict[str, Any]]:
    """The steps of one run; `piece_of` gives the bytes of a token."""
    steps: list[dict[str, Any]] = []
    count = len(rounds[0].counts)
    written, before = [0] * count, [0.0] * count
    ancestors = None  # of the resampling that opens the step
    for number, r in enumerate(rounds, 1):
        if ancestors is not None:
            written, before = [written[a] for a in ancestors], [before[a] for a in ancestors]
        mode = "init" if number == 1 else "smc_step" if ancestors is None else "resample"
        weights = _log_weights(r)
        particles = []
        for n in range(len(r.counts)):
            added = "|".join(_escape(piece_of(token)) for token in r.tokens[n])
            change = 0.0 if weights[n] == before[n] else weights[n] - before[n]
            particles.append(
                {"keep": written[n], "contents_incr": added, "logweight": _number(weights[n]), "weight_incr": _number(change)}
            )
            written[n] += len(added)
        steps.append({"step": number, "mode": mode, **({"ancestors": ancestors} if ancestors else {}), "particles": particles})
        before, ancestors = weights, r.ancestors if r.resampled or len(r.ancestors) < len(r.counts) else None
    if ancestors is not None:  # the last round ended with copies of what had ended before
        evidence = rounds[-1].log_evidence
        particles = [
            {
                "keep": written[a],
                "contents_incr": "",
                "logweight": _number(evidence),
                "weight_incr": _number(evidence - before[a]),
            }
            for a in ancestors
        ]
        steps.append({"step": len(steps) + 1, "mode": "resample", "ancestors": ancestors, "particles": particles})
    return steps


def _log_weights(r: Round) -> list[float]:
    """Log weights before resampling whose mean weight is the evidence after the round."""
    log_weight = np.array(r.log_weight)
    top = log_weight.max()
    if top == -math.inf:
        return log_weight.tolist()
    return (log_weight - top - np.log(np.exp(log_weight - top).mean()) + r.log_evidence).tolist()


def _escape(piece: bytes) -> str:
    """As genlm-control spells tokens; "<<<" and ">>>", with which the viewers mark a highlight, are spelled otherwise."""
    if not piece:
        return END_TOKEN
    try:
        shown = repr(piece.decode("utf-8"))[1:-1]
    except UnicodeDecodeError:
        shown = repr(piece)[2:-1]
    return shown.replace(" ", "␣").replace("<<<", "‹‹‹").replace(">>>", "›››")


def _number(value: float) -> str:
    return "-Infinity" if value == -math.inf else str(value)
