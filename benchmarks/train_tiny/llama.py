"""A Llama in plain torch with transformers' parameter names: one causal pass to train, one cached step to sample.

    h = x + Wo attention(rope(Wq n(x)), rope(Wk n(x)), Wv n(x))
    y = h + Wd (silu(Wg n(h)) * Wu n(h)),    n = RMS norm

The output projection is the embedding (tied). Every row of a cached step stands at the same position, so the query
heads that share a key head are queries of one unmasked attention call, and no padding exists.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, by the names that `transformers.LlamaConfig` gives them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Cache:
    """Keys and values [layers][rows, kv_heads, max_length, head_dim]; `length` positions of every row are filled."""

    def __init__(self, shape: Shape, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (rows, shape.num_key_value_heads, max_length, shape.head_dim)
        self.keys = [torch.empty(size, device=device, dtype=dtype) for _ in range(shape.num_hidden_layers)]
        self.values = [torch.empty(size, device=device, dtype=dtype) for _ in range(shape.num_hidden_layers)]
        self.length = 0

    def fill_from(self, other: Cache) -> None:
        """Begins every row with the positions of a cache of one row."""
        self.length = other.length
        for layer in range(len(self.keys)):
            self.keys[layer][:, :, : other.length] = other.keys[layer]
            self.values[layer][:, :, : other.length] = other.values[layer]

    def keep(self, rows: Tensor) -> None:
        """Keeps only the named rows (int64 [kept])."""
        for layer in range(len(self.keys)):
            self.keys[layer] = self.keys[layer][rows]
            self.values[layer] = self.values[layer][rows]


def rope_table(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim], fp32; the two halves of the head turn together."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim)
    angle = torch.arange(shape.max_position_embeddings, device=device).float()[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to x [..., positions, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [rows, length, hidden] -> the same shape, causal."""
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, *rope), rotate(k, *rope)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, position: int) -> Tensor:
        """x [rows, hidden] at `position`; writes its key and value and attends to all positions so far."""
        rows = x.shape[0]
        q = self.q_proj(x).view(rows, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        k = self.k_proj(x).view(rows, self.kv_heads, self.head_dim)
        keys[:, :, position] = rotate(k, *rope)
        values[:, :, position] = self.v_proj(x).view(rows, self.kv_heads, self.head_dim)
        seen = position + 1
        out = F.scaled_dot_product_attention(rotate(q, *rope), keys[:, :, :seen], values[:, :, :seen])
        return self.o_proj(out.reshape(rows, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Llama(nn.Module):
    """A causal language model with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.model = shape, Backbone(shape)
        cos, sin = rope_table(shape, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._initialise)
        residual_std = 0.02 / (2 * shape.num_hidden_layers) ** 0.5
        for layer in self.model.layers:
            nn.init.normal_(layer.self_attn.o_proj.weight, std=residual_std)
            nn.init.normal_(layer.mlp.down_proj.weight, std=residual_std)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [rows, length] -> logits [rows, length, vocabulary] in the compute dtype."""
        length = tokens.shape[1]
        rope = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, rope)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """tokens int64 [rows], the next of every row -> logits [rows, vocabulary]; the cache grows by one."""
        at = cache.length
        rope = self.cos[at], self.sin[at]
        x = self.model.embed_tokens(tokens)
        for i, layer in enumerate(self.model.layers):
            x = x + layer.self_attn.step(layer.input_layernorm(x), rope, cache.keys[i], cache.values[i], at)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        cache.length = at + 1
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def load_folder(folder: str | Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Llama:
    """Reads a transformers Llama folder into this class."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = model.config
    names = [name for name in Shape.__dataclass_fields__ if name != "rope_theta"]
    theta = config.rope_parameters["rope_theta"]
    own = Llama(Shape(**{name: getattr(config, name) for name in names}, rope_theta=theta))
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    own.load_state_dict(weights)
    return own.to(device, dtype).eval()


def save_folder(model: Llama, folder: str | Path, *, end_ids: list[int], pad_id: int) -> None:
    """Writes `config.json`, `generation_config.json` and `model.safetensors` (bf16) as transformers does."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    settings = asdict(model.shape)
    theta = settings.pop("rope_theta")
    config = LlamaConfig(
        **settings,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_ids,
        pad_token_id=pad_id,
        dtype="bfloat16",
    )
    theirs = LlamaForCausalLM(config)
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    theirs.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    theirs.generation_config = GenerationConfig(do_sample=True, eos_token_id=end_ids, pad_token_id=pad_id)
    theirs.to(torch.bfloat16).save_pretrained(folder)
