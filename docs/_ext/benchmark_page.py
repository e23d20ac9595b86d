"""The tables of the page of measurements, from every `benchmarks/results/*.json`, whatever its shape.

A file is a JSON object. Its scalars, `machine`, `machines` and `versions` say how it was made; the rest are results: a list of
objects, or an object of objects, becomes a table, anything deeper a section of its own.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

MADE_WITH = ("machine", "machines", "versions")
WIDEST = 12  # columns of a table
LONGEST = 80  # rows


def benchmark_page(folder: Path) -> str:
    """MyST text for `docs/benchmarks.md`: all result files below `folder`."""
    files = sorted((folder / "results").glob("*.json"))
    return "\n".join(line for path in files for line in _file(folder, path))


def _file(folder: Path, path: Path) -> list[str]:
    data = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"## {path.stem.replace('_', ' ').capitalize()}", "", *_about(folder, path.stem)]
    if not isinstance(data, dict):
        return [*lines, *_results("results", data, 3)]
    facts = [(key, value) for key, value in data.items() if key in MADE_WITH or not isinstance(value, dict | list)]
    lines += [f"- {_words(key)}: {_fact(value)}" for key, value in facts]
    lines.append("")
    known = {key for key, _ in facts}
    for key, value in data.items():
        if key not in known:
            lines += _results(key, value, 3)
    return lines


def _about(folder: Path, stem: str) -> list[str]:
    """What the script says of itself that has the file's name or writes it."""
    named = folder / f"{stem}.py"
    writers = (p for p in sorted(folder.rglob("*.py")) if f"{stem}.json" in p.read_text(encoding="utf-8"))
    script = named if named.exists() else next(writers, None)
    source = f"`benchmarks/results/{stem}.json`"
    if script is None:
        return [source, ""]
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    prose: list[str] = []
    for part in text.split("\n\n"):
        if not part.startswith(" "):
            prose += [_escaped(part), ""]
        elif not part.lstrip().startswith("python"):  # how to call it is said in the script
            prose += ["```text", *(line[4:] for line in part.split("\n")), "```", ""]
    return [*prose, f"{source}, by `benchmarks/{script.relative_to(folder)}`", ""]


def _results(title: str, value: Any, level: int) -> list[str]:
    """A heading, what is said once, a table if there is one, and what needs headings of its own."""
    lines = [f"{'#' * min(level, 6)} {_words(title).capitalize()}", ""]
    if _objects(value):
        return lines + _tabular({str(i): item for i, item in enumerate(value)}, named=False)
    if not isinstance(value, dict):
        return [*lines, _fact(value), ""]
    single = {key: item for key, item in value.items() if not isinstance(item, dict) and not _objects(item)}
    flat = {key: _flat(item) for key, item in value.items() if isinstance(item, dict) and not _deep(item)}
    lines += [f"- {_words(key)}: {_fact(item)}" for key, item in single.items()] + [""]
    lines += _tabular(flat) if flat else []
    return lines + [
        line for key, item in value.items() if key not in single and key not in flat for line in _results(key, item, level + 1)
    ]


def _tabular(rows: dict[str, dict[str, Any]], named: bool = True) -> list[str]:
    """One row for each object, or one column where that is narrower; what is the same in all rows stands above."""
    flat = {key: _flat(row) for key, row in rows.items()}
    columns = list(dict.fromkeys(name for row in flat.values() for name in row if row[name] is not None))
    if named and len(columns) > WIDEST >= len(flat):
        return _table(["", *flat], [[_words(c), *(row.get(c) for row in flat.values())] for c in columns])
    if not named and len(columns) > WIDEST and (kinds := _kinds(columns[0], flat)):
        parts: list[str] = []
        for kind in kinds:
            of_kind = {key: row | {columns[0]: None} for key, row in flat.items() if row.get(columns[0]) == kind}
            parts += [f"**{_cell(kind)}**", "", *_tabular(of_kind, named=False)]
        return parts
    shared = [
        c for c in columns if len(flat) > 2 and all(row.get(c) == next(iter(flat.values())).get(c) for row in flat.values())
    ]
    shared = shared if len(shared) < len(columns) else []
    columns = [c for c in columns if c not in shared]
    common = [f"In all rows: {', '.join(f'{_words(c)} {_cell(next(iter(flat.values()))[c])}' for c in shared)}.", ""] * bool(
        shared
    )
    first = [""] * named
    return common + _table(
        [*first, *columns], [[_words(key)] * named + [row.get(c) for c in columns] for key, row in flat.items()]
    )


def _kinds(column: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    """The values of a column that tells rows of several kinds apart; none if it does not."""
    values = list(dict.fromkeys(row.get(column) for row in rows.values()))
    return values if all(isinstance(v, str) for v in values) and 1 < len(values) <= len(rows) / 2 else []


def _objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _deep(item: dict[str, Any]) -> bool:
    """Whether a table cannot show it: objects in objects in objects, or lists of objects."""
    inner = [value for value in item.values() if isinstance(value, dict)]
    return any(_objects(v) for v in item.values()) or any(isinstance(w, dict) or _objects(w) for v in inner for w in v.values())


def _flat(item: dict[str, Any]) -> dict[str, Any]:
    """Nested objects as one, their names joined."""
    out: dict[str, Any] = {}
    for key, value in item.items():
        if isinstance(value, dict):
            out |= {f"{key} {name}": inner for name, inner in _flat(value).items()}
        else:
            out[key] = value
    return out


def _table(columns: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [f"| {' | '.join(_words(c) for c in columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows[:LONGEST]]
    if len(rows) > LONGEST:
        lines += ["", f"... and {len(rows) - LONGEST} more rows in the file."]
    return [*lines, ""]


def _words(key: Any) -> str:
    return _escaped(str(key).replace("_", " "))


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        if any(isinstance(v, dict) for v in value.values()):  # a machine for each stage: named once if they agree
            distinct = list(dict.fromkeys(_fact(v) for v in value.values()))
            return "; ".join(distinct)
        return ", ".join(f"{_words(k)} {_cell(v)}" for k, v in value.items())
    return _cell(value)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, list):
        shown = ", ".join(_cell(v) for v in value[:8])
        return shown + ", ..." * (len(value) > 8)
    return _escaped(str(value))


def _escaped(text: str) -> str:
    for sign in ("\\", "|", "*", "<", "[", "]", "$"):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
