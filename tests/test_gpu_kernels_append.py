"""The bookkeeping of a drawn token in one launch against the steps that it stands for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smcgen.potentials.base import ALIVE, DEAD
from smcgen.proposals.base import Drawing
from smcgen.smc.ending import Ending, stop_table
from smcgen.smc.particles import Particles

pytest.importorskip("smcgen.kernels.gpu.append")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = [b"a", b"b", b"ab", b"ba", b"", b"c"]
STATE = ("counts", "reason", "stop_state", "history", "cause", "log_weight")


def prepared(stops, shape: tuple[int, int], size: int, max_tokens: int) -> tuple[Drawing, Drawing, list[Any]]:
    """Drawings of the same particles, on the CPU and on the device, each with its world; some of them are dead already."""
    end = torch.tensor([False] * 4 + [True, False])
    table = stop_table(VOCABULARY, stops)
    ending = Ending(end, None if table is None else torch.from_numpy(table), max_tokens)
    particles = Particles.empty(*shape, max_tokens, 1, torch.device("cpu"))
    particles.restart(list(range(shape[0])))
    particles.reason[torch.rand(shape) < 0.1] = DEAD
    particles.length += torch.randint(0, 3, shape)
    limit = torch.randint(0, size + 2, shape) if stops else None
    steps, one = Drawing(particles, size, 1, limit), Drawing(particles, size, 1, limit)
    for name, value in vars(one).items():
        if isinstance(value, torch.Tensor):
            setattr(one, name, value.to(DEVICE))
    there = Ending(end.to(DEVICE), None if ending.next_state is None else ending.next_state.to(DEVICE), max_tokens)
    return steps, one, [SimpleNamespace(ending=rule) for rule in (ending, there)]


@pytest.mark.parametrize("stops", [(), ("abb", "cc")])
@pytest.mark.parametrize("groups", [1, 40])
def test_many_tokens(stops, groups):
    torch.manual_seed(0)
    size, shape = 8, (groups, 5)
    steps, one, worlds = prepared(stops, shape, size, max_tokens=9)
    seen = set()
    for _ in range(size):
        active = (steps.reason == ALIVE) & (torch.rand(shape) < 0.9)
        token = torch.randint(0, len(VOCABULARY), shape)
        log_q = torch.where(torch.rand(shape) < 0.05, -torch.inf, torch.randn(shape, dtype=torch.float64))
        drawn = active, token, log_q, torch.randint(0, 3, shape) if stops else -1
        taken = steps.append(worlds[0], *drawn)
        there: list[Any] = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in drawn]
        assert torch.equal(one._append_in_one(worlds[1], *there).cpu(), taken)
        for a, b in zip(one.going(), steps.going(), strict=True):
            assert torch.equal(a.cpu(), b)
            assert a.dtype == b.dtype
        for name in STATE:
            assert torch.equal(getattr(one, name).cpu(), getattr(steps, name)), name
        seen |= set(steps.reason.flatten().tolist())
    assert torch.equal(one.tokens.cpu()[..., :-1], steps.tokens[..., :-1])
    assert torch.equal(one.token_log_q.cpu()[..., :-1], steps.token_log_q[..., :-1])
    assert len(seen) == (5 if stops and groups > 1 else len(seen))


@pytest.mark.parametrize("stops", [(), ("abb", "cc")])
@pytest.mark.parametrize("groups", [1, 40])
@pytest.mark.parametrize("size", [2, 9])
def test_several_tokens_at_a_time(stops, groups, size):
    torch.manual_seed(1)
    shape = (groups, 5)
    steps, one, worlds = prepared(stops, shape, size, max_tokens=11)
    offered = torch.randint(0, size + 1, shape)
    tokens = torch.randint(0, len(VOCABULARY), (*shape, size))
    log_q = torch.randn(*shape, size, dtype=torch.float64)
    log_q[torch.rand(log_q.shape) < 0.05] = -torch.inf
    steps.append_all(worlds[0], offered, tokens, log_q)
    tokens, log_q, offered = (x.to(DEVICE) for x in (tokens, log_q, offered))
    one._append_in_one(worlds[1], None, tokens, log_q, -1, offered)
    offered = offered.cpu()
    for name in STATE:
        assert torch.equal(getattr(one, name).cpu(), getattr(steps, name)), name
    assert torch.equal(one.tokens.cpu()[..., :-1], steps.tokens[..., :-1])
    assert torch.equal(one.token_log_q.cpu()[..., :-1], steps.token_log_q[..., :-1])
    assert groups == 1 or ((steps.counts < offered).any() and (steps.counts == offered).any())
