"""Simple conditions on the text: one of some options, something in it, something not in it, its length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from smcgen.errors import Impossible, UsageError
from smcgen.potentials.base import Potential, Prompt
from smcgen.potentials.pattern import ANY, Inexpressible, ranges_of, ranges_to_class, terminal, words
from smcgen.potentials.regex import Regular

Pattern = str | re.Pattern[str]


def choice(options: Iterable[str]) -> Regular:
    """phi(text) = 1 if the text is one of `options`, else 0."""
    if isinstance(options, str):
        raise UsageError("choice: give a list of texts, not one text")
    options = list(dict.fromkeys(options))
    if not options or not all(isinstance(option, str) for option in options):
        raise UsageError("choice: give at least one text, and nothing but texts")
    return Regular(_name("choice", options), words(options))


def contains(*what: Pattern) -> Regular:
    """phi(text) = 1 if every one of `what` occurs somewhere in the text: strings, or compiled patterns."""
    parts = _expressions("contains", what)
    return Regular(_name("contains", what), " & ".join(f"({ANY} {part} {ANY})" for part in parts))


def avoids(*what: Pattern) -> Regular:
    """phi(text) = 1 if none of `what` occurs anywhere in the text: strings, or compiled patterns."""
    parts = _expressions("avoids", what)
    return Regular(_name("avoids", what), f"~({ANY} ({' | '.join(parts)}) {ANY})")


def length(min: int = 0, max: int | None = None, unit: Literal["tokens", "chars", "words", "lines"] = "tokens") -> Potential:
    """phi(text) = 1 if the text has from `min` to `max` (None: any number of) units, else 0.

    unit: "tokens", the end token not counted; "chars", code points; "words", as `text.split()` counts them; "lines",
    as `text.split("\\n")` counts them, except that a line break at the end begins no further line (and "" has none)."""
    for bound in (min, max):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
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
    if not what:
        raise UsageError(f"{name}: give at least one string or compiled pattern")
    out = []
    for part in what:
        if isinstance(part, re.Pattern) and isinstance(part.pattern, str):
            try:
                out.append(terminal(part.pattern, part.flags))
            except Inexpressible as error:
                raise UsageError(f"{name} {part.pattern!r}: {error}") from None
        elif isinstance(part, str) and part:
            out.append(words([part]))
        else:
            raise UsageError(f"{name}: {part!r} is no text with at least one character, and no compiled string pattern")
    return out


def _name(kind: str, parts: Sequence[Any]) -> str:
    shown = ", ".join(repr(p.pattern) if isinstance(p, re.Pattern) else repr(p) for p in parts)
    return f"{kind}({shown})" if len(shown) <= 60 else f"{kind}({shown[:50]}...)"


class TokenCount(Potential):
    """From `minimum` to `maximum` tokens; the state is the number of tokens of each row, int64 [groups, particles]."""

    hard = True
    of_tokens = True  # two spellings of one text may have different values

    def __init__(self, minimum: int, maximum: int | None, name: str):
        self.minimum, self.maximum, self.name = minimum, maximum, name

    def __repr__(self) -> str:
        return self.name

    def bind(self, vocabulary, stops: Sequence[str], device: torch.device) -> TokenCount:
        if stops:
            raise UsageError(
                f"{self.name}: with stop strings the tokens of the text are not well defined: bound another unit, or drop them"
            )
        bound = super().bind(vocabulary, stops, device)
        assert isinstance(bound, TokenCount)
        text = np.array([bool(token) for token in vocabulary.tokens])
        ends = np.zeros(len(vocabulary), bool)
        ends[list(vocabulary.end_ids)] = True
        bound._text, bound._ends = _bits(text), _bits(ends)
        return bound

    _text: torch.Tensor  # int32 [words], the tokens of texts
    _ends: torch.Tensor  # int32 [words], the end tokens

    def start(self, prompts: Sequence[Prompt], particles: int) -> torch.Tensor:
        return torch.zeros(len(prompts), particles, dtype=torch.int64)

    def restart(self, state: torch.Tensor, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        state[list(groups)] = 0

    def mask(self, state: torch.Tensor, out: torch.Tensor, active: torch.Tensor) -> None:
        counts = state.view(-1)
        more = counts < (counts.max() + 1 if self.maximum is None else self.maximum)
        enough = (counts >= self.minimum) & (counts <= (counts if self.maximum is None else self.maximum))
        words = torch.where(more[:, None], self._text, 0) | torch.where(enough[:, None], self._ends, 0)
        out[active] = words[active]

    def extend(self, state: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        state.view(-1).add_(counts)
        return self._value(torch.where(counts > 0, state.view(-1), 0))

    def rollback(self, state: torch.Tensor, counts: torch.Tensor) -> None:
        state.view(-1).sub_(counts)

    def fork(self, state: torch.Tensor, ancestors: torch.Tensor) -> None:
        state.view(-1).copy_(state.view(-1)[ancestors])

    def finish(self, state: torch.Tensor, rows: torch.Tensor, texts: Sequence[str], reasons: Sequence[int]) -> torch.Tensor:
        counts = state.view(-1)[rows]
        return torch.where(counts >= self.minimum, self._value(counts), -torch.inf)

    def _value(self, counts: torch.Tensor) -> torch.Tensor:
        """0 where there may be so many tokens, else -inf."""
        barred = torch.zeros_like(counts, dtype=torch.bool) if self.maximum is None else counts > self.maximum
        return torch.zeros(len(counts), dtype=torch.float64).masked_fill(barred, -torch.inf)


def _bits(chosen: np.ndarray) -> torch.Tensor:
    padded = np.zeros(-(-len(chosen) // 32) * 32, bool)
    padded[: len(chosen)] = chosen
    return torch.from_numpy(np.packbits(padded, bitorder="little").view(np.int32).copy())
