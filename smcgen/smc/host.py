"""Work that the host does for rounds that run on a device, in order, and no sooner waited for than its results are used.

A task reads copies of device tensors and fills others. `later` notes it, `send` has its inputs copied behind what was launched
so far, and `join` carries out all that was sent and has the results copied back. What is launched between `send` and `join`, a
forward as a rule, runs on the device while the host works. A round that is being recorded (see `smc.graph`) ends a CUDA graph
at either, so that the same tasks, with the same buffers, are done each time that it is replayed.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

_recording = False  # whether a round is being recorded, in which nothing has values yet


def asks(x: torch.Tensor) -> bool:
    """Whether to ask for a value of `x` costs less than the work that may be left out by it: on a CPU. On a GPU it would wait
    for the device, and in a recording there is none."""
    return x.device.type == "cpu" and not _recording


class Recorder(Protocol):
    """What `Host` needs of a recording under way."""

    def cut(self, *steps: Callable[[], None]) -> None:
        """Ends a graph; `steps` come after it, and what is launched from now on after them."""
        ...


@dataclass
class Task:
    """Work on the host: `work(*inputs, *outputs)`, tensors on the host, writes the outputs.

    Attributes:
        inputs, outputs: on the device. The inputs must not be written to before the work is done, the outputs are not to be
            read before `Host.join`.
        sent, results: the same on the host.
    """

    work: Callable[..., None]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    sent: list[torch.Tensor] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)

    def reserve(self, apart: bool, pinned: bool) -> None:
        """Makes room on the host; with `apart` False the tensors serve themselves."""

        def room(x: torch.Tensor) -> torch.Tensor:
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) if apart else x

        self.sent, self.results = list(map(room, self.inputs)), list(map(room, self.outputs))

    def send(self) -> None:
        for there, here in zip(self.sent, self.inputs, strict=True):
            if there is not here:
                there.copy_(here, non_blocking=True)

    def do(self) -> None:
        self.work(*self.sent, *self.results)
        for here, there in zip(self.outputs, self.results, strict=True):
            if there is not here:
                here.copy_(there, non_blocking=True)


@dataclass
class Parcel:
    """Tasks whose inputs are sent together.

    Attributes:
        kept: it is sent again and again, with the same buffers, by a recording.
        ready: the buffers are there.
        event: after the copies, on a GPU.
    """

    tasks: list[Task]
    kept: bool
    ready: bool = False
    event: torch.cuda.Event | None = None


class Host:
    """The tasks of a run.

    Attributes:
        seconds: spent in tasks.
        recorder: of the round that is being recorded, if one is.
    """

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, 0.0
        self.recorder: Recorder | None = None
        self._noted: list[Task] = []
        self._sent: list[Parcel] = []
        self._expected = False  # something was sent and not joined since

    def later(
        self,
        work: Callable[..., None],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[tuple[Sequence[int], torch.dtype]] = (),
        lazy: bool = False,
    ) -> Task:
        """Notes a task with outputs of these shapes and dtypes. On a CPU, where nothing is gained by waiting, it is done at
        once unless it is `lazy`: one that other threads prepare meanwhile."""
        made = [torch.empty(*shape, dtype=dtype, device=self.device) for shape, dtype in outputs]
        task = Task(work, list(inputs), made)
        self._noted.append(task)
        if self.device.type == "cpu" and self.recorder is None and not lazy:
            self.join()
        return task

    def send(self) -> None:
        """Has the inputs of all tasks copied to the host."""
        for step in self.rest():
            self._step(step)

    def join(self) -> None:
        """Carries out all tasks: what is launched after this finds their outputs."""
        steps = self.rest()
        if self.recorder is None or self._expected:
            self._step(*steps, self._do)
        self._expected = False

    def rest(self) -> list[Callable[[], None]]:
        """The step that is left to do before a round is over, if any: the inputs of what was noted last are sent."""
        if not self._noted:
            return []
        tasks, self._noted = self._noted, []
        self._expected = True
        return [functools.partial(self._send, Parcel(tasks, self.recorder is not None))]

    def _step(self, *steps: Callable[[], None]) -> None:
        if self.recorder is not None:
            self.recorder.cut(*steps)
        else:
            for step in steps:
                step()

    def _send(self, parcel: Parcel) -> None:
        on_gpu = self.device.type == "cuda"
        if not parcel.ready:  # a recording sends it again and again, and uses the same buffers
            apart = on_gpu or parcel.kept
            parcel.event = torch.cuda.Event() if on_gpu else None
            for task in parcel.tasks:
                task.reserve(apart, on_gpu)
            parcel.ready = True
        for task in parcel.tasks:
            task.send()
        if parcel.event is not None:
            parcel.event.record()
        self._sent.append(parcel)

    def _do(self) -> None:
        sent, self._sent = self._sent, []
        for parcel in sent:
            if parcel.event is not None:
                parcel.event.synchronize()
            began = time.perf_counter()
            for task in parcel.tasks:
                task.do()
            self.seconds += time.perf_counter() - began

    def forget(self) -> None:
        """After a recording, whether or not it has succeeded."""
        self.recorder, self._expected = None, False
        self._noted.clear()


@contextlib.contextmanager
def recording(host: Host, recorder: Recorder) -> Iterator[None]:
    """In this context what `host` is asked for belongs to a recording."""
    global _recording
    host.recorder, _recording = recorder, True
    try:
        yield
    finally:
        _recording = False
        host.forget()
