"""Masks from the exact character parser, for grammars that the fast engine cannot do exactly.

Tokens become paths in a tree of character classes, and one mask is one sweep over the tree, level by level: a table knows
which place follows which on a character class, and only what is new in it is asked of the parser. Grammars tell few classes
of characters apart and few places differ, so that a sweep is array look-ups for the most part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from smcgen.errors import Impossible
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.automaton import Alphabet
from smcgen.potentials.base import packed
from smcgen.potentials.cfg import Cfg
from smcgen.potentials.charparser import CharParser, Place, Run

DEAD, UNKNOWN = -1, -2
PLACES = 1 << 15  # places remembered
MASKS = 1 << 25  # bytes of masks remembered


class Reading(NamedTuple):
    """Where a matcher stands: a place, the bytes of a character that is not complete, and where it stood before."""

    place: Place
    pending: bytes
    before: Reading | None


class CharEngine:
    """A grammar compiled for one vocabulary, with the verbs of `engine.Engine`. Raises Impossible."""

    kind = "exact parser"

    def __init__(self, cfg: Cfg, vocabulary: Vocabulary, name: str):
        self.name, self.parser, self.tokens = name, CharParser(cfg), vocabulary.tokens
        self.width = (len(vocabulary) + 31) // 32
        self._ends = list(vocabulary.end_ids)
        self._alphabet = cfg.alphabet
        self._tree = Tree(vocabulary.tokens, cfg.alphabet)
        self._spans: dict[bytes, list[int]] = {}
        self._forget()
        if not self._mask(Reading(self.parser.first, b"", None)).any() and not self.parser.accepts(self.parser.first):
            raise Impossible(f"{name}: no text can satisfy it, or none that the tokens of {vocabulary.name} can spell")

    def matcher(self) -> CharMatcher:
        """A matcher that has read nothing."""
        return CharMatcher(self, Reading(self.parser.first, b"", None))

    def fill(self, matchers: Sequence[Any], out: np.ndarray, rows: Sequence[int]) -> list[bool]:
        """As `engine.Engine.fill`."""
        accepting = [matcher.is_accepting() for matcher in matchers]
        for matcher, row, accepted in zip(matchers, rows, accepting, strict=True):
            bits = self._mask(matcher.reading)
            if accepted and self._ends:
                bits = bits.copy()
                bits[self._ends] = True
            out[row] = packed(bits)
        return accepting

    def read(self, place: Place, pending: bytes, token: int) -> tuple[Place, bytes] | None:
        """The place, and what is pending, after a token; None if it cannot be read."""
        if not self.tokens[token]:
            return None
        text, rest = _decode(pending + self.tokens[token])
        if text is None:
            return None
        for char in text:
            place = self.parser.read(place, char)
            if not place.runs:
                return None
        return (place, rest) if not rest or self._possible(place, rest) else None

    def _possible(self, place: Place, rest: bytes) -> bool:
        """Whether a character whose first bytes are `rest` can come next."""
        if rest not in self._spans:
            self._spans[rest] = list(self._alphabet.between(*_span(rest)))
        return any(self.parser.step(place, cls).runs for cls in self._spans[rest])

    def _mask(self, reading: Reading) -> np.ndarray:
        """bool [V]: the tokens that can be read next."""
        key = reading.place.runs, reading.pending
        if key not in self._masks:
            if len(self._masks) * len(self.tokens) > MASKS or len(self._places) > PLACES:
                self._forget()
            self._masks[key] = self._sweep(reading.place, reading.pending)
        return self._masks[key]

    def _sweep(self, place: Place, pending: bytes) -> np.ndarray:
        allowed = np.zeros(len(self.tokens), bool)
        if pending:
            for token in self._tree.inner:
                allowed[token] = self.read(place, pending, token) is not None
            return allowed
        tree = self._tree
        at = np.full(tree.size, DEAD, np.int64)
        at[0] = self._number(place)
        for start, end in tree.levels:
            before, classes = at[tree.parent[start:end]], tree.cls[start:end]
            alive = np.flatnonzero(before >= 0)
            steps = self._table[before[alive], classes[alive]]
            if (unknown := steps == UNKNOWN).any():
                pairs = np.unique(np.stack((before[alive][unknown], classes[alive][unknown])), axis=1)
                for number, cls in pairs.T.tolist():
                    after = self.parser.step(self._places[number], cls)
                    # `_number` may replace the table, so it comes first.
                    target = self._number(after) if after.runs else DEAD
                    self._table[number, cls] = target
                steps = self._table[before[alive], classes[alive]]
            at[start + alive] = steps
        allowed[tree.whole] = at[tree.node_of_whole] >= 0
        asked: dict[tuple[int, bytes], bool] = {}
        for token, node, rest in tree.partial:
            if (number := int(at[node])) >= 0:
                if (number, rest) not in asked:
                    asked[number, rest] = self._possible(self._places[number], rest)
                allowed[token] = asked[number, rest]
        return allowed

    def _number(self, place: Place) -> int:
        number = self._numbers.setdefault(place.runs, len(self._places))
        if number == len(self._places):
            self._places.append(place)
            if number == len(self._table):
                more = np.full((len(self._table), self._table.shape[1]), UNKNOWN, np.int64)
                self._table = np.concatenate((self._table, more))
        return number

    def _forget(self) -> None:
        self._places: list[Place] = []
        self._numbers: dict[tuple[Run, ...], int] = {}
        self._table = np.full((256, self._alphabet.size), UNKNOWN, np.int64)
        self._masks: dict[tuple[tuple[Run, ...], bytes], np.ndarray] = {}


class CharMatcher:
    """What has been read of a text; the part of llguidance's matcher that constraints use. A copy costs nothing."""

    def __init__(self, engine: CharEngine, reading: Reading):
        self.engine, self.reading = engine, reading

    def deep_copy(self) -> CharMatcher:
        return CharMatcher(self.engine, self.reading)

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            after = self.engine.read(self.reading.place, self.reading.pending, token)
            if after is None:
                return count
            self.reading = Reading(*after, self.reading)
        return len(tokens)

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        return self.deep_copy().try_consume_tokens(tokens)

    def rollback(self, count: int) -> bool:
        for _ in range(count):
            if self.reading.before is None:
                return False
            self.reading = self.reading.before
        return True

    def is_accepting(self) -> bool:
        return not self.reading.pending and self.engine.parser.accepts(self.reading.place)

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


class Tree:
    """Tokens as paths of character classes from node 0. Nodes are numbered level by level.

    Attributes:
        parent, cls: int64 [size], the edge that leads to each node.
        levels: (first, last + 1) of the nodes of each level below the root.
        whole, node_of_whole: int64 [n], the tokens that are whole characters, and where they lead.
        partial: (token, node, first bytes of a character) of the tokens that end inside a character.
        inner: the tokens that begin inside a character."""

    def __init__(self, tokens: Sequence[bytes], alphabet: Alphabet):
        self.partial: list[tuple[int, int, bytes]] = []
        self.inner: list[int] = []
        paths: dict[tuple[int, ...], list[tuple[int, bytes]]] = {}
        classes: dict[str, int] = {}
        for token, data in enumerate(tokens):
            if not data:
                continue
            text, rest = _decode(data)
            if text is None:
                self.inner.append(token)
                continue
            for char in text:
                if char not in classes:
                    classes[char] = alphabet.of(char)
            paths.setdefault(tuple(classes[char] for char in text), []).append((token, rest))
        nodes = sorted({path[:n] for path in paths for n in range(len(path) + 1)} | {()}, key=lambda path: (len(path), path))
        numbers = {path: number for number, path in enumerate(nodes)}
        self.size = len(nodes)
        self.parent = np.array([numbers[path[:-1]] for path in nodes])
        self.cls = np.array([path[-1] if path else 0 for path in nodes])
        lengths = np.array([len(path) for path in nodes])
        bounds = np.searchsorted(lengths, np.arange(1, lengths[-1] + 2)).tolist()
        self.levels = list(pairwise(bounds))
        whole = [(token, numbers[path]) for path, ends in paths.items() for token, rest in ends if not rest]
        self.whole, self.node_of_whole = np.array(whole, np.int64).reshape(-1, 2).T
        self.partial = [(token, numbers[path], rest) for path, ends in paths.items() for token, rest in ends if rest]


def _decode(data: bytes) -> tuple[str | None, bytes]:
    """The whole characters of `data` and the first bytes of one that it ends in; (None, b"") if it is no UTF-8 text."""
    try:
        return data.decode("utf-8"), b""
    except UnicodeDecodeError as error:
        rest = data[error.start :]
        if error.reason != "unexpected end of data" or not rest:
            return None, b""
        return data[: error.start].decode("utf-8"), rest


def _span(rest: bytes) -> tuple[int, int]:
    """The code points whose first bytes in UTF-8 are `rest`."""
    lead = rest[0]
    size = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    code = lead & (0xFF >> (size + 1))
    for byte in rest[1:]:
        code = code << 6 | byte & 0x3F
    free = 6 * (size - len(rest))
    smallest = {2: 0x80, 3: 0x800, 4: 0x10000}[size]
    return max(code << free, smallest), min(((code + 1) << free) - 1, 0x10FFFF)
