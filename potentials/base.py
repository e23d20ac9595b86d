"""The contract between the engine and a potential: a non-negative factor phi(text) of a target.

A potential as the user writes it is an immutable declaration. `bind` ties it to a vocabulary and returns the object that
runs; `start` makes the state of all rows (row = group * particles + particle). A potential sees the tokens that
prolong the text; the token that ends a sample (an end token, or the one that completes a stop string) is never passed to
`extend`: `finish` gets the final text instead, and closes the telescope

    sum of extend(...) + finish(...) = log phi(text).

A *hard* potential has values 0 and 1 and offers bit masks of the tokens that keep the text possible.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smcgen.target import Factor

if TYPE_CHECKING:
    from smcgen.lm.vocabulary import Vocabulary

# How a sample ended. Kept in `Particles.reason`; ALIVE samples go on, DEAD ones have weight 0.
ALIVE, END, STOP, BUDGET, DEAD = range(5)
REASONS = ("alive", "end", "stop", "budget", "dead")


@dataclass(frozen=True)
class Prompt:
    """One prompt as potentials see it: its token ids and the text or the messages it came from."""

    ids: tuple[int, ...]
    text: str
    messages: tuple[dict, ...] | None = None


def packed(allowed: np.ndarray) -> np.ndarray:
    """Masks as bits: bool [..., V] -> int32 [..., ceil(V / 32)], bit v % 32 of word v // 32 set iff token v is allowed."""
    size = allowed.shape[-1]
    padded = np.zeros((*allowed.shape[:-1], -(-size // 32) * 32), bool)
    padded[..., :size] = allowed
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


class Potential(Factor):
    """Base class. Subclasses set `hard` and `exact`, and override what they need; the defaults are phi = 1.

    Attributes:
        name: how messages, results and `repr` call it.
        hard: values are 0 and 1 and `mask` works.
        exact: for a hard potential, a token the mask allows can always be part of an accepted text's prefix as far as
            the engine knows; False: the mask is an over-approximation and `finish` judges the text.
        sure: for a hard potential, `extend` refuses no token that the mask allows, and so is not waited for.
        kills: phi can be 0; False spares a potential from being asked where only that matters.
        on_device: the state is tensors on `device`, tensors given may be there too, and nothing waits for the host. Such a
            potential has `bits` and `close` besides (see `tabled.Tabled`).
        any_thread: `mask`, `extend`, `rollback` and `fork` may be called on any thread, one at a time. What a user has
            written is called on the thread of the run.
        runs_on: what computes it, for `info` of a result.
        vocabulary, stops, device: set by `bind`.
    """

    name: str = "potential"
    hard: bool = False
    exact: bool = True
    sure: bool = False
    kills: bool = True
    on_device: bool = False
    any_thread: bool = False
    runs_on: str = "host"
    vocabulary: Vocabulary
    stops: tuple[str, ...]
    device: torch.device

    def bind(self, vocabulary: Vocabulary, stops: Sequence[str], device: torch.device) -> Potential:
        """A copy of this potential tied to a vocabulary (its token bytes and end ids) and to the stop strings of the run.

        Whatever can go wrong with a vocabulary goes wrong here. With stop strings a hard potential must let a token
        complete one exactly where the text before the stop is acceptable (and end there), or refuse with the reason.
        Raises Impossible if no text at all can satisfy it, UsageError if it cannot serve this vocabulary or these stops."""
        bound = copy.copy(self)
        bound.vocabulary, bound.stops, bound.device = vocabulary, tuple(stops), device
        return bound

    def start(self, prompts: Sequence[Prompt], particles: int) -> Any:
        """The state of `len(prompts) * particles` rows, all with an empty text."""
        raise NotImplementedError

    def restart(self, state: Any, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        """The rows of `groups[i]` begin anew, with an empty text after `prompts[i]`."""
        raise NotImplementedError

    def mask(self, state: Any, out: torch.Tensor, active: torch.Tensor) -> None:
        """Hard potentials: fill `out`, int32 [rows, ceil(V / 32)] on the CPU, bit v % 32 of word v // 32 set iff token v
        keeps the text possible (end ids: iff the text is acceptable as it stands). Rows where `active` (bool [rows], CPU)
        is False are left untouched. A row with nothing allowed gets all zeros: a dead end, which is no error."""
        raise NotImplementedError

    def extend(self, state: Any, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Row r reads `tokens[r, :counts[r]]` (int64 [rows, T] and [rows], on the CPU; no end tokens).

        Returns float64 [rows] on the CPU: log phi(new prefix) - log phi(old prefix), -inf kills, 0 where counts is 0."""
        raise NotImplementedError

    def rollback(self, state: Any, counts: torch.Tensor) -> None:
        """The last `counts[r]` tokens of row r never happened (int64 [rows], CPU)."""
        raise NotImplementedError

    def finish(self, state: Any, rows: torch.Tensor, texts: Sequence[str], reasons: Sequence[int]) -> torch.Tensor:
        """Rows `rows` (int64 [n]) ended with `texts` for `reasons` (END, STOP or BUDGET).

        Returns float64 [n]: log phi(text) - log phi(last prefix passed to extend); -inf where the text is not accepted."""
        raise NotImplementedError

    def fork(self, state: Any, ancestors: torch.Tensor) -> None:
        """Row r becomes a copy of row `ancestors[r]` (int64 [rows], CPU), whatever the two had read."""
        raise NotImplementedError
