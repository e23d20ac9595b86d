"""Compiled layers: the logits of the layers as transformers has them, few graphs, and no copy of the pool."""

from __future__ import annotations

import gc
import re
import shutil
import warnings
import weakref

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import smcgen as sg
from smcgen.errors import UsageError
from smcgen.lm import compiled as compiled_module
from smcgen.lm.load import load
from smcgen.lm.paged import PagedLM
from smcgen.lm.quantized import quantized
from tests.test_lm_architectures import exercise
from tests.tiny_models import byte_level, tiny_model, word_tokenizer

torch.set_num_threads(1)
CALL = re.compile(r"torch\.ops\.smcgen\.attend\.default\((.*)\)")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def traced(monkeypatch):
    """Layers are traced into graphs, which run as they are: what is tested is not the code that comes of them."""
    monkeypatch.setattr(PagedLM.compile, "__defaults__", ("eager",))


def logits(lm, rows=2):
    context = lm.open(1, rows, 5, 5)
    lm.prefill(context, [0], [[1, 2, 3]])
    return lm.extend(context, torch.arange(rows * 2).view(rows, 2), torch.full((rows,), 2))


def graphs():
    return counters["stats"]["unique_graphs"]


# Of gemma2 and smollm3 layers are of two kinds: with a window, without rope.
@pytest.mark.parametrize(
    ("kind", "count"), [("gpt2", 4), ("gemma2", 8), ("llama", 4), ("gpt-oss", 8), ("smollm3", 8), ("opt", 4), ("qwen3-moe", 4)]
)
def test_one_graph_for_all_layers_and_sizes(traced, kind, count, monkeypatch):
    """Four for a kind of layer: one row or more, one token or more. All are made at load."""
    made = []

    def loaded(*arguments):
        lm = load(*arguments, compile=True)
        assert lm.compiled is True
        made.append(graphs())
        return lm

    monkeypatch.setattr("tests.test_lm_architectures.load", loaded)
    with torch.inference_mode():  # as in a run
        assert exercise(kind, rounds=4) < 1e-4
    assert made == [count]
    assert graphs() == count


def test_layers_of_two_models_do_not_mix(traced):
    one = load(tiny_model("gpt2"), word_tokenizer(), compile=True)
    other = load(tiny_model("gpt2", seed=1), word_tokenizer(), compile=True)
    for lm, seed in ((one, 0), (other, 1), (quantized(one, 3), None)):
        plain = quantized(load(tiny_model("gpt2"), word_tokenizer()), 3) if seed is None else None
        truth = plain or load(tiny_model("gpt2", seed=seed), word_tokenizer())
        assert lm.compiled is True
        assert torch.allclose(logits(lm), logits(truth), atol=1e-4)


def test_integers_can_be_compiled(traced):
    pytest.importorskip("torchao")
    lm = load(tiny_model("gpt2"), word_tokenizer(), weights="int8", compile=True)
    assert lm.compiled is True
    assert torch.allclose(logits(lm), logits(load(tiny_model("gpt2"), word_tokenizer(), weights="int8")), atol=1e-4)


def test_no_pool_outlives_its_context(traced):
    lm = load(tiny_model("gpt2"), word_tokenizer(), compile=True)
    context = lm.open(1, 2, 5, 5)
    lm.prefill(context, [0], [[1, 2, 3]])
    pool = weakref.ref(context.pages)
    del context
    gc.collect()
    assert pool() is None


def test_a_layer_that_cannot_be_compiled_runs_as_it_was():

    def broken(*_):
        raise RuntimeError("no compiler was found")

    lm = load(tiny_model("llama"), word_tokenizer())
    words = "the layers of LlamaForCausalLM run without being compiled: .*no compiler was found"
    with pytest.warns(RuntimeWarning, match=words):
        lm.compile(backend=broken)
    assert isinstance(lm.compiled, str)
    assert torch.equal(logits(lm), logits(load(tiny_model("llama"), word_tokenizer())))


def test_a_failure_later_on(traced):
    """A shape that comes later may fail too."""
    lm = load(tiny_model("gpt2"), word_tokenizer(), compile=True)
    truth = logits(load(tiny_model("gpt2"), word_tokenizer()))
    with torch._dynamo.config.patch(recompile_limit=1), pytest.warns(RuntimeWarning, match="run without being compiled"):
        found = logits(lm)  # outside of inference mode
    assert torch.allclose(found, truth, atol=1e-4)
    assert "forward" not in vars(lm.model.transformer.h[0])


def test_logits_that_differ_undo_it(traced, monkeypatch):
    operator = compiled_module.attend
    monkeypatch.setattr(compiled_module, "attend", lambda *arguments: 1.1 * operator(*arguments))
    with pytest.warns(RuntimeWarning, match="logits through pages are off by"):
        lm = load(tiny_model("gpt2"), word_tokenizer(), compile=True)
    assert torch.equal(logits(lm), logits(load(tiny_model("gpt2"), word_tokenizer())))


def test_fused_layers_are_left_alone():
    lm = load(tiny_model("llama"), word_tokenizer())
    lm.fuse()
    before = logits(lm)
    with pytest.warns(RuntimeWarning, match="run without being compiled: they are fused already"):
        lm.compile()
    assert torch.equal(logits(lm), before)


def test_a_run_says_so(traced, tmp_path):
    for i, name in enumerate(("base", "draft")):
        tiny_model("qwen2", seed=i, vocab_size=280).save_pretrained(tmp_path / name)
        byte_level().save_pretrained(tmp_path / name)
    draft, *lms = (
        sg.LM(str(tmp_path / name), device="cpu", compile=flag)
        for name, flag in (("draft", False), ("base", True), ("base", False))
    )
    options = {"chat": False, "max_tokens": 8, "particles": 4, "block": 2, "seed": 0, "draft": draft}
    one, other = (sg.sample(lm**2, "ab", **options) for lm in lms)
    assert graphs() == 4
    assert one.info["layers"]["base"].startswith("compiled; not fused: ")
    assert other.info["layers"]["base"] == one.info["layers"]["draft"] == "as transformers has them: on a CPU nothing is gained"
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=1e-4)


def test_it_is_of_no_use_to_a_model_that_is_loaded():
    with pytest.raises(UsageError, match="weights and compile have no effect"):
        sg.LM(load("tiny-draft"), compile=True).load()


def copies_of_the_pool(code):
    """What goes to attention as keys and values in generated code, and what is wrong with it: it is no argument of the graph
    as it came, or a line that neither calls attention nor deletes it names it."""
    calls = [_arguments(call)[3:5] for call in CALL.findall(code)]
    names = {name for pair in calls for name in pair}
    wrong = [name for name in names if not re.fullmatch(r"arg\d+_1", name)]
    body = code[code.index("def call(") : code.index("def get_args")]
    for line in body.splitlines():
        harmless = "torch.ops.smcgen.attend" in line or re.match(r"\s*(del |assert_size_stride\(|arg0_1, )", line)
        if not harmless and any(re.search(rf"\b{name}\b", line) for name in names):
            wrong.append(line.strip())
    return calls, wrong


def _arguments(call):
    """The arguments of a call, split at commas outside brackets."""
    found, depth, start = [], 0, 0
    for i, letter in enumerate(call):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            found.append(call[start:i].strip())
            start = i + 1
    return [*found, call[start:].strip()]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_compiled_code_has_no_copy_of_the_pool(kind):
    lm = load(tiny_model(kind), word_tokenizer())
    _, codes = run_and_get_code(lm.compile)
    assert lm.compiled is True
    assert len(codes) == graphs() == {"gpt2": 4, "gemma2": 8}[kind]
    for code in codes:
        calls, wrong = copies_of_the_pool(code)
        assert len(calls) == 1
        assert not wrong
    with torch.inference_mode():
        assert torch.allclose(logits(lm), logits(load(tiny_model(kind), word_tokenizer())), atol=1e-4)
    assert graphs() == len(codes)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_a_copy_of_the_pool_would_be_seen(monkeypatch):
    """The whole pool handed to a layer, of which it takes its part: the compiler copies."""

    def attend(self, layer, query, key, value, *how):
        return compiled_module.attend(query, key, value, self.keys.clone(), self.values * 1, *how)

    monkeypatch.setattr(compiled_module._Declared, "attend", attend)
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    lm = load(tiny_model("gpt2"), word_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, codes = run_and_get_code(lm.compile)
    assert all(copies_of_the_pool(code)[1] for code in codes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_on_a_device(kind, monkeypatch):
    """The same numbers, no copy of the pool, and no waiting for the device."""
    with torch.inference_mode():
        lm = load(tiny_model(kind).cuda(), word_tokenizer())
        _, codes = run_and_get_code(lm.compile)
        assert lm.compiled is True
        assert [copies_of_the_pool(code)[1] for code in codes] == [[]] * {"gpt2": 4, "gemma2": 8}[kind]
        monkeypatch.setattr("tests.test_lm_architectures.load", lambda *arguments: load(*arguments, compile=True))
        assert exercise(kind, device="cuda") < 1e-4
        context = lm.open(4, 8, 10, 40)
        lm.prefill(context, range(4), [[1, 2, 3], [4], [], [5] * 10])
        tokens = torch.ones(32, 3, dtype=torch.int64, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            lm.extend(context, tokens, torch.arange(32, device="cuda") % 4)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_round_is_recorded(weights, tmp_path):
    if weights:
        pytest.importorskip("torchao")
    tiny_model("gemma2", vocab_size=280).save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    options = {"chat": False, "max_tokens": 24, "particles": 4, "seed": 0}
    lms = [sg.LM(str(tmp_path), device="cuda", dtype="float32", weights=weights, compile=flag) for flag in (True, False)]
    one, other = (sg.sample(lm**2, "ab", **options) for lm in lms)
    assert one.info["layers"][tmp_path.name].startswith("compiled; not fused: ")
    assert one.info["cuda_graph"]
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=1e-2)
