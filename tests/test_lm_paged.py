"""Transformers models behind the contract: prompts, sharing, isolation, quantised copies."""

import pytest
import torch

from smcgen.errors import ModelError, UsageError
from smcgen.lm import paged
from smcgen.lm.base import LanguageModel
from smcgen.lm.load import load, quantized
from smcgen.lm.quantized import round_weights
from tests.test_lm_architectures import Mirror
from tests.tiny_models import tiny_model, word_tokenizer

torch.set_num_threads(1)


def ones(context):
    return torch.ones(context.rows, dtype=torch.int64)


def test_it_is_a_language_model():
    lm = load(tiny_model("llama"), word_tokenizer())
    assert isinstance(lm, LanguageModel)
    assert (len(lm.vocabulary), lm.max_tokens, lm.device) == (97, 128, torch.device("cpu"))


def test_equal_prompts_are_read_once_and_shared(monkeypatch):
    mirror = Mirror("llama", groups=4, particles=3, page=4, seed=0)
    read = []
    forward = paged.PagedLM._forward

    def counting(self, pages, length, rows, tokens, counts, keep=0):
        read.extend(counts.tolist())
        return forward(self, pages, length, rows, tokens, counts, keep)

    monkeypatch.setattr(paged.PagedLM, "_forward", counting)
    same, other = list(range(10)), list(range(50, 57))
    mirror.prefill(range(4), [same, other, same, same])
    assert sorted(read) == [7, 10]
    assert mirror.context.pages.in_use() == 3 + 2
    assert mirror.context.pages.unshared() == 3 * (3 * 3 + 2)
    mirror.extend(ones(mirror.context))
    assert mirror.context.pages.in_use() == 2 + 9 + 1 + 3  # whole pages stay shared, each row has its own last one
    assert mirror.error < 1e-4


def test_long_prompts_are_read_in_chunks(monkeypatch):
    monkeypatch.setattr(paged, "CHUNK", 4)
    monkeypatch.setattr(paged, "PREFILL", 8)
    for kind in ("llama", "mistral", "gpt2"):
        mirror = Mirror(kind, groups=5, particles=2, page=4, seed=1)
        mirror.prefill(range(5), [[1], list(range(11)), [], list(range(20, 25)), list(range(40, 50))])
        mirror.extend(ones(mirror.context) * 2)
        assert mirror.error < 1e-4


def test_places_are_filled_again_without_leaks():
    mirror = Mirror("llama", groups=3, particles=2, page=4, seed=2)
    for step in range(12):
        prompts = [mirror.integers(0, 97, 1 + (step + i) % 11).tolist() for i in range(2)]
        mirror.prefill([step % 3, (step + 1) % 3], prompts)
        mirror.extend(mirror.integers(1, 4, mirror.context.rows))
        mirror.check_lengths()
        names = {
            int(p)
            for row, n in zip(mirror.context.pages.table, mirror.context.length, strict=True)
            for p in row[: -(-int(n) // 4)]
        }
        assert mirror.context.pages.in_use() == len(names)
    assert mirror.error < 1e-4


def test_no_tokens_at_all():
    lm = load(tiny_model("llama"), word_tokenizer())
    context = lm.open(2, 2, 3, 3)
    lm.prefill(context, [0, 1], [[1, 2], [3]])
    logits = lm.extend(context, torch.full((4, 2), -1), torch.zeros(4, dtype=torch.int64))
    assert logits.shape == (4, 2, 97)
    assert context.length.tolist() == [2, 2, 1, 1]


def play(lm, prompts, steps, groups):
    """The logits that each of `groups` sees, by group, when these live together through `steps`."""
    context = lm.open(len(groups), 3, max(len(prompts[g]) for g in groups), 40, isolate=True)
    lm.prefill(context, range(len(groups)), [prompts[g] for g in groups])
    seen = {g: [] for g in groups}
    for tokens, counts, ancestors in steps:
        width = max(int(counts[g].max()) for g in groups)
        logits = lm.extend(
            context, torch.cat([tokens[g][:, :width] for g in groups]), torch.cat([counts[g] for g in groups])
        ).unflatten(0, (-1, 3))
        for i, g in enumerate(groups):
            seen[g] += [logits[i, n, : int(counts[g][n])] for n in range(3)]
        lm.fork(context, torch.cat([ancestors[g] + 3 * i for i, g in enumerate(groups)]))
    return {g: torch.cat(rows) for g, rows in seen.items()}


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt-oss"])
def test_isolated_groups_have_bits_of_their_own(kind):
    """A group alone and the same group among others of other lengths, ragged counts and forks: the same bits."""
    lm = load(tiny_model(kind), word_tokenizer())
    random = torch.Generator().manual_seed(0)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=random)

    prompts = [integers(0, 97, n).tolist() for n in (5, 60, 1, 33)]
    steps = [
        (
            [integers(0, 97, 3, 5) for _ in prompts],
            [integers(0, 6, 3) for _ in prompts],
            [integers(0, 3, 3) for _ in prompts],
        )
        for _ in range(5)
    ]
    together = play(lm, prompts, steps, [1, 0, 3, 2])
    for g in range(4):
        assert torch.equal(together[g], play(lm, prompts, steps, [g])[g])


def test_isolated_groups_are_right_too():
    mirror = Mirror("llama", groups=3, particles=2, page=4, seed=3, isolate=True)
    mirror.prefill(range(3), [[1, 2, 3], [4], [5] * 9])
    for _ in range(4):
        mirror.extend(mirror.integers(0, 3, 6))
        mirror.fork(torch.tensor([1, 0, 2, 2, 5, 5]))
    assert mirror.error < 1e-4


def test_a_prompt_longer_than_the_context():
    lm = load(tiny_model("llama"), word_tokenizer())
    with pytest.raises(ModelError, match="a prompt of 129 tokens is longer than the 128 that LlamaForCausalLM can read"):
        lm.open(1, 1, 129, 10)


def test_padding_at_the_edge_of_the_context():
    """Absolute positions end at 128: padding must not look one up beyond."""
    mirror = Mirror("gpt2", groups=1, particles=2, page=4, seed=0)
    mirror.context = mirror.lm.open(1, 2, 126, 2)
    mirror.prefill([0], [mirror.integers(0, 97, 126).tolist()])
    mirror.extend(torch.tensor([2, 0]), steps=4)
    assert mirror.error < 1e-4


class TestQuantized:
    @pytest.mark.parametrize(("bits", "group"), [(8, None), (6, 32), (5, 32), (4, 32), (3, 32), (4, 7)])
    def test_levels_and_error(self, bits, group):
        weight = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
        weight[0] = 0
        rounded = round_weights(weight, bits, group)
        levels = 2 ** (bits - 1) - 1
        for start in range(0, 70, group or 70):
            old, new = weight[:, start : start + (group or 70)], rounded[:, start : start + (group or 70)]
            scale = old.abs().amax(1, keepdim=True) / levels
            assert ((old - new).abs() <= scale / 2 + 1e-6).all()
            assert torch.allclose((new / scale.clamp(min=1e-9)).round() * scale, new, atol=1e-6)

    @pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt-oss"])
    def test_a_copy_that_leaves_its_model_alone(self, kind):
        lm = load(tiny_model(kind), word_tokenizer())
        before = {name: value.clone() for name, value in lm.model.state_dict().items()}
        copies = [quantized(lm, bits) for bits in (8, 5, 3)]
        assert copies[0].name == f"{lm.name}:int8"
        assert copies[0].vocabulary is lm.vocabulary
        for name, value in lm.model.state_dict().items():
            assert torch.equal(value, before[name])
        embedding = lm.model.get_input_embeddings().weight
        assert copies[0].model.get_input_embeddings().weight is embedding
        errors = []
        for copy in [lm, *copies]:
            context = copy.open(1, 1, 5, 5)
            copy.prefill(context, [0], [[1, 2, 3]])
            logits = copy.extend(context, torch.tensor([[4, 5]]), torch.tensor([2])).log_softmax(-1)
            errors.append(logits)
        sizes = [float((e - errors[0]).abs().mean()) for e in errors[1:]]
        assert 0 < sizes[0] < sizes[1] < sizes[2]

    def test_refusals(self):
        lm = load(tiny_model("llama"), word_tokenizer())
        with pytest.raises(UsageError, match="to 8, 6, 5, 4, 3 bits, not 7"):
            quantized(lm, 7)
        with pytest.raises(UsageError, match="a group of 0 inputs"):
            quantized(lm, 4, group=0)
