"""Rewards: functions and models that judge texts, at the end and on the way."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.potentials.base import END, Prompt
from smcgen.potentials.check import check
from smcgen.potentials.reward import RewardPotential, reward
from smcgen.potentials.reward_model import RewardModel
from tests.statistics import evidence_z, many, measure
from tests.tables import enumerate_target, tables
from tests.test_mutations import worst_z
from tests.test_potential_function import VOCABULARY, bind, read
from tests.tiny_models import byte_level, reward_model

BASE, DRAFT = tables()
LM, SMALL = sg.LM(BASE), sg.LM(DRAFT)
OPTIONS = {"draft": SMALL, "block": 1}
MESSAGES = ({"role": "user", "content": "ca"},)


def likes_b(texts):
    return [0.6 * text.count("b") - 0.3 * len(text) for text in texts]


def fickle(texts):
    """Condemns the letter a in texts of even length and praises it in others, which after blocks of two leads astray."""
    return [(1.0 if len(text) % 2 else -1.5) * text.count("a") for text in texts]


def exact(judge, beta):
    return enumerate_target([(BASE, 1.0, (2, 0))], phi=lambda text: math.exp(beta * judge([text])[0]))


PATTERN = re.compile("[bc]")
CASES = {
    "at the end": (likes_b, 1.5, {}, {}),
    "negative": (likes_b, -1.0, {}, {}),
    "every block": (likes_b, 1.5, {"at": "block"}, {}),
    "at a pattern": (likes_b, 1.5, {"at": PATTERN}, {}),
    "early weakened": (likes_b, 1.5, {"at": "block", "early": 0.3}, {}),
    "early ramp": (likes_b, 1.5, {"at": PATTERN, "early": sg.Ramp(first=0.1, rounds=4)}, {}),
    "leads astray": (fickle, 1.0, {"at": "block"}, {}),
    "annealed": (likes_b, 2.0, {"at": "block"}, {"anneal": sg.Ramp(first=0.2, rounds=2, of="potentials")}),
}


@pytest.mark.parametrize("name", CASES)
def test_evidence_and_expectations_are_unbiased(name):
    judge, beta, options, run = CASES[name]
    assert worst_z(LM * reward(judge, beta, **options), exact(judge, beta), {**OPTIONS, **run}) < 4.2


def test_a_bad_guide_costs_variance_only():
    truth = exact(fickle, 1.0)
    spread = []
    for at in ("end", "block"):
        posts = many(LM * reward(fickle, at=at), **OPTIONS)
        assert abs(evidence_z(posts, truth)) < 4
        spread.append(np.exp(posts.log_evidence).std())
    assert spread[1] > 1.2 * spread[0]


def twist_is_not_taken_back(patch):
    original = RewardPotential.finish

    def finish(self, state, rows, texts, reasons):
        return original(self, state, rows, texts, reasons) + torch.from_numpy(self._charged(state, rows.numpy()))

    patch.setattr(RewardPotential, "finish", finish)


def reward_counts_twice(patch):
    original = RewardPotential.finish

    def finish(self, state, rows, texts, reasons):
        return original(self, state, rows, texts, reasons) + torch.tensor(self.model(list(texts)), dtype=torch.float64)

    patch.setattr(RewardPotential, "finish", finish)


@pytest.mark.parametrize("mutant", [twist_is_not_taken_back, reward_counts_twice])
def test_mutant_is_seen(monkeypatch, mutant):
    target, truth = LM * reward(likes_b, at="block"), exact(likes_b, 1.0)
    mutant(monkeypatch)
    assert worst_z(target, truth, OPTIONS) > 6


@pytest.mark.parametrize("of", ["models", "potentials", "all"])
def test_a_ramp_weakens_judgements_of_prefixes_whatever_it_is_of(of):
    vocabulary = sg.LM(BASE).load().vocabulary
    declared = reward(lambda texts: [1.0] * len(texts), at="block", early=sg.Ramp(0.2, 4, of))
    bound = declared.bind(vocabulary, (), torch.device("cpu"))
    token = next(i for i, data in enumerate(vocabulary.tokens) if data)
    assert read(bound, bound.start([Prompt((), "")], 1), [[token]]).item() == pytest.approx(0.2 + 0.8 / 4)


@pytest.mark.parametrize("options", [{}, {"at": "block"}, {"at": PATTERN}, {"at": "block", "early": sg.Ramp(0.2, 3)}])
def test_laws_hold(options):
    check(reward(likes_b, 2.0, **options), VOCABULARY, ["ab", "aé", "", "aab"])


def test_texts_are_judged_once_and_together():
    asked = []

    def counting(texts):
        asked.append(sorted(texts))
        return [0.0] * len(texts)

    bound = bind(reward(counting, at="block"))
    state = bound.start([Prompt((1,), "x")] * 2, 2)
    read(bound, state, [[0, 1], [2], [0], [0]])
    bound.finish(state, torch.arange(4), ["ab", "ab", "a", "aab"], [END] * 4)
    assert asked == [["a", "ab"], ["aab"]]


def test_lines_are_judged_when_they_are_complete():
    asked = []

    def counting(texts):
        asked.extend(texts)
        return [float(len(text)) for text in texts]

    vocabulary = sg.LM(BASE).load().vocabulary
    lines = type(vocabulary)("lines", [b"a", b"\nb", b"\n", b"<end>"], special=(3,), end_ids=(3,))
    bound = reward(counting, at="line").bind(lines, (), torch.device("cpu"))
    state = bound.start([Prompt((), "")], 1)
    assert [read(bound, state, [[t]]).item() for t in (0, 0, 1, 0, 2)] == [0, 0, 3, 0, 3]
    assert asked == ["aa\n", "aa\nba\n"]
    assert bound.finish(state, torch.tensor([0]), ["aa\nba\n"], [END]).item() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": math.nan}, "beta=nan"),
        ({"beta": math.inf}, "beta=inf"),
        ({"beta": 0}, "beta=0"),
        ({"at": "lines"}, r"re\.compile\('lines'\)"),
        ({"at": None}, "at=None"),
        ({"early": 0.5}, "early has no effect"),
        ({"at": "block", "early": "0.5"}, "early='0.5'"),
        ({"at": "block", "early": True}, "early=True"),
        ({"at": "block", "early": 0.0}, "early=0.0"),
        ({"timeout": -1}, "timeout=-1"),
    ],
)
def test_bad_declarations(options, message):
    with pytest.raises(sg.UsageError, match=message):
        reward(likes_b, **options)


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lambda texts: [0.0], "returned 1 values: return one value per text"),
        (lambda texts: [math.nan] * len(texts), "on the text '.*' returned NaN"),
        (lambda texts: [-math.inf] * len(texts), "gave -inf to the text '.*': a reward is a finite number"),
        (lambda texts: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_bad_functions(judge, message):
    with pytest.raises(sg.PotentialError, match=message):
        sg.sample(LM * reward(judge), "ca", max_tokens=3)


# --- models of the transformers library ---------------------------------------------------------------------------

TOKENIZER = byte_level()


def tiny(family="LlamaForSequenceClassification", **changes):
    return reward_model(family, vocab_size=changes.pop("vocab_size", len(TOKENIZER)), **changes)


def loaded(*arguments, **options):
    model = RewardModel(*arguments, **options)
    model.load(torch.device("cpu"))
    return model


TEXTS = ["", "a", "the answer is 42", "b\nc", "ab ab ab ab", "é", "</s>", "a line\nand another\n"]
CHAT, PLAIN = Prompt((1,), "?", MESSAGES), Prompt((1,), "ca")


def alone(model, text, template=True):
    """The score that transformers gives to one text, alone and without padding."""
    if template:
        conversation = [*MESSAGES, {"role": "assistant", "content": text}]
        ids = TOKENIZER.encode(TOKENIZER.apply_chat_template(conversation, tokenize=False), add_special_tokens=False)
    else:
        ids = TOKENIZER.encode(text)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize("pad", [None, 7, TOKENIZER.eos_token_id])
def test_scores_do_not_depend_on_batch_padding_or_order(pad):
    model = tiny(pad_token_id=pad)
    scorer = loaded(model, TOKENIZER, rows=3)
    expected = [alone(model, text).item() for text in TEXTS]
    assert np.std(expected) > 0.1
    for order in (range(len(TEXTS)), reversed(range(len(TEXTS)))):
        order = list(order)
        found = scorer([CHAT] * len(order), [TEXTS[i] for i in order])
        np.testing.assert_allclose(found, [expected[i] for i in order], atol=1e-5)
    assert model.config.pad_token_id == pad


def test_an_encoder_with_labels():
    model = tiny("BertForSequenceClassification", pad_token_id=0, num_labels=2, id2label={0: "bad", 1: "good"})
    expected = [alone(model, text, template=False).log_softmax(-1)[1].item() for text in TEXTS]
    found = loaded(model, TOKENIZER, label="good", chat=False)([PLAIN] * len(TEXTS), TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with pytest.raises(sg.ModelError, match=r"several labels.*name one of"):
        loaded(model, TOKENIZER)


def test_steps_are_judged_where_they_end():
    model = tiny("LlamaForTokenClassification", num_labels=2)
    text = "one\ntwo\n\nthree"
    ids = TOKENIZER.encode(TOKENIZER.apply_chat_template(list(MESSAGES), tokenize=False, add_generation_prompt=True))[1:]
    scores = []
    for step in ("one", "two", "three"):
        ids = ids + TOKENIZER.encode(step, add_special_tokens=False) + TOKENIZER.encode(" .", add_special_tokens=False)
        with torch.inference_mode():
            scores.append(model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)[1].item())
    for combine, value in (("sum", sum(scores)), ("min", min(scores)), ("last", scores[-1])):
        scorer = loaded(model, TOKENIZER, separator=" .", combine=combine)
        assert scorer.steps(text) == ["one", "two", "three"]
        found = scorer([CHAT, CHAT, CHAT], ["x", text, "a\n" * 9])[1]
        assert found == pytest.approx(value, abs=1e-5)
    assert scorer.steps("") == [""]


def test_a_language_model_that_judges_by_a_token():
    model = tiny("LlamaForCausalLM")
    scorer = loaded(model, TOKENIZER, tokens=("+", "-"), separator="!", chat=False)
    found = scorer([PLAIN, PLAIN], ["x", "one\ntwo"])[1]
    plus, minus = (TOKENIZER.encode(t, add_special_tokens=False)[0] for t in "+-")
    total = 0.0
    for whole in ("caone!", "caone!two!"):
        with torch.inference_mode():
            logits = model(torch.tensor([TOKENIZER.encode(whole)])).logits[0, -1].double()
        total += (logits[plus] - torch.logsumexp(logits[[plus, minus]], 0)).item()
    assert found == pytest.approx(total, abs=1e-5)


def test_evidence_with_a_reward_model():
    model = tiny()
    truth = enumerate_target([(BASE, 1.0, (2, 0))], phi=lambda text: math.exp(0.5 * alone(model, text).item()))
    target = LM * reward(RewardModel(model, TOKENIZER), 0.5, at="block")
    posts = many(target, **OPTIONS)
    assert abs(evidence_z(posts, truth)) < 4
    weights = measure(posts, list(truth.gamma)).mean(0)
    assert 0.5 * np.abs(weights / weights.sum() - np.array(list(truth.gamma.values())) / truth.z).sum() < 0.03


def test_each_group_is_judged_after_its_own_prompt():
    scorer = loaded(tiny(), TOKENIZER)
    bound = bind(reward(scorer, at="block"))
    prompts = [CHAT, Prompt((2,), "!", ({"role": "user", "content": "another"},))]
    state = bound.start(prompts, 2)
    expected = [scorer([prompt], ["a"])[0] for prompt in prompts]
    assert abs(expected[0] - expected[1]) > 1e-3
    np.testing.assert_allclose(read(bound, state, [[0]] * 4), np.repeat(expected, 2), atol=1e-5)
    bound.restart(state, [0], prompts[1:])
    assert bound.finish(state, torch.tensor([0, 2]), ["a", "a"], [END, END]).tolist() == pytest.approx(
        [expected[1], 0], abs=1e-5
    )


def test_models_from_a_folder(tmp_path):
    tiny().save_pretrained(tmp_path / "judge")
    TOKENIZER.save_pretrained(tmp_path / "judge")
    named, in_memory = (
        sg.sample(LM * reward(model, 0.5), "ca", max_tokens=3, seed=1)
        for model in (str(tmp_path / "judge"), RewardModel(tiny(), TOKENIZER))
    )
    assert named.log_evidence == pytest.approx(in_memory.log_evidence, abs=1e-5)


def test_models_that_cannot_judge(tmp_path):
    tiny("LlamaForCausalLM").save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    with pytest.raises(sg.ModelError, match="no head that judges"):
        loaded(str(tmp_path / "base"))
    config = tiny().config
    config.architectures = ["LlamaForSequenceClassification"]
    config.save_pretrained(tmp_path / "base")  # says that there is a head where the weights have none
    with pytest.raises(sg.ModelError, match="lacks weights"):
        loaded(str(tmp_path / "base"))
    with pytest.raises(sg.ModelError, match="cannot be read"):
        loaded(str(tmp_path / "nothing"))
    with pytest.raises(sg.UsageError, match="dtype float33 is not supported"):
        loaded(str(tmp_path / "base"), dtype="float33")
    with pytest.raises(sg.UsageError, match="there is no device 'gpu'"):
        loaded(str(tmp_path / "base"), device="gpu")
    with pytest.raises(sg.UsageError, match="rows >= 1"):
        loaded(tiny(), TOKENIZER, rows="3")
    with pytest.raises(sg.UsageError, match="no regular expression"):
        loaded(tiny(), TOKENIZER, step="(")
    with pytest.raises(sg.ModelError, match="no chat template"):
        loaded(tiny(), byte_level(template=None), chat=True)
    with pytest.raises(sg.ModelError, match=r"writes '<\|im_start\|>', which is no token"):
        loaded(tiny(), byte_level(template="{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"))
    with pytest.raises(sg.ModelError, match="the tokenizer belongs to another model"):
        loaded(tiny(vocab_size=100), TOKENIZER)
    with pytest.raises(sg.ModelError, match="no single token"):
        loaded(tiny("LlamaForCausalLM"), TOKENIZER, tokens=("good", "bad"))
    with pytest.raises(sg.ModelError, match="has a head of its own"):
        loaded(tiny(), TOKENIZER, tokens=("+", "-"))
    with pytest.raises(sg.ModelError, match="the prompt is a chat"):
        loaded(tiny("LlamaForCausalLM"), byte_level(template=None), tokens=("+", "-"))([CHAT], ["x"])
    with pytest.raises(sg.PotentialError, match="reads at most 64 tokens"):
        loaded(tiny(), TOKENIZER)([CHAT], ["x" * 100])
    broken = tiny()
    broken.score.weight.data.fill_(math.nan)
    with pytest.raises(sg.PotentialError, match="gave nan to the text"):
        sg.sample(LM * reward(RewardModel(broken, TOKENIZER)), "ca", max_tokens=3)
