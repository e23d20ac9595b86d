"""The tree of histories against lists of tokens."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from smcgen.potentials import history as module
from smcgen.potentials.history import History

TOKENS = [b"a", b"b", b"\xc3", b"\xa9", b""]
ROWS = 4


def rows(strategy):
    return st.lists(strategy, min_size=ROWS, max_size=ROWS)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), rows(st.integers(0, len(TOKENS) - 1))),
        st.tuples(st.just("fork"), rows(st.integers(0, ROWS - 1))),
        st.tuples(st.just("back"), rows(st.integers(0, 3))),
        st.tuples(st.just("compact"), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_tree_equals_lists_of_tokens(steps):
    old, module.SLACK = module.SLACK, 0
    try:
        tree = History(TOKENS, {"mark": (np.int64, -7)})
        nodes = np.zeros(ROWS, np.int64)
        lists = [[] for _ in range(ROWS)]
        for verb, given_rows in steps:
            if verb == "read":
                nodes, fresh = tree.children(nodes, np.array(given_rows))
                assert (tree["mark"][fresh] == -7).all()
                tree["mark"][fresh] = [sum(tree.path(0, node)) for node in fresh.tolist()]
                lists = [[*tokens, token] for tokens, token in zip(lists, given_rows, strict=True)]
            elif verb == "fork":
                nodes, lists = nodes[given_rows], [list(lists[a]) for a in given_rows]
            elif verb == "back":
                counts = [min(n, len(tokens)) for n, tokens in zip(given_rows, lists, strict=True)]
                nodes = tree.ancestors(nodes, np.array(counts))
                lists = [tokens[: len(tokens) - n] for n, tokens in zip(counts, lists, strict=True)]
            elif (ids := tree.compact(nodes)) is not None:
                nodes = ids[nodes]
                assert tree.size <= 1 + sum(map(len, lists))
            for node, tokens in zip(nodes.tolist(), lists, strict=True):
                assert tree.path(0, node) == tokens
                assert tree.depth[node] == len(tokens)
                assert tree.text(node) == b"".join(TOKENS[t] for t in tokens)
                assert node == 0 or tree["mark"][node] == sum(tokens)
            paths = {tuple(tokens): node for node, tokens in zip(nodes.tolist(), lists, strict=True)}
            assert len(set(nodes.tolist())) == len(paths)
    finally:
        module.SLACK = old


def test_memory_follows_the_living_rows():
    tree = History([bytes([i]) for i in range(200)])
    random = np.random.default_rng(0)
    nodes = np.zeros(64, np.int64)
    for _ in range(500):
        nodes, _ = tree.children(nodes, random.integers(0, 200, 64))
        nodes = nodes[random.integers(0, 8, 64)]
        if (ids := tree.compact(nodes)) is not None:
            nodes = ids[nodes]
    assert tree.size < 2 * module.SLACK + 2 * 500 + 64 * 50
    assert tree.depth[nodes].tolist() == [500] * 64
