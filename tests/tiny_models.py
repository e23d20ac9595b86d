"""Tokenizers and transformers models that are small enough to be made on the spot."""

from __future__ import annotations

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from smcgen.lm.vocabulary import _byte_letters

TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKUP = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]


def byte_level(extra=("ab", "Ġa", "Ġ1"), bos=True, template=TEMPLATE, markup=MARKUP, order=1):
    """256 bytes, some merges and special tokens; `bos`: the tokenizer puts <s> in front by itself."""
    letters = list(_byte_letters())[::order]
    tokens = [*letters, *extra]
    merges = [(token[:-1], token[-1]) for token in extra]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in markup])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("é\n", normalized=False)])
    if bos:
        start = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", start)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>" if bos else None, eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def sentencepiece(prefix=True):
    """A tokenizer in the manner of Llama 2: U+2581 for blanks, byte fallback, a decoder that strips the first blank."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁ab", "▁▁"]
    merges = [("▁", "a"), ("▁a", "b"), ("▁", "▁")]
    backend = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in pieces[:3]])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


_BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_MULTIHEAD = {key: value for key, value in _BASE.items() if key not in ("num_key_value_heads", "head_dim")}
_GPT2 = {"vocab_size": 97, "n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4}


def _rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


# name: (model type, configuration). Windows are short, caps low and sinks large, so that a test notices their absence.
SUPPORTED = {
    "llama": ("llama", _BASE),
    "llama-rope-llama3": (
        "llama",
        _BASE | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-rope-yarn": ("llama", _BASE | _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "qwen2": ("qwen2", _BASE),
    "qwen2-window": ("qwen2", _BASE | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", _BASE),
    "mistral": ("mistral", _BASE | {"sliding_window": 6}),
    "gemma2": (
        "gemma2",
        _BASE
        | {
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma3": ("gemma3_text", _BASE | {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gpt2": ("gpt2", _GPT2),
    "gpt-neox": ("gpt_neox", _MULTIHEAD),
    "phi3": ("phi3", _BASE),
    "olmo2": ("olmo2", _BASE),
    "granite": ("granite", _BASE | {"logits_scaling": 2.0, "attention_multiplier": 0.3}),
    "cohere": ("cohere", _BASE | {"logit_scale": 0.5}),
    "cohere2": ("cohere2", _BASE | {"sliding_window": 6}),
    "smollm3": ("smollm3", _BASE | {"no_rope_layer_interval": 2}),
    "gpt-oss": ("gpt_oss", _BASE | {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        _BASE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "opt": ("opt", _MULTIHEAD | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}
REFUSED = {
    "bloom": ("bloom", {"vocab_size": 97, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon": ("falcon", _MULTIHEAD | {"alibi": False}),
    "falcon-alibi": ("falcon", _MULTIHEAD | {"alibi": True}),
    "mpt": ("mpt", {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    "stablelm": ("stablelm", _BASE),
    "llama-rope-dynamic": ("llama", _BASE | _rope("dynamic", factor=4.0)),
    "phi3-rope-long": (
        "phi3",
        _BASE
        | {"original_max_position_embeddings": 32}
        | _rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32),
    ),
    "llama4": ("llama4_text", _BASE | {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8}),
    "gemma4": ("gemma4_text", _BASE | {"sliding_window": 6}),
    "qwen3-next": ("qwen3_next", _BASE),
    "mamba": ("mamba", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}),
}


def tiny_model(kind, seed=0, **changes):
    """A model with random weights that are large enough for attention to matter, in float32 and evaluation mode."""
    model_type, settings = (SUPPORTED | REFUSED)[kind]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(settings | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=None if kind in REFUSED else "eager").eval().float()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 or "sinks" in name:
            torch.nn.init.normal_(weight, std=1.0 if "sinks" in name else 0.2)
    return model


def word_tokenizer(size=97, **special):
    """`size` tokens of one letter each."""
    backend = Tokenizer(models.WordLevel({chr(0x100 + i): i for i in range(size)}, unk_token=chr(0x100)))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def reward_model(family="LlamaForSequenceClassification", seed=0, **changes):
    """An untrained judge whose scores differ from text to text, by default for the tokens of `byte_level`."""
    torch.manual_seed(seed)
    kind = getattr(transformers, family)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
        "pad_token_id": None,
    }
    heads = {} if family.endswith("CausalLM") else {"num_labels": 1}
    return kind(kind.config_class(**{**sizes, **heads, **changes})).eval()
