"""Python functions of the text as factors of a target.

log phi(text) = f(text);   optionally a guess g(prefix) of it on the way, whose values telescope: only f remains.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch

from smcgen.errors import PotentialError, UsageError
from smcgen.potentials.base import Potential, Prompt
from smcgen.potentials.calls import Caller
from smcgen.potentials.history import ROOT, History, shown
from smcgen.values import is_number, plain

Function = Callable[..., Any]  # the kinds are told in `potential`
NOTHING: Any = object()  # no state was given; None is a state like any other


@overload
def potential(
    function: Function,
    *,
    prefix: Function | None = ...,
    state: Any = ...,
    batch: bool = ...,
    timeout: float | None = ...,
    nan: Literal["raise", "kill"] = ...,
    name: str | None = ...,
) -> FunctionPotential: ...


@overload
def potential(
    function: None = ...,
    *,
    prefix: Function | None = ...,
    state: Any = ...,
    batch: bool = ...,
    timeout: float | None = ...,
    nan: Literal["raise", "kill"] = ...,
    name: str | None = ...,
) -> Callable[[Function], FunctionPotential]: ...


def potential(
    function: Function | None = None,
    *,
    prefix: Function | None = None,
    state: Any = NOTHING,
    batch: bool = False,
    timeout: float | None = None,
    nan: Literal["raise", "kill"] = "raise",
    name: str | None = None,
) -> FunctionPotential | Callable[[Function], FunctionPotential]:
    """A Python function of the finished text as a factor; use it as `@potential` or `@potential(prefix=...)`.

    Args:
        function: text -> log phi(text), a float, -inf for 0; or True (phi = 1) and False (phi = 0). An `async def` is
            welcome: the calls for all particles overlap, on an event loop of their own.
        prefix: unfinished text -> a guess of log phi of what it will become, on the same scale. It steers the particles
            early and leaves the target as it is; -inf kills at once: return it only if no continuation is possible. A
            character of which bytes are still missing is not shown.
        state: what to carry along instead of reading every text from its beginning: then `prefix(state, piece)` returns
            (guess, new state) for the piece of text that was added, and `function(state)` judges the finished text. Every
            particle has a deep copy of its own, so that `prefix` may change the state it is given. How a text is cut into
            pieces must not matter.
        batch: `function` and `prefix` take a list of texts and return one value for each.
        timeout: seconds that a call may take (coroutines: each). A call that takes longer stops the run with a
            PotentialError; it never changes a result. None: no limit.
        nan: what a NaN does: "raise" a PotentialError, or "kill" the particle and warn once.
        name: how messages call it; the function's name by default.

    Each distinct text is evaluated once per run, and the value must depend on the text alone."""
    if nan not in ("raise", "kill"):
        raise UsageError(f'potential: nan={nan!r}: write "raise" or "kill"')
    if timeout is not None and not (is_number(plain(timeout)) and 0 < timeout < math.inf):
        raise UsageError(f"potential: timeout={timeout!r}: give a positive number of seconds, or None")
    if function is None:
        return lambda function: potential(
            function, prefix=prefix, state=state, batch=batch, timeout=timeout, nan=nan, name=name
        )
    for given in (function, prefix):
        if given is not None and not callable(given):
            raise UsageError(f"potential: expected a function of the text, got {type(given).__name__}")
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if state is NOTHING:
        return FunctionPotential(function, prefix, batch, timeout, nan, name)
    if prefix is None:
        raise UsageError(f"potential {name}: state= needs prefix=, a function (state, piece) -> (guess, new state)")
    folded = FoldedPotential(function, prefix, batch, timeout, nan, name, state)
    if batch or folded.whole.asynchronous or folded.guess.asynchronous:
        raise UsageError(
            f"potential {name}: a state is carried from text to text: plain functions only, no batch, no async def"
        )
    return folded


@dataclass
class Prefixes:
    """The state: a node of `history` per row; the column `value` is the guess at that prefix."""

    history: History
    nodes: np.ndarray  # int64 [rows]
    particles: int


class FunctionPotential(Potential):
    """What `potential` returns; calling it calls the function.

    Attributes:
        whole, guess: how `function` and `prefix` are asked. Bound copies have their own, which remember a run's values.
    """

    def __init__(self, function: Function, prefix: Function | None, batch: bool, timeout: float | None, nan: str, name: str):
        self.function, self.prefix, self.name = function, prefix, name
        self.whole = Caller(function, name, batch, nan, timeout)
        # Without `prefix` the guess is never asked.
        self.guess = Caller(prefix or function, name if prefix is None else f"{name} (prefix)", batch, nan, timeout)

    def __call__(self, text: Any) -> Any:
        return self.function(text)

    def __repr__(self) -> str:
        return self.name

    def bind(self, vocabulary, stops: Sequence[str], device: torch.device) -> FunctionPotential:
        bound = super().bind(vocabulary, stops, device)
        assert isinstance(bound, FunctionPotential)
        bound.whole, bound.guess = (
            Caller(caller.function, caller.name, caller.batch, caller.nan, caller.timeout)
            for caller in (self.whole, self.guess)
        )
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
        old, history, born = state.nodes.copy(), state.history, []
        for column in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > column)
            state.nodes[rows], fresh = history.children(state.nodes[rows], ids[rows, column])
            born.extend(fresh.tolist())
        self._evaluate(history, born)
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
        nodes = state.nodes[rows.numpy()]
        before = state.history["value"][nodes]
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.where(np.isneginf(before), -np.inf, self._judge(state.history, nodes, texts) - before))

    def _evaluate(self, history: History, nodes: list[int]) -> None:
        """Fills the column `value` of new nodes, parents first."""
        history["value"][nodes] = self.guess([shown(history.text(node)) for node in nodes])
        for node in nodes:
            if history["value"][history.parent[node]] == -np.inf:  # killed, whatever comes after
                history["value"][node] = -np.inf

    def _judge(self, history: History, nodes: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        """log phi of the finished texts of these nodes, float64 [n]."""
        return self.whole(texts)

    def _forget(self, state: Prefixes) -> None:
        if (ids := state.history.compact(state.nodes)) is not None:
            state.nodes = ids[state.nodes]


class FoldedPotential(FunctionPotential):
    """A function of a state that was carried along; the column `state` holds it for every node."""

    def __init__(self, function, prefix, batch, timeout, nan, name, state: Any):
        super().__init__(function, prefix, batch, timeout, nan, name)
        self.first = state

    def start(self, prompts: Sequence[Prompt], particles: int) -> Prefixes:
        columns = {"value": (np.float64, 0.0), "state": (object, None)}
        history = History(self.vocabulary.tokens, columns)
        history["state"][ROOT] = self.first
        return Prefixes(history, np.zeros(len(prompts) * particles, np.int64), particles)

    def _evaluate(self, history: History, nodes: list[int]) -> None:
        for node in nodes:
            parent = int(history.parent[node])
            value, state = -np.inf, None
            if history["value"][parent] != -np.inf:
                text = shown(history.text(node))
                value, state = self._step(history["state"][parent], text, len(shown(history.text(parent))))
            history["value"][node], history["state"][node] = value, state

    def _judge(self, history: History, nodes: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        values = np.empty(len(texts))
        for i, (node, text) in enumerate(zip(nodes.tolist(), texts, strict=True)):
            if history["value"][node] == -np.inf:
                values[i] = -np.inf
                continue
            read, state = shown(history.text(node)), history["state"][node]
            if not text.startswith(read):  # a stop string cut off what had been read
                read, state = "", self.first
            value = 0.0
            if len(text) > len(read):
                value, state = self._step(state, text, len(read))
            dead = value == -np.inf
            values[i] = value if dead else self.whole.checked(self.whole.once(text, copy.deepcopy(state)), text)
        return values

    def _step(self, state: Any, text: str, read: int) -> tuple[float, Any]:
        """The guess and the state after `text`, of which `state` has read the first `read` characters."""
        result = self.guess.once(text, copy.deepcopy(state), text[read:])
        if not isinstance(result, tuple) or len(result) != 2:
            raise PotentialError(f"potential {self.guess.name}: return (guess, new state), not {type(result).__name__}")
        return self.guess.checked(result[0], text), result[1]
