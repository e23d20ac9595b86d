"""Weights that are kept as 8-bit integers: what they weigh, and how near the model stays."""

from __future__ import annotations

import gc
import json
import sys
import weakref

import pytest
import torch

import smcgen as sg
from smcgen.cli import main
from smcgen.errors import ModelError, UsageError
from smcgen.kernels.layers import rounded
from smcgen.lm import load as load_module
from smcgen.lm.fused import Rope
from smcgen.lm.int8 import RoundedLinear, round_linear
from smcgen.lm.load import load, quantized
from tests.test_lm_architectures import exercise
from tests.tiny_models import byte_level, tiny_model, word_tokenizer

torch.set_num_threads(1)
WIDE = {"hidden_size": 64, "intermediate_size": 256}


def int8(kind, **options):
    pytest.importorskip("torchao")
    return load(tiny_model(kind, **options), word_tokenizer(), weights="int8")


def stored_bytes(model, embeddings=True):
    """Of all parameters; those of torchao hold several tensors."""
    seen, total = set(), 0
    skipped = {id(model.get_input_embeddings().weight)} if not embeddings else set()
    for weight in model.parameters():
        parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]] if _wrapped(weight) else [weight]
        for part in parts:
            if id(weight) not in skipped and part.data_ptr() not in seen:
                seen.add(part.data_ptr())
                total += part.numel() * part.element_size()
    return total


def _wrapped(weight):
    return hasattr(weight, "__tensor_flatten__")


def logits(lm):
    context = lm.open(1, 2, 5, 5)
    lm.prefill(context, [0], [[1, 2, 3]])
    return lm.extend(context, torch.tensor([[4, 5], [6, 7]]), torch.tensor([2, 2])).log_softmax(-1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "opt"])
def test_logits_stay_near(kind):
    """As near as with weights that are rounded to 8 bits and kept in float32; with 5 bits they are ten times as far."""
    lm = load(tiny_model(kind), word_tokenizer())
    exact = logits(lm)

    def error(other):
        return float((logits(other) - exact).abs().mean())

    assert 0 < error(int8(kind)) < 1.5 * error(quantized(lm)) < 0.3 * error(quantized(lm, 5))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_pages_give_the_logits_of_a_full_forward_with_the_same_weights(kind, monkeypatch):
    model = int8(kind).model
    monkeypatch.setattr("tests.test_lm_architectures.tiny_model", lambda _: model.set_attn_implementation("eager") or model)
    assert exercise(kind, rounds=3) < 1e-4


@pytest.mark.parametrize(("dtype", "part"), [(torch.bfloat16, 0.55), (torch.float32, 0.3)])
def test_matrices_take_half_the_memory_of_bfloat16(dtype, part):
    model = tiny_model("llama", **WIDE).to(dtype)
    before = stored_bytes(model, embeddings=False)
    rounded = load(model, word_tokenizer(), weights="int8").model if pytest.importorskip("torchao") else None
    assert stored_bytes(rounded, embeddings=False) < part * before
    assert stored_bytes(model, embeddings=False) == before  # the model in memory is left alone
    assert logits(load(model, word_tokenizer())).dtype == dtype


def test_a_head_that_is_the_embedding_stays():
    model = int8("llama", tie_word_embeddings=True).model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert type(int8("llama", tie_word_embeddings=False).model.lm_head.weight) is not torch.nn.Parameter


@pytest.fixture
def fusing(monkeypatch):
    """Layers are fused here as on a GPU."""
    monkeypatch.setattr(load_module, "FUSING", ("cpu", "cuda"))


@pytest.fixture
def triton(monkeypatch):
    """Kernels of layers are those of a GPU; gives (what was wanted, rows, dtype of weights) of products of few rows."""
    gpu = pytest.importorskip("smcgen.kernels.gpu.layers")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and take no tensors of the CPU")
    monkeypatch.setattr("smcgen.kernels.layers.on_triton", lambda x: True)
    seen, few = [], gpu._few

    def watched(wanted, x, weight, bias=None):
        seen.append((wanted, len(x), getattr(weight, "numbers", weight).dtype))
        return few(wanted, x, weight, bias)

    monkeypatch.setattr(gpu, "_few", watched)
    return seen


def rounded_beforehand(kind, **options):
    """A model whose matrices hold rounded values in its own dtype."""
    model = tiny_model(kind, **options)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):  # a new tensor: a head may share its own with the embedding
                module.weight = torch.nn.Parameter(rounded(module.weight).widened(model.dtype))
    return load(model, word_tokenizer())


TIED = [("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {"tie_word_embeddings": False})]


@pytest.mark.parametrize(("kind", "options"), TIED)
def test_fused_layers_read_integers(fusing, kind, options):
    lm = load(tiny_model(kind, **options), word_tokenizer(), weights="int8")
    assert isinstance(lm.fusion, Rope)
    exact, beforehand = load(tiny_model(kind, **options), word_tokenizer()), rounded_beforehand(kind, **options)
    assert torch.allclose(logits(lm), logits(beforehand), atol=1e-5)
    assert 1e-4 < (logits(lm) - logits(exact)).abs().mean() < 1.5 * (logits(quantized(exact)) - logits(exact)).abs().mean()
    assert (lm.model.dtype, lm.shape.dtype) == (torch.float32, torch.float32)
    lm.unfuse("")
    assert torch.allclose(logits(lm), logits(beforehand), atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), TIED)
def test_a_copy_of_fused_layers_keeps_integers(fusing, kind, options):
    lm, plain = load(tiny_model(kind, **options), word_tokenizer()), rounded_beforehand(kind, **options)
    lm.page = 32
    before = logits(lm)
    copied = quantized(lm)
    assert any(isinstance(module, RoundedLinear) for module in copied.model.modules())
    assert isinstance(copied.fusion, Rope)
    assert (copied.name, copied.max_tokens, copied.page) == (f"{lm.name}:int8", lm.max_tokens, lm.page)
    assert torch.allclose(logits(copied), logits(plain), atol=1e-5)
    assert torch.equal(logits(lm), before)
    assert not any(
        isinstance(m, RoundedLinear) for m in (*quantized(lm, 5).model.modules(), *quantized(lm, 8, 32).model.modules())
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_copy_of_layers_as_they_are_keeps_its_dtype(kind):
    model = quantized(load(tiny_model(kind), word_tokenizer())).model
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_a_copy_holds_no_matrix_twice(fusing, monkeypatch):
    lm, made, copied = load(tiny_model("qwen2"), word_tokenizer()), torch.Tensor.__deepcopy__, []
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", lambda self, memo: copied.append(self) or made(self, memo))
    for bits in (8, 5):
        quantized(lm, bits)
    assert not copied


@pytest.mark.parametrize("bits", [8, 5])
def test_kernels_read_a_copy_of_sizes_that_are_no_groups(fusing, triton, bits):
    """They take matrices whose lines lie one behind the other."""
    lm = quantized(load(tiny_model("llama", hidden_size=72, intermediate_size=40), word_tokenizer()), bits)
    found = logits(lm)
    assert triton
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smcgen.kernels.layers.on_triton", lambda x: False)
        assert torch.allclose(found, logits(lm), atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), TIED)
def test_kernels_read_integers(fusing, triton, kind, options):
    lm = load(tiny_model(kind, **options), word_tokenizer(), weights="int8")
    triton.clear()
    found = logits(lm)
    # A prompt of three tokens, then two of two rows, through three layers and a head, every matrix in integers.
    forward = ["linear", "parts", "gated", "parts"] * 3 + ["linear"]
    assert [wanted for wanted, _, _ in triton] == forward * 2
    assert {dtype for _, _, dtype in triton} == {torch.int8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smcgen.kernels.layers.on_triton", lambda x: False)
        assert torch.allclose(found, logits(rounded_beforehand(kind, **options)), atol=1e-5)
    triton.clear()
    with pytest.MonkeyPatch.context() as patch:  # many rows are no matter of our kernel
        patch.setattr("smcgen.kernels.gpu.layers.FEW", {1: 3})
        assert torch.allclose(logits(lm), found, atol=1e-5)
    assert {rows for _, rows, _ in triton} == {1, 3}


def test_no_matrix_is_held_in_another_dtype(fusing):
    model = tiny_model("llama", tie_word_embeddings=False, **WIDE).to(torch.bfloat16)
    before, head = stored_bytes(model, embeddings=False), model.lm_head
    lm = load(model, word_tokenizer(), weights="int8")
    assert isinstance(lm.fusion, Rope)
    assert stored_bytes(lm.model, embeddings=False) < 0.55 * before
    assert stored_bytes(model, embeddings=False) == before  # the model in memory is left alone
    assert model.lm_head is head
    lost = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)]
    held = []  # matrices that are left when one is rounded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smcgen.lm.int8.rounded", lambda w: held.append(sum(one() is not None for one in lost)) or rounded(w))
        del head
        round_linear(model, torch.device("cpu"))
    gc.collect()
    assert len(lost) == len(held) == 22
    assert held[0] == 22
    assert held[-1] <= 4
    assert not any(one() is not None for one in lost)


def test_a_shared_head_gets_integers_of_its_own(fusing):
    model = load(tiny_model("llama", tie_word_embeddings=True), word_tokenizer(), weights="int8").model
    assert isinstance(model.lm_head, RoundedLinear)
    assert model.get_input_embeddings().weight.dtype == torch.float32
    assert torch.equal(model.get_input_embeddings().weight, tiny_model("llama", tie_word_embeddings=True).lm_head.weight)


@pytest.mark.parametrize(
    ("kind", "reason"), [("granite", "its embedding is changed"), ("smollm3", "logits through pages are off by")]
)
def test_a_fusion_that_changes_the_logits_is_undone(fusing, kind, reason):
    """Against the rounded model, not the one that was there before."""
    lm = load(tiny_model(kind), word_tokenizer(), weights="int8")
    assert reason in lm.fusion
    assert torch.allclose(logits(lm), logits(rounded_beforehand(kind)), atol=1e-5)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_other_layers_are_rounded_by_torchao(fusing, monkeypatch, weights):
    asked = []
    monkeypatch.setattr(load_module, "to_int8", lambda *arguments: asked.append(arguments[1:]))
    load(tiny_model("gemma2"), word_tokenizer(), weights=weights)
    load(tiny_model("llama"), word_tokenizer(), weights=weights)
    assert len(asked) == (weights == "int8")


def test_the_law_of_a_run_with_a_draft_of_integers(fusing, tmp_path):
    """Whatever the draft, exact mode keeps the law: greedy text is the model's own, and the draft's nearness shows."""
    tiny_model("qwen2", vocab_size=280).save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    lm, draft = sg.LM(str(tmp_path)), sg.LM(str(tmp_path), weights="int8")
    options = {"chat": False, "max_tokens": 12, "seed": 0, "mode": "exact"}
    plain, post = (sg.sample(lm.at(temperature=0), "ab", **options, draft=d) for d in (None, draft))
    assert plain.text == post.text
    post = sg.sample(lm, "ab", **options, draft=draft)
    assert post.acceptance > 0.9
    assert "fused, int8 weights" in str(post.info["layers"])
    assert "weights='int8'" in repr(draft)


def test_layers_are_not_fused_and_say_why():
    lm = int8("llama")
    lm.fuse()
    assert lm.fusion == "its weights are of type Int8Tensor"


def test_a_run_says_what_its_layers_are(tmp_path):
    pytest.importorskip("torchao")
    tiny_model("qwen2", vocab_size=280).save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    lm = sg.LM(str(tmp_path), weights="int8")
    post = sg.sample(lm**2, "ab", chat=False, max_tokens=6, particles=4, seed=0)
    assert "as transformers has them" in post.info["layers"][tmp_path.name]
    plain = sg.sample(sg.LM(str(tmp_path)) ** 2, "ab", chat=False, max_tokens=6, particles=4, seed=0)
    assert post.log_evidence == pytest.approx(plain.log_evidence, abs=1.0)
    assert post.log_evidence != plain.log_evidence


def test_the_command(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torchao")
    tiny_model("qwen2", vocab_size=280).save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    options = ["ab", "-m", str(tmp_path), "--no-chat", "--max-tokens", "4", "--seed", "0", "--json", "-q"]
    monkeypatch.setattr(sys, "argv", ["smcgen", "sample", *options, "--weights", "int8", "-n", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["settings"]["target"] == f"LM({str(tmp_path)!r}, weights='int8')"


def test_products_stay_exact_elsewhere():
    """torchao offers to turn on inexact float32 products for the whole process."""
    before = torch.get_float32_matmul_precision()
    int8("llama")
    assert torch.get_float32_matmul_precision() == before


def test_refusals(monkeypatch):
    lm = load(tiny_model("llama"), word_tokenizer())
    with pytest.raises(UsageError, match="weights='int4': write 'int8', or leave it out"):
        sg.LM("tiny", weights="int4")
    with pytest.raises(UsageError, match="is loaded already: weights and compile have no effect, leave them out"):
        sg.LM(lm, weights="int8").load()
    with pytest.raises(UsageError, match=r"is loaded already: tokenizer, .* have no effect, leave them out"):
        load(lm, weights="int8")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UsageError, match=r"weights='int8' needs torchao: pip install 'smcgen\[int8\]'"):
        load(tiny_model("llama"), word_tokenizer(), weights="int8")


def test_models_that_would_gain_little_are_refused():
    with pytest.raises(ModelError, match=r"[67]\d% of its weights are in no linear layers .* leave weights='int8' out"):
        int8("qwen3-moe", num_experts=8)


def test_a_rounded_copy_of_fused_integers_is_refused(fusing):
    with pytest.raises(UsageError, match="the weights of LlamaForCausalLM are int8 already"):
        quantized(load(tiny_model("llama"), word_tokenizer(), weights="int8"))
    with pytest.raises(UsageError, match=r"LlamaForCausalLM:int8 are int8 already: .*, give the model that it is a copy of"):
        quantized(quantized(load(tiny_model("llama"), word_tokenizer())), 5)


def test_a_rounded_copy_of_integers_is_refused():
    with pytest.raises(UsageError, match="the weights of LlamaForCausalLM are int8 already: load it without weights='int8'"):
        quantized(int8("llama"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device():
    model = tiny_model("llama").cuda()
    lm, exact = (load(model, word_tokenizer(), weights=weights) for weights in ("int8", None))
    assert isinstance(lm.fusion, Rope)
    context = [one.open(1, 2, 5, 5) for one in (lm, exact)]
    found = []
    for one, its in zip((lm, exact), context, strict=True):
        one.prefill(its, [0], [[1, 2, 3]])
        found.append(one.extend(its, torch.tensor([[4, 5]] * 2, device="cuda"), torch.tensor([2, 2], device="cuda")))
    assert 0 < (found[0] - found[1]).abs().mean() < 0.1 * found[1].abs().mean()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_never_holds_the_matrices_in_bfloat16():
    model = tiny_model("llama", hidden_size=1024, intermediate_size=2048, num_hidden_layers=24).to(torch.bfloat16)
    size = stored_bytes(model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lm = load(model, word_tokenizer(), device="cuda", weights="int8")
    gc.collect()
    assert isinstance(lm.fusion, Rope)
    assert stored_bytes(lm.model) < 0.55 * size
    assert torch.cuda.max_memory_allocated() - before < size
