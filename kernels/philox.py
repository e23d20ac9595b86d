"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

A number is a function of its key alone, so a draw does not depend on which row, batch or device computes it: on a CUDA device
`uniforms`, `per_slot`, `per_step` and `stratified` are one launch each, and give the same bits.

A key is two numbers in [0, 2**32), the low and the high word of a seed, or an int64 tensor [2] with them on the device of the
counters, which a captured CUDA graph reads anew at each replay.
"""

from __future__ import annotations

import torch

from smcgen.kernels.device import on_triton

MASK = 0xFFFFFFFF
PURPOSE, STEP = 24, 16  # bits below the purpose in a counter's last word, and below the step in its third

Key = tuple[int, int] | torch.Tensor


def philox(counter: tuple[torch.Tensor, ...], key: Key) -> tuple[torch.Tensor, ...]:
    """Ten rounds on four 32-bit words.

    Args:
        counter: four int64 tensors with values in [0, 2**32), broadcast together.
        key: two integers in [0, 2**32), or int64 [2].

    Returns:
        Four int64 tensors with values in [0, 2**32).
    """
    a, b, c, d = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        # The low 64 bits of a signed product are those of the unsigned one; the shift's sign bits are masked off.
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = ((right >> 32) & MASK) ^ b ^ k0, right & MASK, ((left >> 32) & MASK) ^ d ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return a, b, c, d


def uniforms(counter: tuple[torch.Tensor, ...], key: Key) -> tuple[torch.Tensor, torch.Tensor]:
    """Two independent float64 in the open interval (0, 1) per counter: 53 bits offset by half a step, never 0 and never 1."""
    if any(on_triton(word) for word in counter):
        from smcgen.kernels.gpu import philox as gpu

        return gpu.uniforms(counter, key)
    a, b, c, d = philox(counter, key)
    return _uniform(a, b), _uniform(c, d)


def _uniform(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    step = (high >> 5).double() * 67108864.0 + (low >> 6).double() + 0.5
    return step.clamp(max=9007199254740991.0) / 9007199254740992.0  # the last half step would round to 1


def per_slot(
    item: torch.Tensor, run: torch.Tensor, round: torch.Tensor, purpose: int, step: int, slots: int, key: Key
) -> torch.Tensor:
    """float64 [groups, slots] in (0, 1): the first number at (item, run, slot + step * 2**16, round + purpose * 2**24).

    Args:
        item, run, round: int64 [groups] in [0, 2**32), [0, 2**32) and [0, 2**24).
        purpose, step, slots: purpose below 256, step and slots below 2**16; numbers, fixed in a captured graph.
        key: see this file's head.
    """
    if on_triton(item):
        from smcgen.kernels.gpu import philox as gpu

        return gpu.per_slot(item, run, round, purpose, step, slots, key)
    return _pair(item, run, round, purpose, step, slots, key)[0]


def per_step(
    item: torch.Tensor, run: torch.Tensor, round: torch.Tensor, purpose: int, steps: int, slots: int, key: Key
) -> torch.Tensor:
    """float64 [groups, slots, steps]: `per_slot` of the steps 0 ... steps - 1."""
    if on_triton(item):
        from smcgen.kernels.gpu import philox as gpu

        return gpu.per_step(item, run, round, purpose, steps, slots, key)
    return torch.stack([per_slot(item, run, round, purpose, step, slots, key) for step in range(steps)], -1)


def stratified(
    item: torch.Tensor, run: torch.Tensor, round: torch.Tensor, purpose: int, step: int, history: torch.Tensor, key: Key
) -> torch.Tensor:
    """As `per_slot`, one number for each particle of `history` int64 [groups, N], but particles with equal histories draw from
    equal strata of (0, 1), dealt out at random: each number is uniform by itself, which is all that an unbiased evidence asks
    for, and m copies of a particle draw each token within one of m times its probability."""
    if on_triton(item):
        from smcgen.kernels.gpu import philox as gpu

        return gpu.stratified(item, run, round, purpose, step, history, key)
    within, deal = _pair(item, run, round, purpose, step, history.shape[1], key)
    ordered, order = history.sort(dim=-1, stable=True)
    place = torch.arange(history.shape[1], device=history.device).expand_as(history)
    fresh = torch.cat([torch.ones_like(place[:, :1], dtype=torch.bool), ordered[:, 1:] != ordered[:, :-1]], -1)
    first = torch.where(fresh, place, 0).cummax(-1).values  # where each family of equal histories begins
    size = torch.zeros_like(place).scatter_add_(-1, first, torch.ones_like(place)).gather(-1, first)
    shift = (deal.gather(-1, order.gather(-1, first)) * size).long()
    stratum = (place - first + shift) % size
    spread = (stratum + within.gather(-1, order)) / size
    return torch.empty_like(spread).scatter_(-1, order, spread)


def _pair(
    item: torch.Tensor, run: torch.Tensor, round: torch.Tensor, purpose: int, step: int, slots: int, key: Key
) -> tuple[torch.Tensor, torch.Tensor]:
    slot = torch.arange(slots, device=item.device)
    return uniforms((item[:, None], run[:, None], slot + (step << STEP), round[:, None] + (purpose << PURPOSE)), key)
