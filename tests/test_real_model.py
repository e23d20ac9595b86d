"""SmolLM2-135M-Instruct against exact answers. Slow; SMCGEN_SMOLLM2 names the GGUF file (see the README).

The truth sums over all spellings of a text and was found by enumeration (tests/data).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import smcgen as sg

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SMCGEN_SMOLLM2" not in os.environ, reason="SMCGEN_SMOLLM2 names no GGUF file"),
]
DATA = Path(__file__).parent / "data"
LANGUAGES = json.loads((DATA / "exact_posterior.json").read_text())["tasks"]
POWERS = json.loads((DATA / "power_exact.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def lm() -> sg.LM:
    return sg.LM(os.environ["SMCGEN_SMOLLM2"])


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("bits", [None, 8])
def test_finite_languages(lm, name, bits):
    task = LANGUAGES[name]
    pattern = "|".join(map(re.escape, task["texts"]))
    options = {} if bits is None else {"draft": lm.quantized(bits), "block": 2}
    post = sg.sample(lm * sg.regex(pattern), task["prompt"], particles=64, runs=16, max_tokens=12, seed=0, **options)
    estimate = {row.text: row.probability for row in post.table()}
    distance = 0.5 * sum(abs(p - estimate.get(text, 0)) for text, p in task["posterior_all"].items())
    print(f"{name}: log evidence {post.log_evidence:.4f} ± {post.log_evidence_se:.4f} ({task['log_evidence_all']:.4f}), "
          f"total variation {distance:.4f}")  # fmt: skip
    assert abs(post.log_evidence - task["log_evidence_all"]) < 0.1
    assert distance < 0.05
    assert set(estimate) <= set(task["texts"])


@pytest.mark.parametrize("alpha", [2, 4])
@pytest.mark.parametrize("name", POWERS)
def test_powers(lm, name, alpha):
    task = POWERS[name]
    truth = task["alpha"][str(alpha)]
    post = sg.sample(lm**alpha, task["prompt_ids"], particles=64, runs=16, max_tokens=24, seed=0)
    estimate = {row.text: row.probability for row in post.table()}
    for top in truth["top"]:
        assert top["prob_lower"] - 0.05 < estimate.get(top["text"], 0) < top["prob_upper"] + 0.05, top["text"]
    assert truth["log_Z_lower"] - 0.1 < post.log_evidence < truth["log_Z_upper"] + 0.1


@pytest.mark.parametrize("alpha", [1, 4])
def test_a_chat_with_a_quantised_draft(lm, alpha):
    options = {"draft": lm.quantized(8), "block": 4, "particles": 8, "max_tokens": 40, "seed": 1}
    post = sg.sample(lm**alpha, "What is the capital of France?", **options)
    again = sg.sample(lm**alpha, "What is the capital of France?", **options)
    assert post.to_json() == again.to_json()
    assert post.text
    if alpha == 4:
        assert "Paris" in post.text
    print(f"alpha {alpha}: {post.text!r}, {post.info['seconds']:.1f} s, ESS {post.ess[0].round(1).tolist()}")


def test_a_pattern_on_a_real_prompt(lm):
    target = lm * sg.regex(r"The capital of France is [A-Z][a-z]+\.")
    post = sg.sample(target, "What is the capital of France?", particles=16, max_tokens=24, seed=1)
    assert post.text == "The capital of France is Paris."
