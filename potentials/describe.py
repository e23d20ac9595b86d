"""What a constraint is worth before anything is sampled with it: verdict, doubts, example texts, the cost of its masks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from smcgen.errors import UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.options import instead_of
from smcgen.potentials.base import Potential, Prompt
from smcgen.potentials.constraint import Constraint
from smcgen.potentials.engine import bytes_vocabulary
from smcgen.potentials.tabled import Tabled
from smcgen.target import LM, Factor

LONGEST = 400  # bytes of an example
CPU = torch.device("cpu")


@dataclass
class Report:
    """What `describe` finds.

    Attributes:
        verdict: "exact" or "checked at the end"; `doubts` says why, `notes` and `warnings` what else to know.
        examples: accepted texts, drawn without a model.
        unfinished: how many draws did not end within 400 bytes, came to a dead end, or failed the check at the end.
        bind_ms: time to compile for the vocabulary.
        runs_on: what computes the masks for the vocabulary.
        mask_us: mean and 95th percentile time of one mask, warm, in microseconds, over `masks` masks; None without
            a vocabulary."""

    name: str
    verdict: str
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    examples: list[str] = field(default_factory=list)
    unfinished: int = 0
    runs_on: str | None = None
    bind_ms: float | None = None
    mask_us: tuple[float, float] | None = None
    masks: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Every field, JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict}"]
        lines += [f"  because {doubt}" for doubt in self.doubts]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  example: {example!r}" for example in self.examples]
        if self.unfinished:
            texts = "random text" if self.unfinished == 1 else "random texts"
            failed = "" if self.verdict == "exact" else ", or failed the check at the end"
            lines.append(f"  {self.unfinished} {texts} did not end within {LONGEST} bytes{failed}")
        if self.mask_us is not None:
            mean, high = self.mask_us
            lines.append(f"  masks: {mean:.0f} us mean, {high:.0f} us p95 ({self.masks} masks), bound in {self.bind_ms:.0f} ms")
            lines.append(f"  run by: {self.runs_on}")
        return "\n".join(lines)


def describe(constraint: Potential, vocabulary: Vocabulary | LM | None = None, examples: int = 5, seed: int = 0) -> Report:
    """Binds `constraint` (a grammar, a schema, a condition on the text), draws example texts from its masks alone, and measures
    masks on the tokens of `vocabulary`, a language model's, if one is given.

    Raises UsageError for a potential that has no masks, and what binding raises: UsageError, Impossible."""
    if not isinstance(constraint, Potential) or not constraint.hard:
        wanted = "give one grammar, schema or condition on the text"
        remedy = wanted if constraint is None or isinstance(constraint, Factor) else instead_of(constraint)
        raise UsageError(f"describe: {constraint!r} has no masks: {remedy}")
    if isinstance(vocabulary, LM):
        vocabulary = vocabulary.load().vocabulary
    random = np.random.default_rng(seed)
    found: list[str] = []
    small = constraint.bind(bytes_vocabulary(), (), CPU)
    tries = 0
    while len(found) < examples and tries < 4 * examples:
        tries += 1
        text = _draw(small, random)
        if text is not None and (constraint.exact or (isinstance(constraint, Constraint) and constraint.accepts(text))):
            found.append(text)
    report = Report(
        constraint.name,
        getattr(constraint, "verdict", "exact"),
        getattr(constraint, "doubts", ()),
        (*getattr(constraint, "notes", ()), *getattr(constraint, "form", ())),
        examples=list(dict.fromkeys(found)),
        unfinished=tries - len(found),
    )
    if vocabulary is not None:
        warn = getattr(constraint, "warnings", None)
        report.warnings = tuple(warn(vocabulary)) if warn else ()
        before = time.perf_counter()
        bound = constraint.bind(vocabulary, (), CPU)
        report.bind_ms, report.runs_on = 1e3 * (time.perf_counter() - before), bound.runs_on
        _time(bound, found, vocabulary)
        costs = np.array(_time(bound, found, vocabulary)) * 1e6
        if len(costs):
            report.mask_us, report.masks = (float(costs.mean()), float(np.percentile(costs, 95))), len(costs)
    return report


def _draw(bound: Potential, random: np.random.Generator) -> str | None:
    """A random text of bytes that are allowed, visible ones preferred; None if it does not end."""
    state = bound.start([Prompt((), "")], 1)
    end, data = bound.vocabulary.end_ids[0], b""
    words = torch.zeros(1, (len(bound.vocabulary) + 31) // 32, dtype=torch.int32)
    while len(data) < LONGEST:
        bound.mask(state, words, torch.ones(1, dtype=torch.bool))
        allowed = np.flatnonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little"))
        if not len(allowed):
            return None
        others = allowed[allowed != end]
        if len(others) < len(allowed) and (not len(others) or random.random() < 0.3):
            return data.decode("utf-8")
        visible = others[(others > 31) & (others < 127)]
        token = int(random.choice(visible if len(visible) and random.random() < 0.97 else others))
        bound.extend(state, torch.tensor([[token]]), torch.ones(1, dtype=torch.int64))
        data += bytes([token])
    return None


def _time(bound: Potential, texts: Sequence[str], vocabulary: Vocabulary) -> list[float]:
    """Seconds of each mask along `texts`, spelled with the vocabulary's longest tokens; nothing is taken from a cache."""
    costs = []
    for text in texts:
        tokens = _tokens(text, vocabulary)
        costs += _time_matcher(bound, tokens) if isinstance(bound, Constraint) else _time_state(bound, tokens)
    return costs


def _time_state(bound: Potential, tokens: Sequence[int]) -> list[float]:
    costs, state, one = [], bound.start([Prompt((), "")], 1), torch.ones(1, dtype=torch.int64)
    words, active = torch.zeros(1, (len(bound.vocabulary) + 31) // 32, dtype=torch.int32), torch.ones(1, dtype=torch.bool)
    for token in tokens:
        before = time.perf_counter()
        if isinstance(bound, Tabled):
            bound.bits(state)
        else:
            bound.mask(state, words, active)
        costs.append(time.perf_counter() - before)
        bound.extend(state, torch.tensor([[token]]), one)
    return costs


def _time_matcher(bound: Constraint, tokens: Sequence[int]) -> list[float]:
    costs, row = [], np.zeros((1, bound.engine.width), np.int32)
    matcher: Any = bound.engine.matcher()
    for token in tokens:
        before = time.perf_counter()
        bound.engine.fill([matcher], row, [0])
        costs.append(time.perf_counter() - before)
        if matcher.try_consume_tokens([token]) != 1:
            break
    return costs


def _tokens(text: str, vocabulary: Vocabulary) -> list[int]:
    """`text` in the tokens that llguidance would choose, the longest that fit."""
    return vocabulary.llguidance().greedy_tokenize(text)
