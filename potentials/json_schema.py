"""JSON texts that a JSON Schema admits.

llguidance computes the masks. What it does not know of JSON Schema it is told to let pass, and `jsonschema` judges the
finished text: a keyword is never dropped in silence.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher
from referencing.exceptions import Unresolvable

from smcgen.errors import Impossible, SmcgenError, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.options import called
from smcgen.potentials.agreement import agrees
from smcgen.potentials.base import Potential
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.engine import HEADER, REMEDY, Engine, Recognizer, explain
from smcgen.potentials.json_bounds import RANGES, mended
from smcgen.potentials.json_draft import check, draft, judge
from smcgen.potentials.json_exact import loads
from smcgen.potentials.json_finite import Finite
from smcgen.potentials.json_plain import plain_schema, pruned
from smcgen.potentials.json_regular import regular
from smcgen.potentials.json_wider import unmixed, without, without_patterns
from smcgen.potentials.regex import Regular, text_of
from smcgen.potentials.stopping import StopEngine
from smcgen.potentials.tabled import tabled
from smcgen.potentials.tables import HASTY, PATIENT, STATE
from smcgen.values import is_number, is_whole, plain

FORM = (
    "properties come in the order in which the schema names them",
    "integers have no fraction or exponent",
    "other numbers between bounds have no exponent, zero no sign; a number that is the only one has no zeros at its end",
    "nothing stands before or after the value",
)
SIZES = tuple(f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties", "Contains"))
COUNTS = ("multipleOf", *SIZES)
KEYS = ("minProperties", "maxProperties")
BESIDE = ": write what stands beside the $ref into the schema that it refers to"
UNSATISFIABLE = "Unsatisfiable schema: "  # how the engine's proofs begin
COUNTED = 'min/maxProperties only supported when all keys listed in "properties" are required'  # as the engine says it
BLANKS = 20  # enough for values that are indented by four, five levels deep
COMPARED = 1000  # states of an automaton that is compared with the engine when a schema is made
LAST = frozenset(b'}]"0123456789el')  # the bytes that a JSON value can end with


@called
def json_schema(schema: dict | bool | str | os.PathLike[str] | type, blanks: int | None = BLANKS) -> Schema:
    """phi(text) = 1 if the text is JSON that `schema` admits, written in the usual form (`form` says what that is), else 0.

    Args:
        schema: a dict, JSON text, the path of a file with one, or a pydantic model class.
        blanks: at most so many blanks and line breaks in a row between the parts of a value, 0 for none; None: any number.
            Without a bound a small model may go on with blanks until its budget is spent.

    The result's `verdict` is "exact", or "checked at the end": then `doubts` names what the masks do not enforce, and
    the `jsonschema` package, by the draft that `$schema` names (2020-12 by default), judges the finished text. A `format`
    that neither knows is not checked, and `doubts` says so. Raises UsageError for what is no schema, Impossible if it admits
    nothing."""
    if blanks is not None and (not is_whole(blanks) or not 0 <= blanks <= 1000):
        raise UsageError(f"json_schema: blanks={blanks!r}: give a number from 0 to 1000, or None for any")
    try:
        return Schema(*_load(schema), blanks)
    except RecursionError:
        raise UsageError("json_schema: the schema is nested too deeply") from None
    except OverflowError:  # from Python's regular expressions
        raise UsageError(f"json_schema: a pattern counts too far: {REMEDY}") from None


class Schema(Constraint):
    """What `json_schema` returns.

    Attributes:
        verdict: "exact" or "checked at the end".
        doubts: why it is not exact.
        form: how texts are written, where JSON leaves a choice."""

    def __init__(self, schema: dict, name: str, blanks: int | None):
        self.name, self.schema, self.blanks = name, schema, blanks
        self.form = FORM if blanks is None else (*FORM, f"at most {blanks} blanks in a row between the parts")
        kind = draft(schema, name)
        check(schema, kind, name)
        found, left, parts = plain_schema(schema, kind, name)
        if found is False:
            raise Impossible(f"{name}: nothing satisfies it")
        self.plain: dict = {} if found is True else found
        self._validator = judge(schema, kind, parts)
        if (reason := self._contradiction()) is not None:
            raise Impossible(f"{name}: {reason}")
        numbers = mended(self.plain)
        self.translation, doubts = _translate(numbers.schema, name, _spaces(blanks))
        self.own = None if numbers.schema == self.plain or left else self._own(numbers.plain)
        if self.own is None:
            doubts += numbers.doubts
            self.form += numbers.form
        else:
            self.translation, doubts = text_of(self.own.expression), ()
        self.doubts = tuple(dict.fromkeys((*doubts, *left)))
        self.exact = not self.doubts
        self.verdict = "exact" if self.exact else "checked at the end"

    def __repr__(self) -> str:
        return self.name

    def _contradiction(self) -> str | None:
        """Why nothing satisfies the schema, as far as that is easily seen; the engine finds more."""
        values = self.plain["enum"] if "enum" in self.plain else [self.plain["const"]] if "const" in self.plain else None
        if values is not None and not any(self._satisfied(value) for value in values):
            return "none of its values satisfies the rest of the schema"
        return None if Finite(self.plain).holds(self.plain) else "every value that it admits would be infinite, or is excluded"

    def _satisfied(self, value: Any) -> bool:
        try:
            return self._validator.is_valid(value)
        except Unresolvable as error:
            raise UsageError(f"{self.name}: {error}: put the schema that it refers to under $defs") from None
        except BaseException as error:  # where Python's recursion ends in a library of `jsonschema`, that panics
            if type(error).__name__ == "PanicException":
                raise RecursionError from None
            raise

    def _own(self, plain: dict) -> Regular | None:
        """Our own expression, where the engine goes wrong about numbers: if the two agree on the schema without these."""
        expression, blanks = regular(self.plain, self.blanks), self.blanks and 1
        if expression is None or (others := regular(plain, blanks)) is None:
            return None
        try:
            translation, doubts = _translate(plain, self.name, _spaces(blanks))
            found = Regular(self.name, expression)
            if doubts or not agrees(others, translation, COMPARED):
                return None
            found.accepts("")
        except SmcgenError:  # the engine's limits
            return None
        return found

    def accepts(self, text: str) -> bool:
        return (self._recognizer if self.own is None else self.own.accepts)(text) and self._valid(text)

    def _settled(self, text: str) -> bool:
        """A key that is spelled with an escape may be that of a property, which the masks do not see."""
        return self.exact and "\\u" not in text

    def _valid(self, text: str) -> bool:
        try:
            return self._satisfied(loads(text))
        except (ValueError, RecursionError):
            return False

    @cached_property
    def _recognizer(self) -> Recognizer:
        return Recognizer(self.translation, self.name)

    @cached_property
    def expression(self) -> str | None:
        """The terminal expression of these texts, None if they are no regular language, or it is not known to be the same."""
        if self.own is not None:
            return self.own.expression
        return regular(self.plain, self.blanks) if self.exact else None

    def bind(self, vocabulary: Vocabulary, stops: Sequence[str], device: torch.device) -> Potential:
        """As every potential; where the language is regular, and small enough for tables over these tokens, the result runs on
        them."""
        steps = PATIENT if device.type == "cuda" else HASTY
        expression = self.expression
        if expression is not None and (self.own is not None or agrees(expression, self.translation, steps // STATE)):
            bound = tabled(self.name, self.accepts, expression, vocabulary, stops, device, steps)
            if bound is not None:
                return bound
        return super().bind(vocabulary, stops, device)

    def _compile(self, vocabulary: Vocabulary, stops: tuple[str, ...]) -> Engine | StopEngine:
        if self.own is not None:
            return self.own._compile(vocabulary, stops)
        if stops:
            return StopEngine(self._engine, vocabulary, stops, self.name, LAST)
        return self._engine(vocabulary)

    def _engine(self, vocabulary: Vocabulary) -> Engine:
        return Engine(self.translation, vocabulary, self.name)


def _load(given: Any) -> tuple[dict, str]:
    """The schema as a dict, and how messages call it."""
    if hasattr(given, "model_json_schema"):
        if not isinstance(given, type):
            raise UsageError(f"json_schema: an instance of {type(given).__name__}: give the class itself")
        return given.model_json_schema(), f"json_schema({given.__name__})"
    name = "json_schema(<schema>)"
    if isinstance(given, str | os.PathLike):
        text = os.fspath(given)
        if not isinstance(given, str) or not (text.lstrip().startswith("{") or text.strip() in ("true", "false")):
            name = f"json_schema({Path(text).name!r})"
            try:
                text = Path(text).read_text(encoding="utf-8-sig")
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
    try:
        given = json.loads(json.dumps(given, allow_nan=False, default=_number))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}: a schema holds what JSON has, texts, numbers, lists, dicts, None") from None
    title = given.get("title")
    return given, f"json_schema({title!r})" if isinstance(title, str) and name.endswith("<schema>)") else name


def _number(value: Any) -> int | float:
    """A number of another kind, such as numpy's, for JSON."""
    if not is_number(number := plain(value)):
        raise TypeError(f"{type(value).__name__} is no JSON value")
    return number


def _spaces(blanks: int | None) -> dict:
    """The engine's options for at most so many blanks in a row."""
    if blanks is None:
        return {}
    if blanks == 0:
        return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    return {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{blanks}}}"}


def _translate(schema: dict, name: str, form: dict) -> tuple[str, tuple[str, ...]]:
    """The grammar for the engine of a plain schema, with its options on the form of texts, and what it does not enforce.

    What the engine refuses is left out until it takes the rest; it says what it leaves out itself."""
    strict = {"json_allow_general_unicode_escapes": True, **form}
    lenient = strict | {"lenient": True, "coerce_one_of": True}
    options = strict
    doubts: dict[str, None] = {}
    while True:
        grammar = _grammar(schema, options)
        refused, messages = _validate(grammar)
        reason, wider = messages[0], schema
        # Where it cannot count properties, the lenient engine leaves out all that are declared, or finds too few.
        counts = [message for message in messages if "min/maxProperties" in message]
        if options is lenient and (counts or (refused and reason.startswith(UNSATISFIABLE))):
            wider = without(schema, KEYS)
            if wider != schema:
                doubts[_doubt(COUNTED, schema)] = None
        if wider == schema and refused and reason.startswith(UNSATISFIABLE):
            wider = _without_part(schema, reason)
            if not isinstance(wider, dict) or wider == schema:
                raise Impossible(f"{name}: {_unsatisfied(reason)}")
        elif wider == schema and (refused or counts):
            doubts[_doubt(reason, schema)] = None
            if options is strict:
                options = lenient
                continue
            wider = _wider(schema, reason)
            if wider == schema:
                raise UsageError(f"{name}: {explain(reason)}{BESIDE if 'circular' in reason else ''}")
        elif wider == schema:
            doubts |= {_doubt(message, schema): None for message in messages if message}
            return grammar, tuple(doubts)
        schema = wider


def _unsatisfied(reason: str) -> str:
    """The engine's proof that no value satisfies the schema."""
    reason = reason.splitlines()[0].removeprefix(UNSATISFIABLE)
    if reason.startswith("Regex is empty"):
        return "pattern, format and lengths of a string exclude each other"
    return reason


def _without_part(schema: dict, reason: str) -> dict | bool:
    """The schema without the part under $defs in which the engine found that nothing satisfies it."""
    part = re.search(r"while processing [^\n]*#/\$defs/(\S+)", reason)
    return pruned(schema, (part[1],)) if part is not None and part[1] in schema.get("$defs", {}) else schema


def _wider(schema: dict, reason: str) -> dict:
    """The schema without what the engine refuses."""
    if "circular" in reason:
        steps = unmixed(schema), without(schema, ("patternProperties",)), unmixed(schema, True)
        return next((wider for wider in steps if wider != schema), schema)
    culprits = _culprits(reason)
    if "pattern" in culprits and (wider := without_patterns(schema, _is_beyond)) != schema:
        return wider
    return without(schema, culprits)


@functools.cache
def _is_beyond(pattern: str) -> bool:
    """Whether the engine refuses a pattern by itself."""
    refused, messages = _validate(_grammar({"type": "string", "pattern": pattern}, {}))
    return refused and not messages[0].startswith(UNSATISFIABLE)


def _doubt(reason: str, schema: dict) -> str:
    """What the engine does not enforce, from its own words."""
    if "circular" in reason:
        return "what stands beside a $ref that leads back to itself is not enforced by the masks"
    if "oneOf" in reason:
        return "oneOf is read as anyOf by the masks"
    if culprits := _culprits(reason):
        written = json.dumps(schema)
        used = [key for key in culprits if f'"{key}": ' in written] or culprits
        if len(used) == 1:
            return f"{used[0]} is not enforced by the masks where it is beyond the engine"
        return f"{' and '.join(used)} are not enforced by the masks: one of them is beyond the engine"
    reason = re.sub(r" \([0-9]+ times\)$", "", reason)
    return f"not enforced by the masks: {reason}"


def _grammar(schema: dict, options: dict) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}\n"


def _validate(grammar: str) -> tuple[bool, list[str]]:
    """Whether the engine refuses a grammar, and its messages (of an error the first line, and where it was found)."""
    refused, messages = LLMatcher.validate_grammar_with_warnings(HEADER + grammar)
    cleaned = []
    for message in messages:
        first, *more = message.split("failed to compile JSON schema: ")[-1].splitlines() or [""]
        cleaned.append("\n".join([first, *(line for line in more if "while processing" in line)]))
    return refused, cleaned or [""]


def _culprits(reason: str) -> tuple[str, ...]:
    """The keywords whose values the engine does not take, from its own words."""
    if "regex" in reason and "regex for" not in reason:
        return "pattern", "patternProperties"
    if "min/maxProperties" in reason:
        return KEYS
    return tuple(key for key in COUNTS if key in reason) or (RANGES if "range" in reason else ())
