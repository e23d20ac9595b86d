"""Whether the model hub is to be asked for a name, before anything that tries again and again for half a minute is."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

from smcgen.errors import ModelError, first_line

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
PATIENCE = 5.0  # seconds for an answer of the hub


def local_files_only(name: str) -> bool:
    """How `from_pretrained` is to read what is named: a folder, and a model in the hub's cache if the hub cannot be reached or,
    for want of an owner in the name, is not to be asked, without the network.

    Raises ModelError, within some seconds, if the name is neither of a folder nor to be had from the hub."""
    if Path(name).is_dir():
        return True
    kept = _HUB_ID.fullmatch(name) is not None and _cached(name)
    if "/" not in name or not _HUB_ID.fullmatch(name):
        if kept:
            return True
        if bits := re.fullmatch("int([34568])", name):
            raise ModelError(f"{name} is no model: a copy of lm in {bits[1]} bits is lm.quantized({bits[1]})")
        raise ModelError(f"there is no folder {name}: check the path (a hub id has the form owner/name)")
    answer = _ask(name)
    if answer is not None and not kept:
        raise ModelError(
            f"{name} is no folder here, and not to be had as a model of the hub: {answer}; check the path, or the name and the "
            "network (a private model needs a login)"
        )
    return answer is not None


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _ask(name: str) -> str | None:
    """None if the hub has the model, else why not. One question, without a second try."""
    from huggingface_hub import HfApi

    answers: list[Any] = []

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=PATIENCE)
            answers.append(None)
        except Exception as error:  # whatever client the library uses
            answers.append(_reason(error))

    # A name server that does not answer has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    return answers[0] if answers else f"no answer within {2 * PATIENCE:g} seconds"


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(error, RepositoryNotFoundError):
        return "the hub has none of that name"
    return f"the hub cannot be reached ({first_line(error)})"
