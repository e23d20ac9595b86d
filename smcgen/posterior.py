"""The result of a run: weighted particles, and what can be said from them.

A `Posterior` is a view of one prompt's items in a `Record` (one per independent run) and computes only what is asked, so that
ten thousand of them cost little.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from smcgen.advice import advise, no_survivors
from smcgen.diagnostics import Diagnostics, diagnose
from smcgen.errors import NoSurvivors, UsageError
from smcgen.genlm_record import genlm_record
from smcgen.html import to_html
from smcgen.options import called
from smcgen.potentials.base import BUDGET, REASONS
from smcgen.record import FORMAT, Record, Round, finite, item_to_dict, pieces_to_dict, read_json, record_from_dict, written
from smcgen.smc.keys import MAX_SLOTS
from smcgen.values import is_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Row(NamedTuple):
    """One distinct text of `Posterior.table`."""

    text: str
    probability: float
    particles: int


class Bound(NamedTuple):
    """An estimate with its standard error over runs (None from one run)."""

    value: float
    se: float | None


@dataclass(frozen=True)
class Sample:
    """One particle at the end of a run.

    Attributes:
        text: the generated text (without end token; cut before a stop string).
        token_ids: the generated tokens, the end token included.
        weight: share of the posterior over all runs.
        log_p: log p_j of the sample under each language-model factor.
        token_log_p: per token, under each language-model factor: [tokens][factors].
        token_log_q: per token, under the law it was drawn from (draft, mask and temperature included).
        reason: "end", "stop", "budget" or "dead".
        run, root: which of the runs, from 0, and the particle of its first round that this one descends from.
    """

    text: str
    token_ids: list[int]
    weight: float
    log_p: list[float]
    token_log_p: list[list[float]]
    token_log_q: list[float]
    reason: str
    run: int
    root: int


class Posterior:
    """Weighted samples from one target and prompt.

    Probabilities are self-normalised estimates: weights of the particles over all runs, each run counting with its evidence.
    """

    def __init__(self, record: Record, prompt: int):
        self._record, self._prompt = record, prompt
        self._items = range(prompt * record.runs, (prompt + 1) * record.runs)

    # --- evidence -------------------------------------------------------------------------------------------------

    @cached_property
    def run_log_evidence(self) -> np.ndarray:
        """float64 [runs]: log Z-hat of each independent run; E[Z-hat] = Z."""
        return self._record.log_evidence[self._items.start : self._items.stop].numpy()

    @property
    def log_evidence(self) -> float:
        """log of the mean Z-hat over the runs, -inf if every particle died."""
        top = self.run_log_evidence.max()
        return float(top + np.log(np.exp(self.run_log_evidence - top).mean())) if np.isfinite(top) else -math.inf

    @property
    def log_evidence_se(self) -> float | None:
        """Standard error of `log_evidence`, None if it cannot be had (see `log_evidence_note`)."""
        return self._standard_error[0]

    @property
    def log_evidence_note(self) -> str:
        """Where the standard error comes from, or why there is none."""
        return self._standard_error[1]

    @cached_property
    def _standard_error(self) -> tuple[float | None, str]:
        if self.failed:
            return None, "every particle died"
        if len(self._items) > 1:
            z = np.exp(self.run_log_evidence - self.run_log_evidence.max())
            # Of normal values a standard deviation is known to one part in sqrt(2 (n - 1)); of others, to less.
            rough = f", few: itself uncertain by {1 / math.sqrt(2 * len(z) - 2):.0%} or more" if len(z) < 10 else ""
            return float(z.std(ddof=1) / z.mean() / math.sqrt(len(z))), f"spread of {len(z)} runs{rough}"
        if self.collapsed is not None:
            return None, "one run that collapsed to one text: use runs=R"
        if self.settings["resampling"] != "multinomial":
            return None, "one run under this resampling scheme: use runs=R, or resampling='multinomial'"
        roots = self._record.fields["root"][self._items.start].numpy()
        weights = self._weights
        shares = np.bincount(roots, weights)
        if (shares > 0).sum() < 4:
            return None, f"one run, and only {(shares > 0).sum()} of its first particles survive: use runs=R"
        # Lee & Whiteley, "Variance estimation in the particle filter" (2018), eq. 8: pairs with different roots.
        n, times = len(weights), sum(r.resampled for r in self.rounds[0]) + 1
        variance = 1 - (n / (n - 1)) ** times * (1 - np.square(shares).sum())
        return float(math.sqrt(max(variance, 0.0))), "genealogy of one run"

    @property
    def divergence_bound(self) -> Bound | None:
        """-mean(log Z-hat) over the runs, in nats: KL(law of one draw of one run, language model) is at most its expectation.

        Only where the target is a language model as it is, so that log Z = 0; else None (see `divergence_note`). Proof: the
        two laws, on the space of all that a run draws, have density ratio Z-hat / Z (Andrieu, Doucet & Holenstein 2010)."""
        if not self.settings.get("plain", False):
            return None
        logs = self.run_log_evidence
        error = float(logs.std(ddof=1) / math.sqrt(len(logs))) if len(logs) > 1 and not self.failed else None
        return Bound(float(-logs.mean()), error)

    @property
    def divergence_note(self) -> str:
        """`divergence_bound` in words, or why there is none."""
        bound = self.divergence_bound
        if bound is None:
            return "no bound on the divergence: the target is not a language model as it is (powers, potentials, 'condition')"
        error = " (one run; runs=R gives its error)" if bound.se is None else f" ± {bound.se:.2g}"
        error += ", which is no more than noise" if bound.se is not None and bound.value < 2 * bound.se else ""
        return f"bound on the divergence of one draw from the language model: {bound.value:.3g} nats{error}"

    @property
    def collapsed(self) -> list[int] | None:
        """Per run, after how many rounds its N particles became one, which went on alone (`sample(collapse=True)`); None if
        runs do not. The evidence is that of the N particles then, and `particles` holds the one of each run."""
        if not self.settings.get("collapse", False):
            return None
        return [sum(len(r.counts) > 1 for r in rounds) for rounds in self.rounds]

    @property
    def failed(self) -> bool:
        """True if every particle of every run died."""
        return not np.isfinite(self.run_log_evidence).any()

    # --- samples --------------------------------------------------------------------------------------------------

    @cached_property
    def _weights(self) -> np.ndarray:
        """float64 [runs * N], sums to 1: particles of all runs, each run weighted by its evidence."""
        within = self._record.fields["log_weight"][self._items.start : self._items.stop]
        within = within - within.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
        weight = (within + torch.from_numpy(self.run_log_evidence)[:, None]).flatten()
        return weight.softmax(0).numpy() if weight.max() > -math.inf else np.zeros(len(weight))

    @cached_property
    def _texts(self) -> list[str]:
        return [text for item in self._items for text in self._record.texts_of(item)]

    @property
    def particles(self) -> list[Sample]:
        """All particles of all runs."""
        return [self._sample(i) for i in range(len(self._weights))]

    def _sample(self, place: int) -> Sample:
        n = self._record.fields["length"].shape[1]
        f = {name: values[self._items[place // n], place % n] for name, values in self._record.fields.items()}
        length = int(f["length"])
        return Sample(
            text=self._texts[place],
            token_ids=f["tokens"][:length].tolist(),
            weight=float(self._weights[place]),
            log_p=f["log_p"].tolist(),
            token_log_p=f["token_log_p"][:length].tolist(),
            token_log_q=f["token_log_q"][:length].tolist(),
            reason=REASONS[int(f["reason"])],
            run=place // n,
            root=int(f["root"]),
        )

    @called
    def samples(self, count: int = 1) -> list[Sample]:
        """`count` draws by weight, with replacement. The first is the same whatever `count`; draws from one run are
        dependent. Raises NoSurvivors if every particle died."""
        if not is_whole(count) or not 1 <= count <= MAX_SLOTS:
            raise UsageError(f"{count!r} draws: ask for an integer from 1 to {MAX_SLOTS}")
        self._survived()
        uniform = self._record.uniforms(count)[self._prompt]
        cumulative = self._weights.cumsum()
        places = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
        return [self._sample(int(place)) for place in np.minimum(places, np.flatnonzero(self._weights)[-1])]

    @property
    def sample(self) -> Sample:
        """One draw by weight, the same each time."""
        return self.samples(1)[0]

    @property
    def text(self) -> str:
        """The text of `sample`."""
        return self.sample.text

    @called
    def texts(self, count: int) -> list[str]:
        """The texts of `samples(count)`."""
        return [sample.text for sample in self.samples(count)]

    def table(self) -> list[Row]:
        """Distinct texts with their probabilities, likeliest first. One text may be several samples (other spellings)."""
        rows: dict[str, list[float]] = {}
        for text, weight in zip(self._texts, self._weights, strict=True):
            if weight > 0:
                rows.setdefault(text, []).append(float(weight))
        return sorted((Row(t, sum(w), len(w)) for t, w in rows.items()), key=lambda row: (-row.probability, row.text))

    def expectation(self, function: Callable[[str], float]) -> float:
        """Weighted mean of a function of the text."""
        self._survived()
        return float(sum(w * function(t) for t, w in zip(self._texts, self._weights, strict=True) if w > 0))

    def piece(self, token: int) -> bytes:
        """What a token that some particle drew adds to the text: its bytes, none for an end token."""
        return self._record.piece_of(token)

    # --- diagnostics ----------------------------------------------------------------------------------------------

    def diagnostics(self) -> Diagnostics:
        """Weights, ancestry and constraints round by round (see `smcgen.diagnostics`)."""
        roots = self._record.fields["root"][self._items.start : self._items.stop].numpy()
        piece_of = self._record.piece_of
        return diagnose(self._weights.reshape(roots.shape), roots, self.rounds, self.cut_probability, piece_of, self.info)

    def advice(self) -> list[str]:
        """What this run lacks and what would help, in plain words; empty if nothing stands out."""
        return advise(self.diagnostics(), self.settings)

    def plot(self, path: str | Path | None = None) -> Figure:
        """ESS and evidence by round, genealogy, weights, texts and tokens on one page, written to `path` (.png, .pdf, .svg) if
        one is given. Needs matplotlib (the extra `plots`); `smcgen.plots` has each picture by itself."""
        from smcgen.plots import plot

        return plot(self, path)

    @property
    def rounds(self) -> list[list[Round]]:
        """Per run, its rounds."""
        return [self._record.rounds_of(item) for item in self._items]

    @property
    def ess(self) -> list[np.ndarray]:
        """Per run, the effective sample size before resampling in each round: float64 [rounds]; 1 after a collapse."""
        return [np.array([r.ess for r in rounds]) for rounds in self.rounds]

    @property
    def ancestors(self) -> list[np.ndarray]:
        """Per run, int64 [rounds, N]: particle n after round r is a copy of particle ancestors[r, n] before. Where a run has
        collapsed to one particle, all N columns name it."""
        n = self.settings["particles"]
        return [np.array([(r.ancestors * n)[:n] for r in rounds]) for rounds in self.rounds]

    @property
    def acceptance(self) -> float | None:
        """Share of the positions put to the test at which a drafted token was accepted; None if none was (no draft, or
        infinite leniency)."""
        judged = sum(r.judged for rounds in self.rounds for r in rounds)
        accepted = sum(r.accepted for rounds in self.rounds for r in rounds)
        return accepted / judged if judged else None

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a particle commits per forward of the model, over the particles that were still going."""
        counts = [count for rounds in self.rounds for r in rounds for count in r.counts if count]
        return sum(counts) / max(len(counts), 1)

    @property
    def cut(self) -> int:
        """Particles at the end that the budget cut."""
        return int((self._record.fields["reason"][self._items.start : self._items.stop] == BUDGET).sum())

    @property
    def cut_probability(self) -> float:
        """Their share of the posterior."""
        reasons = self._record.fields["reason"][self._items.start : self._items.stop].flatten().numpy()
        return float(self._weights[reasons == BUDGET].sum())

    @property
    def dead(self) -> int:
        """Particles that died over all rounds (resampling replaces them)."""
        return sum(r.deaths for rounds in self.rounds for r in rounds)

    @property
    def prompt(self) -> str:
        """The prompt as text, in its chat template if it was put into one."""
        return self._record.prompts[self._prompt]

    @property
    def given(self) -> Any:
        """The prompt as it was given: text, chat messages or token ids; None if every model had its own."""
        return self._record.given[self._prompt]

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decided the run: target, draft, particles, seed, ..."""
        return self._record.settings

    @property
    def info(self) -> dict[str, Any]:
        """What the call cost: seconds, seconds in potentials, rounds, tokens, pages."""
        return self._record.info

    def _survived(self) -> None:
        if self.failed:
            raise self.failure()

    def failure(self) -> NoSurvivors:
        """The error of a run without survivors: round, cause and longest prefix."""
        return no_survivors(self._record, self._items)

    # --- in and out -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict from which `from_json` restores everything."""
        drawn = None if self.failed else self.sample
        return {
            "format": FORMAT,
            "prompt": self.prompt,
            "given": self.given,
            "text": drawn and drawn.text,
            "token_ids": drawn and drawn.token_ids,
            "token_log_p": drawn and drawn.token_log_p,
            "finish_reason": drawn.reason if drawn else "dead",
            "log_evidence": finite(self.log_evidence),
            "log_evidence_se": self.log_evidence_se,
            "diagnostics": self.diagnostics().summary(),
            "settings": self.settings,
            "key": self._record.keys[self._prompt],
            "pieces": pieces_to_dict(self._record, self._items),
            "runs": [item_to_dict(self._record, item) for item in self._items],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """JSON text; written to `path` as well if one is given (whole or not at all)."""
        return written(json.dumps(self.to_dict(), ensure_ascii=False), path)

    @called
    def to_genlm_json(self, path: str | Path | None = None, run: int = 0) -> str:
        """One run in the record format that genlm-control's `InferenceVisualizer` opens; written as by `to_json`."""
        if not is_whole(run) or not 0 <= run < len(self._items):
            raise UsageError(f"run={run!r}: this result has {len(self._items)} run(s), counted from 0")
        record = genlm_record(self.rounds[run], self._record.piece_of)
        return written(json.dumps(record, ensure_ascii=False), path)

    @classmethod
    def from_json(cls, source: str | Path) -> Posterior:
        """The posterior written by `to_json`: a path or the JSON text itself. Raises UsageError if it is something else."""
        return cls(record_from_dict(read_json(source)), 0)

    def _repr_html_(self) -> str:
        return to_html(self)

    def __repr__(self) -> str:
        if self.failed:
            return "Posterior(no survivors)"
        se = "" if self.log_evidence_se is None else f" ± {self.log_evidence_se:.2g}"
        rows = self.table()
        lines = [f"Posterior({len(rows)} distinct text{'s' * (len(rows) != 1)}, log evidence {self.log_evidence:z.4f}{se})"]
        for row in rows[:5]:
            shown = row.text if len(row.text) <= 70 else row.text[:67] + "..."
            lines.append(f"  {row.probability:7.4f}  {shown!r}")
        if len(rows) > 5:
            lines.append(f"  ... {len(rows) - 5} more")
        if self.acceptance is not None:
            used = self.info.get("draft_rounds", [])
            drafts = f", rounds of each draft {used}" if len(used) > 1 else ""
            lines.append(f"  acceptance {self.acceptance:.2f}, {self.tokens_per_round:.2f} tokens per round{drafts}")
        return "\n".join(lines)
