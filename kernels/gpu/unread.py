"""`smcgen.kernels.unread` in one launch."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _unread(
    Tokens, Length, Alive, Read, PromptLength, PromptLast, New, NewCounts, Out, Counts,
    samples, particles, room, new_g, new_n,
    WIDTH: tl.constexpr, T: tl.constexpr, NEW: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One program for each row, copy by copy."""
    row = tl.program_id(0).to(tl.int64)
    sample, j = row % samples, tl.arange(0, P)
    length = tl.load(Length + sample)
    counts = tl.load(PromptLength + row // particles) + length - tl.load(Read + row)
    at = length - counts + j
    place = tl.minimum(tl.maximum(at, 0), room - 1)
    token = tl.load(Tokens + sample * room + place, mask=(j < WIDTH) & (at >= 0), other=0)
    token = tl.where(at < 0, tl.load(PromptLast + row // particles), token)
    if NEW:
        New += sample // particles * new_g + sample % particles * new_n
        token = tl.where(j < WIDTH, token, tl.load(New + j - WIDTH, mask=(j >= WIDTH) & (j < WIDTH + T), other=0))
        counts += tl.load(NewCounts + sample)
    tl.store(Out + row * (WIDTH + T) + j, token, mask=j < WIDTH + T)
    tl.store(Counts + row, tl.where(tl.load(Alive + sample) != 0, counts, 0))


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
    """As `kernels.unread.unread`."""
    more, more_counts = (tokens[..., :0], length) if new is None else new
    size = more.shape[-1]
    out = torch.empty(*read.shape, width + size, dtype=torch.int64, device=tokens.device)
    counts = torch.empty(read.shape, dtype=torch.int64, device=tokens.device)
    if size > 1 and more.stride(-1) != 1:
        more = more.contiguous()
    given = (x.contiguous() for x in (tokens, length, alive, read, prompt_length, prompt_last))
    _unread[(read.numel(),)](
        *given, more, more_counts.contiguous(), out, counts,
        length.numel(), length.shape[1], tokens.shape[-1], *more.stride()[:2],
        WIDTH=width, T=size, NEW=new is not None, P=triton.next_power_of_2(width + size), num_warps=1,
    )  # fmt: skip
    return out, counts
