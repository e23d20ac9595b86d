"""Writes small GGUF files: enough of the format to test a reader of it."""

from __future__ import annotations

import struct

import numpy as np
import torch

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value):
    """A type number and the value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    kind = _value(value[0])[:4]
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(_value(item)[4:] for item in value)


def encode(weight, kind):
    """The bytes of a float32 array in the type `kind`."""
    if kind == BF16:
        return torch.from_numpy(weight).bfloat16().view(torch.int16).numpy().tobytes()
    if kind in (F32, F16):
        return weight.astype(np.float32 if kind == F32 else np.float16).tobytes()
    blocks = weight.reshape(-1, 32)
    low, high = blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)
    if kind == Q8_0:
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        return np.concatenate([scale.view(np.uint8), np.rint(blocks / scale).astype(np.int8).view(np.uint8)], 1).tobytes()
    if kind == Q4_0:
        scale = (np.abs(blocks).max(1, keepdims=True) / 7).astype(np.float16)
        levels, head = np.rint(blocks / scale) + 8, [scale.view(np.uint8)]
    else:
        scale, low = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
        levels, head = np.rint((blocks - low) / scale), [scale.view(np.uint8), low.view(np.uint8)]
    levels = levels.clip(0, 15).astype(np.uint8)
    return np.concatenate([*head, levels[:, :16] | levels[:, 16:] << 4], 1).tobytes()


def write(path, metadata, tensors):
    """tensors: name -> (float32 array, type)."""
    heads, body = b"", b""
    for name, (weight, kind) in tensors.items():
        body += bytes(-len(body) % 32)
        shape = weight.shape[::-1]
        heads += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(body))
        body += encode(weight, kind)
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    data += b"".join(_string(key) + _value(value) for key, value in metadata.items()) + heads
    path.write_bytes(data + bytes(-len(data) % 32) + body)


def write_model(path, model, tokenizer_metadata, kind=F32, extra_tensors=None, **changes):
    """A transformers model of the architectures llama, qwen2 and qwen3; norms and biases stay float32."""
    config = model.config
    about = {
        "general.architecture": config.model_type,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": model.model.layers[0].self_attn.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **changes,
    }
    metadata = {key if "." in key and key.startswith("general") else f"{config.model_type}.{key}": value
                for key, value in about.items()}  # fmt: skip
    tensors = dict(extra_tensors or {})
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, ending = name.rsplit(".", 1)
        array = weight.float().numpy()
        if module.startswith("model.layers."):
            _, _, layer, part = module.split(".", 3)
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            if config.model_type == "llama" and part in heads:
                halves = array.reshape(heads[part], 2, -1, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
            target = f"blk.{layer}.{_NAMES[part]}.{ending}"
        else:
            target = f"{_NAMES[module]}.{ending}"
        tensors[target] = (np.ascontiguousarray(array), kind if array.ndim > 1 else F32)
    write(path, metadata | tokenizer_metadata, tensors)
