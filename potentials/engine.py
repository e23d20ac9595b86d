"""llguidance behind three verbs: a grammar becomes matchers, a matcher reads tokens, a row of bits is filled.

Traps of the engine that end here: tokens are never forced (`no_forcing`), a matcher is made once and then only cloned,
an error state is permanent and is never taken for a mask, "end only" from a dead end is not acceptance, and end tokens
are set from acceptance alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from smcgen.errors import Impossible, PotentialError, UsageError
from smcgen.lm.vocabulary import Vocabulary

HEADER = '%llguidance {"no_forcing": true, "allow_initial_skip": true}\n'
DEAD_END = "NoExtensionBias"  # how the engine names a prefix that it admitted and cannot prolong
STEP_ITEMS = 50_000_000  # parser items per mask (about 20,000 a millisecond): a bound on time only
PARALLEL = 8  # masks from which the thread pool is worth its start


class Matcher(Protocol):
    """What constraints use of llguidance's matchers, and what the exact parser offers as well."""

    def deep_copy(self) -> Any: ...

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Reads tokens up to the first that cannot come here; how many it has read."""
        ...

    def validate_tokens(self, tokens: list[int], /) -> int:
        """As `try_consume_tokens`, without reading."""
        ...

    def rollback(self, num_tokens: int, /) -> bool: ...

    def is_accepting(self) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


class Engine:
    """A grammar (llguidance's Lark dialect) compiled for one vocabulary.

    `name` is how messages call it. Raises UsageError if the engine does not take the grammar, Impossible if no text of
    it can be spelled."""

    def __init__(self, grammar: str, vocabulary: Vocabulary, name: str, limits: LLParserLimits | None = None):
        self.name, self.grammar = name, grammar
        self._tokenizer: LLTokenizer = vocabulary.llguidance()
        self.width = (self._tokenizer.vocab_size + 31) // 32
        self._size = len(vocabulary)
        ends = np.zeros(self.width, np.uint32)
        for end in vocabulary.end_ids:
            ends[end // 32] |= np.uint32(1 << end % 32)
        self._end_words = np.flatnonzero(ends)
        self._end_bits = ends.view(np.int32)[self._end_words]
        limits = limits or LLParserLimits(step_max_items=STEP_ITEMS)
        self._prototype = LLMatcher(self._tokenizer, HEADER + grammar, log_level=0, limits=limits)
        if self._prototype.is_error():
            raise UsageError(f"{name}: {_first_line(self._prototype.get_error())}")
        row = torch.zeros(1, self.width, dtype=torch.int32)
        warm = self._prototype.deep_copy()  # an empty grammar leaves the matcher it is found with in an error
        accepting = self.fill([warm], row, [0])
        if not accepting[0] and not row.any():
            raise Impossible(f"{name}: no text can satisfy it, or none that the tokens of {vocabulary.name} can spell")
        self._prototype = warm

    def matcher(self) -> LLMatcher:
        """A matcher that has read nothing."""
        return self._prototype.deep_copy()

    def fill(self, matchers: Sequence[Any], out: torch.Tensor, rows: Sequence[int]) -> np.ndarray:
        """Row `rows[i]` of `out` (int32 [*, width], contiguous) is the mask of `matchers[i]`: all zeros at a dead end.

        Returns bool [n]: whether the text so far is accepted. Raises PotentialError at a limit of the engine."""
        stride = self.width * 4
        if len(matchers) < PARALLEL:
            for matcher, row in zip(matchers, rows, strict=True):
                matcher.unsafe_compute_mask_ptr(out.data_ptr() + row * stride, stride)
        else:
            pairs = list(zip(matchers, rows, strict=True))
            _executor().unsafe_compute_mask_ptr(pairs, out.data_ptr(), stride, len(out))
        words, index = out.numpy(), np.asarray(rows, np.int64)
        accepting = np.array([matcher.is_accepting() for matcher in matchers], bool)
        for i, matcher in enumerate(matchers):
            if matcher.is_error():
                if DEAD_END not in (error := matcher.get_error()):
                    raise PotentialError(
                        f"{self.name}: the grammar engine gave up ({_first_line(error)}): simplify the grammar, or "
                        "bound its repetitions"
                    )
                words[index[i]], accepting[i] = 0, False
        # The engine sets end bits of its own, one past the vocabulary too where no token ends a text.
        ends = np.where(accepting[:, None], self._end_bits, 0)
        at = index[:, None], self._end_words
        words[at] = (words[at] & ~self._end_bits) | ends
        if self.width * 32 > self._size:
            words[index, self._size // 32] &= np.int32((1 << self._size % 32) - 1)
            words[index, self._size // 32 + 1 :] = 0
        return accepting


class Recognizer:
    """A grammar as a yes-or-no question about whole texts, independent of any vocabulary."""

    def __init__(self, grammar: str, name: str, limits: LLParserLimits | None = None):
        self._engine = Engine(grammar, bytes_vocabulary(), name, limits)

    def __call__(self, text: str | bytes) -> bool:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        matcher = self._engine.matcher()
        return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def read(matcher: Matcher, tokens: Sequence[int], name: str) -> None:
    """`matcher` reads tokens that its masks allowed."""
    if matcher.try_consume_tokens(list(tokens)) != len(tokens):
        reason = _first_line(matcher.get_error())
        raise PotentialError(f"{name}: the grammar engine refuses a text that its mask allowed ({reason})")


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor(torch.get_num_threads())


@functools.cache
def bytes_vocabulary() -> Vocabulary:
    return Vocabulary("bytes", [*(bytes([i]) for i in range(256)), b"<end>"], special=(256,), end_ids=(256,))


def _first_line(message: str) -> str:
    """An engine's report without its dumps of states."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "<state>" not in line]
    return (lines[0] if lines else "no reason given")[:300]
