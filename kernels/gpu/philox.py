"""Philox numbers in one launch each, the same to the last bit as in `smcgen.kernels.philox`."""
# Triton's own types do not describe its language.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.rows import lay, lead, offset

BLOCK = 128  # numbers, or particles of a group, per program
PURPOSE, STEP = 24, 16  # bits below the purpose and below the step in their words, as in `smcgen.kernels.philox`

Key = tuple[int, int] | torch.Tensor


@triton.jit
def _pair(Key, k0, k1, a, b, c, d, DEVICE_KEY: tl.constexpr):
    """Two float64 in (0, 1) for each counter (a, b, c, d), whose words may have any integer type and one shape."""
    if DEVICE_KEY:
        low, high = tl.load(Key), tl.load(Key + 1)
    else:
        low, high = tl.cast(k0, tl.int64), tl.cast(k1, tl.int64)
    a, b, c, d = tl.philox(low | (high << 32), a.to(tl.uint32), b.to(tl.uint32), c.to(tl.uint32), d.to(tl.uint32))
    return _uniform(a, b), _uniform(c, d)


@triton.jit
def _uniform(high, low):
    step = (high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64) + 0.5
    step -= tl.where(step >= 9007199254740992.0, 1.0, 0.0)  # the last half step would round to 1
    return step / 9007199254740992.0


@triton.jit
def _slots(Key, k0, k1, Item, Run, Round, group, slot, step, purpose, item_s, run_s, round_s,
           STEP: tl.constexpr, PURPOSE: tl.constexpr, DEVICE_KEY: tl.constexpr):  # fmt: skip
    """The pairs of the slots `slot` of a group."""
    c = slot + (tl.cast(step, tl.int64) << STEP)
    zero = c * 0
    item, run = tl.load(Item + group * item_s), tl.load(Run + group * run_s)
    round = tl.load(Round + group * round_s) + (tl.cast(purpose, tl.int64) << PURPOSE)
    return _pair(Key, k0, k1, zero + item, zero + run, c, zero + round, DEVICE_KEY)


@triton.jit(do_not_specialize=["k0", "k1", "size"])
def _uniforms(A, B, C, D, Key, k0, k1, U, W, size, d1, d2, a0, a1, a2, b0, b1, b2, c0, c1, c2, e0, e1, e2,
              BLOCK: tl.constexpr, DEVICE_KEY: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    a = tl.load(A + offset(i, d1, d2, a0, a1, a2), mask=inside, other=0)
    b = tl.load(B + offset(i, d1, d2, b0, b1, b2), mask=inside, other=0)
    c = tl.load(C + offset(i, d1, d2, c0, c1, c2), mask=inside, other=0)
    d = tl.load(D + offset(i, d1, d2, e0, e1, e2), mask=inside, other=0)
    u, w = _pair(Key, k0, k1, a, b, c, d, DEVICE_KEY)
    tl.store(U + i, u, mask=inside)
    tl.store(W + i, w, mask=inside)


@triton.jit(do_not_specialize=["k0", "k1", "step", "purpose"])
def _per_slot(Item, Run, Round, Key, k0, k1, step, purpose, Out, item_s, run_s, round_s, N,
              STEP: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr, DEVICE_KEY: tl.constexpr):  # fmt: skip
    """One program per (group, block of slots, step from `step` on)."""
    group = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step += tl.program_id(2)
    u, _ = _slots(Key, k0, k1, Item, Run, Round, group, slot, step, purpose, item_s, run_s, round_s, STEP, PURPOSE, DEVICE_KEY)
    tl.store(Out + (group * N + slot) * tl.num_programs(2) + tl.program_id(2), u, mask=slot < N)


@triton.jit(do_not_specialize=["k0", "k1", "step", "purpose"])
def _stratified(Item, Run, Round, History, Key, k0, k1, step, purpose, Out, item_s, run_s, round_s, history_s, N,
                STEP: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
                DEVICE_KEY: tl.constexpr):  # fmt: skip
    """One program per (group, block of particles); each compares its particles with all."""
    group = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    History += group * history_s
    own = tl.load(History + slot, mask=slot < N, other=0)
    size = tl.zeros([BLOCK], tl.int32)  # of the particle's family
    rank = tl.zeros([BLOCK], tl.int32)  # the particle's place in it
    first = tl.full([BLOCK], 2147483647, tl.int32)  # the slot of the family's first
    for start in range(0, N, OTHERS):
        other = start + tl.arange(0, OTHERS)
        history = tl.load(History + other, mask=other < N, other=0)
        same = (history[None, :] == own[:, None]) & (other < N)[None, :]
        size += tl.sum(same.to(tl.int32), 1)
        rank += tl.sum((same & (other[None, :] < slot[:, None])).to(tl.int32), 1)
        first = tl.minimum(first, tl.min(tl.where(same, other[None, :], 2147483647), 1))
    within, _ = _slots(
        Key, k0, k1, Item, Run, Round, group, slot, step, purpose, item_s, run_s, round_s, STEP, PURPOSE, DEVICE_KEY
    )
    _, deal = _slots(
        Key, k0, k1, Item, Run, Round, group, first, step, purpose, item_s, run_s, round_s, STEP, PURPOSE, DEVICE_KEY
    )
    size = tl.maximum(size, 1)  # lanes past the end
    stratum = (rank + (deal * size.to(tl.float64)).to(tl.int32)) % size
    tl.store(Out + group * N + slot, (stratum.to(tl.float64) + within) / size.to(tl.float64), mask=slot < N)


def _key(key: Key, like: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The key as a tensor (any, if it is given as numbers) and as two numbers."""
    return (key, 0, 0) if isinstance(key, torch.Tensor) else (like, *key)


def uniforms(counter: tuple[torch.Tensor, ...], key: Key) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.philox.uniforms`."""
    shape = torch.broadcast_shapes(*(word.shape for word in counter))
    u, w = torch.empty(2, *shape, dtype=torch.float64, device=counter[0].device).unbind()
    if u.numel() > 0:
        words, strides = zip(*(lay(word[..., None], shape) for word in counter), strict=True)
        grid = (triton.cdiv(u.numel(), BLOCK),)
        _uniforms[grid](
            *words, *_key(key, words[0]), u, w, u.numel(), *lead(shape)[1:], *(s for three in strides for s in three),
            BLOCK, isinstance(key, torch.Tensor), num_warps=4,
        )  # fmt: skip
    return u, w


def per_slot(
    item: torch.Tensor, run: torch.Tensor, round: torch.Tensor, purpose: int, step: int, slots: int, key: Key
) -> torch.Tensor:
    """As `kernels.philox.per_slot`."""
    return _per_slots(item, run, round, purpose, step, 1, slots, key)[..., 0]


def per_step(
    item: torch.Tensor, run: torch.Tensor, round: torch.Tensor, purpose: int, steps: int, slots: int, key: Key
) -> torch.Tensor:
    """As `kernels.philox.per_step`."""
    return _per_slots(item, run, round, purpose, 0, steps, slots, key)


def _per_slots(
    item: torch.Tensor, run: torch.Tensor, round: torch.Tensor, purpose: int, step: int, steps: int, slots: int, key: Key
) -> torch.Tensor:
    """float64 [groups, slots, steps], of the steps from `step` on."""
    out = torch.empty(len(item), slots, steps, dtype=torch.float64, device=item.device)
    if out.numel() > 0:
        block = min(BLOCK, triton.next_power_of_2(slots))
        _per_slot[(len(item), triton.cdiv(slots, block), steps)](
            item, run, round, *_key(key, item), step, purpose, out, item.stride(0), run.stride(0), round.stride(0), slots,
            STEP, PURPOSE, block, isinstance(key, torch.Tensor), num_warps=math.ceil(block / 32),
        )  # fmt: skip
    return out


def stratified(
    item: torch.Tensor, run: torch.Tensor, round: torch.Tensor, purpose: int, step: int, history: torch.Tensor, key: Key
) -> torch.Tensor:
    """As `kernels.philox.stratified`."""
    groups, slots = history.shape
    out = torch.empty(groups, slots, dtype=torch.float64, device=item.device)
    if out.numel() > 0:
        history = history if history.stride(1) == 1 or slots == 1 else history.contiguous()
        columns = triton.next_power_of_2(slots)
        block, others = min(32, columns), min(64, columns)
        _stratified[(groups, triton.cdiv(slots, block))](
            item, run, round, history, *_key(key, item), step, purpose, out, item.stride(0), run.stride(0), round.stride(0),
            history.stride(0), slots, STEP, PURPOSE, block, others, isinstance(key, torch.Tensor),
            num_warps=1 if slots <= 16 else 4,
        )  # fmt: skip
    return out
