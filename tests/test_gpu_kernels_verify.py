"""`kernels.verify.verify`: the torch reference by its law, and the Triton kernels by the reference and by the law's own edges.
Interpreted on a CPU, compiled on a CUDA device with -m gpu."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from smcgen.kernels.categorical import unpack
from smcgen.kernels.gpu import totals as gpu_totals
from smcgen.kernels.gpu import verify as gpu
from smcgen.kernels.verify import Verdict, totals, verify
from tests.test_verify import PAIRS, recursion

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")], id="cuda"
)
INTERPRETED = pytest.param(
    "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, see the other case"), id="cpu"
)
DEVICES = pytest.mark.parametrize("device", [INTERPRETED, CUDA])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at log 0 in the interpreter


def kernels(target, draft, tokens, uniform, final, *, device, chunk=16, **options) -> Verdict:
    """The verdict of the Triton kernels, on the CPU."""
    names = ("temperature", "draft_temperature", "exponent", "leniency", "counts", "allowed")
    values = {"temperature": 1.0, "draft_temperature": 1.0, "leniency": 1.0, **options}
    inputs = [*(target, draft, tokens, uniform, final), *(values.get(name) for name in names), options.get("block", False)]
    inputs = [x.to(device) if isinstance(x, torch.Tensor) and x.device.type != device else x for x in inputs]
    return Verdict(*(x.cpu() for x in gpu.verify(*inputs, chunk=chunk)))


def agree(got: Verdict, want: Verdict, tolerance: float = 3e-6, slack: int = 0) -> None:
    """Equal decisions and logs; `slack` rows may differ, where a uniform fell within rounding of an edge."""
    same = torch.ones(len(want.accepted), dtype=torch.bool)
    for name in ("accepted", "rejected", "chain"):
        same &= getattr(got, name) == getattr(want, name)
    same &= (got.tokens == want.tokens).all(-1)
    assert (~same).sum() <= slack
    for name in ("log_target", "log_law", "log_p", "log_z", "log_left"):
        a, b = getattr(got, name)[same], getattr(want, name)[same]
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a == -torch.inf, b == -torch.inf)
        here = b.isfinite()
        assert ((a - b)[here].abs() < tolerance * (1 + b[here].abs())).all(), (name, (a - b)[here].abs().max())


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """bool [..., V] -> int32 bit rows."""
    words = -(-allowed.shape[-1] // 32)
    wide = torch.zeros(*allowed.shape[:-1], words * 32, dtype=torch.int64)
    wide[..., : allowed.shape[-1]] = allowed
    packed = (wide.unflatten(-1, (words, 32)) << torch.arange(32)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def problem(rows, chains, drafted, size, seed, dtype=torch.float32, power=False, mask=False, ragged=False, like=0.7, heat=1.0):
    """Logits in which chains with equal prefixes have equal rows, drafted tokens, uniforms, and options."""
    random = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, drafted + 1, size, generator=random) * 2
    away = torch.randn(rows, drafted + 1, size, generator=random) * like
    allowed = torch.rand(rows, drafted + 1, size, generator=random) < 0.7
    allowed[..., 0] = True
    shape = (rows, chains, drafted + 1, size)
    target, draft = torch.empty(shape), torch.empty(shape)
    bits, tokens = torch.empty(shape, dtype=torch.bool), torch.zeros(rows, chains, drafted, dtype=torch.int64)
    seen = torch.zeros(rows, chains, dtype=torch.int64)
    for k in range(drafted + 1):
        shift = (seen % size)[..., None] + torch.arange(size)  # another order of the tokens after another prefix
        for out, x in ((target, base), (draft, base + away), (bits, allowed)):
            out[:, :, k] = x[:, k][:, None].expand(rows, chains, size).gather(-1, shift % size)
        if k < drafted:
            law = draft[:, :, k].to(dtype).float() / heat
            law = law.masked_fill(~bits[:, :, k], -torch.inf) if mask else law
            token = torch.multinomial(law.softmax(-1).flatten(0, 1), 1, generator=random).view(rows, chains)
            # every other row: all chains draft the likeliest token, so that several stay alive
            best = law.argmax(-1)
            token = torch.where((torch.arange(rows) % 2 == 1)[:, None], best, token)
            tokens[:, :, k] = token
            seen = seen * 7 + token + 1
    options: dict = {}
    if power:
        options["exponent"] = 0.3 + 2 * torch.rand(rows, generator=random, dtype=torch.float64)
    if mask:
        options["allowed"] = pack(bits)
    if ragged:
        options["counts"] = torch.randint(0, drafted + 1, (rows, 1), generator=random).expand(rows, chains)
    uniform = torch.rand(rows, chains, drafted, generator=random, dtype=torch.float64)
    final = torch.rand(rows, generator=random, dtype=torch.float64)
    return (target.to(dtype), draft[:, :, :drafted].to(dtype), tokens, uniform, final), options


@DEVICES
@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("leniency", [1.0, 1.7])
@pytest.mark.parametrize("kind", ["plain", "power", "mask", "everything"])
def test_the_kernels_decide_as_the_reference(chains, leniency, kind, device):
    every = kind == "everything"
    flags = {"power": kind == "power" or every, "mask": kind == "mask" or every, "ragged": every}
    heat = 1.3 if every else 1.0
    for seed, size in ((1, 37), (3, 5)):
        rows = 3 if device == "cpu" else 200
        inputs, options = problem(rows, chains, 3, size, seed, heat=heat, **flags)
        options |= {"leniency": leniency, "temperature": 0.8 if every else 1.0, "draft_temperature": heat}
        agree(kernels(*inputs, device=device, **options), verify(*inputs, **options))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chains", [1, 3])
def test_views_and_number_formats(dtype, chains, device):
    """The draft's logits lie by step, the target's in rows wider than the vocabulary, with garbage there."""
    (target, draft, tokens, uniform, final), options = problem(4, chains, 4, 45, 5, dtype=dtype)
    want = verify(target.float(), draft.float(), tokens, uniform, final, leniency=2.0, **options)
    wide = torch.full((*target.shape[:-1], 64), 1e4, dtype=dtype, device=device)
    wide[..., :45] = target.to(device)
    by_step = torch.full((4, 4, chains, 50), float("nan"), dtype=dtype, device=device)
    by_step[..., :45] = draft.permute(2, 0, 1, 3).to(device)
    view = by_step.permute(1, 2, 0, 3)[..., :45]
    agree(kernels(wide[..., :45], view, tokens, uniform, final, device=device, leniency=2.0, **options), want)


@DEVICES
@pytest.mark.parametrize("leniency", [1.0, 1.5, 4.0])
@pytest.mark.parametrize("name", PAIRS)
def test_the_law_of_one_candidate_by_its_edges(name, leniency, device):
    """Acceptance switches at u = s p / q exactly, the residual's tokens at its cumulative sums; and the law that is reported is
    the sum over (token, accept flag)."""
    log_p, log_q = PAIRS[name]
    p, q = log_p.exp().numpy(), log_q.exp().numpy()
    law = recursion(p, q, 1, leniency)
    left = np.maximum(p - q, 0)
    residual = left / left.sum() if left.sum() > 1e-14 else p
    cases = []  # token, uniform, final, accepted?, last token
    for x in np.flatnonzero(q > 0).tolist():
        a = min(1.0, leniency * p[x] / q[x])
        if a > 1e-4:
            cases.append((x, a - 1e-5, 0.5, True, None))
        if a < 1 - 1e-4:
            cases.append((x, a + 1e-5, 0.5, False, None))
            edges = np.concatenate([[0], residual.cumsum()])
            for v in np.flatnonzero(residual > 1e-3).tolist():
                cases += [(x, a + 1e-5, edges[v] + 1e-5, False, v), (x, a + 1e-5, edges[v + 1] - 1e-5, False, v)]
    rows = len(cases)
    target = log_p.float().expand(rows, 1, 2, -1)
    draft = log_q.float().expand(rows, 1, 1, -1)
    token, uniform, final = (torch.tensor([case[i] for case in cases]) for i in range(3))
    inputs = (target, draft, token.view(-1, 1, 1), uniform.double().view(-1, 1, 1), final.double())
    for got in (kernels(*inputs, device=device, leniency=leniency, chunk=4), verify(*inputs, leniency=leniency)):
        assert got.accepted.tolist() == [int(case[3]) for case in cases]
        assert got.rejected.tolist() == [not case[3] for case in cases]
        for row, (x, _, _, accepted, last) in enumerate(cases):
            first = int(got.tokens[row, 0])
            assert first == (x if accepted else first if last is None else last)
            assert abs(float(got.log_law[row, 0].exp()) - law[first]) < 2e-6
            assert abs(float(got.log_target[row, 0].exp()) - p[first]) < 2e-6
            if leniency == 1:
                assert abs(float(got.log_gain[row, 0])) < 1e-6


@DEVICES
@pytest.mark.parametrize("leniency", [1.0, 2.0])
@pytest.mark.parametrize("name", ["all tokens", "zeros in both", "one token"])
def test_the_law_of_two_candidates_by_its_edges(name, leniency, device):
    log_p, log_q = PAIRS[name]
    p, q = log_p.exp().numpy(), log_q.exp().numpy()
    law = recursion(p, q, 2, leniency)
    r = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    last = np.maximum(r - q, 0) / np.maximum(r - q, 0).sum()
    cases = []  # the two tokens, their uniforms, final, which one is accepted, last token
    for x in np.flatnonzero(q > 0).tolist():
        a = min(1.0, leniency * p[x] / q[x])
        for y in np.flatnonzero(q > 0).tolist():
            b = min(1.0, leniency * r[y] / q[y])
            if a > 1e-4:
                cases.append(((x, y), (a - 1e-5, 0.5), 0.5, 0, None))
            if a < 1 - 1e-4 and b > 1e-4:
                cases.append(((x, y), (a + 1e-5, b - 1e-5), 0.5, 1, None))
            if a < 1 - 1e-4 and b < 1 - 1e-4:
                v = int(last.argmax())
                edges = np.concatenate([[0], last.cumsum()])
                cases += [((x, y), (a + 1e-5, b + 1e-5), edges[v + i] + shift, 2, v) for i, shift in ((0, 1e-5), (1, -1e-5))]
    assert {case[3] for case in cases} == {0, 1, 2}
    cases = cases[:: max(1, len(cases) // 12)] if device == "cpu" else cases
    rows = len(cases)
    token, uniform = (torch.tensor([case[i] for case in cases])[..., None] for i in range(2))
    final = torch.tensor([case[2] for case in cases]).double()
    inputs = (log_p.float().expand(rows, 2, 2, -1), log_q.float().expand(rows, 2, 1, -1), token, uniform.double(), final)
    for got in (kernels(*inputs, device=device, leniency=leniency, chunk=4), verify(*inputs, leniency=leniency)):
        for row, (xs, _, _, which, v) in enumerate(cases):
            assert int(got.accepted[row]) == (which < 2)
            assert int(got.tokens[row, 0]) == (v if which == 2 else xs[which])
            assert int(got.chain[row]) == (which if which < 2 else 0)
            assert abs(float(got.log_law[row, 0].exp()) - law[int(got.tokens[row, 0])]) < 2e-6


@DEVICES
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("leniency", [1.0, 2.0])
def test_what_has_no_mass(chains, leniency, device):
    """Whole chunks of -inf, laws that share no token, underflow, masks that leave little or nothing, and NaN."""
    size = 40
    (target, draft, tokens, uniform, final), _ = problem(9, chains, 2, size, 7)
    allowed = torch.ones(9, chains, 3, size, dtype=torch.bool)
    target[0, :, :, :32] = -torch.inf  # p lives in the last chunk
    draft[0, :, :, 32:] = -torch.inf  # q elsewhere: always rejected, and the residual is p
    tokens[0] = 3
    target[1], draft[1] = torch.arange(size).float() * -30, torch.arange(size).flip(0).float() * -30  # down to exp(-1170)
    tokens[1] = size - 1
    target[2], draft[2] = draft[2, :, :1], draft[2, :, :1]  # equal laws: never rejected
    uniform[2] = 1 - 1e-5
    allowed[3, :, 0] = False  # nothing at the first position
    allowed[4, :, 2] = False  # nothing at the last
    allowed[5] = False
    allowed[5, :, :, 17] = True  # one token, and it is unlikely
    target[5, :, :, 17] -= 200
    tokens[5] = 17
    target[6, :, 1, 5] = torch.nan  # the second position cannot be judged
    uniform[6, :, 0] = 1e-9
    draft[7, :, 0, 5] = torch.nan
    target[8, :, 0] = -torch.inf
    options = {"leniency": leniency, "allowed": pack(allowed)}
    got = kernels(target, draft, tokens, uniform, final, device=device, **options)
    want = verify(target, draft, tokens, uniform, final, **options)
    keep = torch.tensor([0, 1, 2, 3, 4, 5])
    for verdict in (got, want):
        assert not verdict.log_z[keep].isnan().any()
        assert not verdict.log_gain[keep].isnan().any()
        assert ((verdict.tokens >= 0) & (verdict.tokens < size)).all()
        assert int(verdict.accepted[0]) == 0
        assert int(verdict.tokens[0, 0]) >= 32
        assert int(verdict.accepted[2]) == 2
        assert not verdict.rejected[3]
        assert int(verdict.accepted[3]) == 0
        for row, at in ((3, 0),) + (((4, 2),) if int(verdict.accepted[4]) == 2 else ()):
            assert verdict.log_z[row, at] == verdict.log_gain[row, at] == -torch.inf
            assert int(verdict.tokens[row, at]) == 0
        assert (verdict.tokens[5, : int(verdict.accepted[5]) + 1] == 17).all()
        assert verdict.log_z[5, 0] < -150
        assert verdict.log_z[6, 1].isnan()
        assert verdict.log_z[8, 0].isnan()  # a model that allows nothing at all is at fault, not the text
    agree(Verdict(*(getattr(got, f)[keep] for f in vars(got))), Verdict(*(getattr(want, f)[keep] for f in vars(want))))


@DEVICES
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("size", "drafted"), [(37, 4), (5, 3), (40, 1)])
def test_block_verification_decides_as_the_reference(size, drafted, ragged, device):
    inputs, options = problem(8 if device == "cpu" else 300, 1, drafted, size, size, ragged=ragged)
    want = verify(*inputs, block=True, temperature=0.9, **options)
    agree(kernels(*inputs, device=device, block=True, temperature=0.9, **options), want)
    assert want.rejected.any()
    assert (want.accepted > 0).any()


@DEVICES
def test_block_verification_at_the_edges(device):
    size = 40
    (target, draft, tokens, uniform, final), _ = problem(6, 1, 3, size, 7)
    target[0], draft[0] = draft[0, :, :1], draft[0, :, :1]  # equal laws: the whole block is kept
    uniform[0] = 1 - 1e-5
    target[1, :, :, :32] = -torch.inf  # laws that share no token
    draft[1, :, :, 32:] = -torch.inf
    tokens[1] = 3
    target[2, :, 1, tokens[2, 0, 1]] = -torch.inf  # the second token cannot be
    target[3, :, 0, 5] = torch.nan
    draft[4, :, 1, 5] = torch.nan
    target[5, :, 0, tokens[5, 0, 0]] = 30.0  # the first is all but certain
    draft[5, :, 0, tokens[5, 0, 0]] = -5.0
    got = kernels(target, draft, tokens, uniform, final, device=device, block=True)
    want = verify(target, draft, tokens, uniform, final, block=True)
    for verdict in (got, want):
        assert int(verdict.accepted[0]) == 3
        assert int(verdict.accepted[1]) == 0
        assert int(verdict.tokens[1, 0]) >= 32
        assert int(verdict.accepted[2]) < 2
        assert verdict.log_z[3, 0].isnan()
        assert not verdict.log_z[[0, 1, 2, 5]].isnan().any()
        assert int(verdict.accepted[5]) > 0
        assert ((verdict.tokens >= 0) & (verdict.tokens < size)).all()
    keep = torch.tensor([0, 1, 2, 5])
    agree(Verdict(*(getattr(got, f)[keep] for f in vars(got))), Verdict(*(getattr(want, f)[keep] for f in vars(want))))


WAYS = [(c, s, e, False) for c in (1, 3) for s in (1.0, 1.5) for e in (None, 2.0)]


@pytest.mark.parametrize(("chains", "leniency", "exponent", "block"), [*WAYS, (1, 1.0, None, True)])
def test_blocks_of_the_reference_are_properly_weighted(chains, leniency, exponent, block):
    """E[W f(first two tokens)] over 150,000 blocks is the sum over gamma, a third and a fourth token being summed out, which is
    the whole law for s = 1 and exponent 1 and unbiased weights elsewhere."""
    rows, drafted, size = 150_000, 2, 3
    random = torch.Generator().manual_seed(11)
    base = torch.randn(size + 1, size, generator=random) * 1.2  # logits after a token; the last row at the start
    away = base + torch.randn(size + 1, size, generator=random)
    tokens = torch.zeros(rows, chains, drafted, dtype=torch.int64)
    last = torch.full((rows, chains), size)
    target, draft = [base[last]], []
    for k in range(drafted):
        draft.append(away[last])
        last = torch.multinomial(away.softmax(-1)[last.flatten()], 1, generator=random).view(rows, chains)
        tokens[:, :, k] = last
        target.append(base[last])
    uniform = torch.rand(rows, chains, drafted, generator=random, dtype=torch.float64)
    final = torch.rand(rows, generator=random, dtype=torch.float64)
    power = None if exponent is None else torch.full((rows,), exponent, dtype=torch.float64)
    inputs = (torch.stack(target, 2), torch.stack(draft, 2), tokens, uniform, final)
    got = verify(*inputs, leniency=leniency, exponent=power, block=block)
    if block:  # more is kept than one by one
        assert got.accepted.double().mean() > verify(*inputs).accepted.double().mean() + 0.01
    alpha = exponent or 1.0
    step = base.double().softmax(-1) ** alpha  # gamma of a token after another
    weight = got.log_gain.sum(-1).exp()
    # what has only one token goes on with one from the local target, whose weight is its Z
    short = got.accepted == 0
    local = step / step.sum(-1, keepdim=True)
    more = torch.multinomial(local[got.tokens[:, 0]], 1, generator=random)[:, 0]
    second = torch.where(short, more, got.tokens[:, 1])
    weight = torch.where(short, weight * step.sum(-1)[got.tokens[:, 0]], weight)
    # what has three is gamma of its two times the sum over the third
    truth = step[size][:, None] * step[:size]
    three = (got.accepted == 2).double()
    for a in range(size):
        for b in range(size):
            here = (got.tokens[:, 0] == a) & (second == b)
            value = torch.where(here, weight / torch.where(three > 0, step.sum(-1)[second], 1.0), 0.0)
            error = float(value.std()) / math.sqrt(rows)
            assert abs(float(value.mean()) - float(truth[a, b])) < 4.5 * error
    if leniency == 1 and exponent is None:
        assert (weight - 1).abs().max() < 1e-9


@DEVICES
@pytest.mark.parametrize(("rows", "positions"), [(1, 2), (7, 5), (40, 9)])
def test_totals(rows, positions, device):
    random = torch.Generator().manual_seed(rows)
    fields = torch.randn(5, rows, positions, dtype=torch.float64, generator=random)
    fields[1, torch.rand(rows, positions, generator=random) < 0.2] = -torch.inf
    fields[3, torch.rand(rows, positions, generator=random) < 0.05] = torch.nan
    counts = torch.randint(0, positions + 1, (rows,), generator=random)
    none = torch.zeros(rows, dtype=torch.int64)
    want = totals(Verdict(none[:, None].expand(-1, positions), none, none > 0, none, *fields.unbind()), counts)
    got = gpu_totals.totals(*(fields[i].to(device) for i in range(4)), counts.to(device))
    used = torch.arange(positions) < counts[:, None]
    assert torch.equal(want[2], torch.where(used, fields[2], 0.0))
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a.cpu(), b, atol=1e-12, rtol=1e-12, equal_nan=True)
    assert rows < 40 or (want[0].isfinite().any() and (want[0] == -torch.inf).any() and want[1].isnan().any())


def test_wrong_shapes_and_leniency():
    (target, draft, tokens, uniform, final), _ = problem(2, 1, 2, 5, 0)
    with pytest.raises(ValueError, match="finite and at least 1"):
        verify(target, draft, tokens, uniform, final, leniency=0.5)
    with pytest.raises(ValueError, match="finite and at least 1"):
        verify(target, draft, tokens, uniform, final, leniency=math.inf)
    with pytest.raises(ValueError, match="block verification is for one chain"):
        verify(target, draft, tokens, uniform, final, leniency=2.0, block=True)
    with pytest.raises(ValueError, match=r"rows, M, K \+ 1, V"):
        verify(target[:, :, :2], draft, tokens, uniform, final)
    with pytest.raises(ValueError, match="side by side"):
        gpu.verify(target.mT.contiguous().mT, draft, tokens, uniform, final, 1.0, 1.0, None, 1.0, None, None)


def test_bits_and_flags_are_the_same_mask():
    allowed = torch.rand(3, 70, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(unpack(pack(allowed), 70), allowed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("chains", [1, 8])
@pytest.mark.parametrize("leniency", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_real_shapes_in_a_graph(chains, leniency, dtype):
    """128,256 tokens, K = 8 or 4, captured and replayed on other inputs; the dispatching function itself."""
    inputs, _ = problem(8 if chains == 1 else 2, chains, 8 if chains == 1 else 4, 128_256, 3, dtype=dtype, like=0.3)
    others, _ = problem(8 if chains == 1 else 2, chains, 8 if chains == 1 else 4, 128_256, 4, dtype=dtype, like=0.3)
    static = [x.cuda() for x in inputs]
    verify(*static, leniency=leniency)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = verify(*static, leniency=leniency)
    for case in (inputs, others):
        for buffer, x in zip(static, case, strict=True):
            buffer.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        want = verify(
            *(x.float() if x.is_floating_point() and x.dtype != torch.float64 else x for x in case), leniency=leniency
        )
        agree(Verdict(*(getattr(got, f).cpu() for f in vars(got))), want, tolerance=1e-5, slack=2 if chains == 1 else 1)
