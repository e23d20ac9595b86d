"""Fused layers: the logits of the layers as transformers has them, through the same pages."""

from __future__ import annotations

import pytest
import torch

from smcgen.lm import load as load_module
from smcgen.lm.fused import Rope
from smcgen.lm.load import load
from smcgen.lm.quantized import quantized
from tests.test_lm_architectures import exercise
from tests.tiny_models import tiny_model, word_tokenizer

FUSED = ["llama", "llama-rope-llama3", "llama-rope-yarn", "qwen2", "qwen2-window", "qwen3", "mistral"]


def fused(kind: str, **options):
    lm = load(tiny_model(kind, **options), word_tokenizer())
    lm.fuse()
    return lm


@pytest.mark.parametrize("kind", FUSED)
def test_fused_layers_give_the_same_logits(monkeypatch, kind):
    def loaded(*arguments, **options):
        lm = load(*arguments, **options)
        lm.fuse()
        assert isinstance(lm.fusion, Rope)
        return lm

    monkeypatch.setattr("tests.test_lm_architectures.load", loaded)
    assert exercise(kind) < 1e-4


@pytest.mark.parametrize(
    ("kind", "reason"), [("gemma2", "layers are made of"), ("qwen3-moe", "feed-forward"), ("gpt2", "rotary")]
)
def test_other_layers_stay_and_say_why(kind, reason):
    lm = fused(kind)
    assert reason in lm.fusion
    assert exercise(kind) < 1e-4


def test_a_fusion_that_changes_the_logits_is_undone(monkeypatch):
    """smollm3 leaves rope out in some layers, which its parts do not show."""
    original = load_module.PagedLM.__init__

    def fusing(self, *arguments, **options):
        original(self, *arguments, **options)
        self.fuse()

    monkeypatch.setattr(load_module.PagedLM, "__init__", fusing)
    assert "logits through pages are off by" in load(tiny_model("smollm3"), word_tokenizer()).fusion
    assert isinstance(load(tiny_model("llama"), word_tokenizer()).fusion, Rope)


def test_no_weight_is_held_twice():
    lm = fused("llama")
    layer = lm.model.base_model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    for parts in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1


def test_a_rounded_copy_of_a_fused_model_is_rounded():
    lm = fused("llama")
    plain = load(tiny_model("llama"), word_tokenizer())

    def logits(lm):
        context = lm.open(1, 1, 3, 4)
        lm.prefill(context, [0], [[1, 2, 3]])
        return lm.extend(context, torch.tensor([[4, 5]]), torch.tensor([2]))

    before = logits(lm)
    rounded = quantized(lm, 3)
    assert isinstance(rounded.fusion, Rope)
    assert torch.allclose(logits(rounded), logits(quantized(plain, 3)), atol=1e-5)
    assert (logits(rounded) - before).abs().max() > 1e-3
    assert torch.equal(logits(lm), before)
