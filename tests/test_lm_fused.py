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

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED = ["llama", "llama-rope-llama3", "llama-rope-yarn", "qwen2", "qwen2-window", "qwen3", "mistral"]


def loaded(kind: str, **options):
    """Layers as transformers has them, where the Triton kernels run: on a GPU, or on the CPU by the interpreter."""
    lm = load(tiny_model(kind, **options).to(DEVICE), word_tokenizer())
    if isinstance(lm.fusion, Rope):  # on a GPU loading fuses them
        lm.unfuse("")
    return lm


def fused(kind: str, **options):
    lm = loaded(kind, **options)
    lm.fuse()
    return lm


@pytest.mark.parametrize("kind", FUSED)
def test_fused_layers_give_the_same_logits(monkeypatch, kind):
    def fusing(*arguments, **options):
        lm = load(*arguments, **options)
        lm.fuse()
        assert isinstance(lm.fusion, Rope)
        return lm

    monkeypatch.setattr("tests.test_lm_architectures.load", fusing)
    assert exercise(kind) < 1e-4


@pytest.fixture
def triton(monkeypatch):
    """Layers through the Triton kernels, here or on a GPU; gives the number of parts that each norm has added."""
    gpu = pytest.importorskip("smcgen.kernels.gpu.layers")
    monkeypatch.setattr("smcgen.kernels.layers.on_triton", lambda x: True)
    added, rms_norm = [], gpu.rms_norm

    def counting(x, weight, eps, parts=None):
        added.append(0 if parts is None else len(parts))
        return rms_norm(x, weight, eps, parts)

    monkeypatch.setattr(gpu, "rms_norm", counting)
    return added


@torch.no_grad()
def read(lm, tokens=((4, 5), (6, 7)), keep=0):
    """Logits of `tokens` after a prompt of three."""
    tokens = torch.tensor(tokens, device=lm.device)
    context = lm.open(1, len(tokens), 3, 20)
    lm.prefill(context, [0], [[1, 2, 3]])
    counts = torch.full((len(tokens),), tokens.shape[1], device=lm.device)
    before = context.pages.grow(counts)
    return lm._forward(context.pages, before, None, tokens, counts, keep)


def changed(lm):
    return {name for name, module in lm.model.named_modules() if "forward" in vars(module)}


@pytest.mark.parametrize(
    ("kind", "options"), [("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {"tie_word_embeddings": False})]
)
def test_every_norm_adds_what_the_layer_before_it_left(triton, monkeypatch, kind, options):
    lm = fused(kind, **options)
    plain = loaded(kind, **options)
    if kind == "qwen2":  # heads with biases exist, though transformers makes none
        bias = torch.nn.Parameter(torch.randn(lm.model.lm_head.out_features, device=DEVICE))
        lm.unfuse("")
        lm.model.lm_head.bias = plain.model.lm_head.bias = bias
        lm.fuse()
    triton.clear()
    logits = read(lm)
    # Three layers with two norms each, but for the first, and the last one: for the prompt, and for two tokens of two rows.
    assert triton == [1, 1, 1, 1, 1, 1] * 2
    assert torch.allclose(logits, read(plain), atol=1e-5)
    assert torch.allclose(read(lm, keep=1), logits[:, -1:], atol=1e-5)
    many = [[5, 6, 7, 8, 9, 10] for _ in range(3)]  # 18 rows leave no parts
    triton.clear()
    assert torch.allclose(read(lm, many), read(plain, many), atol=1e-5)
    assert triton == [1] * 6 + [0] * 6
    monkeypatch.setattr("smcgen.kernels.gpu.layers.FEW", {2: 80, 4: 80})
    triton.clear()
    assert torch.allclose(read(lm, many), read(plain, many), atol=1e-5)
    assert triton == [1] * 12


def test_a_forward_that_breaks_off_leaves_nothing(triton, monkeypatch):
    lm = fused("llama")
    logits = read(lm)

    def breaks(*_, **__):
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr(lm.model.base_model.norm, "forward", breaks)
        with pytest.raises(KeyError):
            read(lm)
    assert torch.equal(read(lm), logits)


def test_a_last_norm_of_another_kind_is_left_alone(triton):
    lm = fused("llama")
    plain = loaded("llama")
    lm.unfuse("")
    for one in (lm, plain):
        torch.manual_seed(0)
        one.model.base_model.norm = torch.nn.LayerNorm(32, device=DEVICE)
    lm.fuse()
    assert isinstance(lm.fusion, Rope)
    assert "model.norm" not in changed(lm)
    assert torch.allclose(read(lm), read(plain), atol=1e-5)


def test_unfusing_leaves_no_trace():
    lm = fused("llama")
    ends = {"model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"}
    assert changed(lm) == ends | {f"model.layers.{i}" for i in range(3)}
    lm.unfuse("")
    assert changed(lm) == set()
    assert torch.equal(read(lm), read(loaded("llama")))


@pytest.mark.parametrize(
    ("kind", "reason"), [("gemma2", "layers are made of"), ("qwen3-moe", "feed-forward"), ("gpt2", "rotary")]
)
def test_other_layers_stay_and_say_why(kind, reason):
    lm = fused(kind)
    assert reason in lm.fusion
    assert exercise(kind) < 1e-4


def test_a_fusion_that_changes_the_logits_is_undone(monkeypatch):
    """smollm3 leaves rope out in some layers, granite scales its embedding, which their parts do not show."""
    original = load_module.PagedLM.__init__

    def fusing(self, *arguments, **options):
        original(self, *arguments, **options)
        self.fuse()

    monkeypatch.setattr(load_module.PagedLM, "__init__", fusing)
    assert "logits through pages are off by" in load(tiny_model("smollm3"), word_tokenizer()).fusion
    granite = load(tiny_model("granite"), word_tokenizer())
    assert "its embedding is changed" in granite.fusion
    assert changed(granite) == set()
    assert isinstance(load(tiny_model("llama"), word_tokenizer()).fusion, Rope)


def test_no_weight_is_held_twice():
    lm = fused("llama")
    layer = lm.model.base_model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    for parts in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1


def test_a_rounded_copy_of_a_fused_model_is_rounded():
    lm = fused("llama")
    plain = loaded("llama")

    def logits(lm):
        context = lm.open(1, 1, 3, 4)
        lm.prefill(context, [0], [[1, 2, 3]])
        return lm.extend(context, torch.tensor([[4, 5]], device=DEVICE), torch.tensor([2], device=DEVICE))

    before = logits(lm)
    rounded = quantized(lm, 3)
    assert isinstance(rounded.fusion, Rope)
    assert torch.allclose(logits(rounded), logits(quantized(plain, 3)), atol=1e-5)
    assert (logits(rounded) - before).abs().max() > 1e-3
    assert torch.equal(logits(lm), before)
