"""GGUF files: weights and tokenizer of the Llama family (llama, qwen2, qwen3), read with numpy in seconds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantised tensors are blocks of 32 or 256 values:

    Q8_0  d q             Q4_0, Q5_0  d (q - 8), d (q - 16)      Q4_1, Q5_1  d q + m
    Q4_K, Q5_K  d s q - e m, where s and m are 6-bit numbers for every 32 values       Q6_K  d s (q - 32), s for every 16

Other architectures go through the reader of transformers.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from smcgen.errors import ModelError, first_line
from smcgen.lm.gguf_tokenizer import read_tokenizer

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_FAMILY = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
_ROPE_FACTORS = "rope_freqs.weight"  # divides the rope frequencies, where the model was stretched to long contexts


class Tensor(NamedTuple):
    """Where a tensor lies in the file; `shape` as torch has it."""

    shape: tuple[int, ...]
    kind: int
    start: int


class File(NamedTuple):
    """A GGUF file: its bytes (uint8, mapped), its metadata by key, its tensors by name."""

    data: np.ndarray
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def load(path: Path, dtype: torch.dtype, with_tokenizer: bool = True) -> tuple[Any, Any]:
    """The transformers model (on the CPU, in `dtype`) and tokenizer (None if not wanted) of a GGUF file.

    Raises ModelError for a file that is damaged, or that neither this reader nor that of transformers knows."""
    try:
        file = read(path)
    except (struct.error, ValueError, KeyError, IndexError, OSError, UnicodeDecodeError, OverflowError) as error:
        raise ModelError(f"{path} is no whole GGUF file ({error}): fetch it anew") from error
    try:
        if not _in_family(file):
            return _load_by_transformers(path, file, dtype, with_tokenizer)
        config = _config(file)
        state = {
            _transformers_name(name): _weight(file, name, config).to(dtype) for name in file.tensors if name != _ROPE_FACTORS
        }
        model, info = _FAMILY[config.model_type].from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
        if _ROPE_FACTORS in file.tensors:
            model.model.rotary_emb.inv_freq /= tensor(file, _ROPE_FACTORS)
    except KeyError as error:
        raise ModelError(f"{path} lacks the key {error}: fetch another file of this model") from error
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch another file of this model") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        lost = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ModelError(f"{path} lacks {len(lost)} weights ({lost[0]}, ...): fetch another file of this model")
    return model, read_tokenizer(file.metadata, path.name) if with_tokenizer else None


def read(path: Path) -> File:
    """The head of a GGUF file. Raises ValueError and kin for anything else, and for a file that is cut off."""
    data = np.memmap(path, np.uint8, "r")
    cursor = _Cursor(data.data)
    if bytes(data[:4]) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, not 2 or 3")
    tensors, keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    heads = []
    for _ in range(tensors):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        heads.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    file = File(data, metadata, {name: Tensor(shape, kind, start + at) for name, shape, kind, at in heads})
    for name, (shape, kind, at) in file.tensors.items():
        values, size = _LAYOUT.get(kind, (1, 0))
        if at + math.prod(shape) // values * size > len(data):
            raise ValueError(f"it is cut off within {name}")
    return file


def tensor(file: File, name: str) -> torch.Tensor:
    """A tensor of the file: bfloat16 and float16 as stored, all else as float32."""
    shape, kind, start = file.tensors[name]
    if kind not in _LAYOUT:
        raise ValueError(f"{name} has type {kind}, which is not among F32, F16, BF16, Q4_0 to Q8_0 and Q4_K to Q6_K")
    values, size = _LAYOUT[kind]
    blocks = file.data[start : start + math.prod(shape) // values * size].reshape(-1, size)
    if kind in _PLAIN:
        return torch.frombuffer(bytearray(blocks.tobytes()), dtype=_PLAIN[kind]).view(shape)
    return torch.from_numpy(np.ascontiguousarray(_DECODE[kind](blocks), np.float32)).view(shape)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        if self.at + size > len(self.data):
            raise ValueError("it is cut off")
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            self.at += struct.calcsize(code)
            return list(struct.unpack_from(code, self.data, self.at - struct.calcsize(code)))
        return [self.value(kind) for _ in range(count)]


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, float32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Low halves of the bytes, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """32 bits from byte `at` on, as 0 or 16: [blocks, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes a block, each [blocks, 8]."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    return scales, np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=1)


def _k_blocks(blocks: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """d s q - e m for `levels` [blocks, 8, 32]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    return (_half(blocks, 0) * scales)[..., None] * levels - (_half(blocks, 2) * minima)[..., None]


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _k_blocks(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _k_blocks(blocks, low | fifth << 4)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    levels = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    return (_half(blocks, 208) * blocks[:, 192:208].view(np.int8))[..., None] * levels


_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_DECODE: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
}
# kind: (values, bytes) of a block
_LAYOUT = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)}
_LAYOUT |= {12: (256, 144), 13: (256, 176), 14: (256, 210)}


def _in_family(file: File) -> bool:
    """Whether this reader knows all that the file holds."""
    about = file.metadata
    kind = about.get("general.architecture")
    return (
        kind in _FAMILY
        and not about.get(f"{kind}.expert_count")
        and about.get(f"{kind}.rope.scaling.type", "none") == "none"
        and about.get(f"{kind}.rope.dimension_count", _head_dim(file)) == _head_dim(file)
        and all(_transformers_name(name) for name in file.tensors if name != _ROPE_FACTORS)
    )


def _head_dim(file: File) -> int:
    about, kind = file.metadata, file.metadata["general.architecture"]
    heads = about[f"{kind}.attention.head_count"]
    return about.get(f"{kind}.attention.key_length", about[f"{kind}.embedding_length"] // heads)


def _config(file: File) -> PretrainedConfig:
    about, kind = file.metadata, file.metadata["general.architecture"]
    heads = about[f"{kind}.attention.head_count"]
    ends = [about.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    settings: dict[str, Any] = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": about[f"{kind}.embedding_length"],
        "intermediate_size": about[f"{kind}.feed_forward_length"],
        "num_hidden_layers": about[f"{kind}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": about.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": _head_dim(file),
        "max_position_embeddings": about[f"{kind}.context_length"],
        "rms_norm_eps": about[f"{kind}.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": about.get(f"{kind}.rope.freq_base", 10_000.0)},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": about.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({end for end in ends if end is not None}) or None,
    }
    if kind != "qwen2":  # which always has these biases
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return AutoConfig.for_model(kind, **settings)


def _transformers_name(name: str) -> str | None:
    """What transformers calls the tensor `name`; None if it has no such tensor."""
    if name.startswith("blk."):
        _, layer, part, ending = name.split(".", 3)
        return f"model.layers.{layer}.{_LAYER[part]}.{ending}" if part in _LAYER else None
    part, _, ending = name.partition(".")
    return f"{_TOP[part]}.{ending}" if part in _TOP else None


def _weight(file: File, name: str, config: PretrainedConfig) -> torch.Tensor:
    """A tensor as transformers has it. Files of the llama architecture keep the two halves of a rope pair side by side."""
    weight = tensor(file, name)
    part = name.split(".")[-2]
    if config.model_type != "llama" or part not in ("attn_q", "attn_k"):
        return weight
    heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _load_by_transformers(path: Path, file: File, dtype: torch.dtype, with_tokenizer: bool) -> tuple[Any, Any]:
    kind = file.metadata.get("general.architecture", "unnamed")
    print(f"smcgen: {path.name} ({kind}) is read by transformers, which takes minutes", file=sys.stderr)
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype, local_files_only=True)
        if not with_tokenizer:
            return model, None
        return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # whatever a reader of damaged or unknown files raises
        raise ModelError(
            f"{path} ({kind}) cannot be read by transformers: {first_line(error)}; give the model as a folder of safetensors"
        ) from error
