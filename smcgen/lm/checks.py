"""Which transformers models can be read through pages: refused by name, at load, is what would be silently wrong.

A model that adds something to attention scores through the mask that transformers builds (ALiBi, chunks), keeps a state of
another kind, or rotates cached keys anew, would run and give wrong probabilities. Five checks find these: what the model
declares, what its configuration asks for, whether the attention function was switched, how the model calls it in one short
forward, and whether a second short forward through pages gives the logits of the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from smcgen.errors import ModelError, first_line
from smcgen.lm.attention import NAME, Probe
from smcgen.lm.pages import CacheShape

_LAYERS = {"full_attention", "sliding_attention"}
_TOKENS = 7


def check_supported(model: Any, name: str) -> None:
    """What can be said without running the model. Raises ModelError with the reason."""
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal(model, name, "it is an encoder-decoder, and only decoders (causal language models) can be read")
    if not getattr(model, "_supports_attention_backend", False):
        raise _refusal(model, name, "it does not let its attention be replaced, and K/V pages could not be read")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds:
        raise _refusal(model, name, f"its layers of type {', '.join(sorted(kinds))} are neither full nor sliding attention")
    for rope in _rope_types(getattr(config, "rope_parameters", None)):
        if rope in ("dynamic", "longrope"):
            raise _refusal(
                model,
                name,
                f"its rope of type {rope} changes with the longest row, so keys in the cache would be stale",
            )


def check_calls(model: Any, name: str) -> tuple[CacheShape, Probe]:
    """Runs the model once and looks at its calls of our attention function. Raises ModelError with the reason."""
    config = model.config.get_text_config()
    probe = Probe()
    tokens, positions = probe_tokens(model)
    try:
        model(input_ids=tokens, position_ids=positions, use_cache=False, reading=probe)
    except Exception as error:  # its own code, called in a way that it was not written for
        raise _refusal(model, name, f"it does not run with its attention replaced ({first_line(error)})") from error
    layers = config.num_hidden_layers
    if config._attn_implementation != NAME or not probe.calls:
        raise _refusal(model, name, "its layers do not call the attention function that was set")
    if sorted(call["layer"] for call in probe.calls) != list(range(layers)):
        raise _refusal(model, name, f"it calls attention {len(probe.calls)} times in {layers} layers, not once in each")
    shapes = {(*call["key"].shape, *call["value"].shape) for call in probe.calls}
    if len(shapes) > 1:
        raise _refusal(model, name, "the shape of its keys and values differs between layers, and a pool has one")
    key, value = probe.calls[0]["key"], probe.calls[0]["value"]
    if key.shape[:3] != value.shape[:3] or key.shape[2] != _TOKENS:
        raise _refusal(model, name, f"its keys {tuple(key.shape)} and values {tuple(value.shape)} are not laid out as heads")
    kinds = getattr(config, "layer_types", None) or [None] * layers
    windows = {call["layer"]: call["window"] for call in probe.calls}
    if any(kind == "sliding_attention" and windows[i] is None for i, kind in enumerate(kinds)):
        raise _refusal(model, name, "its sliding layers do not say how wide their window is")
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if windowed and set(kinds) != {"full_attention"} and not any(windows.values()):
        raise _refusal(model, name, "its configuration names a sliding window that its layers do not pass on")
    return CacheShape(layers, key.shape[1], key.shape[3], value.shape[3], value.dtype), probe


def check_agreement(model: Any, name: str, paged: torch.Tensor, plain: torch.Tensor) -> None:
    """Logits through pages against those of the model as it was, [1, T, V] each. Raises ModelError if they differ.

    The median is compared: in a mixture of experts, rounding alone may send a token elsewhere."""
    paged, plain = paged.float(), plain.float()
    # Rounding to 8 bits adds up over the layers: 6 % at 32 layers of random weights. What is wrong is off by far more.
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.15
    scale = float(plain.abs().median())
    error = float((paged - plain).abs().median())
    if not error <= tolerance * scale + 1e-6:
        raise _refusal(model, name, f"its logits through pages are off by {error:.2g} at a size of {scale:.2g}")


def probe_tokens(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A short row of tokens and their positions, [1, T] each, on the model's device."""
    weight = model.get_input_embeddings().weight
    positions = torch.arange(_TOKENS, device=weight.device)[None]
    return (positions * 7 + 3) % weight.shape[0], positions


def _rope_types(parameters: Any) -> Iterator[str]:
    """Every rope type in `rope_parameters`, which may hold one set or one for each kind of layer."""
    if isinstance(parameters, dict):
        for key, value in parameters.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _rope_types(value)


def _refusal(model: Any, name: str, reason: str) -> ModelError:
    kind = getattr(model.config, "model_type", type(model).__name__)
    return ModelError(f"{name} ({kind}) cannot be used: {reason}; take a model of another architecture")
