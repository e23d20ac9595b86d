"""What the pair is worth on held-out prompts: perplexity, draft quality for SMC, accuracy. Plain torch, no engine.

A block of K tokens drawn from the draft q after a prefix has the weight w = prod p / q; tokens after an end token do
not count. N blocks after one prefix have ESS = (sum w)^2 / sum w^2 and the evidence estimate mean(w), of mean 1.
Standard errors are over prompts.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.train_tiny import tasks
from benchmarks.train_tiny.data import WINDOW, chat_prompt, document, encode
from benchmarks.train_tiny.generate import generate
from benchmarks.train_tiny.llama import Llama
from benchmarks.train_tiny.teacher import Text

PARTICLES = 16
BLOCKS = (4, 8)
BEST_OF = (8, 16, 32)


def mean_and_error(values: Tensor) -> dict[str, float]:
    """Mean and its standard error over the first (only) dimension."""
    values = values.double()
    return {"mean": values.mean().item(), "se": (values.std() / len(values) ** 0.5).item()}


def padded(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """int64 [rows, longest] padded with 0 on the right, and the lengths."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    tokens = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    return tokens, lengths


@torch.inference_mode()
def token_log_probs(model: Llama, sequences: list[list[int]], rows: int = 128) -> list[Tensor]:
    """log p of every token but the first, per sequence, float32 on the CPU."""
    device, result = model.model.embed_tokens.weight.device, []
    for start in range(0, len(sequences), rows):
        tokens, lengths = padded(sequences[start : start + rows])
        tokens = tokens.to(device)
        log_p = model(tokens[:, :-1]).float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].cpu()
        result.extend(row[: length - 1] for row, length in zip(log_p, lengths.tolist(), strict=True))
    return result


def prompt_ids(tokenizer: PreTrainedTokenizerFast, texts: list[Text]) -> list[list[int]]:
    """The prompt of each held-out text; of a plain text its first words."""
    written = [" ".join(t.text.split(" ")[:4]) if t.prompt is None else chat_prompt(t.prompt) for t in texts]
    return encode(tokenizer, written)


def perplexity(model: Llama, tokenizer: PreTrainedTokenizerFast, held: dict[str, list[Text]]) -> dict[str, dict[str, float]]:
    """By kind: exp(mean negative log-likelihood per token) of answers; of plain texts, all tokens but the first."""
    found = {}
    for kind, texts in held.items():
        sequences = [ids[:WINDOW] for ids in encode(tokenizer, [document(text) for text in texts])]
        prompts = encode(tokenizer, ["" if text.prompt is None else chat_prompt(text.prompt) for text in texts])
        log_p = token_log_probs(model, sequences)
        kept = [row[max(0, len(prompt) - 1) :] for row, prompt in zip(log_p, prompts, strict=True)]
        total, count = sum(row.sum().item() for row in kept), sum(len(row) for row in kept)
        found[kind] = {"perplexity": float(torch.tensor(-total / count).exp()), "tokens": count, "texts": len(texts)}
    return found


@torch.inference_mode()
def acceptance(base: Llama, draft: Llama, prompts: list[list[int]], answers: list[list[int]], rows: int = 64) -> Tensor:
    """Mean over the answer's positions of sum_v min(p, q), per answer that is not empty."""
    device, result = base.model.embed_tokens.weight.device, []
    pairs = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer]
    for start in range(0, len(pairs), rows):
        chunk = pairs[start : start + rows]
        tokens, _ = padded([prompt + answer for prompt, answer in chunk])
        tokens = tokens.to(device)
        overlap = torch.minimum(base(tokens).float().softmax(-1), draft(tokens).float().softmax(-1)).sum(-1).cpu()
        for row, (prompt, answer) in zip(overlap, chunk, strict=True):
            result.append(row[len(prompt) - 1 : len(prompt) + len(answer) - 1].mean())
    return torch.stack(result)


def prefixes(prompts: list[list[int]], answers: list[list[int]], seed: int) -> list[list[int]]:
    """Each prompt with a random share of the base model's own answer, which has not ended there."""
    rng = random.Random(seed)
    return [prompt + answer[: rng.randrange(len(answer))] for prompt, answer in zip(prompts, answers, strict=True) if answer]


def block_log_weights(
    base: Llama, draft: Llama, contexts: list[list[int]], end_ids: list[int], generator: torch.Generator
) -> Tensor:
    """log w after 1 to K tokens of each drawn block, float64 [contexts, PARTICLES, K] for the largest K of BLOCKS."""
    longest = max(BLOCKS)
    repeated = [context for context in contexts for _ in range(PARTICLES)]
    blocks = generate(draft, repeated, max_tokens=longest, end_ids=end_ids, generator=generator)
    sequences = [context + block for context, block in zip(repeated, blocks, strict=True)]
    difference = torch.zeros(len(sequences), longest, dtype=torch.float64)
    scores = zip(token_log_probs(base, sequences), token_log_probs(draft, sequences), repeated, strict=True)
    for row, (log_p, log_q, context) in enumerate(scores):
        increments = (log_p.double() - log_q.double())[len(context) - 1 :]
        difference[row, : len(increments)] = increments
    return difference.cumsum(-1).view(len(contexts), PARTICLES, longest)


def block_quality(log_weights: Tensor) -> dict[str, dict[str, float]]:
    """For every K of BLOCKS: ESS / N, variance of log w within a prefix, and of the evidence estimate over prefixes."""
    found = {}
    for block in BLOCKS:
        log_w = log_weights[..., block - 1]
        log_z = log_w.logsumexp(-1) - torch.tensor(float(log_w.shape[1])).log()
        ess = (2 * log_w.logsumexp(-1) - (2 * log_w).logsumexp(-1)).exp() / log_w.shape[1]
        found[f"ess_share_{block}"] = mean_and_error(ess)
        found[f"log_weight_variance_{block}"] = mean_and_error(log_w.var(-1))
        found[f"log_evidence_variance_{block}"] = mean_and_error((log_z - log_z.mean()).square())
        found[f"evidence_{block}"] = mean_and_error(log_z.exp())
    return found


def draft_quality(
    base: Llama,
    drafts: dict[str, Llama],
    tokenizer: PreTrainedTokenizerFast,
    held: dict[str, list[Text]],
    *,
    per_kind: int,
    end_ids: list[int],
    seed: int,
) -> dict[str, dict[str, object]]:
    """Acceptance and block quality of every draft on the same answers and prefixes, overall and by kind of text."""
    device = base.model.embed_tokens.weight.device
    texts = [(kind, text) for kind, items in held.items() for text in items[:per_kind]]
    prompts = prompt_ids(tokenizer, [text for _, text in texts])
    generator = torch.Generator(device).manual_seed(seed)
    answers = generate(base, prompts, max_tokens=128, end_ids=end_ids, generator=generator)
    kinds = [kind for (kind, _), answer in zip(texts, answers, strict=True) if answer]
    contexts = prefixes(prompts, answers, seed)
    found: dict[str, dict[str, object]] = {}
    for name, draft in drafts.items():
        overlap = acceptance(base, draft, prompts, answers)
        log_weights = block_log_weights(base, draft, contexts, end_ids, torch.Generator(device).manual_seed(seed))
        by_kind = {}
        for kind in dict.fromkeys(kinds):
            chosen = torch.tensor([i for i, other in enumerate(kinds) if other == kind])
            by_kind[kind] = {"acceptance": mean_and_error(overlap[chosen])} | block_quality(log_weights[chosen])
        found[name] = {"prefixes": len(contexts), "acceptance": mean_and_error(overlap)} | block_quality(log_weights)
        found[name]["by_kind"] = by_kind
    return found


def accuracy(
    base: Llama,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[tasks.Example],
    *,
    max_tokens: int,
    end_ids: list[int],
    seed: int,
) -> dict[str, object]:
    """Share of right answers: greedy, at three temperatures, the likeliest of N draws at T = 1; overall and by task."""
    generator = torch.Generator(base.model.embed_tokens.weight.device).manual_seed(seed)
    prompts = encode(tokenizer, [chat_prompt(example.prompt) for example in examples])

    def answers(temperature: float, draws: int) -> tuple[list[list[int]], Tensor]:
        """Token ids of the answers and whether they are right, bool [examples, draws]."""
        repeated = [prompt for prompt in prompts for _ in range(draws)]
        ids = generate(base, repeated, max_tokens=max_tokens, end_ids=end_ids, generator=generator, temperature=temperature)
        texts = tokenizer.backend_tokenizer.decode_batch(ids)
        right = [tasks.correct(examples[i // draws], text) for i, text in enumerate(texts)]
        return ids, torch.tensor(right).view(-1, draws)

    most = max(BEST_OF)
    greedy = answers(0.0, 1)[1][:, 0].float()
    ids, right = answers(1.0, most)
    sequences = [prompts[i // most] + answer for i, answer in enumerate(ids)]
    log_p = token_log_probs(base, sequences)
    totals = torch.stack([row[len(prompts[i // most]) - 1 :].sum() for i, row in enumerate(log_p)]).view(-1, most)
    found: dict[str, object] = {"items": len(examples), "greedy": mean_and_error(greedy)}
    found["temperature_1"] = mean_and_error(right.float().mean(-1))
    for temperature in (0.5, 0.25):
        found[f"temperature_{temperature}"] = mean_and_error(answers(temperature, 4)[1].float().mean(-1))
    for count in BEST_OF:
        best = totals[:, :count].argmax(-1, keepdim=True)
        found[f"best_of_{count}"] = mean_and_error(right.gather(1, best)[:, 0].float())
    likeliest = right.gather(1, totals.argmax(-1, keepdim=True))[:, 0].float()
    for name, outcomes in (("greedy", greedy), (f"best_of_{most}", likeliest)):
        by_task: dict[str, list[Tensor]] = {}
        for example, outcome in zip(examples, outcomes, strict=True):
            by_task.setdefault(example.task, []).append(outcome)
        found[f"{name}_by_task"] = {task: mean_and_error(torch.stack(seen)) for task, seen in by_task.items()}
    return found


def occurrences(tokenizer: PreTrainedTokenizerFast, examples: list[tasks.Example], windows: np.ndarray) -> int:
    """How many of the examples' prompts stand somewhere in the training windows, token by token."""
    text = np.ascontiguousarray(windows.astype(np.uint16)).tobytes()
    prompts = encode(tokenizer, [chat_prompt(example.prompt) for example in examples])
    return sum(np.array(prompt, np.uint16).tobytes() in text for prompt in prompts)
