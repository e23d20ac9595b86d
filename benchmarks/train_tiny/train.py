"""Trains the base model on packed windows: AdamW, bf16 compute with fp32 weights, warm-up then cosine decay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.train_tiny.data import WINDOW
from benchmarks.train_tiny.llama import Llama, Shape

WARM_UP = 200
FINAL_SHARE = 0.02  # of the peak learning rate


def base_shape(vocab_size: int) -> Shape:
    return Shape(vocab_size, 256, 768, 8, 4, 2, WINDOW)


def draft_shape(vocab_size: int) -> Shape:
    return Shape(vocab_size, 128, 384, 2, 2, 1, WINDOW)


class Windows:
    """Windows int32 [n, length] on the device, drawn without replacement in an order fixed by the seed."""

    def __init__(self, windows: np.ndarray, device: torch.device, seed: int) -> None:
        self.tokens, self.seed, self.epoch, self.at = torch.from_numpy(windows.astype(np.int32)).to(device), seed, -1, 0
        self.order = torch.empty(0, dtype=torch.long)

    def take(self, count: int) -> Tensor:
        """The next windows, int64 [count, length]; a remainder smaller than `count` is skipped."""
        if self.at + count > len(self.order):
            self.epoch, self.at = self.epoch + 1, 0
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            self.order = torch.randperm(len(self.tokens), generator=generator).to(self.tokens.device)
        self.at += count
        return self.tokens[self.order[self.at - count : self.at]].long()


def optimiser(model: Llama, learning_rate: float, device: torch.device) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def learning_rate_share(step: int, steps: int) -> float:
    warm_up = min(WARM_UP, steps // 4)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Budget:
    """How many steps to make: a fixed number, or what fits the minutes as measured over 40 early steps."""

    def __init__(self, steps: int | None, minutes: float | None, device: torch.device) -> None:
        self.steps, self.minutes, self.device = steps or 10**9, minutes, device
        self.fixed, self.start, self.began = steps is not None, time.perf_counter(), 0.0

    def tick(self, step: int) -> None:
        """To be called at the end of every step."""
        if self.fixed or step not in (20, 60):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if step == 20:
            self.began = now
        else:
            left = (self.minutes or 1.0) * 60 - (now - self.start)
            self.steps, self.fixed = 60 + max(1, int(left / ((now - self.began) / 40))), True


def causal_loss(model: Llama, windows: Tensor) -> Tensor:
    """Mean negative log-likelihood per token, natural."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def train_base(
    windows: np.ndarray,
    vocab_size: int,
    *,
    shape: Shape | None = None,
    device: torch.device,
    steps: int | None,
    minutes: float | None,
    rows: int,
    learning_rate: float,
    seed: int,
    checkpoint: Path,
    log: Callable[[str], None],
) -> tuple[Llama, dict[str, float]]:
    """Trains from scratch, or goes on from the checkpoint, which is written about every two minutes."""
    torch.manual_seed(seed)
    model = Llama(shape or base_shape(vocab_size)).to(device)
    adam, source, budget = (
        optimiser(model, learning_rate, device),
        Windows(windows, device, seed),
        Budget(steps, minutes, device),
    )
    step, losses = 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        step, budget.steps, budget.fixed = state["step"], state["steps"], True
        source.seed += step  # other orders than those already seen
        log(f"going on from step {step} of {budget.steps}")
    loss_of = torch.compile(causal_loss) if device.type == "cuda" else causal_loss
    start = saved = time.perf_counter()
    while step < budget.steps:
        rate = learning_rate * learning_rate_share(step, budget.steps)
        for group in adam.param_groups:
            group["lr"] = rate
        loss = loss_of(model, source.take(rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        step += 1
        budget.tick(step)
        if step % 500 == 0 or step == budget.steps:
            mean = torch.stack(losses[-500:]).mean().item()
            now = time.perf_counter()
            speed = len(losses) * rows * WINDOW / (now - start) / 1e6
            log(f"step {step} of {budget.steps}: loss {mean:.4f}, {speed:.2f} M tokens/s")
            if now - saved > 120 and budget.fixed and step < budget.steps:
                state = {"model": model.state_dict(), "adam": adam.state_dict(), "step": step, "steps": budget.steps}
                torch.save(state, checkpoint)
                saved = now
    last = torch.stack(losses[-500:]).mean().item() if losses else float("nan")
    facts = {
        "steps": budget.steps,
        "tokens": budget.steps * rows * WINDOW,
        "loss": last,
        "learning_rate": learning_rate,
    }
    return model.eval(), facts | {"seconds": time.perf_counter() - start, "parameters": model.parameter_count()}
