"""The results of many prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from smcgen.posterior import Posterior
from smcgen.record import Record


class Posteriors(Sequence[Posterior]):
    """The posteriors of many prompts, made one by one as they are asked for."""

    def __init__(self, record: Record):
        self._record = record

    def __len__(self) -> int:
        return len(self._record.prompts)

    @overload
    def __getitem__(self, index: int) -> Posterior: ...
    @overload
    def __getitem__(self, index: slice) -> list[Posterior]: ...
    def __getitem__(self, index: int | slice) -> Posterior | list[Posterior]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return Posterior(self._record, index % len(self))

    def __iter__(self) -> Iterator[Posterior]:
        return (self[i] for i in range(len(self)))

    @property
    def log_evidence(self) -> np.ndarray:
        """float64 [prompts, runs]: log Z-hat of every run."""
        return self._record.log_evidence.view(len(self), self._record.runs).numpy()

    @property
    def info(self) -> dict[str, Any]:
        return self._record.info

    @property
    def settings(self) -> dict[str, Any]:
        return self._record.settings

    def arrays(self) -> dict[str, np.ndarray]:
        """The particles of all prompts as arrays [prompts * runs, N, ...]: tokens, length, reason, log_weight, log_p, ..."""
        return {name: values.numpy() for name, values in self._record.fields.items()}

    def __repr__(self) -> str:
        failed = int((self.log_evidence == -math.inf).all(-1).sum())
        return f"Posteriors({len(self)} prompts{f', {failed} without survivors' if failed else ''})"
