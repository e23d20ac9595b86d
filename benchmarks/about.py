"""What figures were measured with, in the same words in every file of results."""

from __future__ import annotations

import contextlib
import platform
from datetime import date
from importlib import metadata
from typing import Any

import torch
import transformers

import smcgen as sg

SHARED = "shared with other work: seconds are no speeds"


def machine(device: str | torch.device | None = None, note: str = "") -> str:
    """The GPU's name, or the kind of CPU with its threads and `note`. device: None is a GPU if there is one."""
    cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    if cuda:
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}{f', {note}' if note else ''}"


def versions() -> dict[str, str]:
    """Of Python, smcgen and what it computes with."""
    found = {"smcgen": sg.__version__, "python": platform.python_version(), "torch": torch.__version__}
    found["transformers"] = transformers.__version__
    with contextlib.suppress(metadata.PackageNotFoundError):  # only GPUs need it
        found["triton"] = metadata.version("triton")
    return found


def about(device: str | torch.device | None = None, note: str = "") -> dict[str, Any]:
    """The head of a file of results: date, machine, versions."""
    return {"date": date.today().isoformat(), "machine": machine(device, note), "versions": versions()}


def same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether results with the head `old` may stand beside those with the head `new`: all but the date agrees."""
    return all(old.get(key) == value for key, value in new.items() if key != "date")
