"""Distils drafts from the base model under three objectives, all in one loop over the same windows.

With p the base model's and q the draft's next-token law, the loss is the mean over positions of

    forward_kl  sum_v p log(p / q)          covers what the base model says
    reverse_kl  sum_v q log(q / p)          says what the base model finds likely
    renyi2      log sum_v p^2 / q           log E_q[w^2], the second moment of an importance weight w = p / q

The last is what the effective sample size of a block depends on: E_q[w^2] multiplies along the block.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.train_tiny.data import WINDOW
from benchmarks.train_tiny.llama import Llama, Shape
from benchmarks.train_tiny.train import Budget, Windows, draft_shape, learning_rate_share, optimiser

OBJECTIVES = ("forward_kl", "reverse_kl", "renyi2")


def divergence(kind: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The objective `kind` per position: log probabilities [..., vocabulary] -> [...]."""
    if kind == "forward_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    return torch.logsumexp(2 * log_p - log_q, dim=-1)


def _loss(draft: Llama, tokens: Tensor, log_p: Tensor, kind: str) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = draft(tokens)
    return divergence(kind, log_p.float(), logits.float().log_softmax(-1)).mean()


def _log_p(base: Llama, tokens: Tensor) -> Tensor:
    """fp32 log probabilities of the base model, without gradient."""
    with torch.no_grad():
        return base(tokens).float().log_softmax(-1)


def distil(
    base: Llama,
    windows: np.ndarray,
    *,
    shape: Shape | None = None,
    device: torch.device,
    steps: int | None,
    minutes: float | None,
    rows: int,
    learning_rate: float,
    seed: int,
    log: Callable[[str], None],
) -> tuple[dict[str, Llama], dict[str, float]]:
    """One draft per objective, each from the same start on the same windows in the same order."""
    base = base.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    drafts, adams = {}, {}
    for kind in OBJECTIVES:
        torch.manual_seed(seed)
        drafts[kind] = Llama(shape or draft_shape(base.shape.vocab_size)).to(device)
        adams[kind] = optimiser(drafts[kind], learning_rate, device)
    source, budget = Windows(windows, device, seed), Budget(steps, minutes, device)
    compiled = device.type == "cuda"
    log_p_of = torch.compile(_log_p) if compiled else _log_p
    loss_of = torch.compile(_loss) if compiled else _loss
    start, step, losses = time.perf_counter(), 0, []
    while step < budget.steps:
        tokens = source.take(rows)[:, :-1]
        log_p = log_p_of(base, tokens)
        share, row = learning_rate_share(step, budget.steps), []
        for kind, draft in drafts.items():
            for group in adams[kind].param_groups:
                group["lr"] = learning_rate * share
            loss = loss_of(draft, tokens, log_p, kind)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            adams[kind].step()
            adams[kind].zero_grad(set_to_none=True)
            row.append(loss.detach())
        losses.append(torch.stack(row))
        step += 1
        budget.tick(step)
        if step % 500 == 0 or step == budget.steps:
            means = torch.stack(losses[-500:]).mean(0).tolist()
            speed = step * rows * WINDOW / (time.perf_counter() - start) / 1e6
            named = ", ".join(f"{kind} {mean:.4f}" for kind, mean in zip(OBJECTIVES, means, strict=True))
            log(f"step {step} of {budget.steps}: {named}, {speed:.2f} M tokens/s")
    means = torch.stack(losses[-500:]).mean(0).tolist()
    facts = {"steps": budget.steps, "tokens": budget.steps * rows * WINDOW, "learning_rate": learning_rate}
    facts |= {"seconds": time.perf_counter() - start, "parameters": drafts[OBJECTIVES[0]].parameter_count()}
    facts |= {f"loss_{kind}": mean for kind, mean in zip(OBJECTIVES, means, strict=True)}
    return {kind: draft.eval() for kind, draft in drafts.items()}, facts
