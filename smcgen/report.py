"""What the command writes of a run: results to stdout, the rest to stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from smcgen.posterior import Posterior
    from smcgen.posteriors import Posteriors

TRUNCATED = 4  # exit code under --strict
FAILED = 1  # exit code when only some of many prompts had no survivor


def report(batches: list[Posteriors], seed: int | None, form: str | None, note: Callable[[str], None], strict: bool) -> int:
    """Writes results to stdout, and what went with them to stderr.

    Args:
        batches: what was drawn, in one call or in several.
        seed: as the user gave it.
        form: "json" or "text"; None if the results are in a file already.

    Returns the exit code. Raises NoSurvivors if no prompt has a survivor."""
    if not batches:
        note("all results are there already")
        return 0
    info = batches[-1].info
    if seed is None:
        note(f"seed {batches[0].settings['seed']}")
    for name, ignored in info["ignored_defaults"].items():
        if ignored:
            shown = ", ".join(f"{key}={value}" for key, value in ignored.items())
            note(f"{name}: its own generation defaults are not part of the target and are ignored ({shown})")
    for line in speed_notes(info):
        note(line)
    results = [post for batch in batches for post in batch]
    failed = [post for post in results if post.failed]
    if failed and len(failed) == len(results):
        raise failed[0].failure()
    for i, post in enumerate(results if form is not None else ()):
        if form == "json":
            typer.echo(post.to_json())
        else:
            typer.echo(("---\n" if i else "") + (f"[no survivor: {post.failure().cause}]" if post.failed else post.text))
    note(summary(results, sum(batch.info["seconds"] for batch in batches)))
    if failed:
        return FAILED
    return TRUNCATED if strict and any(post.sample.reason == "budget" for post in results) else 0


def speed_notes(info: dict[str, Any]) -> Iterator[str]:
    """What a run says of the choices made for it, and of its speed."""
    if "auto" in info and info["auto"].get("speedup", 1) >= 1:  # a draft that does not pay has been warned of
        yield info["auto"]["why"]
    if "draft_rounds" in info:
        blocks = ", ".join(f"K={k} in {rounds}" for k, rounds in info["block_rounds"].items())
        yield f"rounds of each draft: {info['draft_rounds']}" + f"; {blocks}" * (len(info["block_rounds"]) > 1)
    if "baseline" in info:
        plain, step = info["baseline"], info["step_seconds"]
        yield (
            f"{info['tokens_per_second']:.1f} tokens per second (a round: p50 {1000 * step['p50']:.0f} ms, p95 "
            f"{1000 * step['p95']:.0f} ms), {plain['tokens_per_second']:.1f} without a draft: {plain['speedup']:.2f} times"
        )


def summary(posteriors: list[Posterior], seconds: float) -> str:
    """One line on how the run went."""
    parts = [f"{len(posteriors)} samples"] if len(posteriors) > 1 else []
    if len(posteriors) == 1 and not posteriors[0].failed:
        post = posteriors[0]
        error = "" if post.log_evidence_se is None else f" ± {post.log_evidence_se:.2g}"
        n = post.settings["particles"]
        ess = post.diagnostics().summary()["smallest_ess"]
        if post.settings["mode"] != "exact":
            parts += [f"log evidence {post.log_evidence:.3f}{error}", f"smallest ESS {ess:.1f} of {n}"]
            parts += [f"collapsed after {max(post.collapsed)} rounds"] if post.collapsed is not None else []
            parts += [post.divergence_note] * (post.divergence_bound is not None and post.settings["draft"] is not None)
        if post.acceptance is not None:
            parts += [f"acceptance {post.acceptance:.2f}", f"{post.tokens_per_round:.2f} tokens per round"]
    cut, dead = sum(p.cut for p in posteriors), sum(p.dead for p in posteriors)
    parts += [f"{_particles(cut)} cut by the budget"] * bool(cut) + [f"{_particles(dead)} died"] * bool(dead)
    return ", ".join([*parts, f"{seconds:.1f} s"])


def _particles(count: int) -> str:
    return f"{count} particle{'s' * (count != 1)}"
