"""The exact laws of a short list of texts under the embedded model, by reading every spelling of each: nothing is sampled.

The model is read by transformers alone, not by smcgen, so that the tutorials check the engine against something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

import smcgen as sg

FLOOR = math.log(1e-7)  # a next token less likely than this is not followed; what is lost is counted


class Laws(NamedTuple):
    """What `enumerate_texts` finds.

    Attributes:
        log_evidence: log of the sum of p(x)**alpha over every spelling x of every text.
        conditioned: text -> probability under p**alpha given that the text is one of the list.
        masked: text -> probability if each token is drawn from p(token)**alpha among the allowed ones, and no weight is kept.
        missed: the largest probability that spellings which were not followed can have together.
    """

    log_evidence: float
    conditioned: dict[str, float]
    masked: dict[str, float]
    missed: float


@cache
def _model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(sg.__file__).parent / "models" / "tiny"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def _read(prefixes: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """log p of the next token after prefixes of one length, float64 [prefixes, V]."""
    return _model()(torch.tensor(prefixes)).logits[:, -1].double().log_softmax(-1)


@torch.inference_mode()
def enumerate_texts(texts: Sequence[str], prompt: str, alpha: float = 1.0, chat: bool = True) -> Laws:
    """The laws over `texts` after `prompt`, every text followed by an end token."""
    vocabulary = sg.LM("tiny").load().vocabulary
    start = vocabulary.encode(prompt, chat).ids
    ends = [text.encode() for text in texts]
    weight = dict.fromkeys(ends, -math.inf)
    masked = dict.fromkeys(ends, 0.0)
    missed = 0.0
    # Prefixes of one length at a time: (token ids, bytes, log p, log probability under masking).
    front = [((), b"", 0.0, 0.0)]
    while front:
        rows = _read(tuple((*start, *tokens) for tokens, *_ in front))
        following = []
        for row, (tokens, spelled, log_p, log_q) in zip(rows, front, strict=True):
            rest = {text[len(spelled) :] for text in ends if text.startswith(spelled)}
            allowed = [i for i, piece in enumerate(vocabulary.tokens) if piece and any(r.startswith(piece) for r in rest)]
            allowed += vocabulary.end_ids if b"" in rest else ()
            local = alpha * row[allowed]
            for token, step in zip(allowed, (local - local.logsumexp(0)).tolist(), strict=True):
                p, q = float(row[token]), log_q + step
                if token in vocabulary.end_ids:
                    weight[spelled] = float(torch.logaddexp(torch.tensor(weight[spelled]), torch.tensor(alpha * (log_p + p))))
                    masked[spelled] += math.exp(q)
                elif p > FLOOR:
                    following.append(((*tokens, token), spelled + vocabulary.tokens[token], log_p + p, q))
                else:
                    missed += math.exp(log_p + p)
        front = following
    logs = torch.tensor(list(weight.values()), dtype=torch.float64)
    return Laws(
        log_evidence=float(logs.logsumexp(0)),
        conditioned=dict(zip(texts, logs.softmax(0).tolist(), strict=True)),
        masked={text: masked[text.encode()] for text in texts},
        missed=missed,
    )


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Total variation distance of two laws: the largest difference that they can have on any set of texts, from 0 to 1."""
    return 0.5 * sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {**one, **other})
