"""What a model has to read of samples that have grown: the last tokens that it has not read, and new ones after them."""

from __future__ import annotations

import torch

from smcgen.kernels.device import on_triton


def unread(
    tokens: torch.Tensor,
    length: torch.Tensor,
    alive: torch.Tensor,
    read: torch.Tensor,
    prompt_length: torch.Tensor,
    prompt_last: torch.Tensor,
    width: int,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of prompt and sample from place `read` on.

    Args:
        tokens, length: int64 [G, N, L] and [G, N], the samples.
        alive: bool [G, N]; the others have nothing to read.
        read: int64 [C, G, N], tokens of prompt and sample that each of C copies has read.
        prompt_length, prompt_last: int64 [C, G, 1], at least 1, and the prompt's last token: no sample is further behind.
        width: the most that can be unread.
        new: int64 [G, N, T] and [G, N], new tokens and how many of them are real; then `width` is 1 and one token is unread.

    Returns:
        int64 [C, G, N, width + T], and how many of them are real, int64 [C, G, N].
    """
    if on_triton(tokens):
        from smcgen.kernels.gpu import unread as gpu

        return gpu.unread(tokens, length, alive, read, prompt_length, prompt_last, width, new)
    counts = prompt_length + length - read
    at = (length - counts)[..., None] + torch.arange(width, device=tokens.device)
    found = tokens.expand(len(read), -1, -1, -1).gather(-1, at.clamp(0, tokens.shape[-1] - 1))
    found = torch.where(at < 0, prompt_last[..., None], found)
    if new is not None:
        found, counts = torch.cat([found, new[0].expand(len(read), -1, -1, -1)], -1), counts + new[1]
    return found, torch.where(alive, counts, 0)
