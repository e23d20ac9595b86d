"""Python functions of the text as factors of a target.

log phi(text) = f(text);   optionally a guess g(prefix) of it on the way, whose values telescope: only f remains.
"""

from __future__ import annotations

import codecs
import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch

from smcgen.errors import PotentialError, UsageError
from smcgen.potentials.base import Potential, Prompt
from smcgen.potentials.history import ROOT, History

REMEMBERED = 1 << 17  # values of distinct texts kept per function

Function = Callable[[str], float | bool]


@overload
def potential(
    function: Function, *, prefix: Function | None = ..., nan: Literal["raise", "kill"] = ..., name: str | None = ...
) -> FunctionPotential: ...


@overload
def potential(
    function: None = ..., *, prefix: Function | None = ..., nan: Literal["raise", "kill"] = ..., name: str | None = ...
) -> Callable[[Function], FunctionPotential]: ...


def potential(
    function: Function | None = None,
    *,
    prefix: Function | None = None,
    nan: Literal["raise", "kill"] = "raise",
    name: str | None = None,
) -> FunctionPotential | Callable[[Function], FunctionPotential]:
    """A Python function of the finished text as a factor; use it as `@potential` or `@potential(prefix=...)`.

    Args:
        function: text -> log phi(text), a float, -inf for 0; or True (phi = 1) and False (phi = 0).
        prefix: unfinished text -> a guess of log phi of what it will become, on the same scale. It steers the particles
            early and leaves the target as it is; -inf kills at once: return it only if no continuation is possible. A
            character of which bytes are still missing is not shown.
        nan: what a NaN does: "raise" a PotentialError, or "kill" the particle and warn once.
        name: how messages call it; the function's name by default.

    Each distinct text is evaluated once per run, on one thread, and the value must depend on the text alone."""
    if nan not in ("raise", "kill"):
        raise UsageError(f'potential: nan={nan!r}: write "raise" or "kill"')
    if function is None:
        return lambda function: potential(function, prefix=prefix, nan=nan, name=name)
    for given in (function, prefix):
        if given is not None and not callable(given):
            raise UsageError(f"potential: expected a function of the text, got {type(given).__name__}")
    return FunctionPotential(function, prefix, nan, name or getattr(function, "__name__", type(function).__name__))


@dataclass
class Prefixes:
    """The state: a node of `history` per row; the column `value` is the guess at that prefix."""

    history: History
    nodes: np.ndarray  # int64 [rows]
    particles: int


class FunctionPotential(Potential):
    """What `potential` returns; calling it calls the function."""

    _values: dict[str, float]
    _guesses: dict[str, float]
    _warned: bool

    def __init__(self, function: Function, prefix: Function | None, nan: str, name: str):
        self.function, self.prefix, self.nan, self.name = function, prefix, nan, name

    def __call__(self, text: str) -> float | bool:
        return self.function(text)

    def __repr__(self) -> str:
        return self.name

    def bind(self, vocabulary, stops: Sequence[str], device: torch.device) -> FunctionPotential:
        bound = super().bind(vocabulary, stops, device)
        assert isinstance(bound, FunctionPotential)
        bound._values = {}
        bound._guesses = {}
        bound._warned = False
        return bound

    def start(self, prompts: Sequence[Prompt], particles: int) -> Prefixes:
        history = History(self.vocabulary.tokens, {"value": (np.float64, 0.0)})  # 0 stays the value of the empty text
        return Prefixes(history, np.zeros(len(prompts) * particles, np.int64), particles)

    def restart(self, state: Prefixes, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        rows = np.asarray(groups)[:, None] * state.particles + np.arange(state.particles)
        state.nodes[rows.reshape(-1)] = ROOT

    def extend(self, state: Prefixes, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ids, lengths = tokens.numpy(), counts.numpy()
        if self.prefix is None:
            return torch.zeros(len(lengths), dtype=torch.float64)
        old, history = state.nodes.copy(), state.history
        for column in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > column)
            state.nodes[rows], fresh = history.children(state.nodes[rows], ids[rows, column])
            for node in fresh.tolist():
                if history["value"][history.parent[node]] == -np.inf:  # killed, whatever comes after
                    history["value"][node] = -np.inf
                else:
                    history["value"][node] = self._value(self.prefix, _shown(history.text(node)), self._guesses)
        new, before = history["value"][state.nodes], history["value"][old]
        with np.errstate(invalid="ignore"):
            steps = np.where(np.isneginf(new), -np.inf, new - before)
        self._forget(state)
        return torch.from_numpy(np.where(lengths > 0, steps, 0.0))

    def rollback(self, state: Prefixes, counts: torch.Tensor) -> None:
        if self.prefix is not None:
            state.nodes = state.history.ancestors(state.nodes, counts.numpy())

    def fork(self, state: Prefixes, ancestors: torch.Tensor) -> None:
        state.nodes = state.nodes[ancestors.numpy()]
        self._forget(state)

    def finish(self, state: Prefixes, rows: torch.Tensor, texts: Sequence[str], reasons: Sequence[int]) -> torch.Tensor:
        before = state.history["value"][state.nodes[rows.numpy()]]
        values = np.array([self._value(self.function, text, self._values) for text in texts])
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.where(np.isneginf(before), -np.inf, values - before))

    def _value(self, function: Function, text: str, known: dict[str, float]) -> float:
        if text not in known:
            if len(known) >= REMEMBERED:
                known.clear()
            known[text] = self._ask(function, text)
        return known[text]

    def _ask(self, function: Function, text: str) -> float:
        where = f"potential {self.name} on the text {_short(text)}"
        try:
            result: Any = function(text)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else "no message"
            raise PotentialError(
                f"{where} raised {type(error).__name__} ({reason}): make it return a number for every text"
            ) from error
        if isinstance(result, torch.Tensor | np.ndarray | np.generic) and math.prod(result.shape) == 1:
            result = result.item()
        if isinstance(result, bool):
            return 0.0 if result else -math.inf
        if not isinstance(result, numbers.Real):
            raise PotentialError(f"{where} returned {type(result).__name__}: return log phi, a float, or True or False")
        value = float(result)
        if value == math.inf:
            raise PotentialError(f"{where} returned +inf: return a finite log value, or -inf for 0")
        if not math.isnan(value):
            return value
        if self.nan == "raise":
            raise PotentialError(f'{where} returned NaN: return a number, or let nan="kill" drop such particles')
        if not self._warned:
            self._warned = True
            warnings.warn(f"{where} returned NaN: the particle is dropped (further ones without notice)", stacklevel=2)
        return -math.inf

    def _forget(self, state: Prefixes) -> None:
        if (ids := state.history.compact(state.nodes)) is not None:
            state.nodes = ids[state.nodes]


def _shown(data: bytes) -> str:
    """The text of a prefix, without the bytes of a character that is not complete."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
