"""Potentials of genlm-control (the extra `genlm`) as factors of a target, and factors as potentials of genlm-control.

Both sides say the same: `prefix` is a value on the way that telescopes, `complete` is log phi. genlm-control is imported only
where one of its objects is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from smcgen.errors import PotentialError, UsageError, first_line
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import END, Potential, Prompt
from smcgen.potentials.calls import Late, shortened, wait
from smcgen.potentials.function import FunctionPotential
from smcgen.potentials.history import ROOT, History
from smcgen.target import LM
from smcgen.values import is_number


def from_genlm(potential: Any, *, timeout: float | None = None, name: str | None = None) -> GenlmPotential:
    """A potential of genlm-control as a soft factor: phi(text) = exp(complete(text)), and `prefix` guides the particles.

    Potentials over bytes or characters read the text, whatever its tokens. Potentials over tokens (PromptedLLM, and products
    with it) read the tokens of the sample, which must be those of the base model. What ended a sample does not matter: one that
    was cut by the budget is a complete text too. Whatever is not in the potential's vocabulary has weight 0.

    The potential runs on an event loop of smcgen's own; one whose state belongs to another running loop cannot be shared
    with it. A condition that kills often gains from `sample(..., candidates=...)`.

    Args:
        timeout: seconds that a call (for all particles together) may take before the run stops.
    """
    for attribute in ("vocab", "lookup", "eos", "batch_prefix", "batch_complete"):
        if not hasattr(potential, attribute):
            raise UsageError(f"from_genlm: expected a potential of genlm-control, got {type(potential).__name__}")
    if timeout is not None and not (is_number(timeout) and 0 < timeout < math.inf):
        raise UsageError(f"from_genlm: timeout={timeout!r}: give a positive number of seconds, or None")
    return GenlmPotential(potential, timeout, name or f"genlm({type(potential).__name__})")


class GenlmPotential(FunctionPotential):
    """What `from_genlm` returns. `units` says what its symbols are: "bytes", "characters" or "tokens"."""

    symbols: list[Any]  # of each token id, for units "tokens"; None where the potential does not know the token

    def __init__(self, potential: Any, timeout: float | None, name: str):
        super().__init__(potential.complete, potential.prefix, False, timeout, "raise", name)
        self.potential, self.timeout = potential, timeout
        vocab = potential.vocab
        if all(isinstance(symbol, int) for symbol in vocab):
            self.units = "bytes"
        elif all(isinstance(symbol, str) and len(symbol) == 1 for symbol in vocab):
            self.units = "characters"
        elif all(isinstance(symbol, bytes) for symbol in vocab):
            self.units = "tokens"
        else:
            kind = type(vocab[0]).__name__
            raise UsageError(f"from_genlm: {name} reads {kind} symbols: bytes, single characters and tokens can be read")

    def bind(self, vocabulary: Vocabulary, stops: Sequence[str], device: torch.device) -> FunctionPotential:
        bound = super().bind(vocabulary, stops, device)
        assert isinstance(bound, GenlmPotential)
        if self.units == "tokens":
            if stops:
                raise UsageError(f"{self.name} reads tokens, and stop strings cut inside tokens: leave the stop strings out")
            bound.symbols = self._symbols(vocabulary)
        return bound

    def _symbols(self, vocabulary: Vocabulary) -> list[Any]:
        known = {getattr(symbol, "token_id", bytes(symbol)): symbol for symbol in self.potential.vocab}
        symbols = []
        for i, token in enumerate(vocabulary.tokens):
            symbol = known.get(i, known.get(token)) if token else None
            if symbol is not None and bytes(symbol) != token:
                raise UsageError(
                    f"{self.name} and {vocabulary.name} have different tokenizers: token {i} is {bytes(symbol)!r} in the one "
                    f"and {token!r} in the other"
                )
            symbols.append(symbol)
        return symbols

    def _evaluate(self, history: History, nodes: list[int]) -> None:
        values = history["value"]
        alive = [node for node in nodes if values[history.parent[node]] != -np.inf]
        contexts = [self._context(history, node, None) for node in alive]
        texts = [history.text(node).decode("utf-8", "replace") for node in alive]
        values[nodes] = -np.inf
        values[alive] = self._ask(self.potential.batch_prefix, contexts, texts)
        for node in alive:  # the parent may have been among them
            if values[history.parent[node]] == -np.inf:
                values[node] = -np.inf

    def _judge(self, history: History, nodes: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        contexts = [self._context(history, node, text) for node, text in zip(nodes.tolist(), texts, strict=True)]
        return self._ask(self.potential.batch_complete, contexts, texts)

    def _context(self, history: History, node: int, text: str | None) -> list[Any]:
        """A history, or the finished text of one, in the potential's symbols."""
        if self.units == "tokens":
            ids = [i for i in history.path(ROOT, node) if self.vocabulary.tokens[i]]
            return [self.symbols[i] for i in ids]
        if self.units == "bytes":
            return list(history.text(node) if text is None else text.encode())
        return list(history.text(node).decode("utf-8", "ignore") if text is None else text)

    def _ask(self, method: Any, contexts: Sequence[list[Any]], texts: Sequence[str]) -> np.ndarray:
        lookup = self.potential.lookup
        values = np.full(len(contexts), -np.inf)
        readable = [i for i, context in enumerate(contexts) if all(s is not None and s in lookup for s in context)]
        if readable:
            where = f"potential {self.name} on the text {shortened(texts[readable[0]])}"
            if len(readable) > 1:
                where += f" and {len(readable) - 1} more"
            try:
                found = wait(method([contexts[i] for i in readable]), self.timeout)
            except Late:
                raise PotentialError(f"{where} did not return within {self.timeout:g} s, which stops the run") from None
            except Exception as error:
                raise PotentialError(f"{where} raised {type(error).__name__} ({first_line(error, 'no message')})") from error
            for i, value in zip(readable, found, strict=True):
                values[i] = self.whole.checked(float(value), texts[i])
        return values


def to_genlm(potential: Potential, model: LM | Vocabulary, prompt: str = "") -> Any:
    """A factor as a potential of genlm-control, over the tokens of a language model (each a `Token`, by id; no end tokens).

    `prefix` is what the factor says of an unfinished text (0 or -inf if it is hard), `complete` is log phi.

    Args:
        model: whose tokens, as an `LM` or its vocabulary.
        prompt: what the text continues, for factors that ask.
    """
    base, token = _genlm()
    if not isinstance(potential, Potential):
        raise UsageError(f"to_genlm: {potential!r} is no potential: give a constraint, a reward or a function of the text")
    vocabulary = model.load().vocabulary if isinstance(model, LM) else model
    bound = potential.bind(vocabulary, (), torch.device("cpu"))
    start = vocabulary.encode(prompt, chat=False) if prompt else Prompt((), "")

    class OfSmcgen(base):
        """A bound factor; every call begins with an empty text, so that calls do not depend on each other."""

        def __init__(self) -> None:
            tokens = [token(i, data) for i, data in enumerate(vocabulary.tokens) if data]
            super().__init__(tokens)

        async def prefix(self, context: Sequence[Any]) -> float:
            return float((await self.batch_prefix([context]))[0])

        async def complete(self, context: Sequence[Any]) -> float:
            return float((await self.batch_complete([context]))[0])

        async def batch_prefix(self, contexts: Sequence[Sequence[Any]]) -> np.ndarray:
            return _read(bound, start, contexts)[0]

        async def batch_complete(self, contexts: Sequence[Sequence[Any]]) -> np.ndarray:
            values, state = _read(bound, start, contexts)
            alive = np.flatnonzero(values > -np.inf).tolist()
            texts = [vocabulary.decode([t.token_id for t in contexts[i]]) for i in alive]
            if alive:
                values[alive] += bound.finish(state, torch.tensor(alive), texts, [END] * len(alive)).numpy()
            return values

        async def logw_next(self, context: Sequence[Any]) -> Any:
            if not (bound.hard and bound.exact):
                return await super().logw_next(context)
            values, state = _read(bound, start, [context])
            if values[0] == -np.inf:
                raise ValueError(f"Context {context!r} has weight zero under `prefix`.")
            words = torch.zeros(1, (len(vocabulary) + 31) // 32, dtype=torch.int32)
            bound.mask(state, words, torch.ones(1, dtype=torch.bool))
            allowed = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")[: len(vocabulary)].astype(bool)
            weights = np.where(allowed[[t.token_id for t in self.vocab]], 0.0, -np.inf)
            return self.make_lazy_weights(np.append(weights, await self.complete(context)))

        def is_terminal_only(self) -> bool:
            return isinstance(bound, FunctionPotential) and bound.prefix is None

        def spawn(self) -> Any:
            return OfSmcgen()

        def __repr__(self) -> str:
            return f"to_genlm({potential!r})"

    return OfSmcgen()


def _read(bound: Potential, prompt: Prompt, contexts: Sequence[Sequence[Any]]) -> tuple[np.ndarray, Any]:
    """log phi of these unfinished texts, float64 [n], and the state that has read them."""
    state = bound.start([prompt], len(contexts))
    counts = torch.tensor([len(context) for context in contexts])
    tokens = torch.zeros(len(contexts), max(1, int(counts.max())), dtype=torch.int64)
    for row, context in zip(tokens, contexts, strict=True):
        row[: len(context)] = torch.tensor([t.token_id for t in context], dtype=torch.int64)
    return bound.extend(state, tokens, counts).numpy().copy(), state


def _genlm() -> tuple[Any, Any]:
    try:
        from genlm.backend.tokenization import Token  # pyright: ignore[reportMissingImports]
        from genlm.control import Potential as Base  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(f"to_genlm needs genlm-control: pip install 'smcgen[genlm]' ({error})") from error
    return Base, Token
