"""Texts of a context-free grammar, written in genuine Lark.

lark loads the grammar and defines what it means: Earley parsing with the dynamic lexer (or LALR, if asked for). llguidance
computes the masks from a translation where it would bar no text of the grammar; the project's own exact parser does
elsewhere, more slowly. The verdict says whether masks and meaning are known to agree.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Literal

import lark as larklib
from lark.indenter import DedentError
from lark.load_grammar import load_grammar

from smcgen.errors import PotentialError, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.cfg import Cfg
from smcgen.potentials.charengine import CharEngine
from smcgen.potentials.charparser import CharParser
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.emit import doubts, emit, obstacle, unsure
from smcgen.potentials.engine import Engine
from smcgen.potentials.indent import LEVELS, STEP, declared, indenter, supported
from smcgen.potentials.pattern import Inexpressible
from smcgen.potentials.stopping import StopEngine

LONGEST_GRAMMAR = 1 << 20  # characters
ALTERNATIVES = 10_000  # of all rules, once lark has multiplied out what stands in brackets


def lark(
    grammar: str | os.PathLike[str] | larklib.Lark,
    start: str | None = None,
    parser: Literal["earley", "lalr"] | None = None,
    exact: bool = False,
) -> Grammar:
    """phi(text) = 1 if `grammar` derives the text, else 0: a hard constraint.

    Args:
        grammar: the text of a Lark grammar, the path of a file with one, or a `lark.Lark` object. Imports, templates,
            `%extend`, `%override` and priorities are resolved by lark itself.
        start: the rule that texts are derived from, "start" by default.
        parser: whose language it is: "earley" (with lark's dynamic lexer, the default) or "lalr" (contextual lexer).
        exact: let the exact parser compute the masks, even where the fast engine comes close.

    The result's `verdict` is "exact", or "checked at the end": then the masks may let a text through that lark does not
    derive, lark judges the finished text, and a false one has weight 0; `doubts` says why. Raises UsageError, with the
    rule or terminal and the reason, for a grammar that cannot be used, and Impossible if it derives no text."""
    if isinstance(grammar, larklib.Lark):
        if start is not None or parser is not None:
            raise UsageError("lark: start and parser belong to the Lark object that was given, set them there")
        return Grammar(grammar, "lark(<Lark object>)", exact)
    if not isinstance(grammar, str | os.PathLike):
        raise UsageError(f"lark: give the text or the path of a grammar, or a Lark object, not {type(grammar).__name__}")
    path = _path(grammar)
    name = f"lark({path.name!r})" if path else "lark(<text>)"
    if parser not in (None, "earley", "lalr"):
        raise UsageError(f'lark: parser={parser!r}: write "earley" or "lalr"')
    try:
        text = path.read_text(encoding="utf-8-sig") if path else str(grammar)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name}: cannot read {path} ({error})") from None
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"{name}: a surrogate is no character of a text: leave it out")
    if len(text) > LONGEST_GRAMMAR:
        raise UsageError(f"{name}: {len(text)} characters are too long for a grammar")
    try:
        _bound(text, path, name)
        loaded = _load(text, path, start or "start", parser, name)
    except UsageError:
        raise
    except RecursionError:
        raise UsageError(f"{name}: its rules are nested too deeply") from None
    except Exception as error:  # lark reports faulty grammars by many kinds of exception
        reason = _not_regular(text, path) or _in_a_line(error)
        if "undefined rule: NonTerminal" in reason:
            reason = f"there is no rule {start or 'start'!r} to begin with: name another by start="
        raise UsageError(f"{name}: {reason}") from None
    return Grammar(loaded, name, exact)


class Grammar(Constraint):
    """What `lark` returns.

    Attributes:
        verdict: "exact" or "checked at the end".
        doubts: why it is not exact.
        notes: what a user may want to know besides: rules that derive nothing, why masks come from the slow parser.
        translation: the grammar as llguidance has it; None if the exact parser computes the masks."""

    def __init__(self, loaded: larklib.Lark, name: str, exact: bool = False):
        self.name, self.loaded = name, loaded
        options = loaded.options
        if len(options.start) != 1:
            raise UsageError(f"{name}: {len(options.start)} start rules: give one")
        if options.lexer == "dynamic_complete":
            raise UsageError(
                f'{name}: by lexer="dynamic_complete" terminals may end before their longest match, which masks cannot follow: '
                'write lexer="dynamic"'
            )
        indentation = supported(loaded)
        if options.postlex is not None and indentation is None:
            raise UsageError(f"{name}: a postlex changes the tokens after the lexer, which masks cannot follow: leave it out")
        self.cfg = Cfg(loaded, name, indentation)
        self.notes = tuple(f"{dropped} derives no text" for dropped in self.cfg.dropped)
        if indentation is not None:
            self.notes += (
                f"indentation goes up to {LEVELS} levels of {STEP} blanks, and no line breaks inside brackets: other texts of "
                "the grammar are left out",
            )
        try:
            slow = "exact=True asks for it" if exact else obstacle(self.cfg, lalr=options.parser == "lalr")
        except Inexpressible as error:
            slow = str(error)
        self.translation = None if slow else emit(self.cfg)
        if slow:
            self.notes += (f"masks come from the exact parser, which is slow: {slow}",)
        self.doubts = tuple(unsure(self.cfg) if slow else doubts(self.cfg))
        if options.parser != "earley" or options.lexer != "dynamic":
            self.doubts += (f"the masks follow the grammar, which lark's {options.parser} parser may read more narrowly",)
        self.exact = not self.doubts
        self.verdict = "exact" if self.exact else "checked at the end"

    def __repr__(self) -> str:
        return self.name

    def accepts(self, text: str) -> bool:
        try:
            self.loaded.parse(text)
        except (larklib.exceptions.UnexpectedInput, larklib.exceptions.ParseError, DedentError):
            return False
        except RuntimeError as error:
            if "multiple start symbol items" in str(error):  # lark's Earley gives up on some ambiguities of the whole text
                return CharParser(self.cfg).parse(text)
            raise PotentialError(f"{self.name}: lark raised {error!r} on {text[:60]!r}") from error
        except Exception as error:  # a transformer or callback of the user's Lark object
            raise PotentialError(f"{self.name}: lark raised {type(error).__name__} on {text[:60]!r} ({error})") from error
        return True

    def warnings(self, vocabulary: Vocabulary) -> list[str]:
        """What is odd about this grammar with these tokens: literals that are spelled like special tokens."""
        markup = [vocabulary.spelling[i].decode("utf-8", "replace") for i in sorted(vocabulary.special)]
        found = []
        for terminal in self.cfg.terminals.values():
            if terminal.literal and any(special and special in terminal.literal for special in markup):
                found.append(f"{terminal.literal!r} is spelled like a special token; here it is text, and no token ends there")
        return found

    def _compile(self, vocabulary: Vocabulary, stops: tuple[str, ...]) -> Engine | CharEngine | StopEngine:
        if stops:
            return StopEngine(self._engine, vocabulary, stops, self.name, self.cfg.last)
        return self._engine(vocabulary)

    def _engine(self, vocabulary: Vocabulary) -> Engine | CharEngine:
        if self.translation is None:
            return CharEngine(self.cfg, vocabulary, self.name)
        return Engine(self.translation, vocabulary, self.name)


def _path(grammar: str | os.PathLike[str]) -> Path | None:
    """The file that is meant, None if `grammar` is the grammar itself. A grammar has a colon or a line break in it."""
    if not isinstance(grammar, str):
        return Path(grammar)
    return None if "\n" in grammar or ":" in grammar else Path(grammar)


def _load(text: str, path: Path | None, start: str, parser: str | None, name: str) -> larklib.Lark:
    options: dict[str, Any] = {"start": start, "maybe_placeholders": False}
    if path:
        options |= {"source_path": str(path), "import_paths": [str(path.parent)]}
    if names := declared(text):
        blanks = indenter(names, sorted(set(re.findall(r"\b_?[A-Z][A-Z_0-9]*\b", text))))
        if blanks is None:
            raise UsageError(
                f"{name}: %declare leaves {', '.join(names)} without a definition: define them, or declare one INDENT and one "
                "DEDENT beside a terminal _NL or _NEWLINE"
            )
        if parser == "earley":
            raise UsageError(f'{name}: lark knows indentation with its LALR parser only: write parser="lalr"')
        options["postlex"] = blanks
        parser = "lalr"
    if parser == "lalr":
        return larklib.Lark(text, parser="lalr", lexer="contextual", **options)
    return larklib.Lark(text, parser="earley", lexer="dynamic", **options)


def _bound(text: str, path: Path | None, name: str) -> None:
    """Refuses a grammar that lark would multiply out beyond all bounds."""
    paths = [str(path.parent)] if path else []
    grammar, _ = load_grammar(text, str(path) if path else "<text>", paths, False)
    if (template := _endless(grammar.rule_defs)) is not None:
        raise UsageError(f"{name}: the template {template} uses itself with ever larger arguments: it has no end")
    total = 0.0
    for rule, _, tree, _ in grammar.rule_defs:
        total += (size := _alternatives(tree))
        if size > ALTERNATIVES:
            raise UsageError(
                f"{name}: rule {rule} has more than {ALTERNATIVES} alternatives when its brackets are multiplied out: give "
                "the parts in brackets rules of their own"
            )
    if total > ALTERNATIVES:
        raise UsageError(f"{name}: {total:.0f} alternatives are too many: put words of one kind into one terminal")


def _endless(definitions: list[Any]) -> str | None:
    """A template that comes back to itself with an argument that is a template in turn, which lark would unfold for ever."""
    uses: dict[str, set[str]] = {}
    growing: dict[str, set[str]] = {}
    for rule, parameters, tree, _ in definitions:
        if parameters:
            calls = {call: call.children[0].name for call in tree.find_data("template_usage")}
            uses[rule] = set(calls.values())
            growing[rule] = {name for call, name in calls.items() if len(list(call.find_data("template_usage"))) > 1}
    for rule in uses:
        for first in growing[rule]:
            reached = {first}
            while more := set().union(*(uses.get(name, set()) for name in reached)) - reached:
                reached |= more
            if rule in reached:
                return rule
    return None


def _alternatives(node: Any) -> float:
    """How many alternatives lark makes of a piece of a rule."""
    if not isinstance(node, larklib.Tree):
        return 1
    if node.data == "expr":
        inner, operator = _alternatives(node.children[0]), str(node.children[1])
        if operator != "~":
            return 1 + inner if operator == "?" else 2
        counts = [int(str(count)) for count in node.children[2:]]
        # Longer repetitions are split by lark into rules of their own.
        return sum(min(inner, 1e9) ** n for n in range(counts[0], min(counts[-1], 50) + 1)) if counts[0] <= 50 else 2
    counts = [min(_alternatives(child), 1e9) for child in node.children]
    if node.data == "expansions":
        return sum(counts)
    return math.prod(counts) + (node.data == "maybe")


def _not_regular(text: str, path: Path | None) -> str | None:
    """The terminal or rule with a regular expression that is none, which lark does not name, and why it is none."""
    try:
        grammar, _ = load_grammar(text, str(path) if path else "<text>", [str(path.parent)] if path else [], False)
    except Exception:  # then it is not the regular expressions
        return None
    terminals = [("terminal", name, tree) for name, (tree, _) in grammar.term_defs if tree is not None]
    for kind, name, tree in [*terminals, *(("rule", name, tree) for name, _, tree, _ in grammar.rule_defs)]:
        for token in tree.scan_values(lambda value: getattr(value, "type", None) == "REGEXP"):
            try:
                re.compile(token[1 : token.rindex("/")])
            except (re.error, OverflowError, RecursionError) as error:
                return f"{kind} {name}: {token[:60]} is no regular expression ({error})"
    return None


def _in_a_line(error: Exception) -> str:
    """What lark says and the line of the grammar that it shows, without the mark that it puts below a place in it."""
    said, _, place = str(error).partition("\n\n")
    if len(error.args) == 2 and isinstance(definition := error.args[1], larklib.lexer.TerminalDef):
        said = f"{error.args[0]} ({definition.name}: {definition.pattern.value[:60]!r})"
    said, line = " ".join(said.split()).rstrip(": "), place.partition("\n")[0].strip()
    if "zero-width" in said:
        said += ": let the terminal match at least one character, and write ? behind it where it may be left out"
    return (f"{said}: {line}" if line else said)[:300] or type(error).__name__
