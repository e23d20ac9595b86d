"""A reward on SmolLM2-135M-Instruct: it rises with beta and the evidence falls. Slow; SMCGEN_SMOLLM2 names the GGUF file."""

from __future__ import annotations

import os

import numpy as np
import pytest

import smcgen as sg

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SMCGEN_SMOLLM2" not in os.environ, reason="SMCGEN_SMOLLM2 names no GGUF file"),
]
RUNS = 8


def few_e(texts: list[str]) -> list[float]:
    """Minus the number of the letter e: at most 0, so that the evidence falls as beta grows."""
    return [-float(text.count("e")) for text in texts]


@pytest.mark.parametrize("at", ["end", "block"])
def test_the_reward_rises_and_the_evidence_falls(at):
    lm = sg.LM(os.environ["SMCGEN_SMOLLM2"])
    means, errors, evidences = [], [], [(0.0, 0.0)]
    for beta in (0.0, 0.3, 1.5):
        target = lm * sg.reward(few_e, beta, at=at) if beta else lm
        posts = sg.sample(target, ["Tell me about the sea."] * RUNS, particles=8, max_tokens=16, seed=1)
        rewards = [sum(row.probability * few_e([row.text])[0] for row in post.table()) for post in posts]
        means.append(np.mean(rewards))
        errors.append(np.std(rewards, ddof=1) / RUNS**0.5)
        z = np.exp(posts.log_evidence[:, 0])
        if beta:
            evidences.append((np.log(z.mean()), z.std(ddof=1) / z.mean() / RUNS**0.5))
        print(
            f"at={at}, beta={beta}: reward {means[-1]:.2f} ± {errors[-1]:.2f}, "
            f"log evidence {evidences[-1][0]:.2f} ± {evidences[-1][1]:.2f}"
        )
    for i in (1, 2):
        assert means[i] - means[i - 1] > 2 * np.hypot(errors[i], errors[i - 1])
        assert evidences[i - 1][0] - evidences[i][0] > 2 * np.hypot(evidences[i][1], evidences[i - 1][1])
