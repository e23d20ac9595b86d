"""Simple conditions on the text: one of some options, something in it, something not in it, its length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from smcgen.errors import Impossible, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.options import called
from smcgen.potentials.base import Potential, Prompt, packed
from smcgen.potentials.pattern import ANY, Inexpressible, occurring, ranges_of, ranges_to_class, words
from smcgen.potentials.regex import Regular
from smcgen.potentials.stopping import NONE, StopTable
from smcgen.potentials.tabled import Tabled, log_of
from smcgen.potentials.tables import STATES, TokenTable, trimmed
from smcgen.values import is_whole

Pattern = str | re.Pattern[str]
UNBOUNDED = np.iinfo(np.int64).max


def choice(options: Iterable[str]) -> Regular:
    """phi(text) = 1 if the text is one of `options`, else 0."""
    if isinstance(options, str) or not isinstance(options, Iterable):
        raise UsageError(f"choice: give a list of texts, not {'one text' if isinstance(options, str) else repr(options)}")
    options = list(dict.fromkeys(options))
    if not options or not all(isinstance(option, str) for option in options):
        raise UsageError("choice: give at least one text, and nothing but texts")
    return Regular(_name("choice", options), words(options))


def contains(*what: Pattern) -> Regular:
    """phi(text) = 1 if every one of `what` occurs in the text: strings, or compiled patterns, as `search` finds them."""
    parts = _expressions("contains", what)
    return Regular(_name("contains", what), " & ".join(parts))


def avoids(*what: Pattern) -> Regular:
    """phi(text) = 1 if none of `what` occurs in the text: strings, or compiled patterns, as `search` finds them."""
    parts = _expressions("avoids", what)
    return Regular(_name("avoids", what), f"~({' | '.join(parts)})")


@called
def length(min: int = 0, max: int | None = None, unit: Literal["tokens", "chars", "words", "lines"] = "tokens") -> Potential:
    """phi(text) = 1 if the text has from `min` to `max` (None: any number of) units, else 0.

    unit: "tokens", the one that ends the sample not counted (an end token, or the one that completes a stop string);
    "chars", code points; "words", as `text.split()` counts them; "lines", as `text.split("\\n")` counts them, except that a
    line break at the end begins no further line (and "" has none)."""
    for bound in (min, max):
        if bound is not None and (not is_whole(bound) or bound < 0):
            raise UsageError(f"length: {bound!r} is no number of {unit}: give integers from 0 on")
    if max is not None and max < min:
        raise Impossible(f"length: no text has at least {min} and at most {max} {unit}")
    name = f"length({min}, {max}, {unit!r})"
    if unit == "tokens":
        return TokenCount(min, max, name)
    if unit == "chars":
        return Regular(name, f"/(?s:.){_count(min, max)}/")
    if unit == "lines":
        return Regular(name, f"/(?:[^\\n]*\\n){_count(min, max)}/ | {_unended(min, max)}")
    if unit == "words":
        space = ranges_to_class(ranges_of(r"\s"))
        letter = ranges_to_class(ranges_of(r"\S"))
        if max == 0:
            return Regular(name, f"/{space}*/")
        word, more = f"{letter}+", _count(min - 1 if min else 0, None if max is None else max - 1)
        some = f"{space}*{word}(?:{space}+{word}){more}{space}*"
        return Regular(name, f"/{some}/" if min else f"/(?:{some}|{space}*)/")
    raise UsageError(f'length: unit={unit!r}: write "tokens", "chars", "words" or "lines"')


def _unended(minimum: int, maximum: int | None) -> str:
    """Texts of so many lines the last of which has no line break."""
    if maximum == 0:
        return "/[a&&b]/"
    more = _count(max(minimum - 1, 0), None if maximum is None else maximum - 1)
    return f"/(?:[^\\n]*\\n){more}[^\\n]+/"


def _count(minimum: int, maximum: int | None) -> str:
    return f"{{{minimum},{'' if maximum is None else maximum}}}"


def _expressions(name: str, what: Sequence[Pattern]) -> list[str]:
    """For each of `what`, the texts in which it occurs."""
    if not what:
        raise UsageError(f"{name}: give at least one string or compiled pattern")
    out = []
    for part in what:
        if isinstance(part, re.Pattern) and isinstance(part.pattern, str):
            try:
                out.append(occurring(part.pattern, part.flags, plain=name == "avoids"))
            except Inexpressible as error:
                raise UsageError(f"{name} {part.pattern!r}: {error}") from None
        elif isinstance(part, str) and part:
            out.append(f"({ANY} {words([part])} {ANY})")
        else:
            raise UsageError(f"{name}: {part!r} is no text with at least one character, and no compiled string pattern")
    return out


def _name(kind: str, parts: Sequence[Any]) -> str:
    shown = ", ".join(repr(p.pattern) if isinstance(p, re.Pattern) else repr(p) for p in parts)
    return f"{kind}({shown})" if len(shown) <= 60 else f"{kind}({shown[:50]}...)"


@dataclass
class Counts:
    """The state of a `TokenCount`: how many tokens each row has read, int64 [rows], and after each of them (int64 [rows,
    capacity]) how many count and where the stop automaton stands. Rows of one group stand together."""

    read: torch.Tensor
    counted: torch.Tensor
    stop: torch.Tensor
    particles: int

    def now(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = self.read[rows][:, None]
        return self.counted[rows].gather(1, at)[:, 0], self.stop[rows].gather(1, at)[:, 0]


class TokenCount(Potential):
    """From `minimum` to `maximum` tokens; the token that ends the sample, even by completing a stop string, does not count."""

    hard = True
    of_tokens = True  # two spellings of one text may have different values

    def __init__(self, minimum: int, maximum: int | None, name: str):
        self.minimum, self.name = minimum, name
        self.maximum = UNBOUNDED if maximum is None else maximum

    def __repr__(self) -> str:
        return self.name

    def bind(self, vocabulary: Vocabulary, stops: Sequence[str], device: torch.device) -> Potential:
        """As every potential; the result runs on tables if few enough tokens are counted."""
        counted = self.minimum if self.maximum == UNBOUNDED else self.maximum + 1
        table = StopTable.of(vocabulary.tokens, stops)
        if (counted + 1) * len(table.cut) < STATES:
            return Tabled(self.name, None, self._table(vocabulary, table), vocabulary, stops, device)
        bound = super().bind(vocabulary, stops, device)
        assert isinstance(bound, TokenCount)
        text = np.array([bool(token) for token in vocabulary.tokens])
        done, completing = len(table.cut), (table.cut != NONE) & text  # `done`: the state in which a stop string is complete
        following = np.where(completing, done, table.next_state)
        bound._next = torch.from_numpy(np.vstack((following, np.full_like(following[:1], done))))
        ends = completing.copy()
        ends[:, list(vocabulary.end_ids)] = True
        masks = (text & ~completing, ends, text | ends[0])
        bound._more, bound._ends, bound._all = (torch.from_numpy(packed(mask)) for mask in masks)
        return bound

    def _table(self, vocabulary: Vocabulary, stops: StopTable) -> TokenTable:
        """A state for each number of tokens that matters and each state of the stop automaton, and one where a stop string is
        complete."""
        text = np.array([bool(token) for token in vocabulary.tokens])
        columns = np.where(text, np.where(stops.cut == NONE, stops.next_state, -1), -2)
        kinds, classes = np.unique(columns, axis=1, return_inverse=True)  # where a class of tokens leads; -1: it completes
        width = len(kinds)
        counts = self.minimum + 1 if self.maximum == UNBOUNDED else self.maximum + 1
        done, dead = counts * width, counts * width + 1
        table = np.full((dead + 1, kinds.shape[1]), dead, np.int64)
        table[done] = np.where((kinds == -2).all(0), dead, done)
        for count in range(counts):
            following = min(count + 1, counts - 1) if self.maximum == UNBOUNDED else count + 1
            onward = np.where(kinds >= 0, following * width + kinds, dead) if following < counts else np.full_like(kinds, dead)
            table[count * width : (count + 1) * width] = np.where(kinds == -1, done if count >= self.minimum else dead, onward)
        final = np.repeat(np.arange(counts) >= self.minimum, width)
        return trimmed(classes.reshape(-1), table, np.append(final, [True, False]), vocabulary)

    _next: torch.Tensor  # int32 [stop states, V]
    _more: torch.Tensor  # int32 [stop states - 1, words], the tokens that prolong a text
    _ends: torch.Tensor  # int32 [stop states - 1, words], the tokens that end it
    _all: torch.Tensor  # int32 [words], what may follow a complete stop string: anything, for no sample comes there

    def start(self, prompts: Sequence[Prompt], particles: int) -> Counts:
        read = torch.zeros(len(prompts) * particles, dtype=torch.int64)
        return Counts(
            read, torch.zeros(len(read), 64, dtype=torch.int64), torch.zeros(len(read), 64, dtype=torch.int64), particles
        )

    def restart(self, state: Counts, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        state.read.view(-1, state.particles)[list(groups)] = 0

    def mask(self, state: Counts, out: torch.Tensor, active: torch.Tensor) -> None:
        counted, stop = state.now(active.nonzero()[:, 0])
        done = stop == len(self._more)
        at = torch.where(done, 0, stop)
        more = torch.where((counted < self.maximum)[:, None], self._more[at], 0)
        ends = torch.where(done[:, None], self._all, self._ends[at])
        enough = (counted >= self.minimum) & (counted <= self.maximum)
        out[active] = torch.where(done[:, None], 0, more) | torch.where(enough[:, None], ends, 0)

    def extend(self, state: Counts, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(counts))
        longest = int(state.read.max()) + tokens.shape[1] + 1
        if longest > state.stop.shape[1]:
            more = torch.zeros(len(rows), longest, dtype=torch.int64)
            state.counted, state.stop = torch.cat([state.counted, more], 1), torch.cat([state.stop, more], 1)
        for column in range(int(counts.max())):
            reading = rows[counts > column]
            counted, stop = state.now(reading)
            stop = self._next[stop, tokens[reading, column]].long()
            state.read[reading] += 1
            state.stop[reading, state.read[reading]] = stop
            state.counted[reading, state.read[reading]] = counted + (stop != len(self._more))
        counted, stop = state.now(rows)
        barred = (counted > self.maximum) | ((counted < self.minimum) & (stop == len(self._more)))
        return log_of(~barred | (counts == 0))

    def rollback(self, state: Counts, counts: torch.Tensor) -> None:
        state.read -= counts

    def fork(self, state: Counts, ancestors: torch.Tensor) -> None:
        state.read, state.counted, state.stop = state.read[ancestors], state.counted[ancestors], state.stop[ancestors]

    def finish(self, state: Counts, rows: torch.Tensor, texts: Sequence[str], reasons: Sequence[int]) -> torch.Tensor:
        counted, _ = state.now(rows)
        return log_of((counted >= self.minimum) & (counted <= self.maximum))
