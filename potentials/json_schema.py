"""JSON texts that a JSON Schema admits.

llguidance computes the masks. What it does not know of JSON Schema it is told to let pass, and `jsonschema` judges the
finished text: a keyword is never dropped in silence.
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema
import referencing
from jsonschema.validators import validator_for
from llguidance import LLMatcher
from referencing.exceptions import Unresolvable

from smcgen.errors import Impossible, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.engine import HEADER, Engine, Recognizer
from smcgen.potentials.stopping import StopEngine

FORM = (
    "properties come in the order in which the schema names them",
    "integers have no fraction or exponent",
    "nothing stands before or after the value",
)
LAST = frozenset(b'}]"0123456789el')  # the bytes that a JSON value can end with


def json_schema(schema: dict | bool | str | os.PathLike[str] | type) -> Schema:
    """phi(text) = 1 if the text is JSON that `schema` admits, written in the usual form (`form` says what that is), else 0.

    Args:
        schema: a dict, JSON text, the path of a file with one, or a pydantic model class.

    The result's `verdict` is "exact", or "checked at the end": then `doubts` names what the masks do not enforce, and
    the `jsonschema` package, by the draft that `$schema` names (2020-12 by default), judges the finished text. `format`
    is enforced where the engine knows it. Raises UsageError for what is no schema, Impossible if it admits nothing."""
    return Schema(*_load(schema))


class Schema(Constraint):
    """What `json_schema` returns.

    Attributes:
        verdict: "exact" or "checked at the end".
        doubts: why it is not exact.
        form: how texts are written, where JSON leaves a choice."""

    def __init__(self, schema: dict, name: str):
        self.name, self.schema, self.form = name, schema, FORM
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            where = "/".join(map(str, error.absolute_path)) or "the top"
            raise UsageError(f"{name}: not a JSON Schema at {where}: {error.message[:200]}") from None
        self._validator = kind(schema, registry=referencing.Registry())  # no references to the network
        self.translation, self.doubts = _translate(schema, name)
        self.exact = not self.doubts
        self.verdict = "exact" if self.exact else "checked at the end"

    def __repr__(self) -> str:
        return self.name

    def accepts(self, text: str) -> bool:
        return self._recognizer(text) and self._valid(text)

    def _valid(self, text: str) -> bool:
        try:
            return self._validator.is_valid(json.loads(text))
        except (ValueError, RecursionError):
            return False
        except Unresolvable as error:
            raise UsageError(f"{self.name}: {error}: put the schema that it refers to under $defs") from None

    @cached_property
    def _recognizer(self) -> Recognizer:
        return Recognizer(self.translation, self.name)

    def _compile(self, vocabulary: Vocabulary, stops: tuple[str, ...]) -> Engine | StopEngine:
        if stops:
            return StopEngine(self._engine, vocabulary, stops, self.name, LAST)
        return self._engine(vocabulary)

    def _engine(self, vocabulary: Vocabulary) -> Engine:
        return Engine(self.translation, vocabulary, self.name)


def _load(given: Any) -> tuple[dict, str]:
    """The schema as a dict, and how messages call it."""
    if hasattr(given, "model_json_schema"):
        return given.model_json_schema(), f"json_schema({given.__name__})"
    name = "json_schema(<schema>)"
    if isinstance(given, str | os.PathLike):
        text = os.fspath(given)
        if not isinstance(given, str) or text.lstrip()[:1] not in "{tf":
            name = f"json_schema({Path(text).name!r})"
            try:
                text = Path(text).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{name}: cannot read {given} ({error}): give a dict, JSON text or a path") from None
        try:
            given = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{name}: not JSON ({error})") from None
    if given is False:
        raise Impossible(f"{name}: the schema `false` admits nothing")
    if given is True:
        given = {}
    if not isinstance(given, dict):
        raise UsageError(f"{name}: a schema is a dict, JSON text, a path or a pydantic model, not {type(given).__name__}")
    title = given.get("title")
    return given, f"json_schema({title!r})" if isinstance(title, str) and name.endswith("<schema>)") else name


def _translate(schema: dict, name: str) -> tuple[str, tuple[str, ...]]:
    """The grammar for the engine, and what it does not enforce."""
    options = {"json_allow_general_unicode_escapes": True}
    grammar = _grammar(schema, options)
    refused, (reason, *_) = _validate(grammar)
    if not refused:
        return grammar, ()
    doubts: dict[str, None] = {}
    lenient = options | {"lenient": True, "coerce_one_of": True}
    while refused:
        doubts[_doubt(reason)] = None
        grammar = _grammar(schema, lenient)
        refused, (reason, *_) = _validate(grammar)
        if refused and "regex" in reason and (wider := _without_patterns(schema)) != schema:
            schema = wider
        elif refused:
            raise UsageError(f"{name}: {reason}")
    return grammar, tuple(doubts)


def _doubt(reason: str) -> str:
    """What the engine does not enforce, from its own words."""
    if "regex" in reason:
        return "pattern and patternProperties are not enforced by the masks: one of them is beyond the engine"
    if "oneOf" in reason:
        return "oneOf is read as anyOf by the masks"
    return f"not enforced by the masks: {reason}"


def _grammar(schema: dict, options: dict) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}\n"


def _validate(grammar: str) -> tuple[bool, list[str]]:
    refused, messages = LLMatcher.validate_grammar_with_warnings(HEADER + grammar)
    lines = [message.splitlines()[0].split("failed to compile JSON schema: ")[-1] for message in messages]
    return refused, lines or [""]


def _without_patterns(schema: Any) -> Any:
    """The schema with every regular expression taken out so that it admits more."""
    if isinstance(schema, list):
        return [_without_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _without_patterns(part) for key, part in schema.items()}
    if isinstance(schema.get("pattern"), str):
        del out["pattern"]
    if isinstance(schema.get("patternProperties"), dict):
        del out["patternProperties"]
        out["additionalProperties"] = True
    return out
