"""The algebra in which a target is declared: language models and potentials, raised to powers and multiplied.

    gamma(x) = prod_j p_j(x | prompt_j)**alpha_j * prod_i phi_i(text of x)**beta_i

A `Target` is a flat, immutable product of factors with exponents. Nothing is loaded or computed here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from smcgen.errors import CallError, UsageError
from smcgen.options import called, instead_of
from smcgen.values import is_number, is_whole, plain

if TYPE_CHECKING:
    from smcgen.lm.base import LanguageModel

EXTREME = 1e30  # of exponents, and 1 / EXTREME of temperatures: beyond it logits leave the range of float32


class Factor:
    """Anything that can stand in a product: a language model, a potential, or a product of these."""

    hard = False

    def factors(self) -> tuple[tuple[Factor, float], ...]:
        """The factors of this expression with their exponents."""
        return ((self, 1.0),)

    def __mul__(self, other: Factor) -> Target:
        if isinstance(other, FunctionType):
            name = other.__name__
            raise UsageError(f"{name} is a plain function: make it a potential, smcgen.potential({name}) or @smcgen.potential")
        if not isinstance(other, Factor):
            raise _no_factor(self, "*", other)
        return Target.product(*self.factors(), *other.factors())

    def __rmul__(self, other: object) -> NoReturn:
        raise _no_factor(self, "*", other)

    def __pow__(self, exponent: float) -> Target:
        """Every factor to the power `exponent`. Raises UsageError where a power means nothing: a hard constraint has
        values 0 and 1, a potential may be 0 and has no negative power, and exponent 0 would remove the factor."""
        exponent = plain(exponent)
        if not is_number(exponent):
            raise CallError(f"{self!r} ** {_short(exponent)}: an exponent is a number")
        if not 0 < abs(exponent) <= EXTREME:
            raise UsageError(
                f"exponent {exponent}: give a finite number other than 0, up to {EXTREME:g} (to drop a factor, leave it out)"
            )
        for factor, _ in self.factors():
            if factor.hard and exponent < 0:
                raise UsageError(f"{factor!r} may be 0 and nothing can be divided by it: multiply by the opposite condition")
            if factor.hard:
                raise UsageError(
                    f"{factor!r} is a hard constraint (values 0 and 1), a power does not change it: "
                    f"write the power on the other factors only, e.g. lm**{exponent:g} * constraint"
                )
            if exponent < 0 and not isinstance(factor, LM):
                raise UsageError(f"{factor!r} may be 0 and has no negative power: write a potential that returns -log phi")
        return Target.product(*((factor, power * exponent) for factor, power in self.factors()))

    def __truediv__(self, other: Factor) -> Target:
        if not isinstance(other, Factor):
            raise _no_factor(self, "/", other)
        return self * other**-1


def _no_factor(factor: Factor, sign: str, other: object) -> CallError:
    """The error of a product with something that is no factor."""
    number = plain(other)
    if is_number(number):
        return CallError(f"{factor!r} {sign} {number}: a constant factor changes nothing; for a power write ** {number}")
    return CallError(f"{factor!r} {sign} {_short(other)}: {instead_of(other)}")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."


@dataclass(frozen=True)
class Target(Factor):
    """A product of factors with exponents; make one with `*` and `**`."""

    terms: tuple[tuple[Factor, float], ...]

    @classmethod
    def product(cls, *terms: tuple[Factor, float]) -> Target:
        """Multiplies, adding the exponents of language models that occur twice (same model, prompt and temperature)."""
        merged: list[tuple[Factor, float]] = []
        for factor, power in terms:
            twin = next((i for i, (f, _) in enumerate(merged) if isinstance(f, LM) and f == factor), None)
            if twin is None:
                merged.append((factor, power))
            else:
                merged[twin] = (factor, merged[twin][1] + power)
        return cls(tuple((f, p) for f, p in merged if p != 0))

    def factors(self) -> tuple[tuple[Factor, float], ...]:
        return self.terms

    @property
    def lms(self) -> list[tuple[LM, float]]:
        """Language models with their exponents alpha_j, in the order written."""
        return [(f, p) for f, p in self.terms if isinstance(f, LM)]

    @property
    def potentials(self) -> list[tuple[Factor, float]]:
        """Potentials with their exponents beta_i, in the order written."""
        return [(f, p) for f, p in self.terms if not isinstance(f, LM)]

    def __repr__(self) -> str:
        return " * ".join(repr(f) if p == 1 else f"{f!r}**{p:g}" for f, p in self.terms)


@dataclass
class Handle:
    """What a language model is made from, and the model once it is loaded (shared by all LMs derived from one)."""

    spec: Any
    tokenizer: Any = None
    device: str | None = None
    dtype: str | None = None
    source: Handle | None = None  # this model is made from that one: a quantised copy if there are `bits`, else by `spec`
    bits: int | None = None
    loaded: LanguageModel | None = None
    weights: str | None = None
    compile: bool = False

    @property
    def name(self) -> str:
        if self.source is not None and self.bits is not None:
            return f"{self.source.name}:int{self.bits}"
        if isinstance(self.spec, str):
            return self.spec
        return getattr(self.spec, "name", None) or type(self.spec).__name__

    def load(self) -> LanguageModel:
        """The model, read now if it has not been. Raises ModelError if it cannot be had."""
        from smcgen.lm.base import LanguageModel  # imports torch

        if isinstance(self.spec, LanguageModel):
            if self.weights is not None or self.compile:
                raise UsageError(f"{self.name} is loaded already: weights and compile have no effect, leave them out")
            return self.spec
        found = self.loaded
        if found is None:
            with warnings.catch_warnings():  # tqdm asks for notebook widgets that nothing here uses
                warnings.filterwarnings("ignore", message="IProgress not found")
                from smcgen.lm.load import load, quantized  # imports transformers

            if self.source is not None and self.bits is None:
                found = self.spec.build(self.source.load())  # an NGram
            elif self.source is not None and self.bits is not None:
                found = quantized(self.source.load(), self.bits)
            else:
                options = {"weights": self.weights, "compile": self.compile}
                found = load(self.spec, self.tokenizer, device=self.device, dtype=self.dtype, **options)
            self.loaded = found
        return found


class Truncation(NamedTuple):
    """Which tokens a next-token law keeps (see `kernels.truncate`); None is no limit."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


WHOLE = Truncation()


@dataclass(frozen=True, eq=False, repr=False)
class LM(Factor):
    """A language model as a factor of a target: p(x | prompt), the probability of a whole token sequence.

    Args:
        spec: hub id, local folder, .gguf file, "tiny" (the pair that ships inside), a transformers model in memory, or an
            object that satisfies `smcgen.lm.base.LanguageModel`.
        tokenizer: needed with a transformers model in memory, else read from beside the weights.
        device, dtype: e.g. "cuda", "bfloat16"; by default a GPU if there is one, and bfloat16 there, float32 on a CPU.
        weights: "int8" rounds the matrices to 8-bit integers and keeps them so, in half the memory of bfloat16: the target is
            then the rounded model. Layers that are fused on a GPU read the integers; others need the extra `int8` and save
            memory only. (`quantized(8)` is something else: a second, rounded model for use as a draft.)
        compile: compiles layers that are not fused with `torch.compile` when the model is loaded, which takes from seconds to
            minutes; where that fails the layers run as they are, with a warning. `info["layers"]` tells.

    The model is loaded when it is first needed.
    """

    handle: Handle
    prompt: Any = None
    temperature: float = 1.0
    truncation: Truncation = WHOLE

    @called
    def __init__(
        self,
        spec: Any,
        tokenizer: Any = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        compile: bool = False,
    ):
        for name, value in (("device", device), ("dtype", dtype)):
            if value is not None and not isinstance(value, str):
                raise UsageError(f"{name}={value!r}: give its name, e.g. 'cuda' or 'float32'")
        if spec is None or spec == "":
            raise UsageError("no model: give a hub id, a folder, a .gguf file or a model")
        if weights not in (None, "int8"):
            raise UsageError(f"weights={weights!r}: write 'int8', or leave it out for weights in the dtype of the model")
        handle = spec
        if not isinstance(spec, Handle):
            handle = Handle(spec, tokenizer, device, dtype, weights=weights, compile=bool(compile))
        object.__setattr__(self, "handle", handle)

    @property
    def name(self) -> str:
        return self.handle.name

    def given(self, prompt: str | Sequence[Any]) -> LM:
        """This model reading its own prompt (text, chat messages or token ids) in place of the call's."""
        check_prompt(prompt)
        return self._with(prompt=prompt if isinstance(prompt, str) else tuple(prompt))

    @called
    def at(
        self,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> LM:
        """softmax(logits / temperature), cut to some tokens and normalised: another base model, which is not a power of this
        one (see `**`). What is left out stays as it is.

        Args:
            temperature: at least 1e-30; 0 is greedy decoding, for mode="exact" only.
            top_k: the k likeliest tokens.
            top_p: in (0, 1], the fewest likeliest tokens that have this probability together.
            min_p: in [0, 1], tokens at least this share as likely as the likeliest.
        """
        for name, value, low, high in (
            ("temperature", temperature, 0, math.inf),
            ("top_k", top_k, 1, math.inf),
            ("top_p", top_p, 0, 1),
            ("min_p", min_p, 0, 1),
        ):
            if value is None:
                continue
            wrong = not (is_whole(value) if name == "top_k" else is_number(value)) or not math.isfinite(value)
            tiny = (name == "top_p" and value == 0) or (name == "temperature" and 0 < value < 1 / EXTREME)
            if wrong or tiny or not low <= value <= high:
                wanted = {
                    "temperature": "a positive number, at least 1e-30 (0 is greedy decoding, for mode='exact')",
                    "top_k": "an integer of at least 1",
                    "top_p": "a number in (0, 1]",
                    "min_p": "a number in [0, 1]",
                }[name]
                raise UsageError(f"{name} {value!r}: give {wanted}")
        old = self.truncation
        return self._with(
            temperature=self.temperature if temperature is None else float(temperature),
            truncation=Truncation(
                old.top_k if top_k is None else top_k,
                old.top_p if top_p is None else float(top_p),
                old.min_p if min_p is None else float(min_p),
            ),
        )

    @property
    def law(self) -> tuple[float, Truncation]:
        """The temperature and truncation to compute with: greedy decoding is the likeliest token alone, at temperature 1."""
        return (1.0, Truncation(top_k=1)) if self.temperature == 0 else (self.temperature, self.truncation)

    @called
    def quantized(self, bits: int = 8) -> LM:
        """A copy with weights rounded to `bits` bits (8, 6, 5, 4 or 3), for use as a draft."""
        return LM(Handle(None, source=self.handle, bits=bits))._with(
            prompt=self.prompt, temperature=self.temperature, truncation=self.truncation
        )

    def load(self) -> LanguageModel:
        """The loaded model. Raises ModelError."""
        return self.handle.load()

    def _with(self, **changes: Any) -> LM:
        new = LM(self.handle)
        for name in ("prompt", "temperature", "truncation"):
            object.__setattr__(new, name, changes.get(name, getattr(self, name)))
        return new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LM) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((id(self.handle), self.temperature, self.truncation))

    def _key(self) -> tuple:
        return id(self.handle), self.temperature, self.truncation, self.prompt

    def __repr__(self) -> str:
        text = f"LM({self.name!r})" if self.handle.weights is None else f"LM({self.name!r}, weights={self.handle.weights!r})"
        if self.prompt is not None:
            text += f".given({_short(self.prompt)})"
        options = [] if self.temperature == 1 else [f"temperature={self.temperature:g}"]
        options += [f"{name}={value:g}" for name, value in self.truncation._asdict().items() if value is not None]
        return text + (f".at({', '.join(options)})" if options else "")


def check_prompt(prompt: Any) -> None:
    """Raises UsageError unless `prompt` is one prompt: text, chat messages (dicts with "role" and "content") or token ids."""
    if isinstance(prompt, str):
        if not is_text(prompt):
            raise UsageError("a prompt holds a lone surrogate, which is no character: decode its bytes as UTF-8 first")
        return
    whole = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray) and len(prompt) > 0
    if whole and all(isinstance(part, Integral) and not isinstance(part, bool) for part in prompt):
        return
    messages = [part for part in prompt if isinstance(part, Mapping)] if whole else []
    if messages and len(messages) == len(prompt):
        for part in messages:
            if not isinstance(part.get("role"), str) or "content" not in part:
                raise UsageError(f'message {dict(part)!r}: give {{"role": "user", "content": "..."}}')
        return
    shown = repr(prompt)
    raise UsageError(
        f"prompt {shown if len(shown) < 80 else shown[:77] + '...'}: give text, a list of chat messages or a list of token ids"
    )


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8 (it holds no lone surrogates)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
