"""The bookkeeping of drawn tokens in one launch: `smcgen.proposals.base.Drawing.append` and `append_all` have the meaning."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def _append(
    Tokens,
    LogQs,
    Counts,
    Reason,
    State,
    History,
    Cause,
    Weight,
    First,
    Token,
    LogQ,
    Active,
    Offered,
    Limit,
    Blame,
    End,
    Next,
    NewCounts,
    NewReason,
    NewState,
    NewHistory,
    NewCause,
    NewWeight,
    Taken,
    Going,
    One,
    rows,
    columns,
    states,
    vocabulary,
    max_tokens,
    factor,
    STEPS: tl.constexpr,
    STOPS: tl.constexpr,
    BLAMED: tl.constexpr,
    LIMITED: tl.constexpr,
    ALIVE: tl.constexpr,
    ENDED: tl.constexpr,
    STOPPED: tl.constexpr,
    BUDGET: tl.constexpr,
    DEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < rows
    active = i < 0
    if STEPS == 1:
        active = tl.load(Active + i, mask=here, other=0) != 0
    counts = tl.load(Counts + i, mask=here, other=0)
    reason = tl.load(Reason + i, mask=here, other=0)
    state = tl.load(State + i, mask=here, other=0)
    history = tl.load(History + i, mask=here, other=0)
    first = tl.load(First + i, mask=here, other=0)
    line = i.to(tl.int64) * columns
    gone = i < 0  # died here
    for t in range(STEPS):
        token = tl.load(Token + i * STEPS + t, mask=here, other=0)
        log_q = tl.load(LogQ + i * STEPS + t, mask=here, other=0.0)
        if STEPS > 1:
            active = (reason == ALIVE) & (t < tl.load(Offered + i, mask=here, other=0))
        taken = active & (log_q != float("-inf"))
        died = active & (log_q == float("-inf"))
        tl.store(Tokens + line + counts, token, mask=here & taken)
        tl.store(LogQs + line + counts, log_q, mask=here & taken)
        counts += taken.to(tl.int64)
        after = tl.where(first + counts >= max_tokens, BUDGET, ALIVE)
        if STOPS:
            place = tl.minimum(state, states - 1).to(tl.int64) * vocabulary + token
            moved = tl.load(Next + place, mask=here & taken, other=0).to(tl.int64)
            after = tl.where(moved == states, STOPPED, after)
            state = tl.where(taken, moved, state)
        ends = tl.load(End + token, mask=here & taken, other=0) != 0
        after = tl.where(ends, ENDED, after).to(tl.int64)
        reason = tl.where(taken, after, tl.where(died, DEAD, reason))
        history = tl.where(taken, (history + token + 1) * factor, history)
        gone = gone | died
        if STEPS == 1:
            tl.store(Taken + i, taken, mask=here)
    cause = tl.load(Cause + i, mask=here, other=0)
    blame = cause * 0 - 1
    if BLAMED:
        blame = tl.load(Blame + i, mask=here, other=0)
    going = reason == ALIVE
    if LIMITED:
        going = going & (counts < tl.load(Limit + i, mask=here, other=0))
    tl.store(Going + i, going, mask=here)
    tl.store(One + i, going.to(tl.int64), mask=here)
    weight = tl.load(Weight + i, mask=here, other=0.0)
    tl.store(NewCounts + i, counts, mask=here)
    tl.store(NewReason + i, reason, mask=here)
    tl.store(NewState + i, state, mask=here)
    tl.store(NewHistory + i, history, mask=here)
    tl.store(NewCause + i, tl.where(gone, blame, cause), mask=here)
    tl.store(NewWeight + i, tl.where(gone, float("-inf"), weight), mask=here)


def append(
    tokens: torch.Tensor,
    token_log_q: torch.Tensor,
    state: tuple[torch.Tensor, ...],
    first: torch.Tensor,
    token: torch.Tensor,
    log_q: torch.Tensor,
    active: torch.Tensor | None,
    blame: torch.Tensor | None,
    end: torch.Tensor,
    next_state: torch.Tensor | None,
    max_tokens: int,
    factor: int,
    reasons: tuple[int, int, int, int, int],
    offered: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Puts `token` and `log_q` [G, N] where they belong in `tokens` and `token_log_q` [G, N, columns].

    Args:
        state: counts, reason, stop state, history, cause, log weight [G, N] before.
        first: int64 [G, N], lengths before the block.
        active, log_q: as in `Drawing.append`.  blame: its `cause`, None for -1.
        offered: int64 [G, N]; then `token` and `log_q` are [G, N, T], of which as many are offered, where ALIVE: until one ends
            the sample. `active` is not read.
        limit: of `Drawing`.
        end, next_state, max_tokens: of `smcgen.smc.ending.Ending`.
        factor: of the hash of histories.
        reasons: the numbers of ALIVE, END, STOP, BUDGET and DEAD.

    Returns:
        The state afterwards; where a token was taken, bool [G, N] (not told with `offered`); and what `Drawing.going` says.
    """
    state = tuple(x.contiguous() for x in state)
    new = tuple(torch.empty_like(x) for x in state)
    taken, going = (torch.empty_like(state[0], dtype=torch.bool) for _ in range(2))
    one = torch.empty_like(state[0])
    steps = 1 if offered is None else token.shape[-1]
    anything = first  # for a pointer that is not read
    which = active if offered is None else anything, anything if offered is None else offered
    given = (first, token, log_q, *which, anything if limit is None else limit, anything if blame is None else blame)
    rows = taken.numel()
    _append[(triton.cdiv(rows, BLOCK),)](
        tokens,
        token_log_q,
        *state,
        *(x.contiguous() for x in given),
        end,
        end if next_state is None else next_state,
        *new,
        taken,
        going,
        one,
        rows,
        tokens.shape[-1],
        0 if next_state is None else next_state.shape[0],
        0 if next_state is None else next_state.shape[1],
        max_tokens,
        factor,
        steps,
        next_state is not None,
        blame is not None,
        limit is not None,
        *reasons,
        BLOCK,
        num_warps=4,
    )
    return *new, taken, going, one
