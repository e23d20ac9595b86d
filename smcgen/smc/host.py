"""Work that the host does for rounds that run on a device, in order, and no sooner waited for than its results are used.

A task reads copies of device tensors and fills another. `later` notes it, `send` has its inputs copied behind what was launched
so far, and `join` waits until all that was sent is done. What is launched between `send` and `join`, a forward as a rule, runs
on the device while the host works; tasks that any thread may do are begun at once, on a thread of their own, while this one
launches. A round that is being recorded (see `smc.graph`) ends a CUDA graph at `join`, so that the same tasks, with the same
buffers, are done each time that it is replayed. The copies are part of the graphs: one for all inputs that are sent together,
and one for each result that is used. An event in the middle of a graph tells that the inputs are there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from smcgen.smc.aside import begin

ASIDE: tuple[str, ...] = ("cuda",)  # where tasks are begun by a thread of their own; on a CPU nothing goes on meanwhile
# Whether an event can be in the middle of a graph; else a graph ends at `send` too, and the device waits for the next to come.
INSIDE = "external" in inspect.signature(torch.cuda.Event.__new__).parameters
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
    """Work on the host: `work(*inputs)`, or `work(*inputs, result)`, which writes the result; tensors on the host.

    Attributes:
        inputs: on the device. They must not be written to before the work is done.
        kind: shape and dtype of the result, if there is one.
        aside: any thread may do it.
        idle: of the inputs, whether there is nothing to do, whatever comes before it: the result is 0.
        sent, result: the inputs and the result on the host.
    """

    work: Callable[..., None]
    inputs: list[torch.Tensor]
    kind: tuple[Sequence[int], torch.dtype] | None
    aside: bool
    idle: Callable[..., bool] | None = None
    sent: list[torch.Tensor] = field(default_factory=list)
    result: torch.Tensor | None = None
    apart: bool = False  # the host has a memory of its own
    _output: torch.Tensor | None = None

    @property
    def output(self) -> torch.Tensor:
        """The result on the device, there after `Host.join`. It is copied when it is first asked for."""
        assert self.result is not None
        if self._output is None:
            there, device = self.result, self.inputs[0].device
            self._output = torch.empty_like(there, device=device).copy_(there, non_blocking=True) if self.apart else there
        return self._output

    @property
    def used(self) -> bool:
        """Whether somebody has asked for the result."""
        return self._output is not None

    def do(self) -> None:
        self.work(*self.sent, *([] if self.result is None else [self.result]))


@dataclass
class Parcel:
    """Tasks whose inputs are sent together. A recording sends it again and again.

    Attributes:
        event: after the copies, on a GPU.
        kept: of a recording: who asks for results is known when it is sent.
        doing: waits for another thread that is at it, and returns what `do` does.
    """

    tasks: list[Task]
    event: torch.cuda.Event | None
    kept: bool = False
    doing: Callable[[], float] | None = None

    def pack(self, room: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        """Copies all inputs in one piece into what `room` gives, and makes room for the results."""
        packed, unpack = pack([x for task in self.tasks for x in task.inputs])
        there = room(len(packed), torch.uint8)
        there.copy_(packed, non_blocking=True)
        sent = iter(unpack(there))
        for task in self.tasks:
            task.sent, task.apart = [next(sent) for _ in task.inputs], True
            if task.kind is not None:
                shape, dtype = task.kind
                task.result = room(math.prod(shape), dtype).view(*shape)

    @property
    def inside(self) -> bool:
        """Whether the event is a part of a graph."""
        return self.kept and INSIDE

    def do(self, put_off: bool = False) -> float:
        """Carries out the tasks once their inputs are there, or only what `early` has put off; returns the seconds that it
        took."""
        if self.event is not None:
            self.event.synchronize()
        began = time.perf_counter()
        for task in self.tasks:
            if task.aside or not put_off:
                task.do()
        return time.perf_counter() - began

    def early(self) -> bool:
        """Puts off what any thread may do and nobody waits for, if there is nothing else to do: whether it is put off."""
        mine = [task for task in self.tasks if not task.aside]
        if not self.kept or len(mine) == len(self.tasks) or any(task.aside and task.used for task in self.tasks):
            return False
        if self.event is not None:
            self.event.synchronize()
        if not all(task.idle is not None and task.idle(*task.sent) for task in mine):
            return False
        for task in mine:
            if task.result is not None:
                task.result.zero_()
        return True

    def end(self) -> float:
        """As `do`; if another thread is at it, waits for that."""
        doing, self.doing = self.doing, None
        return self.do() if doing is None else doing()


class Host:
    """The tasks of a run.

    Attributes:
        seconds: spent in tasks.
        recorder: of the round that is being recorded, if one is.
        meanwhile: what may be done where the thread of the run would only wait for the device.
    """

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, 0.0
        self.recorder: Recorder | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self._noted: list[Task] = []
        self._sent: list[Parcel] = []
        self._expected = False  # something was sent and not joined since
        self._after: list[Callable[[], None]] = []  # the graph that is being made

    def later(
        self,
        work: Callable[..., None],
        inputs: Sequence[torch.Tensor],
        kind: tuple[Sequence[int], torch.dtype] | None = None,
        lazy: bool = False,
        aside: bool = False,
        idle: Callable[..., bool] | None = None,
    ) -> Task:
        """Notes a task with a result of this shape and dtype, or none; `aside` and `idle` as in `Task`. On a CPU, where nothing
        is gained by waiting, it is done at once unless it is `lazy`: one that other threads prepare meanwhile."""
        task = Task(work, list(inputs), kind, aside, idle)
        self._noted.append(task)
        if self.device.type == "cpu" and self.recorder is None and not lazy:
            self.join()
        return task

    def send(self) -> None:
        """Has the inputs of all tasks copied to the host."""
        steps = self.rest()
        if self.recorder is not None and INSIDE:
            self._after = steps
        elif steps:
            self._step(*steps)

    def join(self) -> None:
        """All tasks are done: what is launched after this finds their results."""
        steps = self.rest()
        if self.recorder is None or self._expected:
            self._step(*steps, self._do)
        self._expected = False

    def rest(self) -> list[Callable[[], None]]:
        """The steps that are left to do before a round is over: what was noted last is sent."""
        steps, self._after = self._after, []
        if not self._noted:
            return steps
        tasks, self._noted = self._noted, []
        self._expected = True
        inside = self.recorder is not None and INSIDE
        event = torch.cuda.Event(**({"external": True} if inside else {})) if self.device.type == "cuda" else None
        parcel = Parcel(tasks, event, self.recorder is not None)
        if parcel.event is not None or self.recorder is not None:
            parcel.pack(self._room)
        else:  # the tensors serve themselves
            for task in tasks:
                task.sent = task.inputs
                task.result = None if task.kind is None else torch.empty(task.kind[0], dtype=task.kind[1])
        if event is not None and parcel.inside:
            event.record()
        return [*steps, functools.partial(self._send, parcel)]

    def _step(self, *steps: Callable[[], None]) -> None:
        if self.recorder is not None:
            self.recorder.cut(*steps)
        else:
            for step in steps:
                step()

    def _room(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the device can copy from and to."""
        if self.device.type != "cuda":
            return torch.empty(size, dtype=dtype)
        make = functools.partial(torch.empty, size, dtype=dtype, pin_memory=True)
        # The thread that makes a graph may not ask CUDA for memory meanwhile; others may.
        return make() if self.recorder is None else begin(make)()

    def _send(self, parcel: Parcel) -> None:
        if parcel.event is not None and not parcel.inside:
            parcel.event.record()
        # In order: behind tasks that are for this thread none is begun by the other.
        free = all(earlier.doing is not None for earlier in self._sent) and all(task.aside for task in parcel.tasks)
        self._sent.append(parcel)
        if free and self.device.type in ASIDE:
            parcel.doing = begin(parcel.do)

    def _do(self) -> None:
        left, self._sent = self._sent, []
        try:
            while left:
                parcel = left.pop(0)
                if parcel.doing is None and parcel.event is not None and not parcel.event.query():
                    self.meanwhile()
                if not left and parcel.doing is None and self.device.type in ASIDE and parcel.early():
                    parcel.doing = begin(functools.partial(parcel.do, put_off=True))
                    self._sent.append(parcel)  # waited for when somebody joins again
                else:
                    self.seconds += parcel.end()
        finally:  # after an error too nobody is at work any more
            for parcel in left:
                if parcel.doing is not None:
                    with contextlib.suppress(BaseException):
                        parcel.end()

    def forget(self) -> None:
        """After a recording, whether or not it has succeeded."""
        self.recorder, self._expected, self._after = None, False, []
        self._noted.clear()


def pack(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[torch.Tensor], list[torch.Tensor]]]:
    """Tensors as bytes in one piece, uint8 [n], for a copy between device and host costs 3 us however little it carries; and
    what takes such a piece apart, as views of it."""
    # The largest elements come first, so that each begins at a multiple of its size.
    order = sorted(range(len(values)), key=lambda i: -values[i].element_size())
    flat = [values[i].contiguous().view(-1).view(torch.uint8) for i in order]
    sizes, kinds = [len(x) for x in flat], [(x.dtype, x.shape) for x in values]

    def unpack(packed: torch.Tensor) -> list[torch.Tensor]:
        parts = dict(zip(order, packed.split(sizes), strict=True))
        return [parts[i].view(dtype).view(shape) for i, (dtype, shape) in enumerate(kinds)]

    return torch.cat(flat) if len(flat) > 1 else flat[0], unpack


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
