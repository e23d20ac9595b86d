"""Errors that users meet. Each message is one line and names the remedy; `exit_code` is what the command returns."""

from __future__ import annotations


class SmcgenError(Exception):
    """Base of every error that smcgen raises on purpose."""

    exit_code = 1


class UsageError(SmcgenError, ValueError):
    """An argument, option or combination that cannot mean anything: the message says what to write instead."""

    exit_code = 2


class CallError(UsageError, TypeError):
    """A call that Python itself would refuse with a TypeError, an unknown option or a product with something else: the message
    says what to write instead."""


class ModelError(SmcgenError):
    """A model that is missing, unreadable, unsupported, mismatched, or that returned NaN."""

    exit_code = 2


class PotentialError(SmcgenError):
    """A potential that raised, or returned NaN, +inf or the wrong shape; the text that caused it is named."""

    exit_code = 2


class Impossible(SmcgenError):
    """The target is proved empty: no text can satisfy it."""

    exit_code = 3


class NoSurvivors(SmcgenError):
    """Every particle of a run died: its evidence estimate is zero.

    Attributes:
        round: the round in which the last particle died, from 0.
        cause: the factor that killed it.
        prefix: the longest text that was alive before.
    """

    exit_code = 3

    def __init__(self, message: str, round: int, cause: str, prefix: str):
        super().__init__(message)
        self.round, self.cause, self.prefix = round, cause, prefix


def first_line(error: BaseException, empty: str | None = None) -> str:
    """What another library's error says, as a part of a message of ours: its first line that holds something, without the
    full stop; `empty`, or the error's type, if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:;") if lines else empty or type(error).__name__
