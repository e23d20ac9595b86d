"""Language models on a CUDA device: the same numbers, and no waiting for the device within a round."""

import pytest
import torch

from smcgen.lm.load import load
from tests.test_lm_architectures import exercise
from tests.tiny_models import SUPPORTED, tiny_model, word_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", SUPPORTED)
def test_pages_give_the_logits_of_a_full_forward(kind):
    assert exercise(kind, device="cuda") < 1e-4


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_a_round_does_not_wait_for_the_device(kind):
    lm = load(tiny_model(kind).cuda(), word_tokenizer())
    context = lm.open(4, 8, 10, 40)
    lm.prefill(context, range(4), [[1, 2, 3], [4], [], [5] * 10])
    tokens = torch.ones(32, 3, dtype=torch.int64, device="cuda")
    counts = torch.arange(32, device="cuda") % 4
    ancestors = torch.arange(32, device="cuda") // 8 * 8
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            lm.extend(context, tokens, counts)
            lm.fork(context, ancestors)
            lm.trim(context, (context.length - 1).clamp(min=0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    context.pages.verify()


def test_bfloat16_and_isolation():
    model = tiny_model("llama").cuda()
    lm = load(model, word_tokenizer(), dtype="bfloat16")
    prompts = [[1, 2, 3], list(range(40)), [7]]

    def first(groups):
        context = lm.open(len(groups), 2, 50, 5, isolate=True)
        lm.prefill(context, range(len(groups)), [prompts[g] for g in groups])
        rows = 2 * len(groups)
        return lm.extend(context, torch.ones(rows, 2, dtype=torch.int64, device="cuda"),
                         torch.full((rows,), 2, device="cuda"))[:2]  # fmt: skip

    assert torch.equal(first([0]), first([0, 1, 2]))
    with torch.no_grad():
        truth = model(torch.tensor([[1, 2, 3, 1, 1]], device="cuda")).logits[0, 3:]
    assert (first([0])[0].float() - truth).abs().max() < 0.05 * truth.abs().max()
