"""What is unread, in one launch: against the steps that it stands for, and against lists."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from smcgen.kernels import unread as reference
from smcgen.kernels.gpu import unread as gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("copies", "groups", "particles"), [(1, 1, 1), (1, 2, 5), (3, 2, 4)])
@pytest.mark.parametrize(("width", "fresh"), [(1, 4), (1, 1), (1, 0), (1, None), (2, None), (5, None)])
def test_against_lists(copies, groups, particles, width, fresh):
    random = torch.Generator().manual_seed(width)
    shape, room = (groups, particles), 7

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=random)

    tokens, length = draw(0, 99, *shape, room), draw(0, room + 1, *shape)
    length[0, 0] = 0
    alive = torch.rand(shape, generator=random) < 0.7
    prompt_length, prompt_last = draw(width, width + 4, copies, groups, 1), draw(100, 199, copies, groups, 1)
    behind = draw(1, width + 1, copies, *shape)
    behind = torch.minimum(behind, length + 1)  # of the prompt its last token at most
    new = None if fresh is None else (draw(200, 299, *shape, fresh + 1)[..., :fresh], draw(0, fresh + 1, *shape))
    given = tokens, length, alive, prompt_length + length - behind, prompt_length, prompt_last
    found, counts = reference.unread(*given, width=width, new=new)
    there = [x.to(DEVICE) for x in given]
    got = gpu.unread(*there, width=width, new=None if new is None else (new[0].to(DEVICE), new[1].to(DEVICE)))
    assert got[0].dtype == got[1].dtype == torch.int64
    assert torch.equal(got[1].cpu(), counts)
    for c in range(copies):
        for g in range(groups):
            for n in range(particles):
                text = [int(prompt_last[c, g]), *tokens[g, n, : length[g, n]].tolist()]
                want = text[len(text) - int(behind[c, g, n]) :]
                if new is not None:
                    want += new[0][g, n, : new[1][g, n]].tolist()
                assert found[c, g, n, : len(want)].tolist() == got[0][c, g, n, : len(want)].tolist() == want
                assert counts[c, g, n] == (len(want) if alive[g, n] else 0)
    assert ((got[0] >= 0) & (got[0] < 300)).all()  # padding is some token too
