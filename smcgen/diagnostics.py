"""What a run tells about itself: how its weights, its ancestry and its constraints went, round by round.

The effective sample size compares the particles that are there. It cannot see a *garden path*: when every particle begins as
the model likes best, and the constraint then bars what the model goes on with, all of them lose the same factor, and the ESS
stays at N. Another beginning, rare but free, may hold almost all of the evidence. What shows it is the mass that the masks
bar *after* the first choice was made (`barred`), set against what N particles cannot be expected to find (`hidden_nats`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from smcgen.record import Round, finite

NARROW = math.log(10)  # nats: a step at which the masks leave less than a tenth of the mass


@dataclass(frozen=True)
class Diagnostics:
    """Per run and round where a field is a list of lists: [runs][rounds]. Rounds of a text that goes on alone after a collapse
    have no weights, and are left out.

    Attributes:
        particles, runs: N and R.
        ess: effective sample size before resampling.
        log_evidence: log Z-hat of the prefixes after the round.
        chi_square: of the block's proposal against the local target, from the weights.
        resampled: whether the run was resampled.
        deaths: particles whose weight became 0.
        ancestors: first particles that still have a descendant after the round.
        pareto_k: [rounds] k-hat of the weights before resampling, all runs together; None where there are too few.
        barred_nats: [runs] see `barred`.
        hidden_nats: by how much log Z-hat may be too low, if there is a path that no particle took and no mask bars:
            barred nats, weighted by the evidence of the runs, less log(N R); 0 if that is negative.
        root_share: the largest part of the answer that descends from one first particle of one run.
        run_share: the largest part of the answer that comes from one run.
        cut_probability: the part of the answer that the budget cut.
        blank_share: share of the drawn tokens that are nothing but blanks and line breaks.
        acceptance: share of the drafted tokens put to the test that were accepted, None if none was.
        pages_shared: share of the K/V pages that is saved by sharing them, over all rounds; None if models keep none.
        pages, pages_unshared: in use after a round at most, and what caches without sharing would have used at most.
        seconds, potential_seconds: these five are of the whole call, all prompts together; None after `from_json`.
    """

    particles: int
    runs: int
    ess: list[list[float]]
    log_evidence: list[list[float]]
    chi_square: list[list[float]]
    resampled: list[list[bool]]
    deaths: list[list[int]]
    ancestors: list[list[int]]
    pareto_k: list[float | None]
    barred_nats: list[float]
    hidden_nats: float
    root_share: float
    run_share: float
    cut_probability: float
    blank_share: float
    acceptance: float | None
    pages_shared: float | None
    pages: int | None
    pages_unshared: int | None
    seconds: float | None
    potential_seconds: float | None

    def summary(self) -> dict[str, Any]:
        """The numbers that describe the run as a whole, JSON-ready, without times."""
        rounds = [len(run) for run in self.ess]
        known = [k for k in self.pareto_k if k is not None]
        return {
            "rounds": max(rounds),
            "smallest_ess": min(map(min, self.ess)),
            "resampled": sum(map(sum, self.resampled)) / sum(rounds),
            "deaths": sum(map(sum, self.deaths)),
            "ancestors_left": [run[-1] for run in self.ancestors],
            "largest_pareto_k": max(known, default=None),
            "barred_nats": finite(self.barred_nats),
            "hidden_nats": finite(self.hidden_nats),
            "root_share": self.root_share,
            "run_share": self.run_share,
            "cut_probability": self.cut_probability,
            "acceptance": self.acceptance,
        }

    def to_dict(self) -> dict[str, Any]:
        """Every field, JSON-ready: infinite numbers are None."""
        return {name: finite(v) for name, v in asdict(self).items()}

    def __repr__(self) -> str:
        s = self.summary()
        left = "/".join(map(str, s["ancestors_left"][:8])) + ("/..." if self.runs > 8 else "")
        runs = "run" if self.runs == 1 else "runs"
        particles = "particle" if self.particles == 1 else "particles"
        lines = [
            f"Diagnostics({self.runs} {runs} of {self.particles} {particles}, {s['rounds']} rounds)",
            f"  smallest ESS          {s['smallest_ess']:.1f} of {self.particles}; {s['resampled']:.0%} of rounds resampled",
            f"  first particles left  {left}; one of them carries {self.root_share:.0%} of the answer",
        ]
        if self.runs > 1:
            lines.append(f"  one run carries       {self.run_share:.0%} of the answer")
        if s["largest_pareto_k"] is not None:
            lines.append(f"  largest Pareto k      {s['largest_pareto_k']:.2f}")
        if max(self.barred_nats) > 0:
            lines.append(
                f"  barred on the way     {max(self.barred_nats):.1f} nats, of which {self.hidden_nats:.1f} may hide evidence"
            )
        if s["deaths"] or self.cut_probability:
            lines.append(
                f"  died                  {s['deaths']} particles; cut by the budget: {self.cut_probability:.0%} of the answer"
            )
        if self.acceptance is not None:
            lines.append(f"  drafted and accepted  {self.acceptance:.0%}")
        if self.pages_shared is not None:
            lines.append(
                f"  pages shared          {self.pages_shared:.0%}: {self.pages} at most, {self.pages_unshared} without sharing"
            )
        if self.seconds is not None and self.potential_seconds is not None:
            lines.append(f"  seconds               {self.seconds:.2f}, of which {self.potential_seconds:.2f} in potentials")
        return "\n".join(lines)


def diagnose(
    weights: np.ndarray,
    roots: np.ndarray,
    rounds: list[list[Round]],
    cut_probability: float,
    piece_of: Callable[[int], bytes],
    info: dict[str, Any],
) -> Diagnostics:
    """The diagnostics of R runs of N particles.

    Args:
        weights: float64 [R, N], shares of the answer; all 0 if no particle survived. After a collapse, [R, 1].
        roots: int64 [R, N], the first particle that each descends from; [R, 1] likewise.
        rounds: of each run.
        cut_probability, info: as in `Posterior`.
        piece_of: token id -> its bytes.
    """
    judged, accepted = (sum(getattr(r, name) for run in rounds for r in run) for name in ("judged", "accepted"))
    runs, n = len(rounds), len(rounds[0][0].counts)
    rounds = [[r for r in run if len(r.counts) == n] for run in rounds]
    run_shares, lost = weights.sum(-1), np.array([barred(run) for run in rounds])
    memory = info.get("memory", {})
    return Diagnostics(
        particles=n,
        runs=runs,
        ess=[[r.ess for r in run] for run in rounds],
        log_evidence=[[r.log_evidence for r in run] for run in rounds],
        chi_square=[[r.chi_square for r in run] for run in rounds],
        resampled=[[r.resampled for r in run] for run in rounds],
        deaths=[[r.deaths for r in run] for run in rounds],
        ancestors=[distinct_ancestors(run, n) for run in rounds],
        pareto_k=_pareto_by_round(rounds),
        barred_nats=lost.tolist(),
        hidden_nats=max(float(run_shares @ lost) - math.log(n * runs), 0.0),
        root_share=max(float(np.bincount(root, weight).max()) for root, weight in zip(roots, weights, strict=True)),
        run_share=float(run_shares.max()),
        cut_probability=cut_probability,
        blank_share=blank_share(rounds, piece_of),
        acceptance=accepted / judged if judged else None,
        pages_shared=memory.get("shared"),
        pages=memory.get("peak_pages"),
        pages_unshared=memory.get("peak_pages_unshared"),
        seconds=info.get("seconds"),
        potential_seconds=info.get("potential_seconds"),
    )


def distinct_ancestors(rounds: list[Round], particles: int) -> list[int]:
    """After each round, how many of the first particles still have a descendant."""
    root, counts = np.arange(particles), []
    for r in rounds:
        root = root[r.ancestors]
        counts.append(len(np.unique(root)))
    return counts


def blank_share(rounds: list[list[Round]], piece_of: Callable[[int], bytes]) -> float:
    """Share of the tokens drawn in all rounds of all runs that are nothing but blanks and line breaks; 0 if none was drawn."""
    counts = Counter(token for run in rounds for r in run for tokens in r.tokens for token in tokens)
    blank = sum(count for token, count in counts.items() if piece_of(token).isspace())
    return blank / max(counts.total(), 1)


def barred(rounds: list[Round]) -> float:
    """Nats lost at the steps where the masks left less than a tenth of the mass, on average over the particles' weights.

    The first token does not count: nothing had been chosen before it. Mass is that of the law drawn from, i.e. of the draft for
    drafted tokens."""
    total = 0.0
    for t, r in enumerate(rounds):
        steps = -np.diff([0.0, *r.log_left])[t == 0 :]
        total += float(steps[(steps > NARROW) & np.isfinite(steps)].sum())  # infinite: all died, and the evidence says so
    return total


def _pareto_by_round(rounds: list[list[Round]]) -> list[float | None]:
    pooled = []
    for t in range(max(map(len, rounds))):
        weights = [np.array(run[t].log_weight) for run in rounds if t < len(run)]
        weights = [np.exp(w - w.max()) for w in weights if w.max() > -math.inf]
        pooled.append(pareto_k(np.concatenate([w / w.mean() for w in weights])) if weights else None)
    return pooled


def pareto_k(weights: np.ndarray) -> float | None:
    """k-hat, the shape of a generalised Pareto law fitted to the largest weights; None for fewer than 21, or if they are equal.

    Above 0.7 a mean over the weights is not to be relied on, however many there are: Vehtari, Simpson, Gelman, Yao & Gabry,
    "Pareto smoothed importance sampling" (2024), with their weak prior towards 0.5 that stands for ten weights."""
    tail = math.ceil(min(0.2 * len(weights), 3 * math.sqrt(len(weights))))
    if tail < 5:
        return None
    ordered = np.sort(weights)
    excess = ordered[-tail:] - ordered[-tail - 1]
    k = fit_pareto(excess)
    if k is None:
        return None
    k = (tail * k + 10 * 0.5) / (tail + 10)
    # Of few draws, or of weights with ties, the fit can be anything. But the largest of n with infinite variance (k > 1/2)
    # is beyond the order of sqrt(n) means; where it is smaller, there is no such tail to be seen.
    return k if ordered[-1] > math.sqrt(len(weights)) * weights.mean() else min(k, 0.5)


def fit_pareto(excess: np.ndarray) -> float | None:
    """The shape k of a generalised Pareto law from its draws (sorted, >= 0); k > 0 is a heavy tail. None if a quarter of them
    are 0. Zhang & Stephens, "A new and efficient estimation method for the generalized Pareto distribution" (2009)."""
    n = len(excess)
    quartile = excess[int(n / 4 + 0.5) - 1]
    if quartile <= 1e-12 * excess[-1] or excess[-1] <= 0:
        return None
    grid = 1 - np.sqrt((30 + int(math.sqrt(n))) / (np.arange(1, 31 + int(math.sqrt(n))) - 0.5))
    theta = 1 / excess[-1] + grid / (3 * quartile)
    k = np.log1p(-theta[:, None] * excess).mean(-1)
    log_likelihood = n * (np.log(-theta / k) - k - 1)
    posterior = np.exp(log_likelihood - log_likelihood.max())
    return float(np.log1p(-(posterior @ theta / posterior.sum()) * excess).mean())
