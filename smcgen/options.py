"""What users may write where they call: numbers of other kinds, and names of options that other libraries have."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar

from smcgen.errors import CallError
from smcgen.values import plain

F = TypeVar("F", bound=Callable[..., Any])

LAW = "it is part of the model's law, lm.at({name}={value})"
CONDITION = "multiply the model by a condition, lm * sg.{name}(...)"
WISH = "multiply the model by a potential: sg.avoids(...), or a function of the text with @sg.potential"
MADE = "give it where the model is made, sg.LM(..., {name}={value})"
SEVERAL = "post.texts({value}) draws so many texts from the result; particles=N sets how many are weighed"

# Names that other libraries have, and what to write here.
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), LAW),
    **dict.fromkeys(("max_new_tokens", "max_length", "max_output_tokens", "max_completion_tokens"), "write max_tokens={value}"),
    **dict.fromkeys(("n", "num_return_sequences", "num_samples", "samples", "n_samples", "best_of"), SEVERAL),
    **dict.fromkeys(("num_particles", "n_particles"), "write particles={value}"),
    **dict.fromkeys(
        ("num_beams", "beam", "beams", "beam_size", "beam_width"),
        "there is no beam search: particles=N, and a power, lm**2, for likelier texts",
    ),
    "do_sample": "for greedy decoding, sg.generate(lm.at(temperature=0), prompt)",
    **dict.fromkeys(("repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size", "bad_words"), WISH),
    "logit_bias": WISH,
    **dict.fromkeys(("alpha", "power", "exponent"), "write the power on the model, lm**{value}"),
    **dict.fromkeys(("regex", "json_schema", "choice", "contains", "avoids", "lark"), CONDITION),
    **dict.fromkeys(
        ("schema", "response_format", "guided_json"), "multiply the model by a condition, lm * sg.json_schema(...)"
    ),
    "guided_regex": "write lm * sg.regex(...)",
    **dict.fromkeys(("grammar", "guided_grammar"), "write lm * sg.lark(...)"),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "until"), "write stop={value}"),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_model"), "write draft=..."),
    **dict.fromkeys(("num_speculative_tokens", "num_assistant_tokens", "block_size"), "write block={value}"),
    **dict.fromkeys(("random_state", "random_seed", "rng"), "write seed=..., an integer"),
    **dict.fromkeys(("device", "dtype", "weights", "compile", "tokenizer"), MADE),
    **dict.fromkeys(("stream", "streamer"), "texts come whole at the end; progress=True shows how far a run is"),
    **dict.fromkeys(("messages", "prompts", "inputs"), "it is the second argument, prompt"),
    **dict.fromkeys(("model", "lm"), "it is the first argument"),
}


def called(function: F) -> F:
    """Wraps what users call with options: numbers of other kinds, such as numpy's, arrive as Python's, and an option that is
    not there raises CallError with what to write instead."""
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name != "self"]
    unnamed = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    where = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        if len(given) > len(unnamed):
            named = ", ".join(name for name in names if name not in unnamed) or "none"
            raise CallError(f"{where}: {shortened(given[len(unnamed)])} has no place: options are named, and here are {named}")
        for name in options:
            if name not in names:
                raise CallError(unknown(where, name, options[name], names))
        numbers = (value if isinstance(value, list | tuple) else plain(value) for value in given)
        return function(*numbers, **{name: plain(value) for name, value in options.items()})

    return call  # pyright: ignore[reportReturnType] it has the signature of what it wraps


def unknown(where: str, name: str, value: Any, names: list[str]) -> str:
    """The message on an option that `where` does not have among its `names`."""
    shown = shortened(value)
    head = f"{where} has no option {name!r}: "
    if name in ELSEWHERE and not where.startswith("LM"):
        return head + ELSEWHERE[name].format(name=name, value=shown)
    if where == "LM" and name in ("temperature", "top_k", "top_p", "min_p"):
        return head + f"write LM(...).at({name}={shown})"
    if close := get_close_matches(name, names, 1):
        return head + f"did you mean {close[0]}?"
    return head + f"it has {', '.join(names)}"


def shortened(value: Any) -> str:
    """How a message shows a value."""
    shown = repr(value)
    return shown if len(shown) <= 30 else "..."


def instead_of(value: Any) -> str:
    """What to write where a condition or a model was meant, and something else was given."""
    if isinstance(value, str):
        return f"write sg.regex({shortened(value)}) for a pattern, or sg.contains({shortened(value)}) for a text in it"
    if isinstance(value, re.Pattern):
        return "write sg.regex(...) around a pattern, for texts that match it whole"
    if hasattr(value, "logw_next"):
        return "write sg.from_genlm(...) around a potential of genlm-control"
    if isinstance(value, dict) or hasattr(value, "model_json_schema"):
        return "write sg.json_schema(...) around a schema"
    if isinstance(value, list | tuple | set | frozenset):
        return "write sg.choice(...) around texts, for one of them"
    if callable(value):
        name = getattr(value, "__name__", "f")
        return f"make a function a potential, smcgen.potential({name}) or @smcgen.potential"
    return "give a language model or a potential"
