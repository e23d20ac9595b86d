"""llguidance behind three verbs: a grammar becomes matchers, a matcher reads tokens, a row of bits is filled.

Traps of the engine that end here: tokens are never forced (`no_forcing`), a matcher is made once and then only cloned,
an error state is permanent and is never taken for a mask, "end only" from a dead end is not acceptance, and end tokens
are set from acceptance alone.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from smcgen.errors import Impossible, PotentialError, UsageError
from smcgen.lm.vocabulary import Vocabulary

HEADER = '%llguidance {"no_forcing": true, "allow_initial_skip": true}\n'
DEAD_END = "NoExtensionBias"  # how the engine names a prefix that it admitted and cannot prolong
STEP_ITEMS = 50_000_000  # parser items per mask (about 20,000 a millisecond): a bound on time only
ROW_ITEMS = 50_000  # parser items at one place of a text
STACK = 1 << 29  # bytes of address space
# How the engine and Rust's regular expressions report sizes that they do not take, and what helps.
TOO_LARGE = ("fuel exhausted", "too many", "too large", "too complex", "exceeds", "decimal literal invalid")
REMEDY = "lower the counts of its repetitions, or leave out their upper bounds"
SURROGATE = "not a Unicode scalar value"
LARGE = 20_000  # characters of a grammar from which the engine's recursion may need a large stack
SERIAL = 3e-4  # seconds of masks on this thread after which the engine's thread pool is worth waking for the others


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

    kind = "llguidance"

    def __init__(self, grammar: str, vocabulary: Vocabulary, name: str, limits: LLParserLimits | None = None):
        self.name, self.grammar = name, grammar
        self._buffer: tuple[Callable[[], np.ndarray | None], int] = (lambda: None, 0)
        self._tokenizer: LLTokenizer = vocabulary.llguidance()
        self.width = (self._tokenizer.vocab_size + 31) // 32
        # Bits beyond the vocabulary: of this word, all but these; of all words after it.
        self._beyond, self._last = len(vocabulary) // 32, np.int32((1 << len(vocabulary) % 32) - 1)
        ends = np.zeros(self.width, np.uint32)
        for end in vocabulary.end_ids:
            ends[end // 32] |= np.uint32(1 << end % 32)
        words = np.flatnonzero(ends).tolist()
        bits = ends.view(np.int32)[words].tolist()
        self._end_words = [(word, ~end, end) for word, end in zip(words, bits, strict=True)]
        limits = limits or LLParserLimits(step_max_items=STEP_ITEMS, max_items_in_row=ROW_ITEMS)
        self._prototype = _deep(len(grammar), lambda: LLMatcher(self._tokenizer, HEADER + grammar, log_level=0, limits=limits))
        if self._prototype.is_error():
            raise UsageError(f"{name}: {explain(self._prototype.get_error())}")
        row = np.zeros((1, self.width), np.int32)
        warm = self._prototype.deep_copy()  # an empty grammar leaves the matcher it is found with in an error
        accepting = self.fill([warm], row, [0])
        if not accepting[0] and not row.any():
            raise Impossible(f"{name}: no text can satisfy it, or none that the tokens of {vocabulary.name} can spell")
        self._prototype = warm

    def matcher(self) -> LLMatcher:
        """A matcher that has read nothing."""
        return self._prototype.deep_copy()

    def fill(self, matchers: Sequence[Any], out: np.ndarray, rows: Sequence[int]) -> list[bool]:
        """Row `rows[i]` of `out` (int32 [*, width], contiguous) is the mask of `matchers[i]`: all zeros at a dead end.

        Returns whether each text so far is accepted. Raises PotentialError at a limit of the engine."""
        stride, begin = self.width * 4, self._address(out)
        pairs, until = list(zip(matchers, rows, strict=True)), time.perf_counter() + SERIAL
        for i, (matcher, row) in enumerate(pairs, 1):
            matcher.unsafe_compute_mask_ptr(begin + row * stride, stride)
            # Most masks take some microseconds and a few take milliseconds: which do is seen by doing them.
            if time.perf_counter() > until and i + 1 < len(pairs) and torch.get_num_threads() > 1:
                _executor(torch.get_num_threads()).unsafe_compute_mask_ptr(pairs[i:], begin, stride, len(out))
                break
        accepting = []
        for matcher, row in pairs:
            accepted = matcher.is_accepting()
            if matcher.is_error():
                if DEAD_END not in (error := matcher.get_error()):
                    raise PotentialError(f"{self.name}: the grammar engine gave up on a text: {explain(error)}")
                out[row], accepted = 0, False
            # The engine sets end bits of its own, one past the vocabulary too where no token ends a text.
            for word, keep, bits in self._end_words:
                out[row, word] = int(out[row, word]) & keep | (bits if accepted else 0)
            if self._beyond < self.width:
                out[row, self._beyond] &= self._last
                out[row, self._beyond + 1 :] = 0
            accepting.append(accepted)
        return accepting

    def _address(self, out: np.ndarray) -> int:
        """Where `out` begins in memory: one buffer is used again and again, and numpy is slow to say."""
        buffer, address = self._buffer  # read and written in one piece, for several threads may be here
        if buffer() is not out:
            address = out.ctypes.data
            self._buffer = (weakref.ref(out), address)
        return address


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
        reason = matcher.get_error()
        if matcher.is_error():
            raise PotentialError(f"{name}: the grammar engine gave up on a text: {explain(reason)}")
        raise PotentialError(f"{name}: the grammar engine refuses a text that its mask allowed ({_first_line(reason)})")


def explain(report: str) -> str:
    """An engine's report in words that a user can act on."""
    if SURROGATE in report:
        return "a surrogate is no character of a text: leave it out"
    if any(sign in report for sign in TOO_LARGE):
        return f"it is too large for the grammar engine: {REMEDY}"
    return _first_line(report)


def _deep(size: int, make: Callable[[], LLMatcher]) -> LLMatcher:
    """`make()` for a grammar of `size` characters. The engine goes down nested rules by recursion, and overflow is a crash."""
    if size < LARGE:
        return make()
    found: Future[LLMatcher] = Future()

    def work() -> None:
        try:
            found.set_result(make())
        except BaseException as error:
            found.set_exception(error)

    before = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return found.result()


@functools.cache
def _executor(threads: int) -> LLExecutor:
    return LLExecutor(threads)


@functools.cache
def bytes_vocabulary() -> Vocabulary:
    """A token for each byte and an end token, for questions about texts alone."""
    return Vocabulary("bytes", [*(bytes([i]) for i in range(256)), b"<end>"], special=(256,), end_ids=(256,))


def _first_line(message: str) -> str:
    """An engine's report without its dumps of states."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "<state>" not in line]
    return (lines[0] if lines else "no reason given")[:300]
