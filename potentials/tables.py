"""A regular constraint as tables over tokens: masks and steps are look-ups on any device, and need no host.

    masks[state]                        the tokens that keep the text possible, as bits
    next[state, classes[token]]         the state after a token

The automaton over characters (`derivative`) becomes one over the bytes of UTF-8; all tokens run through it, and tokens that do
the same in every state share a class. States from which the tokens can spell no accepted text are one, the dead one.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.automaton import Alphabet
from smcgen.potentials.derivative import Dfa, TooLarge, dfa, reaching
from smcgen.potentials.pattern import MAX_CODE, SURROGATES

STATES = 4_096  # of a table
CELLS = 1 << 24  # entries of `next`
STEPS = 1 << 23  # beginnings of tokens looked at, in all states together: what building costs, about 20 ns each
PATIENT, HASTY = STEPS << 3, STEPS >> 3  # where the host would have to be asked at every token; where it is about as fast
STATE = 5_000  # of these steps is what a state costs by itself
CHUNK = 8  # states whose tokens are run at a time
FEW = 500  # nodes that are not worth counting more closely
MANY = 10_000  # nodes from which a sweep over all is faster
INNER = 1 << 15  # states inside characters
BLOCKS = 1 << 20  # blocks of characters looked at for them, in all states together


@dataclass(eq=False)
class TokenTable:
    """The automaton of a constraint over the tokens of a vocabulary; state 0 is the start, the last one is dead.

    Attributes:
        classes: int32 [V].
        next: int32 [states, classes].
        masks: int32 [states, ceil(V / 32)], bit v % 32 of word v // 32 set iff token v may come; end tokens where `final`.
        final: bool [states], the text is accepted as it stands."""

    classes: torch.Tensor
    next: torch.Tensor
    masks: torch.Tensor
    final: torch.Tensor

    @property
    def states(self) -> int:
        return len(self.final)

    @property
    def dead(self) -> int:
        return self.states - 1

    @property
    def bytes(self) -> int:
        """Memory of all tables."""
        return sum(t.numel() * t.element_size() for t in (self.classes, self.next, self.masks, self.final))

    @property
    def empty(self) -> bool:
        """Whether the tokens can spell no accepted text."""
        return not self.final[0] and not self.masks[0].any()

    def to(self, device: torch.device) -> TokenTable:
        return TokenTable(*(t.to(device) for t in (self.classes, self.next, self.masks, self.final)))

    def mask(self, state: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> int32 [..., ceil(V / 32)]."""
        return self.masks[state]

    def extend(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """The states after one token each: int64 [...] both -> int64 [...]."""
        return self.next[state, self.classes[token].long()].long()


@functools.lru_cache(maxsize=32)
def token_table(expression: str, vocabulary: Vocabulary, steps: int = STEPS) -> TokenTable | None:
    """The table of a terminal expression, on the CPU; None if it would be too large, or take more than `steps` to make."""
    try:
        return _table(over_bytes(dfa(expression, steps // STATE)), vocabulary, steps)
    except TooLarge:
        return None


@dataclass(eq=False)
class Bytes:
    """An automaton over bytes: `step` int32 [states, 256] (-1: no text is left), `accepts` bool [states]; 0 is the start."""

    step: np.ndarray
    accepts: np.ndarray

    def reads(self, text: bytes) -> bool:
        """Whether a whole text is accepted."""
        state = 0
        for byte in text:
            state = int(self.step[state, byte])
            if state < 0:
                return False
        return bool(self.accepts[state])


def over_bytes(automaton: Dfa) -> Bytes:
    """The automaton over UTF-8 of one over characters, its states first and under the same numbers. Raises TooLarge."""
    count, utf8 = len(automaton.step), Utf8(automaton.alphabet)
    if count * sum(map(len, utf8.nodes)) > BLOCKS:
        raise TooLarge
    numbers: dict[bytes, int] = {}
    rows: list[np.ndarray] = []
    step = np.full((count, 256), -1, np.int32)
    for state in range(count):
        found = np.append(automaton.step[state], -1)  # the last entry serves what no character has
        by_level = [found]
        for nodes in utf8.nodes:
            below = found[nodes]
            found = np.full(len(nodes) + 1, -1, np.int32)
            for i in np.flatnonzero((below >= 0).any(1)).tolist():
                key = below[i].tobytes()
                if key not in numbers:
                    if len(rows) >= INNER:
                        raise TooLarge
                    numbers[key] = count + len(rows)
                    rows.append(below[i])
                found[i] = numbers[key]
            by_level.append(found)
        for byte, (level, node) in utf8.lead.items():
            step[state, byte] = by_level[level][node]
    inner = np.full((len(rows), 256), -1, np.int32)
    if rows:
        inner[:, 0x80:0xC0] = rows
    return Bytes(np.concatenate((step, inner)), np.concatenate((automaton.accepts, np.zeros(len(rows), bool))))


class Utf8:
    """The classes of characters as a diagram over the bytes of UTF-8.

    Attributes:
        nodes: for level 1, 2, 3: int32 [n, 64], what each continuation byte leads to: a node of the level below, at the lowest
            a class; -1: nothing.
        lead: first byte -> (level, node); at level 0 a class."""

    def __init__(self, alphabet: Alphabet):
        self._starts, self._classes = alphabet.intervals()
        self._numbers: list[dict[tuple[int, ...], int]] = [{}, {}, {}]
        self.lead = {byte: (0, self._block(byte, 0)) for byte in range(0x80)}
        self.lead |= {byte: (1, self._block((byte - 0xC0) << 6, 1)) for byte in range(0xC2, 0xE0)}
        self.lead |= {byte: (2, self._block((byte - 0xE0) << 12, 2)) for byte in range(0xE0, 0xF0)}
        self.lead |= {byte: (3, self._block((byte - 0xF0) << 18, 3)) for byte in range(0xF0, 0xF5)}
        self.nodes = [np.array(list(level), np.int32).reshape(-1, 64) for level in self._numbers]

    def _block(self, low: int, level: int) -> int:
        """The node of the code points from `low` on that share all but the last `level` bytes."""
        size, smallest = 64**level, (0, 0x80, 0x800, 0x10000)[level]
        if low > MAX_CODE:
            return -1
        if level == 0:
            if SURROGATES[0] <= low <= SURROGATES[1]:
                return -1
            return self._classes[bisect_right(self._starts, low) - 1]
        part = size // 64
        end = bisect_right(self._starts, low)
        whole = low + size - 1 <= (self._starts[end] - 1 if end < len(self._starts) else MAX_CODE)
        if whole and low >= smallest:  # one class, and SURROGATES are one of their own
            children = (self._block(low, level - 1),) * 64
        else:
            children = tuple(-1 if low + i * part < smallest else self._block(low + i * part, level - 1) for i in range(64))
        if children == (-1,) * 64:
            return -1
        return self._numbers[level - 1].setdefault(children, len(self._numbers[level - 1]))


class Trie:
    """The distinct spellings of tokens that add text, as a tree of bytes; nodes are numbered level by level.

    Attributes:
        spelling: int64 [V], the number of a token's spelling, -1 where it adds no text.
        node_of: int32 [spellings], where each ends.
        whole: int32 [nodes], the spelling that ends there, or -1.
        byte: uint8 [nodes], the last byte.
        parent, first, children: int32 [nodes], the node above, the first one below, and how many there are.
        levels: (first, last + 1) of the nodes of 1, 2, ... bytes.
        below: int64 [256], how many nodes begin with each byte; `below_two` int64 [256, 256], with each two."""

    def __init__(self, tokens: Sequence[bytes]):
        texts = sorted(set(tokens) - {b""})
        numbers = {text: i for i, text in enumerate(texts)}
        self.spelling = np.array([numbers.get(token, -1) for token in tokens], np.int64)
        lengths = np.array([len(text) for text in texts], np.int64)
        offsets = np.cumsum(lengths) - lengths
        data = np.frombuffer(b"".join(texts), np.uint8)
        # Texts that are alike so far stand together: a node begins where a text differs from the one before it.
        left, fresh, node = np.arange(len(texts)), np.ones(len(texts), bool), np.zeros(len(texts), np.int64)
        size, heads = 0, data[offsets]
        pairs = heads.astype(np.int64) << 8 | np.append(data, 0)[offsets + 1]
        bytes_, parents, wholes = [], [], []
        self.levels: list[tuple[int, int]] = []
        self.below, self.below_two = np.zeros(256, np.int64), np.zeros(1 << 16, np.int64)
        fresh[1:] = False
        for i in range(int(lengths.max(initial=0))):
            byte = data[offsets[left] + i]
            fresh[1:] |= byte[1:] != byte[:-1]
            begin = np.flatnonzero(fresh)
            parents.append(node[begin])
            node = size + np.cumsum(fresh) - 1
            ended = lengths[left] == i + 1
            whole = np.full(len(begin), -1, np.int32)
            whole[node[ended] - size] = left[ended]
            bytes_.append(byte[begin])
            wholes.append(whole)
            self.below += np.bincount(heads[left[begin]], minlength=256)
            if i:
                self.below_two += np.bincount(pairs[left[begin]], minlength=1 << 16)
            self.levels.append((size, size + len(begin)))
            size += len(begin)
            # What comes after a text that ends here begins with the next text.
            fresh[1:] |= ended[:-1]
            left, fresh, node = left[~ended], fresh[~ended], node[~ended]
        self.below_two = self.below_two.reshape(256, 256)
        self.byte, self.whole = np.concatenate(bytes_), np.concatenate(wholes)
        self.parent = np.concatenate(parents).astype(np.int32)
        self.children = np.bincount(self.parent[self.levels[0][1] :], minlength=size).astype(np.int32)
        self.first = (self.levels[0][1] + np.cumsum(self.children) - self.children).astype(np.int32)
        self.node_of = np.empty(len(texts), np.int32)
        self.node_of[self.whole[self.whole >= 0]] = np.flatnonzero(self.whole >= 0)


@functools.lru_cache(maxsize=4)
def _trie(vocabulary: Vocabulary) -> Trie:
    return Trie(vocabulary.tokens)


def _visited(step: np.ndarray, trie: Trie, state: int) -> int:
    """How many nodes begin with two bytes that are possible in a state, at least about."""
    first = np.flatnonzero(step[state] >= 0)
    count = int(trie.below[first].sum())
    if count <= FEW:
        return count
    return len(first) + int(trie.below_two[first][step[step[state, first]] >= 0].sum())


def _require_work(step: np.ndarray, trie: Trie, steps: int) -> None:
    """Raises TooLarge if the states that tokens of one byte lead to cost too much."""
    single = trie.byte[: trie.levels[0][1]][trie.whole[: trie.levels[0][1]] >= 0]
    seen, queue = np.zeros(len(step), bool), [0]
    seen[0] = True
    for state in queue:
        steps -= STATE + _visited(step, trie, state)
        if steps < 0:
            raise TooLarge
        after = step[state, single]
        for new in np.unique(after[after >= 0]).tolist():
            if not seen[new]:
                seen[new] = True
                queue.append(new)


def _run(step: np.ndarray, trie: Trie, state: int) -> tuple[np.ndarray, np.ndarray]:
    """What spellings do in a state: those that are possible, and the states after them. Made for states with few."""
    node = np.arange(trie.levels[0][1], dtype=np.int32)
    at = step[state, trie.byte[node]]
    parts = []
    while True:
        going = at >= 0
        node, at = node[going], at[going]
        whole = trie.whole[node]
        done = whole >= 0
        parts.append((whole[done], at[done]))  # int32, for there are many
        counts = trie.children[node]
        if not counts.any():
            break
        ends = np.cumsum(counts, dtype=np.int32)
        parent = np.repeat(np.arange(len(node), dtype=np.int32), counts)
        node = (trie.first[node] - ends + counts)[parent] + np.arange(len(parent), dtype=np.int32)
        at = step[at[parent], trie.byte[node]]
    spelling, target = (np.concatenate(column) for column in zip(*parts, strict=True))
    return spelling, target


def _sweep(step: np.ndarray, trie: Trie, states: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """As `_run`, for several states that let most tokens pass: no path is left out."""
    flat = np.append(np.where(step >= 0, step, len(step)).reshape(-1), np.full(256, len(step))).astype(np.int32) << 8
    at = np.empty((len(states), len(trie.byte)), np.int32)
    begin = (np.array(states, np.int32) << 8)[:, None]
    for depth, (low, high) in enumerate(trie.levels):
        before = at.take(trie.parent[low:high], axis=1) if depth else begin
        at[:, low:high] = flat.take(before + trie.byte[low:high])
    at >>= 8
    found = at[:, trie.node_of]
    return [(spelling := np.flatnonzero(row < len(step)).astype(np.int32), row[spelling]) for row in found]


def _table(automaton: Bytes, vocabulary: Vocabulary, steps: int) -> TokenTable:
    trie, step = _trie(vocabulary), automaton.step
    _require_work(step, trie, steps)
    random = np.random.default_rng(0)
    numbers = np.full(len(step), -1, np.int32)  # of the states between tokens
    numbers[0] = 0
    order, moves, work = [0], [], 0
    prints = np.zeros(len(trie.node_of), np.uint64)  # a random linear form of what each spelling does in all states
    while len(moves) < len(order):
        chunk = order[len(moves) : len(moves) + CHUNK]
        visited = [_visited(step, trie, state) for state in chunk]
        work += sum(visited) + STATE * len(chunk)
        if len(order) > STATES or work > steps:
            raise TooLarge
        many = [state for state, nodes in zip(chunk, visited, strict=True) if nodes > MANY]
        swept = dict(zip(many, _sweep(step, trie, many), strict=True)) if many else {}
        for state in chunk:
            spelling, target = swept[state] if state in swept else _run(step, trie, state)
            for new in np.unique(target[numbers[target] < 0]).tolist():
                numbers[new] = len(order)
                order.append(new)
            target = numbers[target]
            moves.append((spelling, target))
            prints[spelling] += random.integers(1, 2**64, dtype=np.uint64) * (target + 1).astype(np.uint64)
    _, classes = np.unique(np.append(prints, np.uint64(0)), return_inverse=True)  # the last: what is possible nowhere
    count, dead = int(classes.max()) + 1, len(order)
    if (dead + 1) * count > CELLS:
        raise TooLarge
    sizes = np.bincount(classes[:-1], minlength=count)
    table = np.full((dead + 1, count), dead, np.int64)
    for state, (spelling, target) in enumerate(moves):
        table[state, classes[spelling]] = target
        # Two spellings of one print that differ somewhere would be one class by mistake.
        assert (table[state][classes[spelling]] == target).all(), "two tokens have one print by chance"
        assert sizes[table[state] != dead].sum() == len(spelling), "two tokens have one print by chance"
    return trimmed(classes[trie.spelling], table, np.append(automaton.accepts[order], False), vocabulary)


def _distinct(row: np.ndarray) -> np.ndarray:
    """The states in a row of `next`."""
    return np.flatnonzero(np.bincount(row))


def trimmed(classes: np.ndarray, table: np.ndarray, final: np.ndarray, vocabulary: Vocabulary) -> TokenTable:
    """`next` (int64 [states, classes]; the last state is dead) without the states from which no sequence of tokens leads to an
    accepted text, with its masks. classes: int64 [V]; final: bool [states]."""
    kept = np.flatnonzero(reaching([_distinct(row) for row in table], final))
    if not len(kept) or kept[0] != 0:
        kept = np.zeros(1, np.int64)  # nothing is accepted: the start alone, which is as good as dead
        table[0] = len(table) - 1
    numbers = np.full(len(table), len(kept), np.int64)
    numbers[kept] = np.arange(len(kept))
    table = np.vstack((numbers[table[kept]], np.full((1, table.shape[1]), len(kept))))
    final = np.append(final[kept], False)
    words = -(-len(vocabulary) // 32)
    masks = np.zeros((len(table), words), np.int32)
    ends = list(vocabulary.end_ids)
    padded = np.zeros(32 * words, bool)
    for state in range(len(table) - 1):
        padded[: len(classes)] = (table[state] < len(kept))[classes]
        padded[ends] = final[state]
        masks[state] = np.packbits(padded, bitorder="little").view(np.int32)
    parts = (classes.astype(np.int32), table.astype(np.int32), masks, final)
    return TokenTable(*map(torch.from_numpy, parts))
