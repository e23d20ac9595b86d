"""Random numbers, draws and scores: known answers, laws, and rows at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from smcgen.kernels.categorical import draw, log_softmax, score, unpack
from smcgen.kernels.philox import philox, uniforms
from smcgen.smc.keys import BONUS, DRAFT, RESAMPLE, SELECT, Keys

# The known-answer vectors published with Random123, philox4x32-10: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(counter, key, result):
    out = philox(tuple(torch.tensor(w) for w in words(counter)), tuple(words(key)))
    assert [int(w) for w in out] == words(result)


def test_uniforms_are_uniform_and_keys_do_not_collide():
    keys = Keys(7, torch.arange(50), torch.zeros(50, dtype=torch.int64))
    seen = []
    for purpose in (DRAFT, BONUS, RESAMPLE, SELECT):
        for round in (0, 1, 300):
            for step in (0, 1, 9):
                seen.append(keys.uniform(purpose, torch.full((50,), round), step, 16))
    values = torch.stack(seen).flatten()
    assert len(values.unique()) == len(values)
    assert values.min() > 0
    assert values.max() < 1
    assert kstest(values.numpy(), "uniform").pvalue > 1e-3
    other = Keys(8, torch.arange(50), torch.zeros(50, dtype=torch.int64)).uniform(0, torch.zeros(50).long(), 0, 16)
    assert (other != seen[0]).all()
    zero = (torch.tensor(0),) * 4
    assert len({float(u) for key in ((0, 0), (0, 1), (1, 0)) for u in uniforms(zero, key)}) == 6


def test_a_key_does_not_depend_on_its_row():
    rows = torch.tensor([3, 9, 4])
    all_three = Keys(1, rows, rows).uniform(0, rows, 2, 5)
    alone = Keys(1, rows[1:2], rows[1:2]).uniform(0, rows[1:2], 2, 5)
    assert (all_three[1] == alone[0]).all()


def test_stratified_numbers_are_uniform_and_spread():
    groups = 20_000
    history = torch.tensor([5, 9, 5, 5, 7, 9, 5, 1]).expand(groups, -1)
    keys = Keys(3, torch.arange(groups), torch.zeros(groups, dtype=torch.int64))
    u = keys.stratified(DRAFT, torch.zeros(groups, dtype=torch.int64), 0, history)
    for n in range(8):  # whatever its family, each particle's number is uniform by itself
        assert kstest(u[:, n].numpy(), "uniform").pvalue > 1e-4
    for family in ([0, 2, 3, 6], [1, 5]):
        m = len(family)
        assert ((u[:, family] * m).long().sort(-1).values == torch.arange(m)).all()
    assert abs(np.corrcoef(u[:, 4], u[:, 7])[0, 1]) < 0.03


def test_draws_follow_the_masses():
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(29, generator=generator)
    allowed = torch.rand(29, generator=generator) < 0.7
    n = 50_000
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    token, log_q, log_z = draw(x.expand(n, -1), u, allowed.expand(n, -1))
    p = x.masked_fill(~allowed, -torch.inf).double().softmax(-1)
    counts = torch.bincount(token, minlength=29)
    assert counts[~allowed].sum() == 0
    keep = p * n > 5
    statistic = ((counts - n * p).square()[keep] / (n * p)[keep]).sum()
    assert chi2.sf(statistic.item(), int(keep.sum()) - 1) > 1e-4
    assert torch.allclose(log_q, p.log()[token], atol=1e-6)
    assert torch.allclose(log_z[0], x[allowed].double().logsumexp(0), atol=1e-6)


def test_rows_with_nothing_or_one_thing_to_draw():
    x = torch.zeros(4, 70)
    allowed = torch.zeros(4, 70, dtype=torch.bool)
    allowed[1, 69] = allowed[2, 0] = True
    x[3] = -torch.inf
    allowed[3] = True
    for u in (2.0**-54, 0.5, 1 - 2.0**-53):
        token, log_q, log_z = draw(x, torch.full((4,), u, dtype=torch.float64), allowed)
        assert token.tolist() == [0, 69, 0, 0]
        assert log_q.tolist() == [-torch.inf, 0, 0, -torch.inf]
        assert log_z.tolist() == [-torch.inf, 0, 0, -torch.inf]


def test_a_forbidden_token_may_hold_nearly_all_the_mass():
    x = torch.tensor([[800.0, 0.0, 1.0]])
    allowed = torch.tensor([[False, True, True]])
    _, log_q, log_z = draw(x, torch.tensor([0.01], dtype=torch.float64), allowed)
    assert torch.isclose(log_z, torch.tensor([0.0, 1.0]).double().logsumexp(0)).all()
    assert torch.isclose(log_q, -log_z).all()


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 1e-4, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores(temperature, dtype):
    x = (4 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))).to(dtype)
    x[0, 7] = -torch.inf
    tokens = torch.tensor([1, 2, 3])
    want = (x.double() / temperature).log_softmax(-1)
    got = log_softmax(x, temperature)
    assert not got.isnan().any()
    finite = want > -1e30
    assert torch.allclose(got.double()[finite], want[finite], rtol=2e-6, atol=2e-6)
    assert torch.equal(score(x, tokens, temperature), got.gather(-1, tokens[:, None])[:, 0])
    assert (got.argmax(-1) == x.argmax(-1)).all()


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_unpack(flags):
    bits = torch.zeros((len(flags) + 31) // 32, dtype=torch.int32)
    for v, flag in enumerate(flags):
        if flag:
            bits[v // 32] |= (1 << (v % 32)) if v % 32 < 31 else -(1 << 31)
    assert unpack(bits, len(flags)).tolist() == flags
