"""Rounds as CUDA graphs: recorded once, replayed without launching kernel by kernel.

A round launches the same kernels on the same tensors each time, for its shapes do not depend on what was drawn. The particles
live in one set of tensors, into which the end of the round copies what it made; models and constraints keep their own state in
place. A round that asks nothing of the host (no potential works there) is one graph, and nothing waits for the device. Where
the launches wait for the host (see `smc.host`) a graph ends and another begins, so that a round with a potential on the host
has one for each drafted token: it draws the token, sends it to the host and goes on with the draft's forward, while the host
fills the masks of the next.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch

from smcgen.errors import first_line
from smcgen.kernels.device import on_triton
from smcgen.lm.batch import Reader
from smcgen.lm.paged import PagedContext
from smcgen.proposals.base import Proposal, World
from smcgen.proposals.draft import DraftProposal
from smcgen.proposals.lenient import LenientProposal
from smcgen.proposals.target import TargetProposal
from smcgen.smc.host import Host, pack, recording
from smcgen.smc.particles import Particles, RoundInfo
from smcgen.smc.round import Algorithm, step


def recordable(world: World, proposal: Proposal) -> bool:
    """Whether a round can be recorded: all that it does on the host is in tasks of `smc.host`."""
    readers = list(world.scorer.readers)
    if isinstance(proposal, DraftProposal):
        readers.append(proposal.reader)
    return (
        on_triton(world.keys.item)
        and type(proposal) in (TargetProposal, DraftProposal, LenientProposal)
        and all(type(r) is Reader and isinstance(r.context, PagedContext) and not r.context.isolate for r in readers)
    )


class Report:
    """What the host wants to know of a round: on a GPU one copy runs behind the round, and `read` waits for it.

    Args:
        names: of the first values.
        packed, unpack: all values in one piece, and what takes it apart (see `host.pack`).
    """

    def __init__(self, names: Sequence[str], packed: torch.Tensor, unpack: Callable[[torch.Tensor], list[torch.Tensor]]):
        self.names, self.unpack = names, unpack
        self.sent = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=packed.is_cuda).copy_(packed, non_blocking=True)
        self.copied = torch.cuda.Event() if packed.is_cuda else None
        if self.copied is not None:
            self.copied.record()

    @functools.cached_property
    def found(self) -> list[torch.Tensor]:
        """All values, on the host."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.unpack(self.sent.clone())  # what is kept is no memory that a GPU can reach

    @property
    def tables(self) -> list[torch.Tensor]:
        """The values without a name."""
        return self.found[len(self.names) :]

    def read(self) -> tuple[RoundInfo, torch.Tensor, torch.Tensor, bool]:
        """The round's information, which groups are done, bool [G], their longest samples, int64 [G], and whether any of the
        flags was set."""
        values = dict(zip(self.names, self.found, strict=False))
        for name in ("ancestors", "tokens", "counts"):  # kept for every round: no larger than needed
            values[name] = values[name].to(torch.int32)
        done, longest, flags = (values.pop(name) for name in ("done", "longest", "flags"))
        return RoundInfo(**values), done, longest, bool(flags.any())


class Capture:
    """Makes CUDA graphs, one after the other, of what is launched; they share one memory."""

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Graphs are made inside this context, on a stream of its own."""
        torch.cuda.synchronize()
        gc.collect()  # nothing that CUDA would have to free may be found garbage while a graph is made
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, which fill masks, may go on.
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        """What launches the graph that has been made since `begin`."""
        self.graph.capture_end()
        return self.graph.replay


class Recording:
    """A round as a list of steps: graphs, and what the host does between them.

    Args:
        host: the tasks of the run.
        work: launches the round.

    Attributes:
        graphs: their number.
    """

    def __init__(self, host: Host, work: Callable[[], None]):
        self.steps: list[Callable[[], None]] = []
        self.graphs = 0
        self.capture = Capture()
        with self.capture.on():
            self.capture.begin()
            with self._ended_anyway(), recording(host, self):
                work()
                self._end(host.rest())

    def cut(self, *steps: Callable[[], None]) -> None:
        """Ends a graph; `steps` come after it, and what is launched from now on after them."""
        self._end(steps)
        self.capture.begin()

    def replay(self) -> None:
        for do in self.steps:
            do()

    def _end(self, steps: Sequence[Callable[[], None]]) -> None:
        self.steps += [self.capture.end(), *steps]
        self.graphs += 1

    @contextlib.contextmanager
    def _ended_anyway(self) -> Iterator[None]:
        """No graph is left unfinished by an error."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.capture.end()
            raise


class Rounds:
    """Runs rounds: the first as it is, which also prepares every kernel, then from a recording if that can be had.

    Args:
        flags: bool [], what must not have happened.
        tables: of the particles, what else is to be reported.

    Attributes:
        particles: the particles after the last round.
        wanted: whether rounds are to be recorded, or were.
        recorded: the recording that is replayed, once there is one.
    """

    def __init__(
        self,
        particles: Particles,
        world: World,
        algorithm: Algorithm,
        flags: Callable[[], Sequence[torch.Tensor]],
        tables: Callable[[Particles], Sequence[torch.Tensor]],
    ):
        self.particles, self.world, self.algorithm = particles, world, algorithm
        self.flags, self.tables = flags, tables
        self.wanted = recordable(world, algorithm.proposal)
        self.recorded: Recording | None = None
        self.told: Any  # of the recording: overwritten when it is replayed
        self.ran = 0

    @property
    def graphs(self) -> int:
        """CUDA graphs that a round is; 0 if it is launched kernel by kernel."""
        return 0 if self.recorded is None else self.recorded.graphs

    def __call__(self) -> Report:
        """One round."""
        if self.wanted and self.ran == 1:
            self._record()
        self.ran += 1
        if self.recorded is not None:
            self.recorded.replay()
            return Report(*self.told)
        return Report(*self._round())

    def _round(self) -> tuple[list[str], torch.Tensor, Callable[[torch.Tensor], list[torch.Tensor]]]:
        """A round, and what a report of it needs. If rounds are to be recorded it leaves the particles in the tensors where it
        found them, as models and constraints do."""
        particles, info = step(self.particles, self.world, self.algorithm)
        if self.wanted:
            pairs = [(getattr(self.particles, field.name), getattr(particles, field.name)) for field in fields(particles)]
            moved = [(old, new) for old, new in pairs if new is not old]
            for dtype in {new.dtype for _, new in moved}:  # one launch for each
                same = [pair for pair in moved if pair[1].dtype == dtype]
                torch._foreach_copy_([old for old, _ in same], [new for _, new in same])  # pyright: ignore[reportPrivateImportUsage]
        else:
            self.particles = particles
        values = vars(info) | {
            "done": particles.done,
            "longest": particles.length.amax(-1),
            "flags": torch.stack(list(self.flags())),
        }
        return list(values), *pack([*values.values(), *self.tables(particles)])

    def _record(self) -> None:
        def work() -> None:
            self.told = self._round()

        self.world.potentials.join()  # what the round before has left is no part of the recording
        try:
            self.recorded = Recording(self.world.potentials.host, work)
        except Exception as error:  # whatever a model does that cannot be recorded
            self.wanted = False
            warnings.warn(f"rounds run without a CUDA graph, more slowly: {first_line(error)}", RuntimeWarning, stacklevel=2)
