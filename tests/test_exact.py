"""mode="exact" draws from the language model itself: chi-square on the joint of three tokens, 10,000 draws a configuration.

A p-value below 1e-4 fails; the wrong samplers below are all seen at p < 1e-12 with the same draws.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

import smcgen as sg
from smcgen.kernels import categorical
from smcgen.proposals import draft as draft_module
from smcgen.proposals import lenient
from smcgen.proposals.block import BlockJudgement
from smcgen.proposals.lenient import Judgement, LenientProposal
from tests.statistics import law_p_value, many, measure
from tests.tables import END, START, Exact, TableLM, V, enumerate_target, log_p, samples, tables, text_of
from tests.test_paged_engine import END as TINY_END
from tests.test_paged_engine import enumerate_samples, tiny, tokenizer
from tests.test_paged_engine import run as run_tiny

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
IDS = (2, 0)
DRAWS = 10_000
TOKENS = 3


def draws(lm: sg.LM = LM, **options) -> sg.Posteriors:
    return many(lm, **{"groups": DRAWS, "mode": "exact", "particles": 1, "max_tokens": TOKENS, "draft": SMALL, **options})


def truth(lm: TableLM = BASE, **options) -> Exact:
    return enumerate_target([(lm, 1.0, IDS)], max_tokens=TOKENS, **options)


def without(lm: TableLM, *tokens: int) -> TableLM:
    table = lm.table.clone()
    table[..., list(tokens)] = -torch.inf
    return TableLM(table, lm.name)


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("block", [1, 2, 3, 4, 5])
def test_law(block, chains):
    posts = draws(block=block, chains=chains, verification="token")
    assert law_p_value(posts, truth()) > 1e-4
    assert np.abs(posts.log_evidence).max() < 1e-6


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_law_of_block_verification(block):
    posts = draws(block=block)
    assert posts.settings["verification"] == "block"
    assert law_p_value(posts, truth()) > 1e-4
    assert np.abs(posts.log_evidence).max() < 1e-6


EDGES = {
    "the draft is the model": (BASE, BASE),
    "disjoint supports": (without(BASE, 0, END), without(DRAFT, 1, 2)),
    "zeros in the model": (without(BASE, 1), DRAFT),
    "zeros in the draft": (BASE, without(DRAFT, 0, END)),
    "zeros in both": (without(BASE, 1), without(DRAFT, 2)),
}


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("name", EDGES)
def test_law_at_the_edges(name, chains):
    base, draft = EDGES[name]
    posts = draws(sg.LM(base), draft=sg.LM(draft), block=2, chains=chains)
    assert law_p_value(posts, positive(base)) > 1e-4
    if name == "the draft is the model":
        assert all(r.accepted == r.judged for post in posts[:200] for r in post.rounds[0])
    if name == "disjoint supports":
        assert all(r.accepted == 0 for post in posts[:200] for r in post.rounds[0])


def positive(base: TableLM) -> Exact:
    """Samples of positive probability, for tables with zeros."""

    def mass(x):
        return math.prod(float(base.probabilities(IDS, x[:i])[t]) for i, t in enumerate(x))

    return Exact({x: mass(x) for x in samples(TOKENS) if mass(x) > 0})


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}, {"temperature": 0.6, "top_p": 0.8}])
@pytest.mark.parametrize("chains", [1, 2])
def test_truncated_targets(options, chains):
    temperature = options.get("temperature", 1.0)

    def law(prefix):
        """Truncation from its definition, one row at a time."""
        p = BASE.probabilities(IDS, prefix, temperature)
        order = sorted(range(V), key=lambda v: (-p[v], v))
        keep = order[: options.get("top_k", V)]
        if "top_p" in options:
            keep = [v for i, v in enumerate(order) if sum(p[order[:i]]) < options["top_p"]]
        keep = [v for v in keep if p[v] >= options.get("min_p", 0) * p.max()]
        cut = np.where(np.isin(np.arange(V), keep), p, 0)
        return cut / cut.sum()

    gamma = {x: math.prod(float(law(x[:i])[t]) for i, t in enumerate(x)) for x in samples(TOKENS)}
    exact = Exact({x: g for x, g in gamma.items() if g > 0})
    assert law_p_value(draws(LM.at(**options), block=2, chains=chains), exact) > 1e-4
    plain = draws(LM.at(**options), draft=None, groups=4000)
    assert law_p_value(plain, exact) > 1e-4


@pytest.mark.parametrize("stops", [("bc", "ab"), ("b",)])
def test_stop_strings_inside_a_block(stops):
    def ended(x):
        return x[-1] == END or len(x) == TOKENS or any(s in text_of(x) for s in stops)

    cut = {x[:n] for x in samples(TOKENS) for n in range(1, len(x) + 1)}
    support = [x for x in cut if ended(x) and not any(ended(x[:n]) for n in range(1, len(x)))]
    exact = Exact({x: math.exp(log_p(BASE, IDS, x)) for x in support})
    assert abs(exact.z - 1) < 1e-9
    assert law_p_value(draws(block=3, chains=2, stop=stops), exact) > 1e-4


def test_kolmogorov_smirnov_gate():
    exact = truth()
    drawn = measure(draws(block=3, seed=5), list(exact.gamma)).mean(0)
    gap = np.abs(np.cumsum(drawn) - np.cumsum(list(exact.gamma.values()))).max()
    assert gap < 1.628 / math.sqrt(DRAWS)  # critical value at 0.01


def test_acceptance_is_the_overlap_of_the_two_laws():
    p, q = BASE.probabilities(IDS, ()), DRAFT.probabilities(IDS, ())
    posts = draws(block=1)
    first = [post.rounds[0][0] for post in posts]
    accepted, judged = sum(r.accepted for r in first), sum(r.judged for r in first)
    assert judged == DRAWS
    assert binomtest(accepted, judged, float(np.minimum(p, q).sum())).pvalue > 1e-4
    assert all(0 <= r.accepted <= r.judged for post in posts for r in post.rounds[0])
    post = sg.sample(LM, "ca", draft=SMALL, mode="exact", max_tokens=TOKENS, runs=50, seed=1)
    assert 0 < post.acceptance < 1
    assert 1 < post.tokens_per_round <= 3
    assert sg.sample(LM, "ca", draft=SMALL, leniency=math.inf, max_tokens=TOKENS).acceptance is None


@pytest.mark.parametrize("block", [1, 3, 4])
def test_tokens_per_step(block):
    """Constant acceptance a: (1 - a**(K + 1)) / (1 - a) tokens a step."""
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.5, 0.3, 0.0])
    one, two = (TableLM(x.log().expand(START + 1, START + 1, V).clone()) for x in (p, q))
    a = float(torch.minimum(p, q).sum())
    options = {"block": block, "max_tokens": 3 * (block + 1), "groups": 4000}
    posts = draws(sg.LM(one), draft=sg.LM(two), verification="token", **options)
    counts = np.array([post.rounds[0][0].counts[0] for post in posts])
    want = (1 - a ** (block + 1)) / (1 - a)
    assert abs(counts.mean() - want) < 4 * counts.std() / math.sqrt(len(counts))


# --- models with a cache --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base():
    return tiny(seed=1)


@pytest.fixture(scope="module")
def lm(base):
    return sg.LM(base, tokenizer())


@pytest.fixture(scope="module")
def draft():
    noisy = tiny(seed=1, size=13)  # a padded vocabulary
    for (name, wide), (_, narrow) in zip(noisy.named_parameters(), tiny(seed=1).named_parameters(), strict=True):
        with torch.no_grad():
            if wide.shape == narrow.shape:
                wide.copy_(narrow)
            else:
                wide[8:] = 3.0 if "head" in name else 0.0  # tokens that do not exist would be likely
                wide[:8].copy_(narrow)
            wide[:8] += 0.03 * torch.randn(wide[:8].shape, generator=torch.Generator().manual_seed(0))
    return sg.LM(noisy, tokenizer())


@pytest.mark.parametrize(("block", "chains"), [(1, 1), (2, 3), (5, 1)])
def test_law_through_the_pages(base, lm, draft, block, chains):
    prompts = [[0, 3, 1], [5]]
    exact = [Exact(enumerate_samples(base, prompt, 1.0)) for prompt in prompts]
    posts = run_tiny(lm, prompts * DRAWS, draft=draft, block=block, chains=chains, mode="exact", particles=1, groups=2000)
    for i, want in enumerate(exact):
        assert law_p_value(posts, want, slice(i, None, 2)) > 1e-4


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("block", [1, 4])
def test_greedy_is_greedy_token_for_token(base, lm, draft, block, chains):
    prompts = [[0, 3, 1], [2], [5, 4, 3, 2, 1, 0, 1, 2], [1, 1], [3, 2, 2, 5, 0]]
    posts = sg.sample(lm.at(temperature=0), prompts, draft=draft, block=block, chains=chains, mode="exact", max_tokens=20)
    for prompt, post in zip(prompts, posts, strict=True):
        read = list(prompt)
        while len(read) < len(prompt) + 20 and (len(read) == len(prompt) or read[-1] != TINY_END):
            read.append(int(base(torch.tensor([read])).logits[0, -1, :8].argmax()))
        assert post.sample.token_ids == read[len(prompt) :]


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 1e-4])
def test_almost_greedy(temperature):
    greedy = sg.generate(LM.at(temperature=0), "ca", draft=SMALL, max_tokens=5)
    post = sg.sample(LM.at(temperature=temperature), "ca", draft=SMALL, mode="exact", max_tokens=5, chains=2, seed=3)
    assert post.text == greedy
    assert post.log_evidence == 0


# --- samplers that are wrong ----------------------------------------------------------------------------------------


def accept_after_the_first_rejection(patch):
    original = Judgement._judge

    def judge(self, k, step, candidates, going):
        original(self, k, step, candidates, going)
        self.rejected = torch.zeros_like(self.rejected)
        self.log_q = torch.full_like(self.log_q, -torch.inf)

    patch.setattr(Judgement, "_judge", judge)


def overwrite_the_last_accepted_token(patch):
    """When all are accepted, the last one is drawn again (from the draft) and there is no bonus."""
    original = Judgement._end

    def end(self):
        whole = ~self.rejected & self.drawing.alive & (self.drawing.counts == self.proposal.drafted)
        self.drawing.counts = self.drawing.counts - whole.long()
        original(self)

    patch.setattr(Judgement, "_end", end)


def bonus_from_the_draft(patch):
    original = Judgement._end

    def end(self):
        self.logits = [torch.where(self.rejected[..., None, None], x, x.roll(1, -1)) for x in self.logits]
        original(self)

    patch.setattr(Judgement, "_end", end)


def residual_not_normalised(patch):
    def draw(log_mass, uniform, allowed=None):
        total = log_mass.exp().cumsum(-1)
        token = torch.searchsorted(total.contiguous(), uniform[..., None], right=True).clamp(max=V - 1)[..., 0]
        return token, log_mass.gather(-1, token[..., None])[..., 0].clamp(min=-50), log_mass.logsumexp(-1)

    patch.setattr(lenient, "draw", draw)


def residual_is_the_model(patch):
    patch.setattr(lenient, "log_excess", lambda log_p, log_q, cost: log_p)


def temperature_on_one_side(patch):
    original = LenientProposal.__init__

    def init(self, reader, drafted, temperature, *rest):
        original(self, reader, drafted, temperature, *rest)
        self.temperature = 0.5

    patch.setattr(LenientProposal, "__init__", init)
    law = Judgement._draft_law

    def draft_law(self, step, allowed):
        return (0.5 * law(self, step, allowed)).log_softmax(-1)

    patch.setattr(Judgement, "_draft_law", draft_law)


def drafts_are_the_likeliest_tokens(patch):
    def power_draw(logits, *arguments, **options):
        token = logits.argmax(-1)
        log_q = categorical.log_softmax(logits).gather(-1, token[..., None])[..., 0]
        return categorical.power_draw(logits, *arguments, **options)._replace(token=token, log_q=log_q)

    patch.setattr(draft_module, "power_draw", power_draw)


def candidates_share_their_random_number(patch):
    def uniform(self, world, drawing, step):
        first = world.keys.uniform(0, drawing.round, step, 1)
        return first.expand(-1, drawing.counts.shape[1])

    patch.setattr(LenientProposal, "uniform", uniform)


def later_candidates_judged_as_the_first(patch):
    original = lenient.accept

    def accept(level, log_p, log_q, candidates, uniform, leniency):
        level = lenient.Levels(level.cost[..., :1].expand_as(level.cost), torch.ones_like(level.mass), level.reach)
        return original(level, log_p, log_q, candidates, uniform, leniency)

    patch.setattr(lenient, "accept", accept)


def acceptance_reuses_the_draft_numbers(patch):
    patch.setattr(lenient, "ACCEPT", lenient.DRAFT)


def residual_of_one_token(patch):
    """Block verification with (p - q)+ where (w p - q)+ is due."""
    original = BlockJudgement._accept

    def judge(self):
        original(self)
        self.level.cost.clamp_(max=1.0)

    patch.setattr(BlockJudgement, "_accept", judge)


def draft_law_out_of_step(patch):
    """Block verification with a draft law that does not add up to 1."""
    original = BlockJudgement._laws

    def laws(self, i, used):
        log_p, log_q = original(self, i, used)
        return log_p, log_q - 0.3 * (i > 0)

    patch.setattr(BlockJudgement, "_laws", laws)


WRONG = {
    accept_after_the_first_rejection: 1,
    overwrite_the_last_accepted_token: 1,
    bonus_from_the_draft: 1,
    residual_not_normalised: 1,
    residual_is_the_model: 1,
    temperature_on_one_side: 1,
    drafts_are_the_likeliest_tokens: 1,
    candidates_share_their_random_number: 3,
    later_candidates_judged_as_the_first: 3,
    acceptance_reuses_the_draft_numbers: 1,
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_wrong_sampler_is_seen(monkeypatch, wrong):
    wrong(monkeypatch)
    block = 1 if wrong is overwrite_the_last_accepted_token else 2
    assert law_p_value(draws(block=block, chains=WRONG[wrong], verification="token"), truth()) < 1e-12


@pytest.mark.parametrize("wrong", [residual_of_one_token, draft_law_out_of_step], ids=lambda f: f.__name__)
def test_wrong_block_verification_is_seen(monkeypatch, wrong):
    options = {"block": 3, "draft": SMALL.at(temperature=0.4), "groups": 5 * DRAWS}
    assert law_p_value(draws(**options), truth()) > 1e-4
    wrong(monkeypatch)
    assert law_p_value(draws(**options), truth()) < 1e-12


# --- what is refused ------------------------------------------------------------------------------------------------


@sg.potential
def short(text: str) -> float:
    return -float(len(text))


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (LM**2, {}, "mode='smc'"),
        (LM * short, {}, "mode='smc'"),
        (LM * sg.regex("a*"), {}, "mode='smc'"),
        (LM * SMALL, {}, "mode='smc'"),
        (LM, {"particles": 4}, "particles has no place"),
        (LM, {"leniency": 2.0}, "leniency has no place"),
        (LM, {"chains": 2, "draft": None}, "without a draft"),
        (LM, {"on_budget": "condition"}, "needs weights"),
        (LM, {"mode": "fast"}, "mode='fast'"),
        (LM, {"verification": "both"}, "'block' or 'token'"),
        (LM, {"verification": "block", "chains": 2}, "one chain"),
        (LM, {"verification": "block", "mode": "smc"}, "one chain"),
        (LM, {"verification": "token", "draft": None}, "without a draft"),
        (LM, {"mode": "smc", "leniency": 0.5}, "from 1"),
        (LM, {"mode": "smc", "leniency": float("nan")}, "from 1"),
        (LM, {"mode": "smc", "leniency": 2.0, "draft": None}, "without a draft"),
        (LM, {"mode": "smc", "leniency": math.inf, "chains": 2}, "finite leniency"),
        (LM, {"mode": "smc", "leniency": math.inf, "draft": SMALL.at(top_k=2)}, "leaves out tokens"),
        (LM.at(temperature=0), {"mode": "smc"}, "greedy"),
        (LM / SMALL.at(top_k=2) ** 0.5, {"mode": "smc"}, "negative exponent"),
    ],
)
def test_what_exact_cannot_mean_is_refused(target, options, message):
    with pytest.raises(sg.UsageError, match=message):
        sg.sample(target, "ca", **{"mode": "exact", "draft": SMALL, "max_tokens": 3, **options})


def test_generate():
    one = sg.generate(LM, "ca", draft=SMALL, max_tokens=5, seed=1)
    assert one == sg.sample(LM, "ca", draft=SMALL, mode="exact", max_tokens=5, seed=1).text
    two = sg.generate(LM, ["ca", "b"], draft=SMALL, max_tokens=5, seed=1)
    assert two[0] == one
    assert len(two) == 2
    with pytest.warns(UserWarning, match="bound on the divergence"):
        sg.generate(LM, "ca", draft=SMALL, mode="smc", max_tokens=5, seed=1)
    with pytest.raises(sg.UsageError, match="use sample"):
        sg.generate(LM**2, "ca")
