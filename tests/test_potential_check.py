"""`check` finds each kind of broken potential."""

import itertools

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.errors import PotentialError, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import Potential
from smcgen.potentials.check import check

VOCABULARY = Vocabulary("small", [b"a", b"b", b"ab", b"<end>"], special=(3,), end_ids=(3,))


class Counting(Potential):
    """phi(text) = 0 if it has more than three letters b, else exp(-(letters a) ** 2); rows are lists of tokens."""

    name = "counting"
    hard = False

    def start(self, prompts, particles):
        self.particles = particles
        return [[] for _ in range(len(prompts) * particles)]

    def restart(self, state, groups, prompts):
        for group in groups:
            for row in range(group * self.particles, (group + 1) * self.particles):
                state[row] = []

    def value(self, ids):
        text = self.vocabulary.decode(ids)
        return -np.inf if text.count("b") > 3 else -(float(text.count("a")) ** 2)

    def extend(self, state, tokens, counts):
        out = torch.zeros(len(state), dtype=torch.float64)
        for row, count in enumerate(counts.tolist()):
            old = self.value(state[row])
            state[row] = state[row] + tokens[row, :count].tolist()
            new = self.value(state[row])
            out[row] = 0 if count == 0 else new if new == -np.inf else new - old
        return out

    def rollback(self, state, counts):
        state[:] = [ids[: len(ids) - n] for ids, n in zip(state, counts.tolist(), strict=True)]

    def fork(self, state, ancestors):
        state[:] = [state[a] for a in ancestors.tolist()]

    def finish(self, state, rows, texts, reasons):
        return torch.tensor([self.final(state, r) for r in rows.tolist()], dtype=torch.float64)

    def final(self, state, row):
        return self.value(state[row]) if self.value(state[row]) == -np.inf else 0.0


class Hard(Counting):
    """At most three letters b."""

    hard = True

    def value(self, ids):
        return -np.inf if self.vocabulary.decode(ids).count("b") > 3 else 0.0

    def mask(self, state, out, active):
        for row in np.flatnonzero(active.numpy()):
            bits = [self.value([*state[row], token]) == 0 for token in range(3)] + [self.value(state[row]) == 0]
            out[row, 0] = sum(1 << token for token, bit in enumerate(bits) if bit)


def test_sound_potentials_pass():
    check(Counting(), VOCABULARY, ["abab", "bbbb", ""])
    check(Hard(), VOCABULARY, ["abab", "bbbb", ""])


class Split(Counting):
    def extend(self, state, tokens, counts):
        out = super().extend(state, tokens, counts)
        return torch.where(counts > 1, out + 1, out)


class Telescope(Counting):
    def final(self, state, row):
        return float(len(state[row]))


class Reason(Counting):
    def finish(self, state, rows, texts, reasons):
        return super().finish(state, rows, texts, reasons) - float(reasons[0])


class Rollback(Counting):
    def rollback(self, state, counts):
        state[:] = [ids[: max(0, len(ids) - n - 1)] for ids, n in zip(state, counts.tolist(), strict=True)]


class Fork(Counting):
    def fork(self, state, ancestors):
        for row, ancestor in enumerate(ancestors.tolist()):  # reads rows that it has already overwritten
            state[row] = state[ancestor]


class Shared(Counting):
    def extend(self, state, tokens, counts):
        out = super().extend(state, tokens, counts)
        for row in np.flatnonzero(counts.numpy() == 0):
            state[row] = state[0]
        return out


class Restart(Counting):
    def restart(self, state, groups, prompts):
        for row in range(len(state)):
            state[row] = []


class NoRestart(Counting):
    def restart(self, state, groups, prompts):
        pass


class Type(Counting):
    def extend(self, state, tokens, counts):
        return super().extend(state, tokens, counts).float()


class NotANumber(Counting):
    def extend(self, state, tokens, counts):
        return super().extend(state, tokens, counts) * torch.tensor(float("nan"))


class Idle(Counting):
    def extend(self, state, tokens, counts):
        return super().extend(state, tokens, counts) - 1


class Barred(Hard):
    def mask(self, state, out, active):
        super().mask(state, out, active)
        out[active] &= ~1


class Allowed(Hard):
    def mask(self, state, out, active):
        super().mask(state, out, active)
        out[active] |= 7


class EndAllowed(Hard):
    def final(self, state, row):
        return -np.inf

    def mask(self, state, out, active):
        super().mask(state, out, active)
        out[active] |= 8


class EndBarred(Hard):
    def mask(self, state, out, active):
        super().mask(state, out, active)
        out[active] &= 7


class Touches(Hard):
    def mask(self, state, out, active):
        super().mask(state, out, torch.ones_like(active))


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Split, "how tokens are split"),
        (Telescope, "add up to one log phi"),
        (Reason, "add up to one log phi"),
        (Rollback, "rollback then extend|beyond"),
        (Fork, "fork then extend|after a fork"),
        (Shared, "what other rows do|fork then extend"),
        (Restart, "other groups alone"),
        (NoRestart, "restarted row"),
        (Type, r"float64 \[rows\]"),
        (NotANumber, "finite numbers or -inf"),
        (Idle, "0 for a row that reads nothing|how tokens are split|other rows"),
        (Barred, "mask bars must have extend -inf"),
        (Allowed, "mask allows has extend -inf"),
        (EndAllowed, "allows an end token"),
        (EndBarred, "bars an end token"),
        (Touches, "leave rows alone"),
    ],
)
def test_each_broken_law_is_named(broken, law):
    with pytest.raises(PotentialError, match=law) as error:
        check(broken(), VOCABULARY, ["abab", "bbbb", "aab"])
    assert "counting" in str(error.value)


CALLS = itertools.count()


@sg.potential
def by_chance(text: str) -> float:
    return float(next(CALLS) % 7)


@sg.potential
def by_chance_hard(text: str) -> bool:
    return next(CALLS) % 3 > 0


@sg.potential(prefix=lambda text: float(next(CALLS) % 7))
def guesses(text: str) -> float:
    return 0.5 * len(text)


class Chance(Counting):
    def value(self, ids):
        return super().value(ids) - 0.1 * (next(CALLS) % 2)


@pytest.mark.parametrize("mine", [by_chance, by_chance_hard, guesses, Chance()])
def test_what_asks_chance_is_named(mine):
    with pytest.raises(PotentialError, match="the same each time"):
        check(mine, VOCABULARY, ["abab", "bb", "a"])


def test_what_asks_chance_as_a_reward():
    with pytest.raises(PotentialError, match="the same each time"):
        check(sg.reward(lambda texts: [float(next(CALLS) % 7) for _ in texts]), VOCABULARY, ["abab", "bb", "a"])


def test_a_text_that_no_token_spells():
    with pytest.raises(UsageError, match="no token of small"):
        check(Counting(), VOCABULARY, ["x"])
