"""From what a user names to a `LanguageModel`: hub ids, folders, GGUF files, the embedded pair, objects in memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from smcgen.errors import ModelError, UsageError, first_line
from smcgen.lm import gguf
from smcgen.lm.attention import NAME
from smcgen.lm.base import LanguageModel
from smcgen.lm.checks import check_agreement, check_calls, check_supported, probe_tokens
from smcgen.lm.fused import unknown
from smcgen.lm.hub import local_files_only
from smcgen.lm.int8 import round_linear, to_int8
from smcgen.lm.paged import PagedLM, one_thread
from smcgen.lm.quantized import quantized
from smcgen.lm.vocabulary import Vocabulary

__all__ = ["load", "quantized"]

EMBEDDED = ("tiny", "tiny-draft")
WEIGHTS = (None, "int8")
FUSING = ("cuda",)  # devices on which layers are fused
# Generation settings that would change probabilities, with the values that change nothing.
_CHANGES_PROBABILITIES = {
    "temperature": (1.0,),
    "top_k": (0,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
}


def load(
    spec: Any,
    tokenizer: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    weights: str | None = None,
    compile: bool = False,
) -> LanguageModel:
    """A language model that the engine can read.

    Args:
        spec: a hub id, a local folder, a .gguf file, "tiny" or "tiny-draft", a transformers model in memory (which is
            left as it is: the copy made here shares its weights), or an object that is a `LanguageModel` already.
        tokenizer: needed with a transformers model in memory; else a tokenizer, or where to find one, in place of the
            model's own.
        device: default a GPU if there is one; a model in memory stays where it is.
        dtype: default bfloat16 on a GPU and float32 on a CPU; a model in memory keeps its own.
        weights: "int8" keeps the matrices of linear layers as 8-bit integers (`smcgen.lm.int8`; needs torchao where layers are
            not fused).
        compile: compiles layers that are not fused (`smcgen.lm.compiled`), which takes from seconds to minutes. Where that
            fails they run as they are, with a warning.

    Raises ModelError for a model that is missing, unreadable or unsupported, UsageError for arguments that mean nothing.
    Only a hub id uses the network.
    """
    if weights not in WEIGHTS:
        raise UsageError(f"weights={weights!r}: write 'int8', or leave it out for weights in the dtype of the model")
    if isinstance(spec, PreTrainedModel):
        return _from_memory(spec, tokenizer, device, dtype, weights, compile)
    if isinstance(spec, LanguageModel):
        if (tokenizer, device, dtype, weights, compile) != (None, None, None, None, False):
            raise UsageError(
                f"{spec.name} is loaded already: tokenizer, device, dtype, weights and compile have no effect, leave them out"
            )
        return spec
    if not isinstance(spec, str | os.PathLike):
        raise UsageError(
            f"a model is a hub id, a folder, a .gguf file, a transformers model or a LanguageModel, not {type(spec).__name__}"
        )
    name = os.fspath(spec)
    where = as_device(device)
    kind = as_dtype(dtype) or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    with quiet():
        if name.lower().endswith(".gguf"):
            if not Path(name).expanduser().is_file():
                raise ModelError(f"there is no file {name}: check the path")
            model, own = gguf.load(Path(name).expanduser(), kind, with_tokenizer=tokenizer is None)
            name = Path(name).stem
        else:
            source, local = _find(name)
            model, own = _read(name, source, local, kind, tokenizer is None)
            name = Path(source).name if local else name
        try:
            if weights == "int8":
                _to_int8(model, name, where)
            model = model.to(where)
        except RuntimeError as error:  # out of memory, a device that is not there
            raise ModelError(f"{name} cannot be put on {where}: {first_line(error)}; choose another device") from error
        return _paged(name, model, _tokenizer(name, own if tokenizer is None else tokenizer), compile)


def _from_memory(
    model: PreTrainedModel, tokenizer: Any, device: Any, dtype: Any, weights: str | None, compile: bool
) -> PagedLM:
    name = Path(model.config.name_or_path or type(model).__name__).name
    if tokenizer is None:
        raise UsageError(f"{name} is a model in memory: give its tokenizer too, LM(model, tokenizer)")
    where = model.device if device is None else as_device(device)
    kind = as_dtype(dtype) or model.dtype
    try:
        if where == model.device and kind == model.dtype:
            shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
            own: Any = copy.deepcopy(model, shared)
        else:
            own = copy.deepcopy(model)
            own = own.to(dtype=kind)
        if weights == "int8":
            with quiet():
                _to_int8(own, name, where)
        own = own.to(where)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"{name} cannot be copied: {first_line(error)}; save it and give the folder") from error
    with quiet():
        return _paged(name, own, _tokenizer(name, tokenizer), compile)


def _to_int8(model: Any, name: str, device: torch.device) -> None:
    if device.type in FUSING and unknown(model) is None:
        round_linear(model, device)
    else:
        to_int8(model, name, device)


@torch.no_grad()
def _paged(name: str, model: Any, tokenizer: Any, compile: bool) -> PagedLM:
    """Checks a model that nobody else uses, and turns its attention to pages."""
    model.eval()
    check_supported(model, name)
    tokens, positions = probe_tokens(model)
    try:
        model.set_attn_implementation("eager")  # the model's own words: others leave soft caps out
        plain = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    except Exception as error:
        raise ModelError(f"{name} does not run: {first_line(error)}; it must be a causal language model") from error
    model.set_attn_implementation(NAME)
    shape, _ = check_calls(model, name)
    config, settings = model.config.get_text_config(), getattr(model, "generation_config", None)
    ends = chain(_ids(config.eos_token_id), _ids(model.config.eos_token_id), _ids(getattr(settings, "eos_token_id", None)))
    vocabulary = Vocabulary.from_tokenizer(tokenizer, name, ends, size=plain.shape[-1])
    if len(vocabulary) < plain.shape[-1] // 2:  # transformers makes an empty tokenizer where it finds none
        raise ModelError(
            f"{name}: its tokenizer has {len(vocabulary)} tokens and the model {plain.shape[-1]}; give its own with tokenizer="
        )
    lm = PagedLM(
        name,
        model,
        vocabulary,
        shape,
        max_tokens=getattr(config, "max_position_embeddings", None),
        ignored=_ignored(settings),
    )
    if lm.device.type in FUSING:
        lm.fuse()
    try:
        check_agreement(model, name, *_both(lm, tokens, plain))
    except ModelError as error:
        if isinstance(lm.fusion, str):
            raise
        lm.unfuse(str(error))
        check_agreement(model, name, *_both(lm, tokens, plain))
    if compile:
        _compile(lm, tokens, plain)
    return lm


def _compile(lm: PagedLM, tokens: torch.Tensor, plain: torch.Tensor) -> None:
    """Compiles the layers, or says why not."""
    lm.compile()
    if lm.compiled is not True:
        return
    try:
        with torch.inference_mode(), one_thread(lm.small):  # as they were compiled
            check_agreement(lm.model, lm.name, *_both(lm, tokens, plain))
    except ModelError as error:
        lm.uncompile(str(error))


def _both(lm: PagedLM, tokens: torch.Tensor, plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits through pages and as they should be, after a prompt of three tokens."""
    split, count = 3, tokens.shape[1]
    context = lm.open(1, 1, prompt_tokens=split, new_tokens=count - split)
    lm.prefill(context, [0], [tokens[0, :split].tolist()])
    paged = lm.extend(context, tokens[:, split:], torch.tensor([count - split], device=lm.device))
    return paged, plain[:, split:, : len(lm.vocabulary)]


def _find(name: str) -> tuple[str, bool]:
    """Where a named model lies: (folder or hub id, whether it is a folder)."""
    if name in EMBEDDED:
        folder = Path(__file__).resolve().parents[1] / "models" / name
        if not folder.is_dir():
            raise ModelError(f"the embedded model {name!r} is not part of this installation: name another model")
        return str(folder), True
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path), True
    if path.is_file():
        raise ModelError(f"{name} is a file, and of files only .gguf can be read: give the folder that it lies in")
    return name, False


def _read(name: str, source: str, local: bool, dtype: torch.dtype, with_tokenizer: bool) -> tuple[Any, Any]:
    """A model and its tokenizer as transformers reads them."""
    no_network = local_files_only(source)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, local_files_only=no_network, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:
        if local:
            raise ModelError(
                f"{name} cannot be read as a causal language model: {first_line(error)}; "
                "the folder must hold config.json and weights as save_pretrained writes them"
            ) from error
        raise ModelError(
            f"{name} is no folder here and could not be had from the hub: {first_line(error)}; "
            "check the name and the network, or give the path of a folder"
        ) from error
    model, info = loaded
    lost = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if lost:
        raise ModelError(f"{name}: the files lack {len(lost)} of its weights ({lost[0]}, ...); fetch the model anew")
    return model, source if with_tokenizer else None


def _tokenizer(name: str, tokenizer: Any) -> Any:
    """A tokenizer object; a string or path is where to find one."""
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    where = os.fspath(tokenizer)
    try:
        return AutoTokenizer.from_pretrained(where, local_files_only=local_files_only(where), trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{name}: no tokenizer can be read from {where}: {first_line(error)}; give one with tokenizer="
        ) from error


def as_device(device: str | torch.device | None) -> torch.device:
    """The device that is named; None is a GPU if there is one. Raises UsageError for one that cannot be used."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError:
        raise UsageError(f"there is no device {device!r}: write cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device} is not supported: write cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this torch sees no CUDA device: write device cpu, or install a torch that does")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that is named. Raises UsageError for one that models cannot have."""
    if dtype is None:
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."), None)
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise UsageError(f"dtype {dtype} is not supported: write float32, bfloat16 or float16")
    return found


def _ids(ends: int | list[int] | None) -> list[int]:
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _ignored(settings: Any) -> dict[str, Any]:
    """The generation defaults of a model that would change probabilities."""
    found = {name: getattr(settings, name, None) for name in _CHANGES_PROBABILITIES}
    return {name: value for name, value in found.items() if value is not None and value not in _CHANGES_PROBABILITIES[name]}


@contextmanager
def quiet() -> Iterator[None]:
    """transformers writes advice and progress bars to stderr; what matters is checked and said here."""
    log = transformers.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
