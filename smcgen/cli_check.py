"""The command `smcgen check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from smcgen.arguments import existing
from smcgen.errors import UsageError


def check(
    file: Annotated[Path, typer.Argument(help="A Lark grammar, or a JSON schema (.json).")],
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Measure the masks on this model's tokens (hub id, folder, .gguf).")
    ] = None,
    start: Annotated[str | None, typer.Option(help="Start rule of a grammar (default: start).")] = None,
    examples: Annotated[int, typer.Option(help="Example texts to draw, without a model.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the examples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compile a grammar or a schema and say what it is worth: verdict, warnings, example texts, cost of its masks.

    Exit codes: 0; 2 it cannot be used; 3 it admits no text.
    """
    if examples < 0:
        raise UsageError(f"--examples {examples}: give 0 or more")
    if seed < 0:
        raise UsageError(f"--seed {seed}: give 0 or more")
    existing("check", file)
    import smcgen as sg
    from smcgen.potentials.describe import describe

    if file.suffix.lower() == ".json":
        if start is not None:
            raise UsageError("--start has no effect on a schema: leave it out")
        constraint = sg.json_schema(file)
    elif file.read_bytes().lstrip().startswith(b"{"):
        raise UsageError(f"{file} begins as a JSON schema does, not a Lark grammar: give it a name that ends in .json")
    else:
        constraint = sg.lark(file, start=start)
    vocabulary = None if model is None else sg.LM(model, device="cpu").load().vocabulary
    found = describe(constraint, vocabulary, examples, seed)
    typer.echo(json.dumps(found.to_dict(), ensure_ascii=False) if as_json else str(found))
