"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

A number is a function of its key alone, so a draw does not depend on which row, batch or device computes it.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Ten rounds on four 32-bit words.

    Args:
        counter: four int64 tensors with values in [0, 2**32), broadcast together.
        key: two integers in [0, 2**32).

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


def uniforms(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two independent float64 in the open interval (0, 1) per counter: 53 bits offset by half a step, never 0 and never 1."""
    a, b, c, d = philox(counter, key)
    return _uniform(a, b), _uniform(c, d)


def _uniform(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return ((high >> 5).double() * 67108864.0 + (low >> 6).double() + 0.5) / 9007199254740992.0
