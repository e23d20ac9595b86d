"""Asking a function of the text for its values: one text at a time, a list at once, or coroutines that overlap.

Each distinct text is asked for once. Whatever is no number, or takes too long, becomes an error that names the text.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import queue
import threading
import warnings
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from smcgen.errors import PotentialError, first_line

REMEMBERED = 1 << 17  # values of distinct texts kept per function
GRACE = 1.0  # seconds more, after which a loop that does not even notice a time limit is given up

T = TypeVar("T")


class Late(Exception):
    """A call did not come back in time."""


class Caller:
    """log values of texts by a function of the user's.

    Args:
        function: text -> value, or with `batch` list of texts -> one value each; plain or `async def`. Values are floats
            (-inf for 0), or True (0.0) and False (-inf).
        name: how messages call it.
        nan: "raise", or "kill": a NaN counts as -inf, with one warning.
        timeout: seconds that one call may take; None: no limit, and the call runs on the caller's thread.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, batch: bool = False, nan: str = "raise", timeout: float | None = None
    ):
        self.function, self.name, self.batch, self.nan, self.timeout = function, name, batch, nan, timeout
        self.asynchronous = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self.known: dict[str, float] = {}
        self.warned = False

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """float64 [len(texts)]. Raises PotentialError."""
        fresh = [text for text in dict.fromkeys(texts) if text not in self.known]
        if fresh and len(self.known) + len(fresh) > REMEMBERED:
            self.known.clear()
            fresh = list(dict.fromkeys(texts))
        for text, result in zip(fresh, self._ask(fresh), strict=True):
            self.known[text] = self.checked(result, text)
        return np.array([self.known[text] for text in texts], np.float64)

    def checked(self, result: Any, text: str) -> float:
        """What the function returned for `text` as a number. Raises PotentialError."""
        if isinstance(result, torch.Tensor | np.ndarray | np.generic) and math.prod(result.shape) == 1:
            result = result.item()
        if isinstance(result, bool):
            return 0.0 if result else -math.inf
        where = self._where([text])
        if not isinstance(result, numbers.Real):
            raise PotentialError(f"{where} returned {type(result).__name__}: return log phi, a float, or True or False")
        value = float(result)
        if value == math.inf:
            raise PotentialError(f"{where} returned +inf: return a finite log value, or -inf for 0")
        if not math.isnan(value):
            return value
        if self.nan == "raise":
            raise PotentialError(f'{where} returned NaN: return a number, or let nan="kill" drop such particles')
        if not self.warned:
            self.warned = True
            warnings.warn(f"{where} returned NaN: the particle is dropped (further ones without notice)", stacklevel=2)
        return -math.inf

    def once(self, text: str, *arguments: Any) -> Any:
        """The function's own result for `arguments`, nothing remembered; errors name `text`."""
        return self._guarded(lambda: self.function(*arguments), [text])

    def _ask(self, texts: list[str]) -> Sequence[Any]:
        if not texts:
            return []
        if self.batch:
            return self._ask_together(texts)
        if self.asynchronous:
            results = self._guarded(lambda: wait(self._overlap(texts), self.timeout), texts)
            for text, result in zip(texts, results, strict=True):
                if isinstance(result, Late):
                    raise self._late([text])
                if isinstance(result, Exception):
                    raise self._failed(result, [text]) from result
            return results
        return [self.once(text, text) for text in texts]

    def _ask_together(self, texts: list[str]) -> Sequence[Any]:
        def call() -> Any:
            made = self.function(list(texts))
            return wait(made, self.timeout) if self.asynchronous else made

        try:
            results = self._guarded(call, texts)
        except PotentialError as error:
            if len(texts) > 1 and not isinstance(error.__cause__, Late):
                for text in texts:  # alone, the text at fault names itself
                    self._ask_together([text])
            raise
        if isinstance(results, torch.Tensor | np.ndarray):
            results = results.reshape(-1).tolist()
        if not isinstance(results, Sequence) or isinstance(results, str):
            raise PotentialError(f"{self._where(texts)} returned {type(results).__name__}: return a list, one value per text")
        if len(results) != len(texts):
            raise PotentialError(f"{self._where(texts)} returned {len(results)} values: return one value per text")
        return results

    async def _overlap(self, texts: list[str]) -> list[Any]:
        """The results of all calls, or the exception that each raised."""

        async def one(text: str) -> Any:
            try:
                async with asyncio.timeout(self.timeout) as limit:
                    return await self.function(text)
            except TimeoutError:
                if limit.expired():
                    raise Late from None
                raise

        return await asyncio.gather(*map(one, texts), return_exceptions=True)

    def _guarded(self, call: Callable[[], Any], texts: list[str]) -> Any:
        try:
            return call() if self.timeout is None or self.asynchronous else within(self.timeout, call)
        except Late as error:
            raise self._late(texts) from error
        except PotentialError:
            raise
        except Exception as error:
            raise self._failed(error, texts) from error

    def _failed(self, error: Exception, texts: list[str]) -> PotentialError:
        reason = first_line(error, "no message")
        return PotentialError(
            f"{self._where(texts)} raised {type(error).__name__} ({reason}): make it return a number for every text"
        )

    def _late(self, texts: list[str]) -> PotentialError:
        return PotentialError(
            f"{self._where(texts)} did not return within {self.timeout:g} s, which stops the run: "
            "raise timeout= if it may be slow"
        )

    def _where(self, texts: list[str]) -> str:
        more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        return f"potential {self.name} on the text {shortened(texts[0])}{more}"


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """`call()` on a thread of its own. Raises Late after `seconds`; the thread, which nothing can end, is left behind."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise Late from None
    if error is not None:
        raise error
    return value


class _Loop:
    """One event loop on a thread of its own for all potentials: a caller's own loop may be running and waiting for us, and
    clients that coroutines keep open (connections, locks) belong to the loop they were made in."""

    current: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None
    lock = threading.Lock()

    @classmethod
    def get(cls) -> asyncio.AbstractEventLoop:
        with cls.lock:
            if cls.current is None:
                cls.current = asyncio.new_event_loop()
                cls.thread = threading.Thread(target=cls.current.run_forever, daemon=True)
                cls.thread.start()
            return cls.current


def wait(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """The result of a coroutine, whether or not the caller is itself inside a running event loop. Raises Late."""
    loop = _Loop.get()
    if threading.current_thread() is _Loop.thread:  # a potential inside a potential: the loop cannot wait for itself
        return within(timeout, lambda: asyncio.run(coroutine))
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(None if timeout is None else timeout + GRACE)
    except TimeoutError:
        if future.done():
            raise
        future.cancel()
        with _Loop.lock:  # it may be stuck in a call that never yields
            if _Loop.current is loop:
                _Loop.current = None
        raise Late from None


def shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
