"""The laws that the engine relies on, checked for any potential, users' own too.

- extend over any split of the same tokens gives the same sum, and finish closes the telescope to log phi(text);
- a token that the mask bars has extend -inf, and one that an `exact` potential's mask allows has not;
- fork then extend is a fresh start, rollback then extend is never having gone there, restarted rows are new;
- a row does not depend on other rows, and rows that are not active are left alone;
- what it says of a text is the same each time: it asks neither chance nor a clock;
- an `exact` constraint's masks let through just the texts that it accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from smcgen.errors import PotentialError, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import BUDGET, END, Potential, Prompt
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.tabled import Tabled
from smcgen.target import LM

TOLERANCE = 1e-6
TRIED = 16  # tokens held against a mask at each prefix
FILLER = 0x5A5A5A5A  # what a mask must leave alone in rows that are not active


def check(
    potential: Potential,
    vocabulary: Vocabulary | LM,
    texts: Sequence[str] = (),
    *,
    stops: Sequence[str] = (),
    prompt: Prompt | None = None,
    histories: int = 16,
    tokens: int = 8,
    seed: int = 0,
) -> None:
    """Raises PotentialError with the first broken law and the tokens that show it; returns None if all hold.

    Args:
        vocabulary: the tokens to try it on: a language model's, `sg.check(mine, sg.LM("tiny"), ["a text", "another"])`.
        texts: texts to try, each in two random spellings; give some that the potential likes and some that it does not.
        histories, tokens: how many random token sequences to try besides, and how long they may be; those of a hard
            potential mostly follow its masks.
        stops, prompt: what `potential` is bound to and started with."""
    if isinstance(vocabulary, LM):
        vocabulary = vocabulary.load().vocabulary
    if not isinstance(potential, Potential) or not isinstance(vocabulary, Vocabulary):
        raise UsageError("check: give a potential and a language model, e.g. check(mine, sg.LM('tiny'), ['a text'])")
    bound = potential.bind(vocabulary, stops, torch.device("cpu"))
    trial = _Trial(bound, vocabulary, prompt or Prompt((), ""), np.random.default_rng(seed))
    sequences = [trial.spell(text) for text in texts for _ in range(2)]
    if isinstance(bound, Constraint | Tabled) and bound.exact and bound.accepts is not None and not stops:
        for sequence in sequences:
            accepted = bound.accepts(vocabulary.decode(sequence))
            law = f"an exact constraint's masks must let through just the texts that it accepts, here `accepts` says {accepted}"
            trial.same(0.0 if accepted else -np.inf, trial.whole(sequence), law, sequence)
    sequences += [trial.draw(tokens) for _ in range(histories)]
    # Functions are asked once for each text in a run, so that only another binding asks again.
    again = _Trial(potential.bind(vocabulary, stops, torch.device("cpu")), vocabulary, trial.prompt, trial.random)
    for sequence in sequences:
        trial.check_again(sequence, again)
    for sequence, other in zip(sequences, sequences[1:] + sequences[:1], strict=True):
        trial.check_split(sequence)
        trial.check_rollback(sequence, other)
        trial.check_rows(sequence, other)
        trial.check_fork(sequence, other)
        trial.check_restart(sequence, other)
        if bound.hard:
            trial.check_masks(sequence)
    trial.check_telescope(sequences)


class _Trial:
    """One bound potential under test. `increments` reads a history in the plainest way, the measure of all else."""

    def __init__(self, bound: Potential, vocabulary: Vocabulary, prompt: Prompt, random: np.random.Generator):
        self.bound, self.vocabulary, self.prompt, self.random = bound, vocabulary, prompt, random
        self.plain = [i for i, token in enumerate(vocabulary.tokens) if token]

    def spell(self, text: str) -> list[int]:
        """Random tokens that spell `text`."""
        data, ids = text.encode(), []
        while data:
            fitting = [i for i in self.plain if data.startswith(self.vocabulary.tokens[i])]
            if not fitting:
                raise UsageError(f"no token of {self.vocabulary.name} begins {data[:20]!r}: check with other texts")
            ids.append(int(self.random.choice(fitting)))
            data = data[len(self.vocabulary.tokens[ids[-1]]) :]
        return ids

    def draw(self, longest: int) -> list[int]:
        """Random tokens: of a hard potential mostly allowed ones, so that they lead somewhere."""
        ids: list[int] = []
        state = self.start(1)
        for _ in range(int(self.random.integers(1, longest + 1))):
            choice = self.plain
            if self.bound.hard and self.random.random() < 0.9:
                allowed = self.mask(state, 1)[0]
                choice = [i for i in self.plain if allowed[i]] or self.plain
            ids.append(int(self.random.choice(choice)))
            self.read(state, [ids[-1:]])
        return ids

    def start(self, rows: int) -> Any:
        return self.bound.start([self.prompt], rows)

    def read(self, state: Any, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """`extend` with one sequence per row, its result held to the contract."""
        counts = torch.tensor([len(s) for s in sequences])
        tokens = torch.zeros(len(sequences), max(1, int(counts.max())), dtype=torch.int64)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        result = self.bound.extend(state, tokens, counts)
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float64 or result.shape != counts.shape:
            got = f"{result.dtype} {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            self.fail("extend must return float64 [rows]", sequences[0], f"it returned {got}")
        values = result.numpy()
        if np.isnan(values).any() or (values == np.inf).any():
            self.fail("extend must return finite numbers or -inf", sequences[0], f"it returned {values}")
        if values[counts.numpy() == 0].any():
            self.fail("extend must return 0 for a row that reads nothing", sequences[0], f"it returned {values}")
        return values

    def finish(self, state: Any, row: int, sequence: Sequence[int], reason: int = END) -> float:
        text = self.vocabulary.decode(sequence)
        value = float(self.bound.finish(state, torch.tensor([row]), [text], [reason])[0])
        if np.isnan(value) or value == np.inf:
            self.fail("finish must return finite numbers or -inf", sequence, f"it returned {value}")
        return value

    def mask(self, state: Any, rows: int, active: torch.Tensor | None = None) -> np.ndarray:
        """bool [rows, V]; the int32 words of rows that are not active are left at FILLER."""
        out = torch.full((rows, (len(self.vocabulary) + 31) // 32), FILLER, dtype=torch.int32)
        active = torch.ones(rows, dtype=torch.bool) if active is None else active
        self.bound.mask(state, out, active)
        if (out[~active] != FILLER).any():
            self.fail("mask must leave rows alone that are not active", [])
        bits = np.unpackbits(out.numpy().view(np.uint8), axis=1, bitorder="little")
        return bits[:, : len(self.vocabulary)].astype(bool)

    def increments(self, sequence: Sequence[int]) -> list[float]:
        """What reading `sequence` token by token gives, alone in a fresh state."""
        state = self.start(1)
        return [float(self.read(state, [[token]])[0]) for token in sequence]

    def check_again(self, sequence: list[int], again: _Trial) -> None:
        law = "what it says of a text must be the same each time: it may ask neither chance nor a clock nor earlier texts"
        (values, end), (other_values, other_end) = ((t.increments(sequence), t.whole(sequence)) for t in (self, again))
        for value, other in zip([*values, end], [*other_values, other_end], strict=True):
            self.same(value, other, law, sequence)

    def whole(self, sequence: list[int]) -> float:
        """log phi of a sequence that has ended."""
        state = self.start(1)
        return float(self.read(state, [sequence])[0]) + self.finish(state, 0, sequence)

    def check_split(self, sequence: list[int]) -> None:
        expected = sum(self.increments(sequence))
        cuts = sorted(self.random.integers(0, len(sequence) + 1, 2).tolist())
        for pieces in ([sequence], [sequence[: cuts[0]], sequence[cuts[0] : cuts[1]], sequence[cuts[1] :]]):
            state = self.start(1)
            found = sum(float(self.read(state, [piece])[0]) for piece in pieces)
            self.same(expected, found, f"extend must not depend on how tokens are split ({pieces})", sequence)

    def check_rollback(self, sequence: list[int], detour: list[int]) -> None:
        at = int(self.random.integers(0, len(sequence) + 1))
        state = self.start(1)
        self.read(state, [sequence[:at]])
        self.read(state, [detour])
        self.bound.rollback(state, torch.tensor([len(detour)]))
        law = f"rollback then extend must equal never having gone there (after {at} tokens, {detour} was taken back)"
        self.continues(state, 1, 0, sequence, at, law)

    def check_rows(self, sequence: list[int], other: list[int]) -> None:
        at, back = int(self.random.integers(0, len(sequence) + 1)), int(self.random.integers(0, len(other) + 1))
        law = f"a row must not depend on what other rows do ({other} in another row after {at} tokens)"
        for row in (0, 1):
            state = self.start(2)
            self.read(state, [sequence[:at], []][:: 1 - 2 * row])
            self.read(state, [[], other][:: 1 - 2 * row])
            self.bound.rollback(state, torch.tensor([0, back][:: 1 - 2 * row]))
            self.continues(state, 2, row, sequence, at, law)

    def check_fork(self, sequence: list[int], other: list[int]) -> None:
        at = int(self.random.integers(0, len(sequence) + 1))
        for ancestors in ([1, 1], [1, 0]):
            state = self.start(2)
            self.read(state, [other, sequence[:at]])
            self.bound.fork(state, torch.tensor(ancestors))
            law = f"fork then extend must equal a fresh start (row 0 became a copy of row 1 after {at} tokens)"
            self.continues(state, 2, 0, sequence, at, law)
            path, read = (sequence, at) if ancestors[1] == 1 else ([*other, *sequence[at:]], len(other))
            self.continues(state, 2, 1, path, read, "after a fork row 1 must go on from its ancestor alone")

    def check_restart(self, sequence: list[int], other: list[int]) -> None:
        at = int(self.random.integers(0, len(sequence) + 1))
        state = self.bound.start([self.prompt, self.prompt], 1)
        self.read(state, [sequence[:at], other])
        self.bound.restart(state, [1], [self.prompt])
        self.continues(state, 2, 0, sequence, at, "restart must leave other groups alone")
        self.continues(state, 2, 1, sequence, 0, "a restarted row must equal a fresh one")

    def check_masks(self, sequence: list[int]) -> None:
        state = self.start(TRIED)
        for at in range(len(sequence) + 1):
            prefix = sequence[:at]
            if -np.inf in self.increments(prefix):
                return  # a dead particle is never asked for a mask
            active = torch.arange(TRIED) % 2 == 0
            allowed = self.mask(state, TRIED, active)[0]
            tokens = self.some(np.flatnonzero(allowed[self.plain])) + self.some(np.flatnonzero(~allowed[self.plain]))
            values = self.read(state, [[token] for token in tokens])
            for token, value in zip(tokens, values.tolist(), strict=True):
                if not allowed[token] and value != -np.inf:
                    self.fail("a token that the mask bars must have extend -inf", [*prefix, token], f"it has {value}")
                if self.bound.exact and allowed[token] and value == -np.inf:
                    self.fail("a token that an exact potential's mask allows has extend -inf", [*prefix, token])
            self.bound.rollback(state, torch.ones(TRIED, dtype=torch.int64))
            fresh = self.start(1)
            total = float(self.read(fresh, [prefix])[0]) + self.finish(fresh, 0, prefix)
            for end in self.vocabulary.end_ids:
                if allowed[end] and total == -np.inf and self.bound.exact:
                    self.fail("the mask allows an end token where finish says -inf", prefix)
                if not allowed[end] and total != -np.inf:
                    self.fail("the mask bars an end token where finish accepts the text", prefix)
            if at < len(sequence):
                self.read(state, [sequence[at : at + 1]] * TRIED)

    def check_telescope(self, sequences: Sequence[list[int]]) -> None:
        totals: dict[str, tuple[float, list[int]]] = {}
        for sequence in sequences:
            before = sum(self.increments(sequence))
            for reason in (END, BUDGET):
                state = self.start(1)
                self.read(state, [sequence])
                total = before + self.finish(state, 0, sequence, reason)
                law = "extend and finish must add up to one log phi for a text (compared with tokens {})"
                what = str(sequence) if getattr(self.bound, "of_tokens", False) else self.vocabulary.decode(sequence)
                known, first = totals.setdefault(what, (total, sequence))
                self.same(known, total, law.format(first), sequence)

    def continues(self, state: Any, rows: int, row: int, sequence: list[int], at: int, law: str) -> None:
        """Row `row` of `rows` has read `sequence[:at]`: the rest, and the end, must give what they give a fresh row."""
        for token, value in zip(sequence[at:], self.increments(sequence)[at:], strict=True):
            pieces: list[list[int]] = [[] for _ in range(rows)]
            pieces[row] = [token]
            self.same(value, float(self.read(state, pieces)[row]), law, sequence)
        fresh = self.start(1)
        self.read(fresh, [sequence])
        self.same(self.finish(fresh, 0, sequence), self.finish(state, row, sequence), law, sequence)

    def some(self, positions: np.ndarray) -> list[int]:
        """TRIED / 2 random tokens at these positions of `plain`, any if there are none."""
        positions = positions if len(positions) else np.arange(len(self.plain))
        return [self.plain[i] for i in self.random.choice(positions, TRIED // 2)]

    def same(self, expected: float, found: float, law: str, sequence: Sequence[int]) -> None:
        if expected != found and not abs(expected - found) <= TOLERANCE * (1 + abs(expected)):
            self.fail(law, sequence, f"expected {expected:.6g}, got {found:.6g}")

    def fail(self, law: str, tokens: Sequence[int], detail: str = "") -> NoReturn:
        text = self.vocabulary.decode(tokens)
        raise PotentialError(f"{self.bound.name}: {law}; {detail} (tokens {list(tokens)}, text {text[:80]!r})")
