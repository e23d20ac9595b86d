"""What to do about a run, in plain words: one function for each rule, silent on a healthy run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from smcgen.diagnostics import Diagnostics, blank_share
from smcgen.errors import NoSurvivors
from smcgen.potentials.base import DEAD
from smcgen.record import Record

Rule = Callable[[Diagnostics, dict[str, Any]], str | None]


PADDED = 0.25  # share of the tokens: where texts did not end and so many are blanks, blanks are worth a word


def advise(diagnostics: Diagnostics, settings: dict[str, Any]) -> list[str]:
    """What the rules have to say; `settings` are those of the posterior."""
    found = [rule(diagnostics, settings) for rule in RULES]
    return [line for line in found if line]


def nothing_left(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    if d.run_share > 0:
        return None
    return "No particle survived: more particles, a larger max_tokens, or a weaker constraint."


def garden_path(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    if d.hidden_nats < 3:
        return None
    lost = d.hidden_nats + math.log(d.particles * d.runs)
    return (
        f"The constraint barred {lost:.0f} nats of what the model wanted to write after a beginning of its own liking. Another "
        f"beginning, which no particle took, may hold more: log evidence may be up to {d.hidden_nats:.0f} nats too low, and "
        "the ESS cannot show it. Say in the prompt what form the answer has, use more particles, or runs=R to see whether "
        "runs agree."
    )


def runs_disagree(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    if d.runs < 3 or d.run_share < 0.8:
        return None
    finals = [run[-1] for run in d.log_evidence if run[-1] > -math.inf]
    spread = f", and their log evidence lies between {min(finals):.1f} and {max(finals):.1f}" if len(finals) > 1 else ""
    return f"One of {d.runs} runs carries {d.run_share:.0%} of the answer{spread}: more particles in each run."


def runs_lost(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    lost = sum(run[-1] == -math.inf for run in d.log_evidence)
    if lost in (0, d.runs):
        return None
    return (
        f"{lost} of {d.runs} runs lost every particle. They count, as 0, in the evidence; the answer rests on the others: more "
        "particles, or a condition that can steer from the beginning (a grammar or a regex, or a prefix check)."
    )


def collapsed(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    if d.particles < 4 or d.root_share < 0.99 or settings.get("collapse", False):  # where one text is all that is left
        return None
    resampled, rounds = max(((sum(run), len(run)) for run in d.resampled), key=lambda pair: pair[0])
    if resampled < 2:
        return None
    remedies = "more particles, or runs=R for independent answers"
    if settings["draft"] is not None:
        remedies = "more particles, shorter blocks, a finite leniency, or a draft temperature nearer T / alpha"
    return f"{resampled} of {rounds} rounds resampled and all of the answer descends from 1 first particle: {remedies}."


def low_ess(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    shares = [ess / d.particles for run in d.ess for ess in run]
    poor = sum(share < 0.25 for share in shares)
    if d.particles < 4 or poor < 0.5 * len(shares):
        return None
    remedies = "more particles, or a Ramp of the exponents (anneal=)"
    if settings["draft"] is not None:
        remedies = "a draft nearer to the model, shorter blocks, or a finite leniency"
    return f"In {poor} of {len(shares)} rounds less than a quarter of the particles carried the weight: {remedies}."


def heavy_tail(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    rounds = [t for t, k in enumerate(d.pareto_k) if k is not None and k > 0.7]
    if not rounds:
        return None
    worst = max(k for k in d.pareto_k if k is not None)
    return (
        f"The weights of {len(rounds)} of {len(d.pareto_k)} rounds have a heavy tail (Pareto k up to {worst:.2f}, 0.7 is "
        "the limit): do not rely on the evidence and its error; more particles, or a proposal nearer to the target."
    )


def deaths(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    died, drawn = sum(map(sum, d.deaths)), d.particles * sum(map(len, d.ess))
    if d.run_share == 0 or died < 0.25 * drawn:
        return None
    return (
        f"{died} particles died in {sum(map(len, d.ess))} rounds: a condition is judged too late; give it a prefix check, use "
        "a grammar or a regex, which can mask tokens, or candidates=8."
    )


def cut(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    if d.cut_probability < 0.25:
        return None
    return (
        f"The budget of {settings['max_tokens']} tokens cut {d.cut_probability:.0%} of the answer: a larger max_tokens, stop=, "
        "or on_budget='condition'."
    )


def padded(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    """Only where texts did not end: blanks in a text that is whole are the model's own affair."""
    whole = d.run_share > 0 and d.cut_probability < 0.25 and sum(map(sum, d.deaths)) < 0.25 * d.particles * d.runs
    remedy = fewer_blanks(settings)
    if whole or d.blank_share < PADDED or remedy is None:
        return None
    return (
        f"{d.blank_share:.0%} of the tokens drawn are blanks and line breaks, which the condition lets through: use {remedy}."
    )


def fewer_blanks(settings: dict[str, Any]) -> str | None:
    """What keeps a text from being padded with blanks, if a condition of this run has a say in it."""
    if any(name.startswith("json_schema(") for name in settings["potentials"]):
        return "blanks=0 or blanks=1 in json_schema, or --blanks"
    if any(name.startswith("lark(") for name in settings["potentials"]):
        return "a grammar that names its blanks in place of %ignore"
    return None


def one_particle(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    final = d.log_evidence[0][-1]
    if d.particles * d.runs > 1 or abs(final) < 1e-6 or final == -math.inf:
        return None
    return "One particle is weighed against none: its text follows the proposal, not the target. Use particles=8 or more."


def slow_potentials(d: Diagnostics, settings: dict[str, Any]) -> str | None:
    if d.seconds is None or d.potential_seconds is None or d.seconds < 1 or d.potential_seconds < 0.7 * d.seconds:
        return None
    return (
        f"{d.potential_seconds / d.seconds:.0%} of the time went into potentials: give them a batch method, judge them at line "
        "ends only, or use a grammar in place of a function."
    )


RULES: tuple[Rule, ...] = (
    nothing_left,
    garden_path,
    runs_disagree,
    runs_lost,
    collapsed,
    low_ess,
    heavy_tail,
    deaths,
    cut,
    padded,
    one_particle,
    slow_potentials,
)


def no_survivors(record: Record, items: range) -> NoSurvivors:
    """The error of runs that lost every particle: round, cause, longest prefix and remedies."""
    f = {name: values[items.start : items.stop] for name, values in record.fields.items()}
    rounds, settings = [record.rounds_of(item) for item in items], record.settings
    causes = f["cause"][f["reason"] == DEAD]
    names = [*settings["potentials"], "the constraints together", "the language models (probability 0)"]
    cause = names[int(causes.mode().values)] if len(causes) else "the weights"
    prefix = [text for item in items for text in record.texts_of(item)][int(f["length"].argmax())]
    last = max(map(len, rounds)) - 1
    full = bool((f["length"] >= settings["max_tokens"]).any())
    remedies = "a larger max_tokens, more particles" if full else "more particles, a larger max_tokens"
    share, fewer = blank_share(rounds, record.piece_of), fewer_blanks(settings)
    if share >= PADDED and fewer is not None:
        remedies = f"{fewer} ({share:.0%} of the tokens drawn are blanks), {remedies}"
    return NoSurvivors(
        f"no particle survived: {cause} killed the last one in round {last} (longest text reached: {prefix!r}); "
        f"use {remedies}, or a weaker constraint",
        round=last,
        cause=cause,
        prefix=prefix,
    )
