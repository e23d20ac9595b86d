"""Reads a GGUF file of the Llama architecture with numpy alone: weights by their transformers names, and the tokenizer.

Quantised blocks hold 32 values and an fp16 scale d (Q4_1 also a minimum m):
value = d * q (Q8_0), d * (q - 8) (Q4_0), d * q + m (Q4_1). The low four bits of a byte are the first half of its block.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _F16, _Q4_0, _Q4_1, _Q8_0 = 0, 1, 2, 3, 8
_BLOCK_BYTES = {_Q4_0: 18, _Q4_1: 20, _Q8_0: 34}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class GGUF(NamedTuple):
    """Metadata by key, and fp32 tensors by their names in the file, shapes as in torch (rows first)."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        return [self.value(kind) for _ in range(count)]


def _dequantise(data: np.ndarray, kind: int, count: int, offset: int) -> np.ndarray:
    """fp32 values [count] of the tensor that begins at byte `offset`."""
    if kind == _F32:
        return np.frombuffer(data, np.float32, count, offset)
    if kind == _F16:
        return np.frombuffer(data, np.float16, count, offset).astype(np.float32)
    if kind not in _BLOCK_BYTES:
        raise ValueError(f"tensor type {kind} is not read here: only F32, F16, Q4_0, Q4_1 and Q8_0 are")
    blocks = np.frombuffer(data, np.uint8, count // 32 * _BLOCK_BYTES[kind], offset).reshape(-1, _BLOCK_BYTES[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == _Q8_0:
        return (blocks[:, 2:].view(np.int8) * scale).reshape(-1)
    packed = blocks[:, 4:] if kind == _Q4_1 else blocks[:, 2:]
    levels = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    if kind == _Q4_0:
        return ((levels - 8) * scale).reshape(-1)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    return (levels * scale + minimum).reshape(-1)


def read_gguf(path: str | Path) -> GGUF:
    """Reads the whole file. Raises ValueError for what is no GGUF file or holds another tensor type."""
    data = np.memmap(path, np.uint8, "r")
    cursor = _Cursor(memoryview(data))
    if cursor.scalar("I") != 0x46554747:
        raise ValueError(f"{path} is no GGUF file")
    cursor.scalar("I")  # format version
    n_tensors, n_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(n_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for _ in range(n_tensors):
        name, n_dims = cursor.string(), cursor.scalar("I")
        dims = [cursor.scalar("Q") for _ in range(n_dims)]
        infos.append((name, dims[::-1], cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: _dequantise(data, kind, int(np.prod(shape)), start + offset).reshape(shape) for name, shape, kind, offset in infos
    }
    return GGUF(metadata, tensors)


def llama_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `transformers.LlamaConfig` that the metadata states."""
    return {
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
    }


def llama_weights(gguf: GGUF) -> dict[str, np.ndarray]:
    """The tensors by their transformers names; rotary halves put back in transformers' order."""

    def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
        return weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)

    heads = gguf.metadata["llama.attention.head_count"]
    kv_heads = gguf.metadata["llama.attention.head_count_kv"]
    weights = {}
    for name, tensor in gguf.tensors.items():
        if name == "token_embd.weight":
            weights["model.embed_tokens.weight"] = tensor
        elif name == "output_norm.weight":
            weights["model.norm.weight"] = tensor
        elif name == "output.weight":
            weights["lm_head.weight"] = tensor
        elif name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if part in ("attn_q", "attn_k"):
                tensor = unpermute(tensor, heads if part == "attn_q" else kv_heads)
            weights[f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"] = tensor
    return weights


def digit_bpe_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer of the SmolLM2 family, which splits numbers into single digits."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
