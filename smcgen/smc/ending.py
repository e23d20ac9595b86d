"""When a sample ends: end tokens, stop strings and the budget, decided on the device.

Stop strings are matched on the bytes of the tokens by the automaton of Aho & Corasick (1975), run once over the whole
vocabulary: `next_state[s, v]` is where token v leads from state s, and the last state means that a stop string is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from smcgen.potentials.base import ALIVE, BUDGET, END, STOP


@dataclass
class Ending:
    """Rules of a run.

    Attributes:
        end: bool [V], the end tokens.
        next_state: int32 [states, V] of the stop automaton, or None without stop strings; state `states` is "complete".
        max_tokens: budget of generated tokens, the end token included.
        condition: the target is conditioned on having ended, so that the last token of the budget must end the sample.
    """

    end: torch.Tensor
    next_state: torch.Tensor | None
    max_tokens: int
    condition: bool = False

    def advance(self, token: torch.Tensor, state: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """After `token` has become the `length`-th of its sample: the reason it ended (ALIVE if not) and the stop state."""
        reason = torch.where(length >= self.max_tokens, BUDGET, ALIVE)
        if self.next_state is not None:
            states = self.next_state.shape[0]
            state = self.next_state[state.clamp(max=states - 1), token].long()
            reason = torch.where(state == states, STOP, reason)
        return torch.where(self.end[token], END, reason), state

    def terminating(self, state: torch.Tensor) -> torch.Tensor:
        """Tokens that end a sample from stop state `state` [...]: bool [..., V]."""
        if self.next_state is None:
            return self.end.expand(*state.shape, -1)
        states = self.next_state.shape[0]
        return (self.next_state[state.clamp(max=states - 1)] == states) | self.end

    def draftable(self, length: torch.Tensor) -> torch.Tensor:
        """How many more tokens a proposal may draw that need not end the sample."""
        return (self.max_tokens - int(self.condition) - length).clamp(min=0)


def stop_table(tokens: Sequence[bytes], stops: Sequence[str]) -> np.ndarray | None:
    """The stop automaton over a vocabulary: int32 [states, V], None without stops.

    Args:
        tokens: the bytes each token adds to the text.
        stops: non-empty strings.
    """
    if not stops:
        return None
    delta = _automaton([stop.encode() for stop in stops])
    states = delta.shape[0] - 1
    # All tokens step together, one byte position at a time; the longer ones stand first and go on alone.
    order = sorted(range(len(tokens)), key=lambda v: -len(tokens[v]))
    lengths = np.array([len(tokens[v]) for v in order])
    state = np.repeat(np.arange(states, dtype=np.int32)[:, None], len(tokens), axis=1)
    for i in range(lengths[0]):
        going = int((lengths > i).sum())
        symbols = np.frombuffer(bytes(tokens[v][i] for v in order[:going]), np.uint8)
        state[:, :going] = delta[state[:, :going], symbols]
    table = np.empty_like(state)
    table[:, order] = state
    return table


def _automaton(stops: Sequence[bytes]) -> np.ndarray:
    """Byte transitions int32 [states + 1, 256]; the last state (a stop is complete) is absorbing."""
    prefixes = sorted({stop[:i] for stop in stops for i in range(len(stop))}, key=lambda p: (len(p), p))
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    complete = len(prefixes)
    delta = np.full((complete + 1, 256), complete, np.int32)
    for prefix, i in number.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            if not text.endswith(tuple(stops)):
                delta[i, byte] = next(number[text[k:]] for k in range(len(text) + 1) if text[k:] in number)
    return delta


def cut_at_stop(text: bytes, stops: Sequence[str]) -> bytes:
    """The text before the stop string that is complete first; of several complete at the same byte, the longest."""
    best: tuple[int, int] | None = None
    for stop in map(str.encode, stops):
        at = text.find(stop)
        if at >= 0 and (best is None or (at + len(stop), at) < best):
            best = (at + len(stop), at)
    return text if best is None else text[: best[1]]
