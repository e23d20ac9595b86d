"""Stop strings for any constraint: what `stops.fold` does to a regular language, done beside an engine that cannot.

A text x of the language may be followed by a stop string and the sample ends there. While tokens are read, the engine follows
the text as far as it is a beginning of one in the language; beside it stand the places where the text was complete and what
came since is the beginning of a stop string. A token is allowed if the engine allows it and it completes no stop string, if
it prolongs such a beginning, or if it completes a stop string (the first to do so) before which the text was complete.

A text that the engine believes in can still come to nothing, where every way on holds a stop string: a dead end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from smcgen.errors import Impossible, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import packed
from smcgen.potentials.engine import Matcher

NONE = np.iinfo(np.int32).max  # no stop string is completed


class Inner(Protocol):
    """What is used of an `engine.Engine` or a `charengine.CharEngine`."""

    kind: str
    width: int

    def matcher(self) -> Any: ...

    def fill(self, matchers: Sequence[Any], out: np.ndarray, rows: Sequence[int]) -> list[bool]: ...


@dataclass(eq=False)
class StopTable:
    """Where tokens lead in the stop automaton, whose states are the longest end of the text that begins a stop string.

    Attributes:
        next_state: int32 [states, V], meaningless where a stop string is completed.
        cut: int32 [states, V], where the text ends: bytes after (< 0: before) the beginning of the token, NONE if no stop
            string is completed.
        hopeful: per state, the lengths of its ends from which some stop string can be the first to be completed."""

    next_state: np.ndarray
    cut: np.ndarray
    hopeful: list[tuple[int, ...]]

    @classmethod
    def of(cls, tokens: Sequence[bytes], stops: Sequence[str]) -> StopTable:
        """tokens: the bytes each token adds to the text. Raises UsageError for an empty stop string."""
        if "" in stops:
            raise UsageError("a stop string is empty: give one with at least one character")
        # A stop string that holds another, other than at its end, is never the first to be completed.
        words = [stop.encode() for stop in dict.fromkeys(stops) if not any(other in stop[:-1] for other in stops)]
        states = sorted({b""}.union(word[:i] for word in words for i in range(len(word))), key=len)
        step, done = _bytes(words, states)
        next_state = np.repeat(np.arange(len(states), dtype=np.int32)[:, None], len(tokens), axis=1)
        cut = np.full_like(next_state, NONE)
        order = sorted(range(len(tokens)), key=lambda v: -len(tokens[v]))
        lengths = np.array([len(tokens[v]) for v in order])
        for i in range(lengths[0] if len(lengths) else 0):
            going = np.array(order[: int((lengths > i).sum())])
            symbols = np.frombuffer(bytes(tokens[v][i] for v in going.tolist()), np.uint8)
            at = next_state[:, going]
            found = done[at, symbols]
            cut[:, going] = np.where((cut[:, going] == NONE) & (found > 0), i + 1 - found, cut[:, going])
            next_state[:, going] = step[at, symbols]
        hopeful = [
            tuple(k for k in range(1, len(state) + 1) if _completes(words, states, step, done, state, state[-k:]))
            for state in states
        ]
        return cls(next_state, cut, hopeful)


def _bytes(words: Sequence[bytes], states: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The automaton over bytes, [states, 256]: the next state, and the length of the longest stop string completed (or 0)."""
    numbers = {state: i for i, state in enumerate(states)}
    step, done = np.zeros((len(states), 256), np.int32), np.zeros((len(states), 256), np.int32)
    for state, i in numbers.items():
        for byte in {byte for word in words for byte in word}:
            text = state + bytes([byte])
            done[i, byte] = max((len(word) for word in words if text.endswith(word)), default=0)
            step[i, byte] = next(numbers[text[k:]] for k in range(len(text) + 1) if text[k:] in numbers)
    return step, done


def _completes(
    words: Sequence[bytes], states: Sequence[bytes], step: np.ndarray, done: np.ndarray, state: bytes, begun: bytes
) -> bool:
    """Whether a stop string that begins with `begun` is the first to be completed if its rest follows after `state`."""
    for word in words:
        at = states.index(state)
        for i in range(len(begun), len(word) if word.startswith(begun) else 0):
            found, at = int(done[at, word[i]]), int(step[at, word[i]])
            if found:
                if i == len(word) - 1 and found == len(word):
                    return True
                break
    return False


class Choices(NamedTuple):
    """The tokens that depend on where the text was complete, at one stop state.

    `completing`: int64 [n], tokens that complete a stop string; `ends`: [n], what each asks for, as an index of the answers;
    `prolonging`, `begins`: tokens that end in the beginning of a stop string, likewise (a token may come twice)."""

    completing: np.ndarray
    ends: np.ndarray
    prolonging: np.ndarray
    begins: np.ndarray


class Point(NamedTuple):
    """Where a matcher stands. `begun`: lengths of ends of the text that begin a stop string and before which the text was
    complete; `inside`: the engine has read all tokens; `done`: a stop string is complete."""

    state: int
    begun: frozenset[int]
    inside: bool
    done: bool
    before: Point | None


class StopEngine:
    """A constraint with stop strings, with the verbs of `engine.Engine`.

    Args:
        build: makes the engine of the constraint for a vocabulary. It gets one with more tokens than `vocabulary`: the
            beginnings of tokens that end before a stop string.
        last: the bytes that a complete text can end with, None if nothing is known of them.
    Raises Impossible if no text can satisfy both."""

    def __init__(
        self,
        build: Callable[[Vocabulary], Inner],
        vocabulary: Vocabulary,
        stops: Sequence[str],
        name: str,
        last: frozenset[int] | None = None,
    ):
        self.name, self.tokens, self.last = name, vocabulary.tokens, last
        self.table, wide, self.pieces = prepared(vocabulary, tuple(stops))
        self.inner = build(wide)
        self.kind = f"{self.inner.kind}, stop strings beside it"
        self.width = (len(vocabulary) + 31) // 32
        self.longest = max(map(len, map(str.encode, stops)))
        self._ends = np.array(vocabulary.end_ids, np.int64)
        self._text = np.array([bool(token) for token in self.tokens])
        self._rows = np.zeros((0, self.inner.width), np.int32)
        self._choices: dict[int, Choices] = {}
        row = np.zeros((1, self.width), np.int32)
        if not self.fill([self.matcher()], row, [0])[0] and not row.any():
            raise Impossible(f"{name}: no text before a stop string can satisfy it, or none that the tokens can spell")

    def matcher(self) -> StopMatcher:
        """A matcher that has read nothing."""
        return StopMatcher(self, self.inner.matcher(), Point(0, frozenset(), True, False, None))

    def fill(self, matchers: Sequence[Any], out: np.ndarray, rows: Sequence[int]) -> list[bool]:
        """As `engine.Engine.fill`."""
        inside = [i for i, matcher in enumerate(matchers) if matcher.point.inside]
        if len(self._rows) < len(inside):
            self._rows = np.zeros((len(inside), self.inner.width), np.int32)
        accepting = [matcher.point.done for matcher in matchers]
        nothing = np.zeros(32 * self.inner.width, bool)
        found = self.inner.fill([matchers[i].inner for i in inside], self._rows, range(len(inside))) if inside else []
        for row, i in enumerate(inside):
            accepting[i] = found[row]
        places = {i: row for row, i in enumerate(inside)}
        for i, matcher in enumerate(matchers):
            bits = (
                nothing
                if i not in places
                else np.unpackbits(self._rows[places[i]].view(np.uint8), bitorder="little").view(bool)
            )
            allowed = self._text.copy() if matcher.point.done else self._allowed(matcher, bits, accepting[i])
            allowed[self._ends] = accepting[i]
            out[rows[i]] = packed(allowed)
        return accepting

    def _allowed(self, matcher: StopMatcher, bits: np.ndarray, accepting: bool) -> np.ndarray:
        choices = self._at(matcher.point.state)
        answers = self._answers(matcher, bits, accepting, choices)
        allowed = bits[: len(self.tokens)].copy()
        allowed[choices.completing] = answers[choices.ends]
        allowed[choices.prolonging[answers[choices.begins]]] = True
        return allowed

    def _answers(self, matcher: StopMatcher, bits: np.ndarray, accepting: bool, choices: Choices) -> np.ndarray:
        """bool [longest + pieces]: was the text complete n bytes before here; will it be after piece i."""
        answers = np.zeros(self.longest + len(self.pieces), bool)
        answers[0] = accepting
        answers[list(matcher.point.begun)] = True
        if matcher.point.inside and not matcher.inner.is_error():
            asked = np.unique(np.concatenate((choices.ends, choices.begins)))
            for index in asked[asked >= self.longest].tolist():
                piece, token = self.pieces[index - self.longest]
                if bits[token] and (self.last is None or piece[-1] in self.last):
                    copy = matcher.inner.deep_copy()
                    answers[index] = copy.try_consume_tokens([token]) == 1 and copy.is_accepting()
        return answers

    def complete(self, matcher: StopMatcher, token: int, at: int) -> bool:
        """Whether the text is complete `at` bytes after (< 0: before) the beginning of a token that comes next."""
        if at < 0:
            return -at in matcher.point.begun
        if not matcher.point.inside:
            return False
        if at == 0:
            return matcher.inner.is_accepting()
        copy = matcher.inner.deep_copy()
        return copy.try_consume_tokens([self.numbers[self.tokens[token][:at]]]) == 1 and copy.is_accepting()

    @functools.cached_property
    def numbers(self) -> dict[bytes, int]:
        """The token that spells each piece."""
        return dict(self.pieces)

    def _at(self, state: int) -> Choices:
        if state not in self._choices:
            places = {piece: self.longest + i for i, (piece, _) in enumerate(self.pieces)}

            def asks(token: int, at: int) -> int:
                return -at if at <= 0 else places[self.tokens[token][:at]]

            cut, after = self.table.cut[state], self.table.next_state[state]
            completing = np.flatnonzero((cut != NONE) & self._text)
            ends = [asks(token, at) for token, at in zip(completing.tolist(), cut[completing].tolist(), strict=True)]
            hopes = np.array([bool(lengths) for lengths in self.table.hopeful])
            prolonging, begins = [], []
            for token in np.flatnonzero((cut == NONE) & self._text & hopes[after]).tolist():
                for length in self.table.hopeful[after[token]]:
                    prolonging.append(token)
                    begins.append(asks(token, len(self.tokens[token]) - length))
            arrays = (np.array(part, np.int64) for part in (completing, ends, prolonging, begins))
            self._choices[state] = Choices(*arrays)
        return self._choices[state]


class StopMatcher:
    """What has been read of a text; the part of llguidance's matcher that constraints use."""

    def __init__(self, engine: StopEngine, inner: Matcher, point: Point):
        self.engine, self.inner, self.point = engine, inner, point

    def deep_copy(self) -> StopMatcher:
        return StopMatcher(self.engine, self.inner.deep_copy(), self.point)

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            after = self._after(token)
            if after is None:
                return count
            if after.inside:
                self.inner.try_consume_tokens([token])
            self.point = after
        return len(tokens)

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        if len(tokens) == 1:
            return int(self._after(tokens[0]) is not None)
        return self.deep_copy().try_consume_tokens(tokens)

    def rollback(self, count: int) -> bool:
        inside = 0
        for _ in range(count):
            if self.point.before is None:
                return False
            inside += self.point.inside
            self.point = self.point.before
        return inside == 0 or self.inner.rollback(inside)

    def is_accepting(self) -> bool:
        return self.point.done or (self.point.inside and self.inner.is_accepting())

    def is_error(self) -> bool:
        return self.inner.is_error()

    def get_error(self) -> str:
        return self.inner.get_error()

    def _after(self, token: int) -> Point | None:
        """Where a token leads; None if it cannot come here."""
        engine, point = self.engine, self.point
        if token >= len(engine.tokens) or not engine.tokens[token]:
            return None
        if point.done:
            return Point(0, frozenset(), False, True, point)
        cut = int(engine.table.cut[point.state, token])
        if cut != NONE:
            return Point(0, frozenset(), False, True, point) if engine.complete(self, token, cut) else None
        state, size = int(engine.table.next_state[point.state, token]), len(engine.tokens[token])
        lengths = engine.table.hopeful[state]
        begun = frozenset(length for length in lengths if engine.complete(self, token, size - length))
        inside = point.inside and self.inner.validate_tokens([token]) == 1
        return Point(state, begun, inside, False, point) if inside or begun else None


@functools.lru_cache(maxsize=8)
def prepared(vocabulary: Vocabulary, stops: tuple[str, ...]) -> tuple[StopTable, Vocabulary, tuple[tuple[bytes, int], ...]]:
    """The stop automaton over a vocabulary, the vocabulary with the beginnings of tokens that end before a stop string or
    before the beginning of one, and these beginnings with their ids there."""
    table = StopTable.of(vocabulary.tokens, stops)
    found: set[bytes] = set()
    for state in range(len(table.cut)):
        cut, after = table.cut[state], table.next_state[state]
        for token in np.flatnonzero((cut != NONE) & (cut > 0)).tolist():
            found.add(vocabulary.tokens[token][: cut[token]])
        hopes = np.array([bool(lengths) for lengths in table.hopeful])
        for token in np.flatnonzero((cut == NONE) & hopes[after]).tolist():
            data = vocabulary.tokens[token]
            found.update(data[:-length] for length in table.hopeful[after[token]] if length < len(data))
    pieces, spelling = [], list(vocabulary.spelling)
    known = {token: i for i, token in reversed(list(enumerate(vocabulary.tokens))) if token}
    for piece in sorted(found):
        if piece not in known:
            known[piece] = len(spelling)
            spelling.append(piece)
        pieces.append((piece, known[piece]))
    wide = vocabulary
    if len(spelling) > len(vocabulary):
        wide = Vocabulary(vocabulary.name, spelling, vocabulary.special, vocabulary.end_ids, vocabulary.bos_id)
    return table, wide, tuple(pieces)
