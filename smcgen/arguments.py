"""What the options of the command name: prompts, drafts, conditions, potentials, files."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smcgen.errors import UsageError
from smcgen.files import replace

if TYPE_CHECKING:
    from smcgen.drafts.ngram import NGram
    from smcgen.smc.schedule import Ramp
    from smcgen.target import LM, Factor

BITS = (8, 6, 5, 4, 3)  # of the copies that -d int8 ... int3 make


def read_prompts(prompt: str | None, file: Path | None) -> list[Any]:
    """The prompts of a call: the argument, stdin, or a file of lines (.jsonl: objects with "prompt" or "messages")."""
    if file is None:
        return [prompt if prompt is not None and prompt != "-" else _from_stdin()]
    if prompt is not None:
        raise UsageError("a prompt and --prompt-file: give one of the two")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompt-file {file}: cannot be read ({error})") from None
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"--prompt-file {file}: holds no prompt")
    if file.suffix.lower() != ".jsonl":
        return [line for _, line in numbered]
    return [_from_json(line, f"{file}, line {number}") for number, line in numbered]


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise UsageError("no prompt: give one as the argument, on stdin, or with --prompt-file")
    try:
        text = sys.stdin.read().rstrip("\n")
        text.encode("utf-8")  # in a POSIX locale bytes that are no UTF-8 arrive as lone surrogates
        return text
    except UnicodeError:
        raise UsageError("stdin is no UTF-8 text: convert it first") from None


def _from_json(line: str, where: str) -> Any:
    from smcgen.target import check_prompt

    try:
        item = json.loads(line)
        kind = "messages" if "messages" in item else "prompt"
        found = item[kind]
        check_prompt(found)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (json.JSONDecodeError, RecursionError, KeyError, TypeError):
        kind, found = "prompt", None
    messages = isinstance(found, list) and isinstance(found[0], dict)  # not token ids
    if not (messages if kind == "messages" else isinstance(found, str)):
        raise UsageError(f'{where}: give {{"prompt": "text"}} or {{"messages": [{{"role": ..., "content": ...}}]}}')
    return found


def template_free(prompts: list[Any]) -> bool:
    """Whether all prompts are text without special tokens of a chat template, as `<|...|>`."""
    return all(isinstance(prompt, str) and "<|" not in prompt for prompt in prompts)


def continued_or_asked(prompts: list[Any]) -> list[Any]:
    """For the small pair: a text that ends like a sentence becomes a chat message, any other stays and is continued."""
    return [[{"role": "user", "content": p}] if p.rstrip()[-1:] in (".", "?", "!", ":") else p for p in prompts]


def named_drafts(lm: LM, names: list[str] | None, device: str | None, dtype: str | None) -> Any:
    """The draft that -d names, or a list of those it names if it is repeated."""
    if not names or len(names) == 1:
        return named_draft(lm, names[0] if names else None, device, dtype)
    if "none" in names:
        raise UsageError("-d none beside other drafts: leave it out")
    return [named_draft(lm, name, device, dtype) for name in names]


def named_draft(lm: LM, name: str | None, device: str | None, dtype: str | None) -> LM | NGram | None:
    """The draft that -d names; without a name the small pair has its own, and other models have none."""
    from smcgen.target import LM

    if name == "ngram":
        from smcgen.drafts.ngram import NGram

        return NGram()
    if name == "none" or (name is None and lm.name != "tiny"):
        return None
    if name is None:
        name = "tiny-draft"
    if re.fullmatch(r"int\d+", name):
        if int(name[3:]) not in BITS:
            raise UsageError(f"-d {name}: give {', '.join(f'int{bits}' for bits in BITS)}, or a model")
        return lm.quantized(int(name[3:]))
    return LM(name, device=device, dtype=dtype)


def check_state(path: Path, drafts: list[str] | None, blocks: list[int] | None, mode: str | None) -> None:
    """Raises UsageError, before anything is run, if no policy could be kept in a file."""
    if mode == "auto":
        raise UsageError("--policy-state has no place in --mode auto, which chooses the arms anew: leave it out")
    if len(drafts or ()) < 2 and len(blocks or ()) < 2:
        raise UsageError("--policy-state has no effect without several drafts or block lengths: leave it out")
    if not path.exists():
        _write(path, "")
        path.unlink()


def keep_state(path: Path, info: dict[str, Any]) -> None:
    """Writes what the policy of a run has learned."""
    _write(path, json.dumps(info["policy_state"]))


def conditions(
    pattern: str | None,
    grammar: Path | None,
    schema: Path | None,
    blanks: int | None,
    options: list[str] | None,
    wanted: list[str] | None,
    banned: list[str] | None,
) -> Iterator[Factor]:
    """The hard constraints that the options name."""
    import smcgen as sg

    if pattern is not None:
        yield sg.regex(pattern)
    if grammar is not None:
        yield sg.lark(existing("--grammar", grammar))
    if schema is not None:
        spacing = {} if blanks is None else {"blanks": blanks}
        yield sg.json_schema(existing("--json-schema", schema), **spacing)
    elif blanks is not None:
        raise UsageError("--blanks has no effect without --json-schema: leave it out")
    if options:
        yield sg.choice(options)
    if wanted:
        yield sg.contains(*wanted)
    if banned:
        yield sg.avoids(*banned)


def existing(option: str, path: Path) -> Path:
    """The path, if there is a file. Raises UsageError naming the option if not."""
    if not path.is_file():
        raise UsageError(f"{option} {path}: there is no such file")
    return path


def ramp(text: str) -> Ramp:
    """`FIRST:ROUNDS` or `FIRST:ROUNDS:OF`."""
    import smcgen as sg

    first, rounds, *of = text.split(":")[:4] if ":" in text else (text, "")
    try:
        return sg.Ramp(float(first), int(rounds), *of)  # pyright: ignore[reportArgumentType] Ramp checks the name
    except (ValueError, TypeError):
        raise UsageError(f"--anneal {text}: give FIRST:ROUNDS or FIRST:ROUNDS:OF, e.g. 0.5:8") from None


def reward_model(name: str) -> Factor:
    """`MODEL` or `MODEL:beta`."""
    import smcgen as sg

    model, _, number = name.rpartition(":")
    try:
        beta = float(number) if model else 1.0
    except ValueError:
        raise UsageError(f"--reward {name}: {number!r} is no number: give MODEL or MODEL:beta") from None
    return sg.reward(model or name, beta)


def python_potential(name: str) -> Factor:
    """`module:attribute` or `file.py:attribute`; a plain function is made a potential."""
    import smcgen as sg

    module, _, attribute = name.rpartition(":")
    if not module or not attribute:
        raise UsageError(f"--potential {name}: give module:name or file.py:name")
    if module.endswith(".py"):
        existing("--potential", Path(module))
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            if spec is None or spec.loader is None:
                raise ImportError(f"{module} cannot be read")
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        else:
            sys.path.insert(0, "")
            loaded = importlib.import_module(module)
        found: Any = getattr(loaded, attribute)
    except (Exception, SystemExit) as error:  # whatever the user's own module raises
        kind = type(error).__name__
        raise UsageError(f"--potential {name}: {kind}: {error} (give module:name or file.py:name)") from None
    if isinstance(found, sg.Potential):
        return found
    if not callable(found):
        raise UsageError(f"--potential {name}: neither a potential nor a function of the text")
    return sg.potential(found)


def _write(path: Path, text: str) -> None:
    try:
        replace(path, text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--policy-state {path}: cannot be written ({error})") from None
