"""The layers of a Llama-like transformers model with fewer, larger steps: eight launches a layer in place of about forty.

The weights of query, key and value are one matrix, those of gate and up another; rope, the normalisation of heads and the
write into pages belong to attention; the norms add the residual. No model is written anew: each decoder layer keeps its modules
and gets another `forward` of the same meaning, if it is built from the parts that are known here, and so do the embedding, the
norm behind the layers and the head. All others stay as transformers has them. `smcgen.lm.load` compares the logits before and
after.

A layer may leave a part of its sum to the norm that comes next (see `kernels.layers.add_linear`). What lies between is
transformers' code, so the parts are an attribute of the tensor that the layer returns: they end with it, and nothing is kept
from one forward to another. In the same way the embedding hands on its tokens, which the norm of the first layer looks up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from smcgen.errors import ModelError
from smcgen.kernels.layers import Rounded, Weight, add_linear, embed_norm, gated_linear, linear, rms_norm
from smcgen.lm.attention import Probe, Reading
from smcgen.lm.int8 import RoundedLinear

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


@dataclass
class FusedLayer:
    """The parts of one decoder layer; weights are [out, in], all of them rounded or none."""

    layer: int
    dim: int  # of a head
    scale: float
    window: int | None
    input_norm: torch.Tensor
    output_norm: torch.Tensor
    eps: float
    norms: tuple[torch.Tensor, torch.Tensor, float] | None  # of query and key heads
    qkv: Weight
    qkv_bias: torch.Tensor | None
    sizes: tuple[int, int, int]  # outputs of query, key and value
    out: Weight
    gate_up: Weight
    down: Weight
    later: bool  # whether the norm behind it adds what it leaves
    table: torch.Tensor | None = None  # [tokens, hidden], of the embedding, in the first layer

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: Any = None, reading: Reading | None = None, **_: Any
    ) -> torch.Tensor:
        """[rows, T, hidden] -> the same. `position_embeddings` are the tables of `Rope`."""
        assert reading is not None
        rows, steps, hidden = hidden_states.shape
        residual = hidden_states.reshape(-1, hidden)
        if self.table is None:
            x = rms_norm(residual, self.input_norm, self.eps, _parts(hidden_states))
        else:
            tokens = getattr(hidden_states, "tokens", None)
            if tokens is None:
                raise ModelError("its embedding is changed before the first layer")
            x = embed_norm(residual, tokens.reshape(-1), self.table, self.input_norm, self.eps)
        qkv = linear(x, self.qkv, self.qkv_bias).view(rows, steps, -1, self.dim).transpose(1, 2)
        query, key, value = qkv.split([size // self.dim for size in self.sizes], 1)
        x = reading.attend(
            self.layer, query, key, value, self.scale, self.window, None, None, rope=position_embeddings, norms=self.norms
        )
        parts = add_linear(residual, x.reshape(rows * steps, -1), self.out)
        x = rms_norm(residual, self.output_norm, self.eps, parts)
        parts = add_linear(residual, gated_linear(x, self.gate_up), self.down, self.later)
        made: Any = residual.view(rows, steps, hidden)
        made.parts = parts
        return made


class Rope:
    """Stands in for a model's rotary embedding: cosines and sines [positions, dim] of all positions, made once."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype):
        self.make, self.device, self.dtype = module.forward, device, dtype
        self.tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def reach(self, positions: int) -> None:
        """The tables hold `positions` lines at least."""
        if self.tables is None or len(self.tables[0]) < positions:
            x = torch.zeros(1, dtype=self.dtype, device=self.device)
            cos, sin = self.make(x, position_ids=torch.arange(positions, device=self.device)[None])
            self.tables = cos[0].contiguous(), sin[0].contiguous()

    def forward(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.tables is not None, "reach() comes first"
        return self.tables


@torch.no_grad()
def fuse(model: Any, probe: Probe) -> Rope | str:
    """Fuses every layer of `model` in place, or none.

    probe: how the layers of the model call attention.

    Returns the tables of positions, to be asked to `reach` as far as the model will read, or the reason why the model stays as
    it is."""
    reason = unknown(model)
    if reason is not None:
        return reason
    base, layers, rotary = model.base_model, model.base_model.layers, model.base_model.rotary_emb
    known = {call["layer"]: call for call in probe.calls}
    for i, layer in enumerate(layers):
        call = known[i]
        if call["softcap"] is not None or call["sinks"] is not None:
            return "its attention has soft caps or sinks"
        if layer.self_attn.q_proj.weight.shape[0] % call["key"].shape[3] or call["key"].shape[3] != call["value"].shape[3]:
            return "its heads differ in size"
    embedding: Any = model.get_input_embeddings()
    if not _is_plain(embedding, nn.Embedding) or embedding.max_norm is not None:
        return "its embedding is not plain"
    norm: Any = getattr(base, "norm", None)
    head: Any = model.get_output_embeddings()
    known_norm = _is_rms(norm)
    for i, layer in enumerate(layers):
        made = _fused(i, layer, known[i], later=known_norm or i < len(layers) - 1)
        if i == 0:
            made.table, embedding.forward = embedding.weight, partial(_embed, like=embedding.weight)
        layer.forward = made.forward
    if known_norm:
        norm.forward = partial(_norm, weight=norm.weight, eps=norm.variance_epsilon)
    if _is_plain(head) or isinstance(head, RoundedLinear):
        head.forward = partial(_head, weight=_weight(head), bias=head.bias)
    rope = Rope(rotary, layers[0].self_attn.q_proj.weight.device, model.dtype)
    rotary.forward = rope.forward
    return rope


def unfuse(model: Any) -> None:
    """The modules as transformers has them."""
    base = model.base_model
    ends = model.get_input_embeddings(), getattr(base, "norm", None), model.get_output_embeddings()
    for module in (base.rotary_emb, *ends, *base.layers):
        if module is not None:
            vars(module).pop("forward", None)


def _embed(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Room for [rows, T, hidden], which the first layer fills."""
    made: Any = like.new_empty(*tokens.shape, like.shape[1])
    made.tokens = tokens
    return made


def _parts(x: torch.Tensor) -> torch.Tensor | None:
    """What a fused layer has left to be added to `x`."""
    return getattr(x, "parts", None)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x, weight, eps, _parts(x))


def _head(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


def unknown(model: Any) -> str | None:
    """What in the parts of a model is not known here; how it calls attention may speak against it too."""
    base = model.base_model
    if getattr(base, "layers", None) is None or getattr(base, "rotary_emb", None) is None:
        return "it has no layers with one rotary embedding for all"
    return next((reason for reason in map(_unknown, base.layers) if reason is not None), None)


def _unknown(layer: Any) -> str | None:
    """What in a decoder layer is not known here."""
    parts = {name for name, _ in layer.named_children()}
    if parts != _LAYER:
        return f"its layers are made of {', '.join(sorted(parts))}"
    attention, mlp = {n for n, _ in layer.self_attn.named_children()}, {n for n, _ in layer.mlp.named_children()}
    if not _PROJECTIONS <= attention <= _PROJECTIONS | _NORMS or len(attention & _NORMS) == 1:
        return f"its attention is made of {', '.join(sorted(attention))}"
    if not _MLP <= mlp <= _MLP | {"act_fn"} or not _is_silu(getattr(layer.mlp, "act_fn", None)):
        return "its feed-forward part is not gate, up and down with SiLU"
    linear = [getattr(layer.self_attn, n) for n in _PROJECTIONS] + [getattr(layer.mlp, n) for n in _MLP]
    if {type(part) for part in linear} not in ({nn.Linear}, {RoundedLinear}):
        return "its matrices are not plain"
    kinds = {type(part.weight) for part in linear} - {nn.Parameter}
    if kinds:
        return f"its weights are of type {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if any(getattr(layer.mlp, n).bias is not None for n in _MLP) or layer.self_attn.o_proj.bias is not None:
        return "its output and feed-forward matrices have biases"
    norms = [layer.input_layernorm, layer.post_attention_layernorm] + [getattr(layer.self_attn, n) for n in attention & _NORMS]
    if not all(map(_is_rms, norms)):
        return "its norms are not root mean squares"
    return None


def _is_plain(matrix: Any, kind: type[nn.Module] = nn.Linear) -> bool:
    return type(matrix) is kind and type(matrix.weight) is nn.Parameter


def _is_rms(norm: Any) -> bool:
    return hasattr(norm, "variance_epsilon") and getattr(norm, "bias", None) is None


def _is_silu(activation: Any) -> bool:
    x = torch.linspace(-3, 3, 7)
    return activation is not None and bool(torch.allclose(activation(x), nn.functional.silu(x)))


def _fused(i: int, layer: Any, call: dict[str, Any], later: bool) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    biases = [part.bias for part in projections]
    norms = None
    if hasattr(attention, "q_norm"):
        norms = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon
    return FusedLayer(
        layer=i,
        dim=call["key"].shape[3],
        scale=call["scale"],
        window=call["window"],
        input_norm=layer.input_layernorm.weight,
        output_norm=layer.post_attention_layernorm.weight,
        eps=layer.input_layernorm.variance_epsilon,
        norms=norms,
        qkv=_merge(projections),
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        sizes=tuple(part.weight.shape[0] for part in projections),
        out=_weight(attention.o_proj),
        gate_up=_merge([mlp.gate_proj, mlp.up_proj]),
        down=_weight(mlp.down_proj),
        later=later,
    )


def _weight(part: Any) -> Weight:
    return part.whole if isinstance(part, RoundedLinear) else part.weight


def _merge(parts: Any) -> Weight:
    """The weights of some layers as one matrix, of which their own become views: no weight is held twice."""
    whole = torch.cat([part.weight for part in parts])
    for part, view in zip(parts, whole.split([part.weight.shape[0] for part in parts]), strict=True):
        part.weight.data = view
    return Rounded(whole, torch.cat([part.scale for part in parts])) if isinstance(parts[0], RoundedLinear) else whole
