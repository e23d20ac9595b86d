"""Ancestral sampling of many texts at once: all rows advance one position per step, prompts are forced tokens.

x_t ~ softmax(logits / T) restricted to tokens with p >= min_p * max p     (Gumbel maximum; T = 0: the largest)
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.train_tiny.llama import Cache, Llama


def draw(logits: Tensor, temperature: float, min_p: float, generator: torch.Generator) -> Tensor:
    """One token per row of logits [rows, vocabulary] -> int64 [rows]."""
    if temperature == 0:
        return logits.argmax(-1)
    scores = logits.float().div_(temperature)
    if min_p > 0:
        floor = scores.amax(-1, keepdim=True) + torch.log(torch.tensor(min_p)).item()
        scores.masked_fill_(scores < floor, -torch.inf)
    noise = torch.empty_like(scores).exponential_(generator=generator).clamp_(min=1e-30).log_()
    return scores.sub_(noise).argmax(-1)


@torch.inference_mode()
def generate(
    model: Llama,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    end_ids: list[int],
    generator: torch.Generator,
    temperature: float = 1.0,
    min_p: float = 0.0,
    shared: list[int] | None = None,
    compact_every: int = 32,
) -> list[list[int]]:
    """Continuations of `shared` + prompt (token ids, the end token kept when it came), at most `max_tokens` each.

    `shared` is read once for all rows. Rows of one call share every step, so a call costs what its longest prompt and
    text cost: group equal lengths.
    """
    device, dtype = model.model.embed_tokens.weight.device, model.model.embed_tokens.weight.dtype
    shared = shared or []
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    total = int(lengths.max()) + max_tokens
    tokens = torch.zeros(len(prompts), total, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    ends = torch.tensor(end_ids, device=device)
    result: list[list[int]] = [[] for _ in prompts]
    origin = torch.arange(len(prompts), device=device)
    stop_at = lengths + max_tokens  # the first position a row does not hold
    cache = Cache(model.shape, len(prompts), len(shared) + total, device, dtype)
    if shared:
        first = Cache(model.shape, 1, len(shared), device, dtype)
        for token in shared:
            model.step(torch.tensor([token], device=device), first)
        cache.fill_from(first)

    def hand_over(rows: Tensor) -> None:
        texts, starts, stops = tokens[rows].tolist(), lengths[rows].tolist(), stop_at[rows].tolist()
        for source, text, start, stop in zip(origin[rows].tolist(), texts, starts, stops, strict=True):
            result[source] = text[start:stop]

    for position in range(total - 1):
        drawn = draw(model.step(tokens[:, position], cache), temperature, min_p, generator)
        following = position + 1
        chosen = following >= lengths
        tokens[:, following] = torch.where(chosen, drawn, tokens[:, following])
        ended = chosen & (following < stop_at) & torch.isin(tokens[:, following], ends)
        stop_at = torch.where(ended, following + 1, stop_at)
        if following % compact_every == 0 or following == total - 1:
            done = stop_at <= following + 1
            if bool(done.all()) or following == total - 1:
                hand_over(torch.arange(len(origin), device=device))
                break
            if done.float().mean() > 0.2:
                hand_over(done.nonzero().flatten())
                kept = (~done).nonzero().flatten()
                cache.keep(kept)
                tokens, lengths, stop_at, origin = tokens[kept], lengths[kept], stop_at[kept], origin[kept]
    return result
