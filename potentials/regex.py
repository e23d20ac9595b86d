"""Texts that a regular expression matches whole, in Python's meaning of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import cached_property

import torch
from llguidance import LLParserLimits

from smcgen.errors import UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.agreement import agrees
from smcgen.potentials.base import Potential
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.derivative import TooLarge, dfa
from smcgen.potentials.engine import ROW_ITEMS, STEP_ITEMS, Engine, Recognizer
from smcgen.potentials.pattern import Inexpressible, terminal
from smcgen.potentials.stops import fold
from smcgen.potentials.tabled import tabled
from smcgen.potentials.tables import PATIENT, STATE, STEPS, Bytes, over_bytes

COMPARED = 500  # states of an automaton that is compared with the engine before it is used: some tenths of a second
FUEL = 10_000_000  # of the engine's lexer, for a second try: about 0.1 s


def regex(pattern: str | re.Pattern[str]) -> Regular:
    """phi(text) = 1 if `re.fullmatch(pattern, text)`, else 0: a hard constraint, exact.

    Flags go inside, as `(?i)`, or with a compiled pattern. Look-arounds and word boundaries are understood outside of
    repetitions. Raises UsageError for back-references, possessive repetitions and such, with the reason."""
    if isinstance(pattern, re.Pattern):
        source, flags = pattern.pattern, pattern.flags
    else:
        source, flags = pattern, 0
    if not isinstance(source, str):
        raise UsageError(f"regex: expected a string pattern, got {type(source).__name__}")
    try:
        expression = terminal(source, flags)
    except Inexpressible as error:
        raise UsageError(f"regex {source!r}: {error}") from None
    return Regular(f"regex({source!r})", expression)


class Regular(Constraint):
    """A regular language, given by a terminal expression of the engine."""

    def __init__(self, name: str, expression: str):
        self.name, self.expression = name, expression

    def __repr__(self) -> str:
        return self.name

    def accepts(self, text: str) -> bool:
        if self._automaton is not None:
            return self._automaton.reads(text.encode("utf-8", "surrogatepass"))
        return self._recognizer(text)

    @cached_property
    def _recognizer(self) -> Recognizer:
        return Recognizer(text_of(self.expression), self.name)

    @cached_property
    def _automaton(self) -> Bytes | None:
        """Our own, where the engine may be wrong: in the complement of several word boundaries it is. None if too large."""
        if "~" in self.expression:
            with contextlib.suppress(TooLarge):
                return over_bytes(dfa(self.expression, STEPS // STATE))
        return None

    def bind(self, vocabulary: Vocabulary, stops: Sequence[str], device: torch.device) -> Potential:
        """As every potential; where the language is small enough for tables over these tokens, the result runs on them."""
        steps = PATIENT if device.type == "cuda" else STEPS
        bound = tabled(self.name, self.accepts, self.expression, vocabulary, stops, device, steps)
        if bound is not None:
            return bound
        if "~" in self.expression and agrees(self.expression, text_of(self.expression), COMPARED) is False:
            raise UsageError(
                f"{self.name}: the grammar engine would get its negations wrong (word boundaries, look-arounds), and it is too "
                "large for tables: take fewer of them, or smaller counts"
            )
        return super().bind(vocabulary, stops, device)

    def _compile(self, vocabulary: Vocabulary, stops: tuple[str, ...]) -> Engine:
        grammar = text_of(fold(self.expression, stops))
        try:
            return Engine(grammar, vocabulary, self.name)
        except UsageError:  # too much for the usual limits of the engine's lexer
            limits = LLParserLimits(step_max_items=STEP_ITEMS, max_items_in_row=ROW_ITEMS, initial_lexer_fuel=FUEL)
            return Engine(grammar, vocabulary, self.name, limits)


def text_of(expression: str) -> str:
    """The engine's grammar of one terminal."""
    # A complement holds byte strings that are no UTF-8 text, hence the intersection with all texts.
    return f"start: TEXT\nTEXT: ({expression}) & /(?s:.)*/\n"
