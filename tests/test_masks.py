"""Masks are what a matcher of their own would give, whoever computes them: this thread, the pool, or what was known before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import smcgen as sg
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials import engine
from smcgen.potentials.base import Prompt
from smcgen.potentials.constraint import Constraint, Rows

PIECES = ["a", "b", "ab", '"', '"a', '",', "1", "12", ",", ", ", "[", "[[", "]", "],", "]]", " ", "true", "{", "}", ":", '":']
END = len(PIECES)
WORDS = Vocabulary("masks", [*map(str.encode, PIECES), b"<end>"], special=(END,), end_ids=(END,))
GRAMMAR = r"""
start: value
value: "1" | "true" | list | /"[ab, ]*"/ | "{" pair "}"
list: "[" [value ("," value)*] "]"
pair: /"[ab]+"/ ":" value
%ignore " "
"""
CPU = torch.device("cpu")


def alone(bound: Constraint, tokens: list[int]) -> np.ndarray:
    """The mask after `tokens`, by a matcher that has read nothing else: int32 [words]."""
    matcher, row = bound.engine.matcher(), np.zeros((1, bound.engine.width), np.int32)
    if tokens:
        assert matcher.try_consume_tokens(tokens) == len(tokens)
    bound.engine.fill([matcher], row, [0])
    return row[0, : (len(WORDS) + 31) // 32]


def walk(bound: Constraint, rows: int, rounds: int, seed: int) -> int:
    """Random texts under their masks, resampled and shortened now and then; the masks on the way are compared. Their number."""
    generator = np.random.default_rng(seed)
    state: Rows = bound.start([Prompt((), "")], rows)
    texts: list[list[int]] = [[] for _ in range(rows)]
    out = torch.zeros(rows, (len(WORDS) + 31) // 32, dtype=torch.int32)
    compared = 0
    for _ in range(rounds):
        for _ in range(4):
            active = generator.random(rows) < 0.9
            out.fill_(7)
            bound.mask(state, out, torch.from_numpy(active))
            counts, tokens = np.zeros(rows, np.int64), np.zeros((rows, 1), np.int64)
            for r in range(rows):
                if not active[r]:
                    assert (out[r] == 7).all()
                    continue
                assert np.array_equal(out[r].numpy(), alone(bound, texts[r]))
                compared += 1
                bits = np.unpackbits(out[r].numpy().view(np.uint8), bitorder="little")
                allowed = [t for t in np.flatnonzero(bits).tolist() if t != END]
                if allowed:
                    counts[r], tokens[r, 0] = 1, generator.choice(allowed)
                    texts[r].append(int(tokens[r, 0]))
            assert not bound.extend(state, torch.from_numpy(tokens), torch.from_numpy(counts)).any()
        back = np.array([generator.integers(min(3, len(text) + 1)) for text in texts])
        bound.rollback(state, torch.from_numpy(back))
        texts = [text[: len(text) - n] for text, n in zip(texts, back, strict=True)]
        ancestors = generator.integers(rows, size=rows)
        bound.fork(state, torch.from_numpy(ancestors))
        texts = [texts[a].copy() for a in ancestors]
    return compared


@pytest.mark.parametrize("serial", [-1.0, 0.0, float("inf")])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_masks_are_those_of_a_matcher_alone(monkeypatch, serial, rows):
    """`serial`: the pool gets all masks but the first, or none."""
    monkeypatch.setattr(engine, "SERIAL", serial)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    bound = sg.lark(GRAMMAR).bind(WORDS, (), CPU)
    assert isinstance(bound, Constraint)
    assert walk(bound, rows, 6, seed=rows) > 10 * rows


def test_the_pool_is_woken_for_slow_masks_only(monkeypatch):
    calls = []

    class Pool:
        def unsafe_compute_mask_ptr(self, pairs, begin, stride, size):
            calls.append(len(pairs))
            for matcher, row in pairs:
                matcher.unsafe_compute_mask_ptr(begin + row * stride, stride)

    monkeypatch.setattr(engine, "_executor", lambda threads: Pool())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    bound = sg.lark(GRAMMAR).bind(WORDS, (), CPU).engine
    out = np.zeros((9, bound.width), np.int32)
    for serial, expected in ((60.0, []), (-1.0, [8])):
        monkeypatch.setattr(engine, "SERIAL", serial)
        bound.fill([bound.matcher() for _ in range(9)], out, range(9))
        assert calls == expected
        assert (out == out[0]).all()
        assert out.any()
