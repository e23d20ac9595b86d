"""The tokenizer that a GGUF file describes, rebuilt with the `tokenizers` library.

The file holds tokens, kinds, merges or scores, and the *name* of the rule that cuts a text before merging
(`tokenizer.ggml.pre`); a rule that is not known here would give other tokens than the model was trained on, and is refused.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from smcgen.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens; the others are 1 normal, 2 unknown, 5 unused, 6 byte
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def read_tokenizer(metadata: dict[str, Any], name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a file with this metadata; `name` is what messages call it. Raises ModelError if it is unknown."""
    try:
        kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
        tokens = metadata["tokenizer.ggml.tokens"]
        if kind == "gpt2":
            backend = _byte_level(tokens, metadata["tokenizer.ggml.merges"], pre)
        elif kind == "llama":
            prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
            backend = _sentencepiece(tokens, metadata["tokenizer.ggml.scores"], prefix)
        else:
            raise ValueError(f"model {kind!r}")
        kinds = metadata["tokenizer.ggml.token_type"]
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"{name}: its tokenizer is not known here ({error}); give one, LM(file, tokenizer) with a hub id or folder"
        ) from error
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    named = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    begins = kind == "llama" or (pre in _SPLITS and _SPLITS[pre] is _LLAMA3)
    if metadata.get("tokenizer.ggml.add_bos_token", begins) and "bos_token" in named:
        bos = (named["bos_token"], metadata["tokenizer.ggml.bos_token_id"])
        backend.post_processor = processors.TemplateProcessing(f"{bos[0]}:0 $A:0", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _byte_level(tokens: list[str], merges: list[str], pre: str) -> Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    whole_words = pre in _SPLITS and _SPLITS[pre] in (_LLAMA3, _TEKKEN)  # a text that is one token is not merged
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=whole_words))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        cut = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    elif pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in ("gpt-2", "gpt2"):
        backend.pre_tokenizer = byte_level
    else:
        raise ValueError(f"pre-tokenizer {pre!r}")
    if pre in _SPLITS and _SPLITS[pre] is _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(tokens: list[str], scores: list[float], prefix: bool) -> Tokenizer:
    """SentencePiece BPE: of all neighbours, the pair whose union has the best score is merged first."""
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [
        (-scores[i], len(token[:cut]), token[:cut], token[cut:])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    pairs = [(left, right) for _, _, left, right in sorted(merges, key=lambda merge: merge[:2])]
    backend = Tokenizer(models.BPE(ids, pairs, byte_fallback=True, fuse_unk=True))
    blank = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank]) if prefix else blank
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend
