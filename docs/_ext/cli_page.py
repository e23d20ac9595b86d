"""The page on the command, from the parser that the command itself uses."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args, get_type_hints

KINDS = {int: "N", float: "X", Path: "PATH"}


def cli_page() -> str:
    """MyST text for `docs/cli.md`: usage, arguments and options of every command of `smcgen`."""
    import typer.main

    from smcgen.cli import app

    group: Any = typer.main.get_command(app)
    lines: list[str] = []
    for name, command in group.commands.items():
        lines += _command(f"smcgen {name}", command, get_type_hints(command.callback))
    return "\n".join(lines)


def _command(name: str, command: Any, types: dict[str, Any]) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
    words = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments]
    lines = [f"## {name}", "", f"    {' '.join([name, '[OPTIONS]', *words])}", "", inspect.cleandoc(command.help or ""), ""]
    if arguments:
        lines += _table("argument", [(f"`{p.name.upper()}`", p) for p in arguments])
    panels: dict[str, list[Any]] = {}
    for option in options:
        panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    for panel, members in panels.items():
        lines += [f"### {panel}" if len(panels) > 1 else "", "", *_table("option", [(_names(p, types), p) for p in members])]
    return lines


def _names(option: Any, types: dict[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in sorted([*option.opts, *option.secondary_opts], key=lambda n: n.startswith("--")))
    if option.is_flag:
        return names
    annotation = types.get(option.name, str)
    kind = next((found for found in (annotation, *get_args(annotation)) if found in KINDS), str)
    return f"{names} {KINDS.get(kind, 'TEXT')}"


def _table(heading: str, rows: list[tuple[str, Any]]) -> list[str]:
    lines = [f"| {heading} | default | meaning |", "|---|---|---|"]
    for names, parameter in rows:
        default = parameter.default
        shown = "" if default is None or default is False or callable(default) or default == () else f"`{default}`"
        lines.append(f"| {names} | {shown} | {_cell(parameter.help or '')} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    """Help text inside a table: no cell ends early, and `*` and `<` are themselves."""
    for sign in ("\\", "|", "*", "<", "_", "[", "]"):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
