"""Stop strings, end tokens and budgets against a definition by search in the text."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from smcgen.potentials.base import ALIVE, BUDGET, END, STOP
from smcgen.smc.ending import Ending, cut_at_stop, stop_table

TOKENS = [b"a", b"b", b"ab", b"ba", b"aab", b"", "é".encode(), "é".encode()[:1], "é".encode()[1:]]
letters = st.text("abé", min_size=1, max_size=4)


@given(st.lists(letters, min_size=1, max_size=3), st.lists(st.integers(0, len(TOKENS) - 1), max_size=8))
def test_the_automaton_finds_the_first_stop(stops, ids):
    table = torch.from_numpy(stop_table(TOKENS, stops))
    end = torch.zeros(len(TOKENS), dtype=torch.bool)
    end[5] = True
    ending = Ending(end, table, max_tokens=7)
    text, state = b"", torch.zeros((), dtype=torch.int64)
    for n, token in enumerate(ids, 1):
        terminating = ending.terminating(state)
        text += TOKENS[token]
        complete = any(stop.encode() in text for stop in stops)
        assert bool(terminating[token]) == (complete or token == 5)
        reason, state = ending.advance(torch.tensor(token), state, torch.tensor(n))
        want = END if token == 5 else STOP if complete else BUDGET if n >= 7 else ALIVE
        assert int(reason) == want
        if want != ALIVE:
            break


@given(letters, st.lists(letters, min_size=1, max_size=3))
def test_the_cut_leaves_no_stop(text, stops):
    cut = cut_at_stop(text.encode(), stops).decode()
    if not any(s in text for s in stops):
        assert cut == text
        return
    assert text.startswith(cut)
    assert not any(s in cut for s in stops)
    first_end = min(text.find(s) + len(s) for s in stops if s in text)
    longest = max(len(s) for s in stops if text[:first_end].endswith(s))
    assert cut == text[: first_end - longest]


def test_a_stop_across_tokens_and_inside_one():
    table = torch.from_numpy(stop_table(TOKENS, ["bab"]))
    ending = Ending(torch.zeros(len(TOKENS), dtype=torch.bool), table, max_tokens=9)
    state = torch.zeros((), dtype=torch.int64)
    reasons = []
    for n, token in enumerate([0, 1, 4], 1):  # a, b, aab: "baab" holds no "bab"
        reason, state = ending.advance(torch.tensor(token), state, torch.tensor(n))
        reasons.append(int(reason))
    reason, _ = ending.advance(torch.tensor(2), state, torch.tensor(4))  # ab completes it
    assert [*reasons, int(reason)] == [ALIVE, ALIVE, ALIVE, STOP]
    assert cut_at_stop(b"abaabab", ["bab"]) == b"abaa"
