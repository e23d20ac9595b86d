"""smcgen: text from language models under conditions. Names are loaded when first used, so that importing costs nothing."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smcgen.drafts.ngram import NGram
    from smcgen.errors import Impossible, ModelError, NoSurvivors, PotentialError, SmcgenError, UsageError
    from smcgen.interop.genlm import from_genlm, to_genlm
    from smcgen.posterior import Posterior
    from smcgen.posteriors import Posteriors
    from smcgen.potentials.base import Potential
    from smcgen.potentials.check import check
    from smcgen.potentials.describe import describe
    from smcgen.potentials.function import potential
    from smcgen.potentials.json_schema import json_schema
    from smcgen.potentials.lark import lark
    from smcgen.potentials.regex import regex
    from smcgen.potentials.reward import reward
    from smcgen.potentials.reward_model import RewardModel
    from smcgen.potentials.soft import phrases, target_length
    from smcgen.potentials.text import avoids, choice, contains, length
    from smcgen.sampling import asample, generate, sample
    from smcgen.smc.schedule import Ramp
    from smcgen.target import LM, Target

__version__ = "0.1.0"

__all__ = [
    "LM",
    "Impossible",
    "ModelError",
    "NGram",
    "NoSurvivors",
    "Posterior",
    "Posteriors",
    "Potential",
    "PotentialError",
    "Ramp",
    "RewardModel",
    "SmcgenError",
    "Target",
    "UsageError",
    "asample",
    "avoids",
    "check",
    "choice",
    "contains",
    "describe",
    "from_genlm",
    "generate",
    "json_schema",
    "lark",
    "length",
    "phrases",
    "potential",
    "regex",
    "reward",
    "sample",
    "target_length",
    "to_genlm",
]

_HOME = {
    "smcgen.drafts.ngram": ("NGram",),
    "smcgen.errors": ("SmcgenError", "UsageError", "ModelError", "PotentialError", "Impossible", "NoSurvivors"),
    "smcgen.interop.genlm": ("from_genlm", "to_genlm"),
    "smcgen.posterior": ("Posterior",),
    "smcgen.posteriors": ("Posteriors",),
    "smcgen.potentials.base": ("Potential",),
    "smcgen.potentials.check": ("check",),
    "smcgen.potentials.describe": ("describe",),
    "smcgen.potentials.function": ("potential",),
    "smcgen.potentials.json_schema": ("json_schema",),
    "smcgen.potentials.lark": ("lark",),
    "smcgen.potentials.regex": ("regex",),
    "smcgen.potentials.reward": ("reward",),
    "smcgen.potentials.reward_model": ("RewardModel",),
    "smcgen.potentials.soft": ("phrases", "target_length"),
    "smcgen.potentials.text": ("avoids", "choice", "contains", "length"),
    "smcgen.sampling": ("sample", "asample", "generate"),
    "smcgen.smc.schedule": ("Ramp",),
    "smcgen.target": ("LM", "Target"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'smcgen' has no attribute {name!r}")
    with warnings.catch_warnings():  # in a notebook, tqdm (a part of transformers) asks for widgets that nothing here uses
        warnings.filterwarnings("ignore", message="IProgress not found")
        return getattr(importlib.import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULE]
