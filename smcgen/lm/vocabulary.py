"""The tokens of a language model: the bytes each adds to the text, the end tokens, and how a prompt becomes token ids.

Two models can be used together iff their vocabularies agree token by token (`Vocabulary.difference`); sizes of their
weight matrices, which are often padded, do not matter.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from smcgen.errors import ModelError, UsageError, first_line

if TYPE_CHECKING:
    import llguidance

    from smcgen.potentials.base import Prompt


class Vocabulary:
    """The tokens of one model. Treat it as immutable: models, potentials and results share it.

    Attributes:
        name: how messages call it, usually the model's name.
        tokens: the bytes that each id adds to the text; b"" for special tokens and end tokens.
        special: ids that are markup, not text.
        end_ids: ids that end a text, sorted; may be empty.
        bos_id: the token a text begins with, or None.
        tokenizer: the transformers tokenizer, or None: then texts are split greedily, longest token first.
    """

    def __init__(
        self,
        name: str,
        tokens: Iterable[bytes],
        special: Iterable[int] = (),
        end_ids: Iterable[int] = (),
        bos_id: int | None = None,
        tokenizer: Any = None,
    ):
        """`tokens` holds the spelling of every id, that of special and end tokens too: it tells them apart in
        `difference`, and is replaced by b"" in `self.tokens`. Raises UsageError for an id that is no token."""
        self.name = name
        self.spelling = tuple(bytes(token) for token in tokens)
        self.special = frozenset(special)
        self.end_ids = tuple(sorted(set(end_ids)))
        self.bos_id = bos_id
        self.tokenizer = tokenizer
        silent = self.special.union(self.end_ids)
        self._check_ids([*silent, *(() if bos_id is None else (bos_id,))])
        self.tokens = tuple(b"" if i in silent else token for i, token in enumerate(self.spelling))

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, name: str, end_ids: Iterable[int] = (), size: int | None = None) -> Vocabulary:
        """The vocabulary of a transformers tokenizer that is backed by the `tokenizers` library.

        end_ids: end tokens that the model names; the tokenizer's own is added.
        size: columns of the model's logits; tokens beyond it are dropped, columns beyond the tokens are padding.
        Raises ModelError for a tokenizer without such a backend."""
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelError(
                f"{name}: {type(tokenizer).__name__} is no fast tokenizer, and the bytes of its tokens cannot be read; "
                "convert it (AutoTokenizer.from_pretrained(..., use_fast=True) makes a tokenizer.json)"
            )
        spelling = _spelling(tokenizer.backend_tokenizer)[:size]
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        special |= {i for i, token in enumerate(spelling) if token == b""}  # ids that no token has: never text
        ends = {*end_ids, *(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))}
        count, bos_id = len(spelling), tokenizer.bos_token_id
        return cls(
            name,
            spelling,
            special={i for i in special if i < count},
            end_ids={i for i in ends if 0 <= i < count},
            bos_id=bos_id if bos_id is not None and bos_id < count else None,
            tokenizer=tokenizer,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Vocabulary({self.name!r}, {len(self)} tokens, end_ids={self.end_ids})"

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens `ids`; bytes that are no valid UTF-8 become U+FFFD."""
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", errors="replace")

    def encode(self, prompt: str | Sequence[Mapping] | Sequence[int], chat: bool | None = None) -> Prompt:
        """The token ids of a prompt, never empty.

        prompt: a text, a list of messages ({"role": ..., "content": ...}), or token ids, taken as they are.
        chat: for a text: True makes it one user message, False continues it as it stands, None does the first iff the
            model has a chat template and the text is not empty and holds no special token of the model.
        A text that is continued gets the tokens that the tokenizer puts in front (BOS), once; a chat has what its
        template writes. Raises UsageError for a prompt that cannot be read."""
        from smcgen.potentials.base import Prompt  # potentials import the algebra, which imports models

        if isinstance(prompt, str):
            if chat is None:
                chat = bool(prompt) and self._has_template and not self._holds_special(prompt)
            if not chat:
                return Prompt(self._encode_raw(prompt), prompt)
            messages = ({"role": "user", "content": prompt},)
            return Prompt(self._split(self._render(messages)), prompt, messages)
        items: list[Any] = list(prompt)
        if not items:
            raise UsageError("the prompt is empty: give at least one message or one token id")
        if isinstance(items[0], Mapping):
            messages = tuple(dict(message) for message in items)
            text = self._render(messages)
            return Prompt(self._split(text), text, messages)
        try:
            ids = tuple(operator.index(i) for i in items)
        except TypeError:
            raise UsageError(
                'a prompt is a text, a list of messages such as {"role": "user", "content": "..."}, or a list of token '
                f"ids; this one holds {type(items[0]).__name__}"
            ) from None
        self._check_ids(ids)
        return Prompt(ids, self.decode(ids))

    def difference(self, other: Vocabulary, ends: bool = True) -> str | None:
        """None if both have the same tokens under the same ids (and the same end tokens, unless `ends` is False), else
        one line with the first difference."""
        if self.spelling != other.spelling or self.special != other.special:
            for i, (a, b) in enumerate(zip(self.spelling, other.spelling, strict=False)):
                if a != b:
                    return f"token {i} is {_show(a)} in {self.name} and {_show(b)} in {other.name}"
                if (i in self.special) != (i in other.special):
                    where, elsewhere = (self, other) if i in self.special else (other, self)
                    return f"token {i} ({_show(a)}) is a special token in {where.name} and text in {elsewhere.name}"
            return f"{self.name} has {len(self)} tokens and {other.name} has {len(other)}"
        if ends and self.end_ids != other.end_ids:
            return f"{self.name} ends at tokens {self.end_ids} and {other.name} at {other.end_ids}"
        return None

    def llguidance(self) -> llguidance.LLTokenizer:
        """These tokens as llguidance takes them (built once). Its masks have a bit for every id; without end tokens one
        more id, len(self), stands for the end."""
        return self._llguidance

    @cached_property
    def _llguidance(self) -> llguidance.LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        # Special tokens keep their spelling here: llguidance hides it from texts, and grammars may call them by name.
        wrapper = TokenizerWrapper(_ForLLGuidance(self))
        return LLTokenizer(wrapper, eos_token=list(self.end_ids) or None)

    @cached_property
    def _has_template(self) -> bool:
        return getattr(self.tokenizer, "chat_template", None) is not None

    @cached_property
    def _prefix(self) -> tuple[int, ...]:
        """What stands before a text that is continued: the tokenizer's own choice, or bos_id where there is none."""
        if self.tokenizer is None:
            return () if self.bos_id is None else (self.bos_id,)
        probe = self._split("a")
        full = self.tokenizer.backend_tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(probe) + 1):
            if tuple(full[start : start + len(probe)]) == probe:
                return tuple(full[:start])
        return ()

    def _holds_special(self, text: str) -> bool:
        spellings = (self.spelling[i].decode("utf-8", errors="replace") for i in self.special)
        return any(special and special in text for special in spellings)

    def _encode_raw(self, text: str) -> tuple[int, ...]:
        ids, prefix = self._split(text), self._prefix
        if prefix and ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if not ids and self.bos_id is not None:
            ids = (self.bos_id,)
        if not ids:
            raise UsageError(f"the prompt is empty and {self.name} has no token to begin a text with: give some text")
        return ids

    def _render(self, messages: Sequence[Mapping]) -> str:
        if not self._has_template:
            raise UsageError(f"{self.name} has no chat template: give the prompt as plain text (--no-chat)")
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever the template, a program that ships with the model, raises
            raise UsageError(
                f"the chat template of {self.name} refuses these messages ({first_line(error)}): check their roles and contents"
            ) from error

    def _split(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` and nothing around it."""
        if self.tokenizer is not None:
            ids = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            self._check_ids(ids)
            return tuple(ids)
        ids, rest = self._greedy(text.encode("utf-8"))
        if rest:
            raise UsageError(f"no token of {self.name} begins {rest[:20]!r}: write the prompt with its tokens")
        return ids

    def _greedy(self, data: bytes) -> tuple[tuple[int, ...], bytes]:
        """`data` split into the longest tokens that fit, none of them special, and what no token begins."""
        ids = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._by_bytes), None)
            if size is None:
                break
            ids.append(self._by_bytes[data[:size]])
            data = data[size:]
        return tuple(ids), data

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {token: i for i, token in reversed(list(enumerate(self.tokens))) if token}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)

    def _check_ids(self, ids: Iterable[int]) -> None:
        for i in ids:
            if not 0 <= i < len(self.spelling):
                raise UsageError(f"token id {i} is not in {self.name}: ids go from 0 to {len(self.spelling) - 1}")


class _ForLLGuidance:
    """What llguidance's TokenizerWrapper reads."""

    def __init__(self, vocabulary: Vocabulary):
        self.tokens = list(vocabulary.spelling)
        self.special_token_ids = sorted(vocabulary.special.union(vocabulary.end_ids))
        self.bos_token_id = vocabulary.bos_id
        self.eos_token_id = vocabulary.end_ids[0] if vocabulary.end_ids else None
        self._greedy = vocabulary._greedy

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens for a text that a grammar forces: never a special token, even where the text is spelled like one."""
        return list(self._greedy(text.encode("utf-8") if isinstance(text, str) else text)[0])


def _show(token: bytes) -> str:
    return repr(token.decode("utf-8")) if _is_utf8(token) else repr(token)


def _is_utf8(token: bytes) -> bool:
    try:
        token.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _spelling(backend: Any) -> list[bytes]:
    """The bytes of every id of a `tokenizers.Tokenizer`, b"" for ids that no token has. Decoders decide: byte-level BPE
    writes bytes as letters, SentencePiece writes a blank as U+2581 and single bytes as <0x..>; others are asked what
    a token adds to a text."""
    tokens = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    steps = _decoder_steps(backend)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        letters = _byte_letters()
        spelled = {
            i: b"".join(letters[c] for c in token) if letters.keys() >= set(token) else token.encode()
            for i, token in tokens.items()
        }
        spelled |= {i: token.content.encode() for i, token in added.items()}
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        spelled = {i: _sentencepiece_bytes(token, steps) for i, token in tokens.items()}
    else:
        spelled = _added_text(backend, sorted(tokens.keys() - added.keys()))
        spelled |= {i: token.content.encode() for i, token in added.items()}
    spelled |= {i: token.content.encode() for i, token in added.items() if token.special}
    return [spelled.get(i, b"") for i in range(max(spelled, default=-1) + 1)]


def _decoder_steps(backend: Any) -> list[dict]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())  # its JSON, without that of the whole vocabulary
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_letters() -> dict[str, bytes]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, the others for letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): bytes([byte]) for byte in plain} | {chr(256 + n): bytes([byte]) for n, byte in enumerate(rest)}


def _sentencepiece_bytes(token: str, steps: Sequence[dict]) -> bytes:
    for step in steps:
        if step["type"] == "ByteFallback" and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        if step["type"] == "Replace" and "String" in step["pattern"]:
            token = token.replace(step["pattern"]["String"], step["content"])
        if step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
    return token.encode()


def _added_text(backend: Any, ids: Sequence[int]) -> dict[int, bytes]:
    """What each id adds to a text that has already begun, by the tokenizer's own decoder."""
    start = next((i for i in ids if backend.decode([i]).strip()), None)
    if start is None:
        return {i: backend.decode([i]).encode() for i in ids}
    before = backend.decode([start])
    texts = backend.decode_batch([[start, i] for i in ids])
    return {i: text[len(before) :].encode() for i, text in zip(ids, texts, strict=True)}
