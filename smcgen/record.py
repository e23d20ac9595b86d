"""What a call leaves behind: the particles of all its items in arrays, and the JSON form of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smcgen.errors import UsageError
from smcgen.files import replace
from smcgen.smc.keys import SELECT, Keys

FORMAT = "smcgen-posterior-1"


@dataclass(frozen=True)
class Round:
    """What happened in one round of one run."""

    ess: float
    resampled: bool
    log_evidence: float  # of the prefixes after the round
    chi_square: float  # of the block's proposal against the local target
    deaths: int
    log_weight: list[float]  # of each particle before resampling
    log_left: list[float]  # log of the share of the mass that the masks left, up to each token of the block
    ancestors: list[int]
    tokens: list[list[int]]  # what each particle drew, before resampling
    counts: list[int]  # how many
    judged: int = 0  # positions at which drafted tokens were put to the test of acceptance, all particles together
    accepted: int = 0  # positions at which one was accepted


INFINITE = {"log_evidence": -math.inf, "chi_square": math.inf, "log_weight": -math.inf, "log_left": -math.inf}  # null in JSON
REALS = {"log_weight": torch.float64, "log_p": torch.float64, "token_log_p": torch.float32, "token_log_q": torch.float32}
ITEM_FIELDS = ("tokens", "length", "reason", "log_weight", "log_p", "token_log_p", "token_log_q", "cause", "root")


@dataclass
class Record:
    """All items of a call. Arrays are [items, N, ...] on the CPU, as in `smc.particles.Particles`.

    Attributes:
        fields: the arrays named in ITEM_FIELDS.
        log_evidence: float64 [items], log Z-hat of each run.
        prompts, runs: text of each prompt; prompt p owns items p * runs ... p * runs + runs - 1.
        settings: everything that decided the run, as written to JSON.
        info: what it cost.
        texts_of: item -> the texts of its particles.
        piece_of: token id -> its bytes.
        rounds_of: item -> its rounds.
        keys: the item key of each prompt.
        given: each prompt as the call had it, JSON-ready.
        drawn: what `uniforms` gave last, by its count.
    """

    fields: dict[str, torch.Tensor]
    log_evidence: torch.Tensor
    prompts: list[str]
    runs: int
    settings: dict[str, Any]
    info: dict[str, Any]
    texts_of: Callable[[int], list[str]]
    piece_of: Callable[[int], bytes]
    rounds_of: Callable[[int], list[Round]]
    keys: list[int]
    given: list[Any]
    drawn: dict[int, np.ndarray] = field(default_factory=dict)

    def uniforms(self, count: int) -> np.ndarray:
        """float64 [prompts, count] in (0, 1): what selects particles, made for all prompts at once."""
        if count not in self.drawn:
            item = torch.tensor(self.keys)
            zero = torch.zeros_like(item)
            self.drawn = {count: Keys(self.settings["seed"], item, zero).uniform(SELECT, zero, 0, count).numpy()}
        return self.drawn[count]


def as_given(prompt: Any) -> Any:
    """A prompt (text, messages, token ids or None), JSON-ready."""
    if prompt is None or isinstance(prompt, str):
        return prompt
    return [dict(part) if isinstance(part, Mapping) else int(part) for part in prompt]


def item_to_dict(record: Record, item: int) -> dict[str, Any]:
    """One run, JSON-ready: padding is cut off, and an infinite number becomes null."""
    values = {name: array[item].tolist() for name, array in record.fields.items()}
    longest = max(values["length"], default=0)
    for name in ("tokens", "token_log_p", "token_log_q"):
        values[name] = [row[:longest] for row in values[name]]
    for name in REALS:
        values[name] = finite(values[name])
    rounds = [{**vars(r), **{name: finite(getattr(r, name)) for name in INFINITE}} for r in record.rounds_of(item)]
    return {
        "log_evidence": finite(float(record.log_evidence[item])),
        "texts": record.texts_of(item),
        "particles": values,
        "rounds": rounds,
    }


def pieces_to_dict(record: Record, items: range) -> dict[str, str]:
    """The bytes of every token that some particle of these items drew, as Latin-1 text."""
    drawn = {t for item in items for r in record.rounds_of(item) for tokens in r.tokens for t in tokens}
    return {str(token): record.piece_of(token).decode("latin-1") for token in sorted(drawn)}


def record_from_dict(data: dict[str, Any]) -> Record:
    """The record of one prompt from `Posterior.to_dict`. Raises UsageError if something is missing."""
    try:
        return _record(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UsageError(f"a posterior that is not whole ({type(error).__name__}: {error}): write it again") from None


def _record(data: dict[str, Any]) -> Record:
    runs = data["runs"]
    longest = max((len(row) for run in runs for row in run["particles"]["tokens"]), default=0)
    columns: dict[str, list] = {name: [] for name in ITEM_FIELDS}
    for run in runs:
        particles = run["particles"]
        blank = {"tokens": 0, "token_log_q": 0.0, "token_log_p": [0.0] * len(particles["log_p"][0])}
        for name in ITEM_FIELDS:
            rows = _infinite(particles[name], -math.inf)
            if name in blank:
                rows = [row + [blank[name]] * (longest - len(row)) for row in rows]
            columns[name].append(rows)
    texts = [run["texts"] for run in runs]
    rounds = [[_round(r) for r in run["rounds"]] for run in runs]
    evidence = [-math.inf if run["log_evidence"] is None else run["log_evidence"] for run in runs]
    pieces = {int(token): piece.encode("latin-1") for token, piece in data["pieces"].items()}
    return Record(
        fields={name: torch.tensor(rows, dtype=REALS.get(name, torch.int64)) for name, rows in columns.items()},
        log_evidence=torch.tensor(evidence, dtype=torch.float64),
        prompts=[data["prompt"]],
        runs=len(runs),
        settings=data["settings"],
        info={},
        texts_of=texts.__getitem__,
        piece_of=pieces.__getitem__,
        rounds_of=rounds.__getitem__,
        keys=[data["key"]],
        given=[data.get("given")],
    )


def _round(values: dict[str, Any]) -> Round:
    return Round(**{**values, **{name: _infinite(values[name], infinity) for name, infinity in INFINITE.items()}})


def _infinite(value: Any, infinity: float) -> Any:
    if isinstance(value, list):
        return [_infinite(v, infinity) for v in value]
    return infinity if value is None else value


def read_json(source: str | Path) -> dict[str, Any]:
    """The JSON object in a file, or in the text itself. Raises UsageError if it is not one that `to_json` wrote."""
    if not isinstance(source, str | Path):
        raise UsageError(f"{source!r}: give a path, or the JSON text itself")
    text = str(source)
    if not text.lstrip().startswith("{"):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {text!r}: {error}") from None
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f"not a posterior written by to_json (format {FORMAT!r} expected)")
    return data


def written(text: str, path: str | Path | None) -> str:
    """The text; the file at `path`, if one is given, holds it whole or is not touched."""
    if path is not None:
        try:
            replace(path, text)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot write {str(path)!r}: {error}") from None
    return text


def finite(value: Any) -> Any:
    """The number, or None (null in JSON) if it is infinite or no number; in a list, each of them."""
    if isinstance(value, list):
        return [finite(v) for v in value]
    return value if value is not None and math.isfinite(value) else None
