"""Work of the host: what it is sent, who does it and in which order, and what becomes of errors."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch

import smcgen as sg
from smcgen.potentials.constraint import Constraint
from smcgen.smc import graph
from smcgen.smc import host as module
from smcgen.smc.aside import begin
from smcgen.smc.host import Host, Parcel, Task
from tests import tape
from tests.test_recorded import DRAFTED, GRAMMAR, LM, likes_b, run, same

CPU = torch.device("cpu")


def test_a_parcel_is_one_copy():
    """Whatever the inputs are: their order, kinds and shapes are those that the tasks were given."""
    inputs = [
        torch.tensor([True, False, True]),
        torch.arange(12, dtype=torch.int32).view(3, 4).T,  # not contiguous
        torch.randn(2, 3, dtype=torch.float64),
        torch.zeros(0, 2, dtype=torch.int64),
        torch.tensor(7),
        torch.tensor([[1, 2**40]]),
        torch.tensor([False]),
        torch.arange(12).view(3, 4)[:, 1],  # strided
    ]
    tasks = [Task(print, inputs[:2], None, False), Task(print, inputs[2:], ((2, 3), torch.float64), False)]
    rooms = []

    def room(size: int, dtype: torch.dtype) -> torch.Tensor:
        rooms.append(torch.empty(size, dtype=dtype))
        return rooms[-1]

    Parcel(tasks, None).pack(room)
    sent = [*tasks[0].sent, *tasks[1].sent]
    assert [(x.dtype, x.shape) for x in sent] == [(x.dtype, x.shape) for x in inputs]
    assert all(torch.equal(x, y) for x, y in zip(sent, inputs, strict=True))
    assert len(rooms) == 2  # of all inputs, and of the one result
    assert {x.untyped_storage()._cdata for x in sent} == {rooms[0].untyped_storage()._cdata}
    assert tasks[1].result is not None
    tasks[1].result.fill_(3.0)
    assert (tasks[1].output == 3).all()
    assert tasks[1].output is tasks[1].output  # copied once


def test_one_input_needs_no_packing(monkeypatch):
    monkeypatch.setattr(torch, "cat", None)
    task = Task(print, [torch.arange(5)], None, False)
    Parcel([task], None).pack(lambda size, dtype: torch.empty(size, dtype=dtype))
    assert torch.equal(task.sent[0], torch.arange(5))


def test_the_other_thread_does_what_any_may_do(monkeypatch):
    """In order: what comes behind a task for the thread of the run waits for that."""
    monkeypatch.setattr(module, "ASIDE", ("cpu",))
    host, done, here = Host(CPU), [], threading.get_ident()
    given = torch.zeros(1)
    gate = threading.Event()

    def note(name: str, wait: bool = False):
        def work(x: torch.Tensor) -> None:
            assert not wait or gate.wait(10)
            done.append((name, threading.get_ident() == here))

        return work

    for name, aside in (("a", True), ("b", False), ("c", True)):
        host.later(note(name, wait=name == "a"), [given], lazy=True, aside=aside)
        host.send()
    assert done == []  # "a" waits, and the others behind it
    gate.set()
    host.join()
    assert done == [("a", False), ("b", True), ("c", True)]
    host.later(note("d"), [given], lazy=True, aside=True)
    host.send()
    until = time.perf_counter() + 10
    while len(done) < 4 and time.perf_counter() < until:  # it is begun before anybody joins
        time.sleep(0.001)
    assert done[3:] == [("d", False)]
    host.join()


@pytest.mark.parametrize("inference", [False, True])
def test_results_of_the_other_thread(monkeypatch, inference):
    monkeypatch.setattr(module, "ASIDE", ("cpu",))
    with torch.inference_mode(inference):
        host = Host(CPU)
        modes = []

        def work(x: torch.Tensor, out: torch.Tensor) -> None:
            modes.append(torch.is_inference_mode_enabled())
            out.copy_(2 * x)

        task = host.later(work, [torch.arange(3)], ((3,), torch.int64), lazy=True, aside=True)
        host.send()
        host.join()
        assert task.output.tolist() == [0, 2, 4]
    assert modes == [inference]
    assert host.seconds > 0


def test_an_error_of_the_other_thread_is_the_caller_s(monkeypatch):
    monkeypatch.setattr(module, "ASIDE", ("cpu",))
    host, done = Host(CPU), []

    def fails(x: torch.Tensor) -> None:
        raise ValueError("long enough")

    def slow(x: torch.Tensor) -> None:
        time.sleep(0.05)
        done.append(1)

    for work in (fails, slow):
        host.later(work, [torch.zeros(1)], lazy=True, aside=True)
        host.send()
    with pytest.raises(ValueError, match="long enough"):
        host.join()
    assert done == [1]  # nobody is at work any more
    host.later(slow, [torch.zeros(1)], lazy=True, aside=True)
    host.join()
    assert done == [1, 1]
    assert begin(lambda: 5)() == 5


@pytest.mark.parametrize("there", [False, True])
def test_a_wait_is_used(there):
    """Where the device has not come so far, and nowhere else."""
    host, done = Host(CPU), []

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return there

        def synchronize(self) -> None:
            done.append("waited")

    host.meanwhile = lambda: done.append("meanwhile")
    task = Task(lambda: done.append("done"), [], None, False)
    host._send(Parcel([task], None))
    host.join()
    assert done == ["done"]
    parcel: Any = Parcel([task], None)
    parcel.event = Event()
    host._send(parcel)
    host.join()
    assert done[1:] == [*([] if there else ["meanwhile"]), "waited", "done"]


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_what_nobody_waits_for_is_put_off(monkeypatch, ended, kept, used):
    """If the run's own tasks have nothing to do, and then only."""
    monkeypatch.setattr(module, "ASIDE", ("cpu",))
    host, done, gate = Host(CPU), [], threading.Event()

    def read(x: torch.Tensor, out: torch.Tensor) -> None:
        assert not put_off or gate.wait(10)
        done.append("read")

    def close(x: torch.Tensor, out: torch.Tensor) -> None:
        done.append("close")
        out.fill_(1)

    kind, given = ((2,), torch.float64), torch.tensor([ended])
    tasks = [Task(read, [given], kind, True), Task(close, [given], kind, False, lambda x: not x.any())]
    parcel = Parcel(tasks, None, kept)
    parcel.pack(lambda size, dtype: torch.full((size,), 5).to(dtype))
    assert not used or tasks[0].output is not None
    assert tasks[1].output is not None  # as a recording asks for it
    put_off = kept and not used and not ended
    for _ in range(2):  # as when a recording is played again
        done.clear()
        gate.clear()
        host._send(parcel)
        host.join()
        assert done == ([] if put_off else ["read", "close"])
        assert tasks[1].result is not None
        assert tasks[1].result.tolist() == ([0, 0] if put_off else [1, 1])
        host.later(lambda x: done.append("fork"), [given], lazy=True, aside=True)
        host.send()
        gate.set()
        host.join()
        assert done == [*(["read"] if put_off else ["read", "close"]), "fork"]


@pytest.mark.parametrize("leniency", [2.0, math.inf])
def test_recorded_rounds_with_a_thread_beside_draw_the_same(monkeypatch, leniency):
    """The grammar follows on that thread, and what a user has written is called on this one."""
    threads: dict[str, set[int]] = {"grammar": set(), "user": set()}
    extend = Constraint.extend

    def watched(self, *arguments):
        threads["grammar"].add(threading.get_ident())
        return extend(self, *arguments)

    @sg.potential
    def user(text: str) -> float:
        threads["user"].add(threading.get_ident())
        return 0.1 * len(text)

    put_off, early = [], Parcel.early
    monkeypatch.setattr(Parcel, "early", lambda self: put_off.append(early(self)) or put_off[-1])
    monkeypatch.setattr(Constraint, "extend", watched)
    monkeypatch.setattr(graph, "Capture", tape.Capture)
    for extra in (sg.length(1, 12), likes_b, user):
        found = []
        for wanted in (True, False):
            monkeypatch.setattr(graph, "recordable", lambda *_, wanted=wanted: wanted)
            monkeypatch.setattr(module, "ASIDE", ("cpu",) if wanted else ())
            found.append(run(LM * sg.lark(GRAMMAR) * extra, **DRAFTED | {"leniency": leniency}))
            if wanted:
                assert found[0].info["cuda_graph"]
                assert threads["grammar"] - {threading.get_ident()}
        same(*found)
    assert threads["user"] == {threading.get_ident()}
    assert {True, False} <= set(put_off)
