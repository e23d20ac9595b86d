"""Rounds as one CUDA graph: recorded once, replayed without Python and without waiting for the device.

A round that asks nothing of the host (no potential on the host, models that read pages) launches the same kernels on the same
tensors each time, for its shapes do not depend on what was drawn. The particles live in one set of tensors, into which the end
of the graph copies what the round made; models and constraints keep their own state in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import fields

import torch

from smcgen.kernels.device import on_triton
from smcgen.lm.batch import Reader
from smcgen.lm.paged import PagedContext
from smcgen.proposals.base import Proposal, World
from smcgen.proposals.draft import DraftProposal
from smcgen.proposals.lenient import LenientProposal
from smcgen.proposals.target import TargetProposal
from smcgen.smc.particles import Particles, RoundInfo
from smcgen.smc.round import Algorithm, step


def recordable(world: World, proposal: Proposal) -> bool:
    """Whether a round waits for nothing on the host, so that it can be recorded."""
    readers = list(world.scorer.readers)
    if isinstance(proposal, DraftProposal):
        readers.append(proposal.reader)
    return (
        on_triton(world.keys.item)
        and type(proposal) in (TargetProposal, DraftProposal, LenientProposal)
        and world.potentials.on_device
        and all(type(r) is Reader and isinstance(r.context, PagedContext) and not r.context.isolate for r in readers)
    )


class Report:
    """What the host wants to know of a round: on a GPU the copies run behind the round, and `read` waits for them.

    `tables`, the page tables of the models, are there after `read`; on a CPU they are no copies, and the next round changes
    them."""

    def __init__(
        self, info: RoundInfo, particles: Particles, flags: Sequence[torch.Tensor], tables: Sequence[torch.Tensor] = ()
    ):
        small = {"ancestors": torch.int32, "tokens": torch.int32, "counts": torch.int32}
        values = {name: value.to(small.get(name, value.dtype)) for name, value in vars(info).items()}
        values |= {"done": particles.done, "longest": particles.length.amax(-1), "flags": torch.stack(list(flags))}
        self.copied = None
        if particles.length.is_cuda:
            values = {name: _to_host(value) for name, value in values.items()}
            tables = [_to_host(table) for table in tables]
            self.copied = torch.cuda.Event()
            self.copied.record()
        self.values, self.tables = values, tables

    def read(self) -> tuple[RoundInfo, torch.Tensor, torch.Tensor, bool]:
        """The round's information, which groups are done, bool [G], their longest samples, int64 [G], and whether any of
        `flags` was set."""
        if self.copied is not None:
            self.copied.synchronize()
        values = dict(self.values)
        done, longest, flags = (values.pop(name) for name in ("done", "longest", "flags"))
        return RoundInfo(**values), done, longest, bool(flags.any())


def _to_host(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


class Rounds:
    """Runs rounds: the first as it is, which also prepares every kernel, then from a recording if that can be had.

    Attributes:
        particles: the particles after the last round.
        wanted: whether rounds are to be recorded, or were.
        recorded: the recording that is replayed, once there is one.
    """

    def __init__(self, particles: Particles, world: World, algorithm: Algorithm):
        self.particles, self.world, self.algorithm = particles, world, algorithm
        self.wanted = recordable(world, algorithm.proposal)
        self.recorded: torch.cuda.CUDAGraph | None = None
        self.ran = 0

    def __call__(self) -> RoundInfo:
        """One round. Its tensors are overwritten by the next."""
        if self.wanted and self.ran == 1:
            self._record()
        self.ran += 1
        if self.recorded is not None:
            self.recorded.replay()
            return self.info
        if not self.wanted:
            self.particles, info = step(self.particles, self.world, self.algorithm)
            return info
        return self._round()

    def _round(self) -> RoundInfo:
        """A round that leaves the particles in the tensors where it found them, as models and constraints do."""
        particles, info = step(self.particles, self.world, self.algorithm)
        for field in fields(particles):
            getattr(self.particles, field.name).copy_(getattr(particles, field.name))
        return info

    def _record(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.info = self._round()
        except Exception as error:  # whatever a model does that cannot be recorded
            self.wanted = False
            warnings.warn(
                f"rounds run without a CUDA graph, more slowly: {str(error).strip().splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        torch.cuda.current_stream().wait_stream(stream)
        self.recorded = graph
