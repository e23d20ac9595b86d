"""A progress bar on stderr for what takes more than two seconds."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

PATIENCE = 2.0  # seconds


class Progress:
    """A context manager around a long loop; `update(done)` shows `done` of `total` once two seconds have passed.

    Args:
        label: what is being done.
        total: of the units that `update` counts.
        show: True or False; None shows it on a terminal, and in notebooks that can draw one (ipywidgets).
    """

    def __init__(self, label: str, total: int, show: bool | None = None):
        self.label, self.total = label, total
        drawable = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None
        self.show = (sys.stderr.isatty() or drawable) if show is None else show
        self.began = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def update(self, done: int) -> None:
        if not self.show or (self.bar is None and time.monotonic() - self.began < PATIENCE):
            return
        if self.bar is None:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self.bar = Bar(console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=self.total)
        self.bar.update(self.task, completed=done)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
