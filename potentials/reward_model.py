"""Reward models of the transformers library: how good a text is as an answer to a prompt, as a number.

Three kinds, told by the model's architecture: sequence classification (one score for the whole answer), and process reward
models, which judge an answer step by step: token classification, or a language model that is asked to tell a good step by a
token. The last two read

    prompt, step 1, separator, step 2, separator, ...

and judge each step at the last token of the separator after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from smcgen.errors import ModelError, PotentialError, UsageError, first_line
from smcgen.options import called
from smcgen.potentials.base import Prompt
from smcgen.potentials.calls import shortened
from smcgen.values import is_whole

_MARKUP = re.compile(r"<\|[^<>|]+\|>")  # how chat templates spell special tokens
KINDS = ("ForSequenceClassification", "ForTokenClassification", "ForCausalLM")


class RewardModel:
    """A reward model, loaded when it is first needed.

    Args:
        model: a hub id, a local folder, or a transformers model in memory.
        tokenizer: needed with a model in memory, else read from beside the weights.
        label: of a classifier with several labels, the name or number of the one that counts; the reward is the log of its
            probability. A process reward model with two labels counts label 1. A single label is taken as it is (a sequence
            classifier's score) or as the logit of "good" (a token classifier's).
        tokens: (good, bad), of a language model that judges steps: the reward of a step is log p(good) - log(p(good) + p(bad)).
        separator: what is written after each step for a process reward model.
        step: ends of steps; what it matches belongs to no step.
        combine: a process reward model's judgements become one number as their "sum" (log of the product of the
            probabilities), "min" or "last".
        chat: read the prompt and the answer through the chat template of the reward model's own tokenizer (True), or the
            generated text alone (False; a process reward model reads the prompt as plain text before it). None: by whether
            there is a template.
        rows: texts per forward.
        device, dtype: default: where the base model runs, float32 on a CPU and bfloat16 elsewhere; a model in memory stays
            as it is.
    """

    @called
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        label: str | int | None = None,
        tokens: tuple[str, str] | None = None,
        separator: str = "\n",
        step: str | re.Pattern[str] = r"\n+",
        combine: Literal["sum", "min", "last"] = "sum",
        chat: bool | None = None,
        rows: int = 16,
        device: str | None = None,
        dtype: str | None = None,
    ):
        if combine not in ("sum", "min", "last"):
            raise UsageError(f"RewardModel: combine={combine!r}: give 'sum', 'min' or 'last'")
        if not is_whole(rows) or rows < 1 or not separator:
            raise UsageError("RewardModel: give an integer rows >= 1 and a separator that is not empty")
        try:
            self.step = re.compile(step)
        except re.error as error:
            raise UsageError(f"RewardModel: step={step!r} is no regular expression: {error}") from None
        if not isinstance(model, str) and tokenizer is None:
            raise UsageError("RewardModel: a model in memory needs its tokenizer, RewardModel(model, tokenizer)")
        self.name = model if isinstance(model, str) else type(model).__name__
        self.source, self.tokenizer = model, tokenizer
        self.label, self.tokens, self.separator, self.combine = label, tokens, separator, combine
        self.chat, self.rows = chat, rows
        self.device, self.dtype = device, dtype
        self.model: Any = None
        self.kind = ""
        self.columns: list[int] = []  # of the logits: the label that counts, or the good and the bad token

    def load(self, device: torch.device) -> None:
        """Reads the model, if it has not been read. Raises ModelError for one that cannot judge, UsageError for a device or a
        dtype that cannot be used, with the remedy."""
        if self.model is not None:
            return
        from smcgen.lm.load import as_device  # imports transformers

        where = as_device(self.device) if self.device else device
        if isinstance(self.source, str):
            model = self._read(where)
        else:
            model = self.source.to(where) if self.device else self.source
        self.kind = next((kind for kind in KINDS if type(model).__name__.endswith(kind)), "")
        self.columns = self._columns(model)
        if self.chat is None:
            self.chat = getattr(self.tokenizer, "chat_template", None) is not None
        elif self.chat and getattr(self.tokenizer, "chat_template", None) is None:
            raise ModelError(f"reward model {self.name} has no chat template: give a tokenizer that has one, or chat=False")
        if self.chat:
            self._check_template()
        if len(self.tokenizer) > (size := model.get_input_embeddings().num_embeddings):
            raise ModelError(
                f"reward model {self.name} knows {size} tokens and its tokenizer {len(self.tokenizer)}: "
                "the tokenizer belongs to another model"
            )
        self.model = model.eval()

    def __call__(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """The reward of each text as the answer to the prompt beside it; it depends on these two alone, up to rounding."""
        encoded = [self._encode(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]))
        rewards = [0.0] * len(encoded)
        with torch.inference_mode():
            for first in range(0, len(order), self.rows):
                chosen = order[first : first + self.rows]
                for i, value in zip(chosen, self._judge([encoded[i] for i in chosen]), strict=True):
                    rewards[i] = value
        return rewards

    # --- loading --------------------------------------------------------------------------------------------------

    def _read(self, where: torch.device) -> Any:
        import transformers

        from smcgen.lm.hub import local_files_only
        from smcgen.lm.load import as_dtype, quiet

        auto = {
            "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
            "ForTokenClassification": transformers.AutoModelForTokenClassification,
            "ForCausalLM": transformers.AutoModelForCausalLM,
        }
        dtype = as_dtype(self.dtype) or (torch.float32 if where.type == "cpu" else torch.bfloat16)
        source = str(Path(self.source).expanduser())
        try:
            options: dict[str, Any] = {"local_files_only": local_files_only(source)}
        except ModelError as error:
            raise ModelError(f"reward model {self.name} cannot be read: {error}") from None
        try:
            with quiet():
                config = transformers.AutoConfig.from_pretrained(source, **options)
                names = config.architectures or ["none"]
                kind = next((kind for kind in KINDS if names[0].endswith(kind)), None)
                if kind is None or (kind == "ForCausalLM" and self.tokens is None):
                    raise ModelError(
                        f"{self.name} has no head that judges (its architecture is {names[0]}): name a sequence or token "
                        "classification model, or give tokens=(good, bad) for a language model that judges by a token"
                    )
                model, report = auto[kind].from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
                if self.tokenizer is None:
                    self.tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(
                f"reward model {self.name} cannot be read ({first_line(error)}): check its name or path"
            ) from error
        if missing := sorted(report["missing_keys"]):
            raise ModelError(
                f"reward model {self.name} lacks weights ({', '.join(missing[:3])}): its head was never trained, name another"
            )
        return model.to(where)

    def _columns(self, model: Any) -> list[int]:
        if self.tokens is not None:
            if self.kind != "ForCausalLM":
                raise ModelError(f"tokens={self.tokens!r} is for language models that judge; {self.name} has a head of its own")
            return [self._token(token) for token in self.tokens]
        if self.kind not in KINDS[:2]:
            raise ModelError(f"{self.name} has no head that judges: give a classification model, or tokens=(good, bad)")
        names = {int(i): str(name) for i, name in model.config.id2label.items()}
        if len(names) == 1:
            return [0]
        label = 1 if self.label is None and len(names) == 2 and self.kind == KINDS[1] else self.label
        if label in names:
            return [int(label)]
        if label in names.values():
            return [next(i for i, name in names.items() if name == label)]
        raise ModelError(f"reward model {self.name} has several labels, of which label={label!r} is none: name one of {names}")

    def _token(self, token: str) -> int:
        ids = self.tokenizer.encode(token, add_special_tokens=False)
        if len(ids) == 2 and not self.tokenizer.decode(ids[:1]).strip():  # a tokenizer that puts a blank in front
            ids = ids[1:]
        if len(ids) != 1:
            raise ModelError(f"{token!r} is no single token of reward model {self.name}: look up how its judgements are spelt")
        return ids[0]

    def _check_template(self) -> None:
        rendered = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        for markup in _MARKUP.findall(rendered):
            if len(self.tokenizer.encode(markup, add_special_tokens=False)) > 1:
                raise ModelError(
                    f"the chat template of reward model {self.name} writes {markup!r}, which is no token of its tokenizer: "
                    "it belongs to another model"
                )

    # --- reading --------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[dict], **options: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # whatever the template, a program that ships with the model, raises
            raise ModelError(
                f"the chat template of reward model {self.name} refuses this prompt ({first_line(error)}): give RewardModel a "
                "tokenizer whose template takes it, or chat=False"
            ) from error

    def _encode(self, prompt: Prompt, text: str) -> tuple[list[int], list[int]]:
        """The tokens to read and where the judgements are (none for a sequence classifier)."""
        if prompt.messages is not None and not self.chat and self.kind != KINDS[0]:
            raise ModelError(
                f"reward model {self.name} reads plain text (chat=False, or no chat template) and the prompt is a chat: leave "
                "chat out, or give a tokenizer that has a template"
            )
        asked = prompt.messages or ({"role": "user", "content": prompt.text},)
        if self.kind == KINDS[0]:
            if self.chat:
                whole = self._render([*asked, {"role": "assistant", "content": text}])
                ids = self.tokenizer.encode(whole, add_special_tokens=False)
            else:
                ids = self.tokenizer.encode(text)
            places = []
        else:
            if self.chat:
                ids = self.tokenizer.encode(self._render(asked, add_generation_prompt=True), add_special_tokens=False)
            else:
                ids = self.tokenizer.encode(prompt.text)
            places = []
            for step in self.steps(text):
                ids += self.tokenizer.encode(step, add_special_tokens=False)
                ids += self.tokenizer.encode(self.separator, add_special_tokens=False)
                places.append(len(ids) - 1)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and len(ids) > limit:
            raise PotentialError(
                f"reward model {self.name} reads at most {limit} tokens and the text {shortened(text)} has {len(ids)} with "
                "its prompt: lower max_tokens"
            )
        return ids or [self.tokenizer.eos_token_id or 0], places

    def steps(self, text: str) -> list[str]:
        """The steps of an answer, at least one."""
        return [step for step in self.step.split(text) if step.strip()] or [text]

    def _judge(self, encoded: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """One forward over rows padded on the right."""
        width = max(len(ids) for ids, _ in encoded)
        config = self.model.config.get_text_config()
        own = config.pad_token_id
        # Classifiers look for the last token that is not the padding: it must be one that no row ends with.
        pad = own if own is not None else next(v for v in range(len(encoded) + 1) if all(ids[-1] != v for ids, _ in encoded))
        tokens = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in encoded], device=self.model.device)
        real = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in encoded], device=self.model.device)
        try:
            config.pad_token_id = pad
            logits = self.model(input_ids=tokens, attention_mask=real).logits.double().cpu()
        finally:
            config.pad_token_id = own
        if self.kind == KINDS[0]:
            return self._log_label(logits).tolist()
        if self.kind == KINDS[2]:
            logits = logits[..., self.columns]
        judged = [self._judged(logits[row, places]) for row, (_, places) in enumerate(encoded)]
        combine = {"sum": torch.sum, "min": torch.min, "last": lambda values: values[-1]}[self.combine]
        return [float(combine(values)) for values in judged]

    def _log_label(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[..., 0] if logits.shape[-1] == 1 else logits.log_softmax(-1)[..., self.columns[0]]

    def _judged(self, logits: torch.Tensor) -> torch.Tensor:
        """log p(good) of each step: logits [steps, labels], or [steps, 2] of the good and the bad token."""
        if logits.shape[-1] == 1:
            return torch.nn.functional.logsigmoid(logits[..., 0])
        return logits.log_softmax(-1)[..., 0 if self.kind == KINDS[2] else self.columns[0]]
