"""GGUF files: every tensor type, the model and the tokenizer that come out, files that are damaged or foreign."""

import json
import os
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smcgen.errors import ModelError
from smcgen.lm import gguf
from smcgen.lm.gguf_tokenizer import read_tokenizer
from smcgen.lm.load import load
from smcgen.lm.vocabulary import Vocabulary, _byte_letters
from tests.gguf_writer import BF16, F16, F32, Q4_0, Q4_1, Q8_0, write, write_model

torch.set_num_threads(1)
BLOCKS = json.loads((Path(__file__).parent / "data" / "gguf_blocks.json").read_text())["types"]
LETTERS = list(_byte_letters())
MERGES = ["a b", "Ġ a", "1 2", "Ġ Ġ", "ĠĠ ĠĠ", "Ġ 1"]
TOKENS = [*LETTERS, *(merge.replace(" ", "") for merge in MERGES), "<|end|>", "<|user|>", "<think>"]
KINDS = [*[1] * (len(LETTERS) + len(MERGES)), 3, 3, 4]
END, USER = TOKENS.index("<|end|>"), TOKENS.index("<|user|>")
BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": USER,
    "tokenizer.ggml.eos_token_id": END,
    "tokenizer.ggml.eot_token_id": USER,
    "tokenizer.chat_template": "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}",
}


def model(kind="llama", **changes):
    settings = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "head_dim": 16,
    }
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(settings | changes))).eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.2)
    return made


def logits_of(lm, ids):
    context = lm.open(1, 1, len(ids), 1)
    lm.prefill(context, [0], [ids[:-1]])
    return lm.extend(context, torch.tensor([ids[-1:]]), torch.tensor([1]))[0, 0]


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_against_the_dequantiser_of_ggml(kind):
    values, size = gguf._LAYOUT[int(kind)]
    raw = np.frombuffer(bytes.fromhex(BLOCKS[kind]["blocks"]), np.uint8)
    truth = np.array(BLOCKS[kind]["values"], np.float32)
    assert len(raw) == 2 * size
    assert len(truth) == 2 * values
    file = gguf.File(raw, {}, {"x": gguf.Tensor((2, values), int(kind), 0)})
    np.testing.assert_array_equal(gguf.tensor(file, "x").numpy(), truth.reshape(2, values))


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(F32, 0.0), (F16, 1e-3), (BF16, 4e-3), (Q8_0, 5e-3), (Q4_1, 0.07), (Q4_0, 0.08)]
)
def test_a_file_of_every_type_gives_the_weights_back(tmp_path, kind, tolerance):
    truth = model(tie_word_embeddings=False)
    write_model(tmp_path / "m.gguf", truth, BPE, kind)
    read, _ = gguf.load(tmp_path / "m.gguf", torch.float32)
    assert read.state_dict().keys() == truth.state_dict().keys()
    for name, weight in read.state_dict().items():
        wrong = (weight - truth.state_dict()[name]).abs().max() / truth.state_dict()[name].abs().max()
        assert wrong <= tolerance, name
    half, _ = gguf.load(tmp_path / "m.gguf", torch.bfloat16)
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_a_file_gives_the_logits_of_its_model(tmp_path, kind, changes):
    truth = model(kind, **changes)
    write_model(tmp_path / "m.gguf", truth, BPE)
    lm = load(tmp_path / "m.gguf", device="cpu")
    assert lm.name == "m"
    assert lm.max_tokens == 128
    assert lm.vocabulary.end_ids == tuple(sorted((END, USER)))  # eos and eot
    assert len(lm.vocabulary) == len(TOKENS)  # the matrix is padded
    ids = [5, 99, 260, 3, 17]
    with torch.no_grad():
        want = truth(torch.tensor([ids])).logits[0, -1, : len(lm.vocabulary)]
    torch.testing.assert_close(logits_of(lm, ids), want, rtol=1e-4, atol=1e-4)


def test_rope_factors_stretch_the_frequencies(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    truth = model(rope_parameters=rope | {"original_max_position_embeddings": 32})
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / truth.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 4
    write_model(tmp_path / "m.gguf", truth, BPE, extra_tensors={"rope_freqs.weight": (factors, F32)})
    ids = list(range(60))
    with torch.no_grad():
        want = truth(torch.tensor([ids])).logits[0, -1, : len(TOKENS)]
    torch.testing.assert_close(logits_of(load(tmp_path / "m.gguf", device="cpu"), ids), want, rtol=1e-4, atol=1e-4)


class TestTokenizer:
    def encode(self, text, **changes):
        return read_tokenizer(BPE | changes, "m").encode(text, add_special_tokens=False)

    def spell(self, text, **changes):
        return [(BPE | changes)["tokenizer.ggml.tokens"][i] for i in self.encode(text, **changes)]

    def test_digits_stand_alone(self):
        assert self.spell("ab  12") == ["ab", "ĠĠ", "1", "2"]
        assert self.spell(" 1") == ["Ġ", "1"]
        assert self.spell(" a 1") == ["Ġa", "Ġ", "1"]

    def test_other_rules_cut_otherwise(self):
        assert self.spell("  12", **{"tokenizer.ggml.pre": "gpt-2"}) == ["Ġ", "Ġ", "12"]
        assert self.spell("  12", **{"tokenizer.ggml.pre": "qwen2"}) == ["Ġ", "Ġ", "1", "2"]
        assert self.spell("  12", **{"tokenizer.ggml.pre": "llama-bpe"}) == ["Ġ", "Ġ", "12"]

    def test_markup(self):
        tokenizer = read_tokenizer(BPE, "m")
        vocabulary = Vocabulary.from_tokenizer(tokenizer, "m")
        assert vocabulary.special == {END, USER}
        assert vocabulary.tokens[TOKENS.index("<think>")] == b"<think>"
        assert self.spell("a<think>ab<|end|>") == ["a", "<think>", "ab", "<|end|>"]
        assert vocabulary.encode("ab").ids == (USER, TOKENS.index("ab"), END)

    def test_bos_only_where_the_file_says_so(self):
        for pre, said, bos in (
            ("smollm", None, False),
            ("smollm", True, True),
            ("llama-bpe", None, True),
            ("llama-bpe", False, False),
        ):
            changes = {"tokenizer.ggml.pre": pre} | ({} if said is None else {"tokenizer.ggml.add_bos_token": said})
            ids = Vocabulary.from_tokenizer(read_tokenizer(BPE | changes, "m"), "m").encode("ab", chat=False).ids
            assert ids == ((USER,) if bos else ()) + (TOKENS.index("ab"),)

    def test_unknown_rules_are_refused(self, tmp_path):
        for changes in ({"tokenizer.ggml.pre": "invented"}, {"tokenizer.ggml.model": "t5"}):
            with pytest.raises(ModelError, match=r"m: its tokenizer is not known here .*; give one"):
                read_tokenizer(BPE | changes, "m")
        path = tmp_path / "m.gguf"
        write_model(path, model(), BPE | {"tokenizer.ggml.pre": "invented"})
        assert len(load(path, read_tokenizer(BPE, "m")).vocabulary) == len(TOKENS)  # one that is given serves

    def test_sentencepiece_merges_the_best_pair_first(self):
        """Against the algorithm itself, on random vocabularies and texts."""
        draw = random.Random(0)
        for _ in range(20):
            pieces = {"▁", *"abc"} | {"".join(draw.choices("▁abc", k=draw.randint(2, 4))) for _ in range(25)}
            tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *sorted(pieces)]
            scores = {token: -float(i) for i, token in enumerate(draw.sample(sorted(pieces), len(pieces)))}
            metadata = {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": [scores.get(token, 0.0) for token in tokens],
                "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
                "tokenizer.ggml.bos_token_id": 1,
                "tokenizer.ggml.eos_token_id": 2,
            }
            vocabulary = Vocabulary.from_tokenizer(read_tokenizer(metadata, "m"), "m")
            for _ in range(20):
                text = "".join(draw.choices("abc ", k=draw.randint(1, 12)))
                ids = vocabulary.encode(text + "é").ids
                want = best_pairs("▁" + text.replace(" ", "▁"), scores)
                assert [tokens[i] for i in ids] == ["<s>", *want, "<0xC3>", "<0xA9>"]
                assert vocabulary.decode(ids) == " " + text + "é"


def best_pairs(text, scores):
    """SentencePiece BPE, as written: merge the neighbours whose union has the best score, the leftmost of equals."""
    pieces = list(text)
    while True:
        unions = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not unions:
            return pieces
        i = -max(unions)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


class TestDamage:
    @pytest.fixture
    def path(self, tmp_path):
        write_model(tmp_path / "m.gguf", model(), BPE)
        return tmp_path / "m.gguf"

    def refuse(self, path, words):
        with pytest.raises(ModelError, match=words) as error:
            load(path)
        assert "\n" not in str(error.value)

    def test_cut_off_anywhere(self, path):
        data = path.read_bytes()
        for size in (0, 3, 10, 100, 3000, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:size])
            self.refuse(path, "is no whole GGUF file .*: fetch it anew")

    def test_something_else(self, path):
        path.write_bytes(b"PK\x03\x04" + bytes(1000))
        self.refuse(path, "it does not begin with GGUF")
        path.write_bytes(b"GGUF" + bytes(1000))
        self.refuse(path, "its version is 0")

    def test_missing(self, path):
        self.refuse(path.with_name("other.gguf"), "there is no file .*other.gguf: check the path")

    def test_a_weight_is_missing(self, path):
        truth = model()
        truth.model.layers[1].mlp.up_proj = torch.nn.Identity()
        write_model(path, truth, BPE)
        self.refuse(path, r"lacks 1 weights \(model.layers.1.mlp.up_proj.weight")

    def test_metadata_is_missing(self, path):
        write(path, {"general.architecture": "llama", **BPE}, {"token_embd.weight": (np.zeros((2, 32), np.float32), F32)})
        self.refuse(path, "lacks the key .llama.attention.head_count.")

    def test_an_unknown_type(self, path):
        data = bytearray(path.read_bytes())
        head = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
        data[head] = 29
        path.write_bytes(data)
        self.refuse(path, "token_embd.weight has type 29")

    def test_other_architectures_go_to_transformers(self, path, capsys):
        write(path, {"general.architecture": "wavelet", **BPE}, {"x": (np.zeros(32, np.float32), F32)})
        self.refuse(path, r"\(wavelet\) cannot be read by transformers: .*; give the model as a folder")
        assert "is read by transformers, which takes minutes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif("SMCGEN_SMOLLM2" not in os.environ, reason="SMCGEN_SMOLLM2 names no GGUF file of SmolLM2-135M")
def test_smollm2():
    lm = load(os.environ["SMCGEN_SMOLLM2"])
    assert lm.vocabulary.end_ids == (2,)
    prompt = lm.vocabulary.encode("Is the moon larger than the sun?")
    assert prompt.ids[:4] == (1, 9690, 198, 2683)
    assert lm.vocabulary.decode(lm.vocabulary.encode("x  12\n 3", chat=False).ids) == "x  12\n 3"
    total = 0.0
    for text in ("Yes", "No", "Yes.", "No."):
        ids = [*lm.vocabulary.encode(text, chat=False).ids, 2]
        context = lm.open(1, 1, len(prompt.ids), len(ids))
        lm.prefill(context, [0], [prompt.ids[:-1]])
        tokens = torch.tensor([[prompt.ids[-1], *ids[:-1]]])
        log_prob = lm.extend(context, tokens, torch.tensor([len(ids)]))[0].double().log_softmax(-1)
        total += float(log_prob[torch.arange(len(ids)), ids].sum().exp())
    assert abs(np.log(total) - -7.93566) < 0.02  # by enumeration, with weights rounded to float16
