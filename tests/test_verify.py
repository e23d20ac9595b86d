"""Recursive rejection with leniency: laws and weights by enumeration, to rounding."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from smcgen.kernels.verify import Levels, accept, levels, log_excess, log_law
from tests.tables import END, T, V, samples, tables

BASE, DRAFT = tables()
PROMPT = (2, 0)


def random_law(seed: int, zeros: tuple[int, ...] = ()) -> torch.Tensor:
    logits = 1.5 * torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[list(zeros)] = -torch.inf
    return logits.log_softmax(-1)


PAIRS = {
    "all tokens": (random_law(0), random_law(1)),
    "zeros in p": (random_law(2, (0, 3)), random_law(3)),
    "zeros in q": (random_law(4), random_law(5, (1, 2))),
    "zeros in both": (random_law(6, (0, 4)), random_law(7, (0, 1))),
    "disjoint": (random_law(8, (0, 1)), random_law(9, (2, 3, 4))),
    "equal": (random_law(10), random_law(10)),
    "one token": (random_law(11, (0, 1, 2, 3)), random_law(12)),
}


def recursion(p: np.ndarray, q: np.ndarray, n: int, s: float) -> np.ndarray:
    """The token's law, adding up all outcomes of n candidates; written from the definition, apart from the kernel."""
    law = np.zeros_like(p)
    for xs in itertools.product(range(len(p)), repeat=n):
        chance, r = math.prod(q[x] for x in xs), p
        for x in xs:
            if chance == 0:
                break
            a = min(1.0, s * r[x] / q[x])
            law[x] += chance * a
            chance *= 1 - a
            left = np.maximum(r - q, 0)
            r = left / left.sum() if left.sum() > 1e-14 else p
        law += chance * r
    return law


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("s", [1.0, 1.5, 4.0])
def test_the_law_of_a_token(name, n, s):
    log_p, log_q = PAIRS[name]
    candidates = torch.ones(n, dtype=torch.bool)
    level = levels(log_p, log_q, candidates, s)
    law = torch.stack([log_law(level, log_p[x], log_q[x], candidates, s) for x in range(5)]).exp().numpy()
    want = recursion(log_p.exp().numpy(), log_q.exp().numpy(), n, s)
    assert np.abs(law - want).max() < 1e-12
    assert abs(law.sum() - 1) < 1e-12
    if s == 1:
        assert np.abs(law - log_p.exp().numpy()).max() < 1e-12
        assert np.abs(want - log_p.exp().numpy()).max() < 1e-12


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("s", [1.0, 2.0])
def test_acceptance_and_residual_by_frequency(name, s):
    """`accept` and a draw from the excess have the law that `log_law` names, candidates that do not exist included."""
    log_p, log_q = PAIRS[name]
    rows = 40_000
    generator = torch.Generator().manual_seed(3)
    tokens = torch.multinomial(log_q.exp(), rows * 3, replacement=True, generator=generator).view(rows, 3)
    candidates = torch.tensor([True, False, True]).expand(rows, 3)
    level = levels(log_p.expand(rows, -1), log_q.expand(rows, -1), candidates, s)
    uniform = torch.rand(rows, 3, generator=generator, dtype=torch.float64)
    which = accept(level, log_p[tokens], log_q[tokens], candidates, uniform, s)
    rest = log_excess(log_p.expand(rows, -1), log_q.expand(rows, -1), level.cost[:, -1:]).exp()
    drawn = torch.multinomial(rest, 1, generator=generator)[:, 0]
    token = torch.where(which < 3, tokens.gather(-1, which.clamp(max=2)[:, None])[:, 0], drawn)
    one = Levels(level.cost[0], level.mass[0], level.reach[0])
    law = torch.stack([log_law(one, log_p[x], log_q[x], candidates[0], s) for x in range(5)]).exp()
    count = torch.bincount(token, minlength=5)
    error = (rows * law * (1 - law)).sqrt().clamp(min=1e-3)
    assert ((count - rows * law).abs() / error).max() < 4.5
    assert not (which == 1).any()


def test_tiny_probabilities_do_not_underflow():
    log_p, log_q = torch.tensor([0.0, -800.0]).double(), torch.tensor([-800.0, 0.0]).double()
    candidates = torch.ones(1, 1, dtype=torch.bool)
    level = levels(log_p[None], log_q[None], candidates, 1.0)
    uniform = torch.full((1, 1), 0.5, dtype=torch.float64)
    assert int(accept(level, log_p[None, :1], log_q[None, :1], candidates, uniform, 1.0)) == 0
    assert int(accept(level, log_p[None, 1:], log_q[None, 1:], candidates, uniform, 1.0)) == 1
    assert not level.cost.isnan().any()


def allowed(prefix: tuple[int, ...]) -> np.ndarray:
    """A mask that depends on two tokens of context and never leaves nothing."""
    mask = np.ones(V, bool)
    if len(prefix) > 1:
        mask[(prefix[-1] + 2 * prefix[-2]) % END] = False
    return mask


def local(alpha: float, masked: bool, prefix: tuple[int, ...]) -> tuple[np.ndarray, float, np.ndarray]:
    """p~, Z_t and q at a prefix."""
    mask = allowed(prefix) if masked else np.ones(V, bool)
    p, q = BASE.probabilities(PROMPT, prefix) ** alpha * mask, DRAFT.probabilities(PROMPT, prefix) * mask
    return p / p.sum(), p.sum(), q / q.sum()


WEIGHTS = {
    "right": lambda p, law, m, accepted: p / law,
    "rejected tokens weigh 1": lambda p, law, m, accepted: p / law if accepted else 1.0,
    "p / q for accepted tokens": lambda p, law, m, accepted: p / m["q"] if accepted else 1.0,
    "by the flag, p / (q a) and p / r": lambda p, law, m, accepted: p / (m["accept"] if accepted else m["reject"]),
    "no weight": lambda p, law, m, accepted: 1.0,
}


def walk(s: float, alpha: float, masked: bool, weight=WEIGHTS["right"], drafted: int = 3, bonus: bool = True):
    """Adds up probability times weight over every (token, accept flag) path of one particle, for every sample; also the
    least and the greatest weight. s = inf: every drafted token is accepted."""
    mass = {(): {0: {1.0: 1.0}}}  # prefix -> position in the block -> weight -> probability
    total, extremes = defaultdict(float), [math.inf, -math.inf]
    one = torch.ones(1, dtype=torch.bool)
    for length in range(T):
        for prefix in [x for x in mass if len(x) == length]:
            p, z, q = local(alpha, masked, prefix)
            log_p, log_q = torch.from_numpy(np.log(np.maximum(p, 1e-320))), torch.from_numpy(np.log(np.maximum(q, 1e-320)))
            log_p[torch.from_numpy(p == 0)], log_q[torch.from_numpy(q == 0)] = -torch.inf, -torch.inf
            if s < math.inf:
                level = levels(log_p, log_q, one, s)
                law = torch.stack([log_law(level, log_p[x], log_q[x], one, s) for x in range(V)]).exp().numpy()
                r = level.log_density(log_p, log_q)[..., -1].exp().numpy()
                took = np.minimum(q, s * p)
            else:
                law, r, took = q, np.zeros(V), q
            left = max(1 - took.sum(), 0.0)
            for k, weights in mass.pop(prefix).items():
                for x in np.flatnonzero(p > 0).tolist():
                    if k == drafted:
                        ways = [(p[x], z if bonus else 1.0, 0)]
                    else:
                        m = {"q": q[x], "accept": took[x], "reject": left * r[x]}
                        ways = [(took[x], z * weight(p[x], law[x], m, True), k + 1)]
                        if left * r[x] > 0:
                            ways.append((left * r[x], z * weight(p[x], law[x], m, False), 0))
                    sample = (*prefix, x)
                    for w, chance in weights.items():
                        for probability, factor, after in ways:
                            if x == END or len(sample) == T:
                                total[sample] += chance * probability * w * factor
                                extremes = [min(extremes[0], w * factor), max(extremes[1], w * factor)]
                            else:
                                place = mass.setdefault(sample, {}).setdefault(after, defaultdict(float))
                                place[w * factor] += chance * probability
    return total, extremes


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("s", [1.0, 1.5, 2.0, math.inf])
def test_every_path_adds_up_to_the_target(s, alpha, masked):
    total, (least, greatest) = walk(s, alpha, masked)
    for sample in samples():
        gamma = math.prod(
            float(BASE.probabilities(PROMPT, sample[:i])[t] ** alpha * (allowed(sample[:i])[t] if masked else 1))
            for i, t in enumerate(sample)
        )
        assert abs(total.get(sample, 0.0) - gamma) < 1e-12
    if s == 1 and alpha == 1 and not masked:
        assert abs(least - 1) < 1e-12
        assert abs(greatest - 1) < 1e-12


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "right"])
def test_wrong_weights_do_not_add_up(name):
    gamma = {x: math.prod(float(BASE.probabilities(PROMPT, x[:i])[t]) for i, t in enumerate(x)) for x in samples()}
    total, _ = walk(2.0, 1.0, False, WEIGHTS[name])
    assert sum(abs(total.get(x, 0.0) - g) for x, g in gamma.items()) > 0.01
    total, _ = walk(2.0, 1.0, False)
    assert sum(abs(total.get(x, 0.0) - g) for x, g in gamma.items()) < 1e-12


def test_a_bonus_without_weight_does_not_add_up():
    total, _ = walk(2.0, 2.0, False, bonus=False)
    gamma = {x: math.prod(float(BASE.probabilities(PROMPT, x[:i])[t]) ** 2 for i, t in enumerate(x)) for x in samples()}
    assert abs(sum(total.values()) / sum(gamma.values()) - 1) > 0.01
