"""Memory of a run: pages counted round by round, and groups admitted so that the worst case of all models fits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import smcgen as sg
from benchmarks import memory as benchmark
from smcgen import batch as batch_module
from smcgen.errors import ModelError
from smcgen.lm import memory as memory_module
from smcgen.lm import pages as pages_module
from smcgen.lm.memory import Demand, Memory, groups_that_fit
from smcgen.lm.paged import PagedLM
from smcgen.lm.pages import PAGE, pages_needed
from smcgen.smc import graph
from tests.tables import tables
from tests.test_paged_engine import tiny, tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lm():
    return sg.LM(tiny(seed=1), tokenizer())


@pytest.fixture(scope="module")
def draft():
    return sg.LM(tiny(seed=2), tokenizer())


def read(sample: sg.Sample, prompt: list[int]) -> int:
    """Tokens of which a model has the K/V at the end: all but the last."""
    return len(prompt) + len(sample.token_ids) - 1


def test_pages_without_resampling_share_the_prompt_alone(lm):
    prompt = [0, 3, 1, 4] * 9  # two whole pages and a part of a third
    post = sg.sample(lm, prompt, particles=5, max_tokens=25, seed=0, threshold=0.0)
    whole = (len(prompt) - 1) // PAGE
    each = [-(-read(s, prompt) // PAGE) for s in post.particles]
    # A row writes where the prompt ends, so each but one has a copy of that page, and the last one the original.
    assert post.info["memory"]["pages"] == whole + sum(count - whole for count in each)
    assert post.info["memory"]["pages_unshared"] == sum(each)
    assert 0 < post.info["memory"]["shared"] < 1


def test_one_particle_shares_nothing(lm):
    memory = sg.sample(lm, [0, 3], particles=1, max_tokens=40, seed=0).info["memory"]
    assert memory["pages"] == memory["pages_unshared"] == memory["peak_pages"] > 0
    assert memory["shared"] == 0
    assert memory["peak_bytes"] is None  # torch keeps no such count of a CPU


@pytest.mark.parametrize("options", [{}, {"block": 3, "leniency": 2.0, "chains": 2}, {"block": [2, 3], "leniency": 2.0}])
def test_counts_of_every_round_are_those_of_the_tables(monkeypatch, lm, draft, options):
    seen = []
    note = Memory.note

    def check(self, copies):
        note(self, copies)
        rows = []
        for cache in self.caches:
            named = [row[: -(-n // cache.page)] for row, n in zip(cache.table.tolist(), cache.length.tolist(), strict=True)]
            rows.append((len(set(itertools.chain(*named))), sum(map(len, named))))
        assert self.counts == seen  # the last round is left for later
        seen.append(rows)

    monkeypatch.setattr(Memory, "note", check)
    options = {**options, "draft": [draft, lm]} if options else {}
    posts = sg.sample(lm**2, [[0, 3, 1], [4], [2] * 20], particles=6, max_tokens=40, seed=1, groups=2, **options)
    memory, pools = posts.info["memory"], len(posts.info["models"])
    assert len(seen) == posts.info["rounds"]
    assert {len(rows) for rows in seen} == {pools}
    totals = [[sum(cache[i] for cache in rows) for rows in seen] for i in range(2)]
    assert (memory["pages"], memory["pages_unshared"]) == (totals[0][-1], totals[1][-1])
    assert (memory["peak_pages"], memory["peak_pages_unshared"]) == (max(totals[0]), max(totals[1]))
    assert memory["shared"] == pytest.approx(1 - sum(totals[0]) / sum(totals[1]))
    assert len(memory["pool_bytes"]) == pools
    assert min(memory["pool_bytes"]) > 0


def test_models_without_pages_use_none():
    post = sg.sample(sg.LM(tables()[0]), "ca", particles=4, max_tokens=3, seed=0)
    memory = post.info["memory"]
    assert (memory["pages"], memory["shared"], memory["pool_bytes"]) == (0, None, [0])
    assert "pages" not in repr(post.diagnostics())


def test_the_model_in_a_look_up_draft_counts(lm, draft):
    spec = sg.NGram(model=draft)
    memory = sg.sample(lm, [0, 3], draft=spec, block=2, particles=4, max_tokens=10, seed=0).info["memory"]
    assert min(memory["pool_bytes"]) > 0
    with_model, without = spec.build(lm.load()), sg.NGram().build(lm.load())
    assert Demand(with_model, 1, 4, 2).bytes(1, 8, 8) == Demand(draft.load(), 1, 4, 2).bytes(1, 8, 8) > 0
    assert Demand(without, 1, 4, 2).bytes(1, 8, 8) == 0


def test_diagnostics_say_what_was_shared(lm):
    post = sg.sample(lm**2, [0, 3, 1] * 8, particles=8, max_tokens=40, seed=0)
    found, memory = post.diagnostics(), post.info["memory"]
    assert (found.pages_shared, found.pages, found.pages_unshared) == tuple(
        memory[name] for name in ("shared", "peak_pages", "peak_pages_unshared")
    )
    most, alone = memory["peak_pages"], memory["peak_pages_unshared"]
    line = f"pages shared          {memory['shared']:.0%}: {most} at most, {alone} without sharing"
    assert line in repr(found)
    assert sg.Posterior.from_json(post.to_json()).diagnostics().pages_shared is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_recorded_rounds_count_the_same(monkeypatch):
    lm, draft = sg.LM(tiny(seed=1).cuda(), tokenizer()), sg.LM(tiny(seed=2).cuda(), tokenizer())

    def memory():
        options = {"particles": 4, "max_tokens": 40, "seed": 3, "groups": 3, "draft": draft, "block": 3}
        posts = sg.sample(lm**2, [[2, 2], [3, 1, 2], [4]], **options)
        return posts.info["memory"], posts.info["cuda_graph"]

    recorded, is_recorded = memory()
    monkeypatch.setattr(graph, "recordable", lambda *_: False)
    plain, is_plain = memory()
    assert (is_recorded, is_plain) == (True, False)
    assert recorded.pop("peak_bytes") > 0
    assert plain.pop("peak_bytes") > 0
    # Recorded rounds are read one late, so that one more may come after the last group is done, which changes no page.
    same = ("peak_pages", "peak_pages_unshared", "pages", "pages_unshared", "pool_bytes")
    assert [recorded[name] for name in same] == [plain[name] for name in same]


# --- admission --------------------------------------------------------------------------------------------------------

PROMPTS = [[0, 3, 1], [2], [5, 4, 3, 2, 1, 0, 1, 2], [1, 1], [3, 2, 2, 5, 0]]
OPTIONS = {"particles": 4, "max_tokens": 20, "seed": 3, "deterministic": True}


def have(monkeypatch, demands: list[Demand], groups: int, spare: float = 1.001) -> None:
    """Just enough memory for so many groups."""
    needed = sum(demand.bytes(groups, 8, OPTIONS["max_tokens"] + 1) for demand in demands)
    monkeypatch.setattr(pages_module, "available_bytes", lambda device: int(spare * needed / memory_module.USABLE) + 1)


@pytest.mark.parametrize("groups", [None, 4])
def test_fewer_prompts_at_a_time_where_memory_is_short(monkeypatch, lm, draft, groups):
    options = OPTIONS | {"draft": draft, "block": 3, "groups": groups}
    whole = sg.sample(lm**2, PROMPTS, **options)
    assert whole.settings["groups"] == (groups or len(PROMPTS))
    have(monkeypatch, [Demand(lm.load(), 1, 4, 4), Demand(draft.load(), 1, 4, 2)], 2)
    posts = sg.sample(lm**2, PROMPTS, **options)
    assert posts.settings["groups"] == 2
    assert (posts.arrays()["tokens"] == whole.arrays()["tokens"]).all()
    assert (posts.log_evidence == whole.log_evidence).all()


def test_what_all_models_need_together_decides(monkeypatch, lm, draft):
    """There is room for four groups of the model, but not of all that a run may add to it."""
    have(monkeypatch, [Demand(lm.load(), 1, 4, 4)], 4)
    assert sg.sample(lm, PROMPTS, **OPTIONS).settings["groups"] >= 4
    assert sg.sample(lm, PROMPTS, draft=draft, block=3, **OPTIONS).settings["groups"] < 4
    have(monkeypatch, [Demand(lm.load(), 1, 4, 4), Demand(draft.load(), 1, 4, 2)], 4)
    two = lm * lm.given([2, 2]) ** 0.5
    assert sg.sample(lm, PROMPTS, draft=draft, block=3, **OPTIONS).settings["groups"] == 4
    assert sg.sample(two, PROMPTS, draft=draft, block=3, **OPTIONS).settings["groups"] < 4
    assert sg.sample(lm, PROMPTS, draft=draft, block=3, chains=2, **OPTIONS).settings["groups"] == 2


def test_the_worst_case_is_what_is_reserved(monkeypatch, lm, draft):
    reserved = []
    open_ = PagedLM.open

    def watched(self, groups, particles, prompt_tokens, new_tokens, isolate=False):
        context = open_(self, groups, particles, prompt_tokens, new_tokens, isolate)
        reserved.append(context.pages.keys.nbytes + context.pages.values.nbytes)
        assert context.pages.count == pages_needed(groups, particles, prompt_tokens, new_tokens)
        return context

    monkeypatch.setattr(PagedLM, "open", watched)
    have(monkeypatch, [Demand(lm.load(), 2, 8, 4), Demand(draft.load(), 1, 8, 2)], 3)
    target = lm * lm.given([2, 2]) ** 0.5
    posts = sg.sample(target, PROMPTS, draft=draft, block=3, chains=2, **OPTIONS)
    assert posts.settings["groups"] == 3
    assert sum(reserved) <= pages_module.available_bytes(CPU)
    assert sum(reserved) == sum(posts.info["memory"]["pool_bytes"])


def test_a_prompt_that_cannot_fit_is_refused_before_the_first_token(monkeypatch, lm, draft):
    def never(*_):
        raise AssertionError("a model has read something")

    reading = lm.load(), draft.load()  # which reads a few tokens
    monkeypatch.setattr(PagedLM, "prefill", never)
    have(monkeypatch, [Demand(reading[0], 1, 4, 4)], 1)  # the draft has no room
    message = (
        r"the K/V cache and the logits of LlamaForCausalLM for 4 rows of 8 \+ 21 tokens need 0\.\d\d GB, and 0\.\d\d GB are"
        r" free on cpu: take fewer particles or chains, a smaller max_tokens, a shorter prompt or a smaller model"
    )
    with pytest.raises(ModelError, match=message):
        sg.sample(lm, PROMPTS, draft=draft, block=3, **OPTIONS)


def test_no_memory_at_all(monkeypatch, lm):
    monkeypatch.setattr(pages_module, "available_bytes", lambda device: -1)
    with pytest.raises(ModelError, match=r"0\.00 GB are free"):
        groups_that_fit([Demand(lm.load(), 1, 4, 1)], 3, 8, 8, CPU)
    assert groups_that_fit([Demand(tables()[0], 1, 4, 1)], 3, 8, 8, CPU) == 3  # a table keeps nothing


# --- the benchmark ----------------------------------------------------------------------------------------------------


def test_the_benchmark_counts_what_is_shared_beyond_the_prompt(monkeypatch, lm, draft):
    monkeypatch.setattr(batch_module, "Memory", benchmark.Recorder)
    prompt = [0, 3, 1, 4] * 5
    alone, block = {"alpha": 1.0, "threshold": 0.0}, {"block": 2, "leniency": math.inf}
    for run in (alone, alone | block):
        row = benchmark.measure(lm, draft, 4, prompt, 25, 0, run)
        assert row["pages"] == row["prompt_only_pages"] < row["unshared_pages"]
        assert row["saved_of_text"]["mean"] == row["saved_of_text"]["end"] == 0
    row = benchmark.measure(lm, draft, 4, prompt, 25, 0, {"alpha": 2.0, "threshold": 1.0})
    assert row["resampled"] > 0.5
    assert row["saved"]["end"] > row["saved_of_text"]["end"] > 0


def test_rounds_are_counted_when_there_is_time(monkeypatch):
    """All but the last round at once, that one when asked."""
    memory, counted = Memory([]), []
    monkeypatch.setattr(memory, "_count", counted.append)
    first, second = [torch.zeros(1)], [torch.ones(1)]
    memory.note(first)
    assert counted == []
    memory.note(second)
    assert counted == [first]
    memory.count()
    assert counted == [first, second]
