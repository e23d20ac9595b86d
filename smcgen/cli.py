"""The command `smcgen`. Results go to stdout, everything else to stderr; torch is imported only when a run begins."""

from __future__ import annotations

import functools
import io
import logging
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smcgen import __version__
from smcgen.arguments import (
    check_state,
    conditions,
    continued_or_asked,
    keep_state,
    named_drafts,
    python_potential,
    ramp,
    read_prompts,
    reward_model,
    template_free,
)
from smcgen.cli_check import check
from smcgen.errors import SmcgenError, UsageError
from smcgen.report import FAILED, report

if TYPE_CHECKING:
    from smcgen.target import Factor

INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Text from language models under conditions, by Sequential Monte Carlo.",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"smcgen {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


MODEL, TARGET, RUN, OUTPUT = "Models and prompts", "Target", "How to draw", "Output"


@app.command()
def sample(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads it from stdin.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            rich_help_panel=MODEL,
            help="Base model: hub id, folder or .gguf file (default: 'tiny', the small pair that ships with smcgen).",
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "-d",
            "--draft",
            rich_help_panel=MODEL,
            help="Draft model with the same tokenizer; 'int8' ... 'int3' make a quantised copy of the base model, 'ngram' "
            "looks up what came before; 'none' (the default for every model that is named): no draft. Repeated: a policy "
            "chooses.",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=MODEL,
            help='Prompts, one per line; a .jsonl file has {"prompt": text} or {"messages": [...]} per line.',
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            rich_help_panel=MODEL,
            help="Apply the model's chat template (default: if it has one and the prompt holds no special tokens).",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(rich_help_panel=MODEL, help="cpu, cuda, cuda:1 ... (default: a GPU).")] = None,
    dtype: Annotated[
        str | None, typer.Option(rich_help_panel=MODEL, help="float32, bfloat16 or float16 (default: by device).")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MODEL, help="int8: the model's matrices as 8-bit integers, for memory (-d int8 is a draft)."
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", rich_help_panel=MODEL, help="Compile the model's layers where they are not fused.")
    ] = False,
    alpha: Annotated[
        float, typer.Option(rich_help_panel=TARGET, help="Exponent of the model: the target is p(x)**alpha.")
    ] = 1.0,
    temperature: Annotated[
        float, typer.Option(rich_help_panel=TARGET, help="Temperature of the base model (no substitute for alpha).")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(rich_help_panel=TARGET, help="Cut the base model to its k likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(rich_help_panel=TARGET, help="Cut the base model to the likeliest tokens that make p together."),
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(rich_help_panel=TARGET, help="Cut the base model at this share of the likeliest token.")
    ] = None,
    regex: Annotated[str | None, typer.Option(rich_help_panel=TARGET, help="The whole text matches this pattern.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(rich_help_panel=TARGET, help="The text is derived by the Lark grammar in this file.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(rich_help_panel=TARGET, help="The text is JSON that the schema in this file admits.")
    ] = None,
    blanks: Annotated[int | None, typer.Option(rich_help_panel=TARGET, help="Most blanks in a row in that JSON (20).")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(rich_help_panel=TARGET, help="The text is one of these; give it once for each.")
    ] = None,
    contains: Annotated[
        list[str] | None, typer.Option(rich_help_panel=TARGET, help="The text contains this string; may be repeated.")
    ] = None,
    avoid: Annotated[
        list[str] | None, typer.Option(rich_help_panel=TARGET, help="The text does not contain this; may be repeated.")
    ] = None,
    potential: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=TARGET, help="module:name of a Python potential, or file.py:name; may be repeated."),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=TARGET,
            help="MODEL or MODEL:beta, a reward model (hub id or folder): the text counts exp(beta * reward); may be repeated.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(rich_help_panel=TARGET, help="Budget of generated tokens.")] = 128,
    stop: Annotated[
        list[str] | None, typer.Option(rich_help_panel=TARGET, help="End the text before this string; may be repeated.")
    ] = None,
    on_budget: Annotated[
        str,
        typer.Option(rich_help_panel=TARGET, help="truncate: a cut text counts; condition: only texts that ended count."),
    ] = "truncate",
    mode: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RUN,
            help="smc: weighted particles; exact: one lossless sequence, for a model without powers or conditions "
            "(the default there, with a draft); auto: measures, then chooses.",
        ),
    ] = None,
    particles: Annotated[
        int | None, typer.Option("-n", "--particles", rich_help_panel=RUN, help="Particles per run (default 8; exact: 1).")
    ] = None,
    block: Annotated[
        list[int] | None,
        typer.Option(
            "-k", "--block", rich_help_panel=RUN, help="Tokens drafted per round (default 4). Repeated: a policy chooses."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RUN,
            help="Of several drafts and blocks: restarting (default), ucb-tuned, ucb1, thompson, sliding-ucb, hedge or fixed.",
        ),
    ] = None,
    policy_reward: Annotated[
        str | None,
        typer.Option(rich_help_panel=RUN, help="What the policy maximises: speed (tokens per cost; default) or acceptance."),
    ] = None,
    policy_state: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=RUN, help="Read what the policy has learned from this JSON file, if it exists, and write it."
        ),
    ] = None,
    draft_cost: Annotated[
        list[float] | None,
        typer.Option(
            rich_help_panel=RUN, help="Of a token of each draft, in forwards of the model (default 0: ranks by acceptance)."
        ),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", rich_help_panel=RUN, help="Run without the draft too, and compare the speed.")
    ] = False,
    leniency: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=RUN,
            help="Keep a drafted token with probability min(1, s * target / draft); 1: lossless, inf: keep all (default 2).",
        ),
    ] = None,
    chains: Annotated[
        int | None, typer.Option(rich_help_panel=RUN, help="Continuations drafted per particle (with a finite leniency).")
    ] = None,
    verification: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RUN,
            help="How exact mode judges one chain: block (drafted tokens together, the default) or token (one by one).",
        ),
    ] = None,
    collapse: Annotated[
        bool,
        typer.Option(
            "--collapse",
            rich_help_panel=RUN,
            help="Plain text from particles: once one has finished, one is drawn by weight and goes on alone, exactly.",
        ),
    ] = False,
    candidates: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=RUN, help="Without a draft: judge up to so many candidates for a token with all potentials."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(rich_help_panel=RUN, help="Texts per prompt, each from a run of its own.")] = 1,
    runs: Annotated[
        int, typer.Option(rich_help_panel=RUN, help="Runs combined into each text; gives an error of the evidence.")
    ] = 1,
    seed: Annotated[
        int | None, typer.Option(rich_help_panel=RUN, help="Of all randomness (default: a fresh one, named on stderr).")
    ] = None,
    resampling: Annotated[
        str, typer.Option(rich_help_panel=RUN, help="multinomial, residual, stratified, systematic, ssp or killing.")
    ] = "systematic",
    threshold: Annotated[
        float, typer.Option(rich_help_panel=RUN, help="Resample when ESS falls below this share of the particles.")
    ] = 0.9,
    anneal: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RUN,
            help="FIRST:ROUNDS or FIRST:ROUNDS:OF, exponents that rise from this share within so many rounds; of: models (the "
            "default), potentials or all.",
        ),
    ] = None,
    draft_temperature: Annotated[
        float | None, typer.Option(rich_help_panel=RUN, help="Of the draft (default: temperature / alpha).")
    ] = None,
    groups: Annotated[int | None, typer.Option(rich_help_panel=RUN, help="Prompts that run at a time.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", rich_help_panel=RUN, help="Results of a prompt do not depend on the others.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=OUTPUT, help="One JSON object per sample on stdout.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", rich_help_panel=OUTPUT, help="Write JSON lines to this file.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=OUTPUT, help="Go on with what a run that was cut off left for -o.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option("--plot", rich_help_panel=OUTPUT, help="Draw the run into this file (.png, .pdf, .svg); one sample only."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", rich_help_panel=OUTPUT, help="Exit with code 4 if the budget cut a text.")
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", rich_help_panel=OUTPUT, help="Nothing on stderr but errors.")] = False,
) -> None:
    """Draw text from a model, raised to a power and under conditions.

    Exit codes: 0; 1 some prompts had no survivor, or another failure; 2 usage; 3 impossible target; 4 truncated (--strict).
    """
    if samples < 1:
        raise UsageError(f"--samples {samples}: give at least 1")
    if policy_state is not None:
        check_state(policy_state, draft, block, mode)
    prompts = read_prompts(prompt, prompt_file)
    if picture is not None:
        from smcgen.plots import check_plot

        if len(prompts) * samples > 1:
            raise UsageError(f"--plot draws one result, not {len(prompts) * samples}: give one prompt, and no --samples")
        check_plot(picture)
    if resume and (output is None or mode == "auto" or policy_state is not None or picture is not None):
        raise UsageError("--resume goes on with the file of -o, and not with --mode auto, --policy-state or --plot")
    note = (lambda *_: None) if quiet else _note
    with ExitStack() as stack:
        import smcgen as sg
        from smcgen.lines import lines, prompts_at_a_time

        file = None if output is None else stack.enter_context(lines(output, resume, note))
        warned = stack.enter_context(warnings.catch_warnings(record=True))
        named = model is not None
        base = sg.LM(model if model is not None else "tiny", device=device, dtype=dtype, weights=weights, compile=compile)
        lm = base.at(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        target: Factor = lm if alpha == 1 else lm**alpha
        for factor in conditions(regex, grammar, json_schema, blanks, choice, contains, avoid):
            for doubt in getattr(factor, "doubts", ()):
                note(f"{factor!r} is checked at the end: {doubt}")
            target = target * factor
        for factor in (*map(python_potential, potential or ()), *map(reward_model, reward or ())):
            target = target * factor
        helper = named_drafts(base, draft, device, dtype)
        if not named:
            note("using the small pair that ships with smcgen; name a model of yours with -m")
            if chat is None and template_free(prompts):
                prompts, chat = continued_or_asked(prompts), False
                note("a prompt that ends like a sentence is asked, any other is continued (--chat and --no-chat decide)")
        if mode is None:
            alone = target is lm and helper is not None and on_budget == "truncate" and anneal is None and not collapse
            mode = "exact" if alone and particles is None and leniency is None and runs == 1 else "smc"

        draw = functools.partial(
            sg.sample,
            target,
            draft=helper,
            particles=particles,
            block=block[0] if block and len(block) == 1 else block or None,
            policy=policy,
            policy_state=policy_state if policy_state is not None and policy_state.exists() else None,
            reward=policy_reward,
            draft_costs=draft_cost or None,
            baseline=baseline,
            max_tokens=max_tokens,
            runs=runs,
            stop=tuple(stop or ()),
            on_budget=on_budget,
            resampling=resampling,
            threshold=threshold,
            draft_temperature=draft_temperature,
            leniency=leniency,
            chains=chains,
            verification=verification,
            collapse=collapse,
            candidates=candidates,
            anneal=None if anneal is None else ramp(anneal),
            mode=mode,
            chat=chat,
            groups=groups,
            deterministic=deterministic,
            progress=False if quiet else None,
        )
        wanted = [p for p in prompts for _ in range(samples)]
        if file is None:
            batches = [draw(wanted, seed=seed)]
        else:
            whole = mode == "auto" or policy_state is not None or baseline  # what is measured or learned is so once
            at_a_time = len(wanted) if whole else max(1, groups or prompts_at_a_time(mode, particles, chains))
            batches = file.draw(draw, wanted, seed, at_a_time)
        for warning in warned:
            note(str(warning.message))
        if policy_state is not None:
            keep_state(policy_state, batches[0].info)
        if picture is not None:
            batches[0][0].plot(picture)
    code = report(batches, seed, None if output else "json" if as_json else "text", note, strict)
    if code:
        raise typer.Exit(code)


app.command()(check)


def _note(message: str) -> None:
    typer.echo(f"smcgen: {message}", err=True)


def main() -> None:
    """Entry point: one line and an exit code for every error that smcgen raises on purpose."""
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # its retries; the error that follows says all
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        app(standalone_mode=True)
    except SmcgenError as error:
        typer.echo(f"smcgen: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:  # typer makes a silent exit of Ctrl-C
            raise
        typer.echo("smcgen: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(FAILED)
    except OSError as error:
        typer.echo(f"smcgen: cannot write the result: {error}", err=True)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
