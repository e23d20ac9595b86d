"""A thread beside that of the run, which does one thing after the other.

Lighter than an executor of `concurrent.futures`, whose futures and locks cost some 20 microseconds more each time: much, where
the whole step of a round has a few hundred."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def begin(do: Callable[[], T]) -> Callable[[], T]:
    """Has `do` called by the thread, behind all that it was given before, in this thread's inference mode.

    Returns what waits for the value, to be called once; an exception of `do` is raised there."""
    answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    _inbox().put((do, torch.is_inference_mode_enabled(), answer))

    def value() -> T:
        found, error = answer.get()
        if error is not None:
            raise error
        return found

    return value


@functools.cache
def _inbox() -> SimpleQueue[tuple[Callable[[], Any], bool, SimpleQueue]]:
    inbox: SimpleQueue[tuple[Callable[[], Any], bool, SimpleQueue]] = SimpleQueue()
    threading.Thread(target=_serve, args=(inbox,), name="smcgen host", daemon=True).start()
    return inbox


def _serve(inbox: SimpleQueue[tuple[Callable[[], Any], bool, SimpleQueue]]) -> None:
    while True:
        _serve_one(*inbox.get())


def _serve_one(do: Callable[[], Any], inference: bool, answer: SimpleQueue) -> None:
    try:
        with torch.inference_mode() if inference else contextlib.nullcontext():
            answer.put((do(), None))
    except BaseException as error:
        answer.put((None, error))
