"""Acceptance of drafted tokens in Triton; `smcgen.kernels.verify` has the mathematics and the torch reference.

One chain takes four launches: the masses of chunks of all rows; acceptance, one program per row, which needs no sum over the
vocabulary; the sums over the positions where a law or a residual needs them (one position per row if s = 1); and the token
that ends each block. With several chains every level of the recursion waits for the sum of the level before, so one program
walks along each row, and passes over the vocabulary at rejections only (if s = 1), of which a row has at most M. Block
verification takes the four launches of one chain; its sums come before the decision, which the last launch makes.

A mass is exp(k (x - m)) in float32 with m the largest logit of its chunk or row and k = exponent / temperature. Logs of single
tokens, joins of chunks and all that is decided are float64, so nothing underflows that could be drawn. What lies in memory
between the launches is a few numbers per chunk of 4,096 tokens.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.laws import (
    ALL,
    ALLOWED,
    ALLOWED_TOP,
    DRAFT,
    DRAFT_TOP,
    FIELDS,
    LOG_LAW,
    LOG_LEFT,
    LOG_P,
    LOG_Q,
    LOG_TARGET,
    LOG_Z,
    RESULTS,
    TINY,
    TOP,
    excess_laws,
    finite,
    join,
    log_add,
    log_excess,
    log_law,
    log_mass,
    masked,
    masses,
    rates,
    target_masses,
    wide,
)
from smcgen.kernels.gpu.walk import walk

CHUNK = 4096


@triton.jit
def _judge(
    Target, Draft, Bits, Exponent, Parts, Tokens, Counts, Uniform, Out, OutTokens, Accepted, Rejected, Chain,
    V, chunks, words, rows, temperature, draft_temperature, log_s, t0, t2, d0, d2,
    K: tl.constexpr, KP: tl.constexpr, P: tl.constexpr,
    MASK: tl.constexpr, POWER: tl.constexpr, COUNTS: tl.constexpr, LENIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chain: all positions of a row at once, for no decision needs a sum."""
    row = tl.program_id(0).to(tl.int64)
    k, c = tl.arange(0, KP), tl.arange(0, P)
    place = row * (K + 1) + k
    At = Parts + place[:, None] * FIELDS * chunks + c[None, :]
    drafted = k < K
    one, power, rate = rates(Exponent, row, temperature, POWER)
    draft_rate = 1.0 / wide(draft_temperature)
    high, log_allowed, log_z, log_left, top, log_all = target_masses(
        At, drafted[:, None] & (c < chunks)[None, :], chunks, rate, one, power, 1, MASK, POWER
    )
    draft_high, draft_total = join(At, drafted[:, None] & (c < chunks)[None, :], chunks, DRAFT_TOP, DRAFT, draft_rate, 1)
    token = tl.load(Tokens + row * K + k, mask=drafted, other=0)
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    x = tl.load(Target + row * t0 + k * t2 + token, mask=drafted, other=float("-inf")).to(tl.float32)
    y = tl.load(Draft + row * d0 + k * d2 + token, mask=drafted, other=float("-inf")).to(tl.float32)
    log_p = log_mass(x, top, log_all, one)
    z = masked(x, Bits + place * words, token, drafted, MASK)
    log_target = log_mass(z, high, log_allowed, rate)
    log_q = log_mass(y, draft_high, tl.log(draft_total), draft_rate)
    exists = drafted
    if COUNTS:
        exists = exists & (k < tl.load(Counts + row))
    judged = exists & (log_z != float("-inf"))
    if BLOCK:  # the sums decide: here only w_i, and every token as if it were taken
        log_w, last = tl.zeros([KP], tl.float64), one * 0.0
        ratio = tl.where(exists, log_target - log_q, 0.0)
        for i in range(0, K):
            last = tl.minimum(last + tl.sum(tl.where(k == i, ratio, 0.0), 0), 0.0)
            log_w = tl.where(k > i, last, log_w)
        tl.store(Out + LOG_Q * ((row * 0 + rows) * (K + 1)) + row * (K + 1) + k, log_w, mask=k <= K)
    uniform = tl.load(Uniform + row * K + k, mask=drafted, other=0.5)
    take = judged & (tl.log(uniform) + log_q < log_target + wide(log_s))
    accepted = tl.min(tl.where(take, KP, k), 0)
    if BLOCK:
        accepted = tl.sum(exists.to(tl.int32), 0)
    tl.store(Accepted + row, accepted.to(tl.int64))
    tl.store(Rejected + row, tl.sum(tl.where(judged & (k == accepted), 1, 0), 0) > 0)
    tl.store(Chain + row, accepted.to(tl.int64) * 0)
    kept = k < accepted
    Out += row * (K + 1) + k
    plane = (row * 0 + rows) * (K + 1)
    tl.store(OutTokens + row * (K + 1) + k, tl.where(kept, token, 0), mask=k <= K)
    tl.store(Out + LOG_TARGET * plane, tl.where(kept, log_target, 0.0), mask=k <= K)
    tl.store(Out + LOG_LAW * plane, tl.where(kept, log_target, 0.0), mask=k <= K)
    if LENIENT:  # the last launch makes the law of it
        tl.store(Out + LOG_Q * plane, tl.where(kept, log_q, 0.0), mask=k <= K)
    tl.store(Out + LOG_P * plane, tl.where(kept, log_p, 0.0), mask=k <= K)
    tl.store(Out + LOG_Z * plane, tl.where(kept, log_z, 0.0), mask=k <= K)
    tl.store(Out + LOG_LEFT * plane, tl.where(kept, log_left, 0.0), mask=k <= K)


@triton.jit
def _sums(
    Target, Draft, Bits, Exponent, Parts, Left, Out, Accepted, Rejected,
    V, chunks, words, rows, temperature, draft_temperature, s, t0, t2, d0, d2,
    K: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    MASK: tl.constexpr, POWER: tl.constexpr, LENIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chain, one program per (row and position, chunk): sum (p - q)+ and sum (q - s p)+, where they will be asked for; for
    block verification sum (w p - q)+."""
    chunk = tl.program_id(1)
    if BLOCK:
        row, t = tl.program_id(0).to(tl.int64) // K, tl.program_id(0) % K
        needed = t < tl.load(Accepted + row)  # the number of drafted tokens
    elif LENIENT:
        row, t = tl.program_id(0).to(tl.int64) // K, tl.program_id(0) % K
        needed = (t < tl.load(Accepted + row)) | ((t == tl.load(Accepted + row)) & (tl.load(Rejected + row) != 0))
    else:
        row = tl.program_id(0).to(tl.int64)
        t = tl.load(Accepted + row)
        needed = tl.load(Rejected + row) != 0
    if needed:
        place = row * (K + 1) + t
        c = tl.arange(0, P)
        At = Parts + place * FIELDS * chunks + c
        _, _, rate = rates(Exponent, row, temperature, POWER)
        draft_rate = 1.0 / wide(draft_temperature)
        if MASK or POWER:
            high, total = join(At, c < chunks, chunks, ALLOWED_TOP, ALLOWED, rate, 0)
        else:
            high, total = join(At, c < chunks, chunks, TOP, ALL, rate, 0)
        log_allowed = tl.log(total)
        draft_high, draft_total = join(At, c < chunks, chunks, DRAFT_TOP, DRAFT, draft_rate, 0)
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(Target + row * t0 + t * t2 + v, mask=v < V, other=float("-inf")).to(tl.float32)
        y = tl.load(Draft + row * d0 + t * d2 + v, mask=v < V, other=float("-inf")).to(tl.float32)
        x = masked(x, Bits + place * words, v, v < V, MASK)
        y = masked(y, Bits + place * words, v, v < V, MASK)
        p, excess, q = excess_laws(x, y, high, log_allowed, draft_high, tl.log(draft_total), rate, draft_rate, rate * 0.0 + 1.0)
        if BLOCK:
            w = tl.exp(tl.load(Out + LOG_Q * ((row * 0 + rows) * (K + 1)) + place))
            excess = tl.maximum(w.to(tl.float32) * p - q, 0.0)
        Left += tl.program_id(0).to(tl.int64) * 2 * chunks + chunk
        tl.store(Left, tl.sum(excess, 0))
        if LENIENT:
            tl.store(Left + chunks, tl.sum(tl.maximum(q - s * p, 0.0), 0))


@triton.jit
def _finish(
    Target, Draft, Bits, Exponent, Parts, Left, Levels, Uniform, Final, Out, OutTokens, Accepted, Rejected, Chain,
    V, chunks, words, rows, temperature, draft_temperature, log_s, t0, t1, t2, d0, d1, d2,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    MASK: tl.constexpr, POWER: tl.constexpr, LENIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token that ends each block, from the residual or the local target; with leniency and one chain the laws besides."""
    row = tl.program_id(0).to(tl.int64)
    c, k, j = tl.arange(0, P), tl.arange(0, KP), tl.arange(0, MP)
    inside = c < chunks
    accepted, chain = tl.load(Accepted + row), tl.load(Chain + row)
    rejected = tl.load(Rejected + row) != 0
    log_leniency = wide(log_s)
    Out += row * (K + 1)
    OutTokens += row * (K + 1)
    plane = (row * 0 + rows) * (K + 1)
    w = tl.cast(1.0, tl.float64)
    if BLOCK:  # so far `accepted` was the number of drafted tokens
        ok = (k < accepted)[:, None] & inside[None, :]
        at = Left + (row * K + k)[:, None] * 2 * chunks + c[None, :]
        rest = tl.sum(tl.load(at, mask=ok, other=0.0).to(tl.float64), 1)
        ws = tl.exp(tl.load(Out + LOG_Q * plane + k, mask=k <= K, other=0.0))
        chance = tl.where(k < accepted, rest / tl.maximum(rest + 1.0 - ws, TINY), ws)
        tries = (k > 0) & (k <= accepted)
        passed = tries & (tl.load(Uniform + row * K + k - 1, mask=tries, other=1.0) < chance)
        kept = tl.max(tl.where(passed, k, 0), 0).to(tl.int64)
        rejected = kept < accepted
        accepted = kept
        w = tl.sum(tl.where(k == kept, ws, 0.0), 0)
        tl.debug_barrier()  # all threads have read what is now overwritten
        tl.store(Accepted + row, accepted)
        tl.store(Rejected + row, rejected)

    one, power, rate = rates(Exponent, row, temperature, POWER)
    draft_rate = 1.0 / wide(draft_temperature)
    place = (row * M + chain) * (K + 1) + accepted
    At = Parts + place * FIELDS * chunks + c
    high, log_allowed, log_z, log_left, top, log_all = target_masses(At, inside, chunks, rate, one, power, 0, MASK, POWER)
    has_draft = c < tl.where(rejected, chunks, 0)
    draft_high, draft_total = join(At, has_draft, chunks, DRAFT_TOP, DRAFT, draft_rate, 0)
    log_draft = tl.log(tl.where(rejected, draft_total, 1.0))

    # The levels at the rejection; without one, what makes the residual the local target.
    cost, mass, reach = rate * 0.0, rate * 0.0 + 1.0, rate * 0.0
    if M == 1:
        slot = row
        if LENIENT or BLOCK:
            slot = row * K + tl.minimum(accepted, K - 1)
        if LENIENT:
            at = Left + (row * K + k)[:, None] * 2 * chunks + c[None, :]
            ok = ((k < accepted) & (k < K))[:, None] & inside[None, :]
            n = tl.sum(tl.load(at, mask=ok, other=0.0).to(tl.float64), 1)
            b = tl.sum(tl.load(at + chunks, mask=ok, other=0.0).to(tl.float64), 1)
            log_p = tl.load(Out + LOG_TARGET * plane + k, mask=k < accepted, other=0.0)
            log_q = tl.load(Out + LOG_Q * plane + k, mask=k < accepted, other=0.0)
            log_r = log_excess(log_p, log_q, tl.where(n > TINY, 1.0, 0.0)) - tl.log(tl.where(n > TINY, n, 1.0))
            law = log_add(tl.minimum(log_q, log_p + log_leniency), tl.log(b) + log_r)
            tl.store(Out + LOG_LAW * plane + k, law, mask=k < accepted)
            reach = tl.sum(tl.load(Left + slot * 2 * chunks + chunks + c, mask=has_draft, other=0.0).to(tl.float64), 0)
        Residual = Left + slot * 2 * chunks + c
        left = tl.sum(tl.load(Residual, mask=has_draft, other=0.0).to(tl.float64), 0)
        cost = tl.where(left > TINY, cost + 1.0 / w, cost)
        mass = tl.where(left > TINY, left, mass)
        costs, weights = tl.where(j == 1, cost, 0.0), tl.where(j == 1, mass, 1.0)
        reaches = tl.where(j == 1, reach, 1.0)
    else:
        Residual = Left + row * 2 * chunks + c
        Level = Levels + row * 3 * MP + j
        ok = j < tl.where(rejected, M + 1, 0)
        costs = tl.load(Level, mask=ok, other=0.0)
        weights = tl.load(Level + MP, mask=ok, other=1.0)
        reaches = tl.load(Level + 2 * MP, mask=ok, other=0.0)
        cost = tl.sum(tl.where(j == M, costs, 0.0), 0)

    # First the chunk where the uniform falls, then the token in it.
    if MASK or POWER:
        tops = tl.load(At + ALLOWED_TOP * chunks, mask=inside, other=float("-inf")).to(tl.float64)
        sums = tl.load(At + ALLOWED * chunks, mask=inside, other=0.0).to(tl.float64)
    else:
        tops = tl.load(At + TOP * chunks, mask=inside, other=float("-inf")).to(tl.float64)
        sums = tl.load(At + ALL * chunks, mask=inside, other=0.0).to(tl.float64)
    part = sums * tl.exp((tops - finite(high)) * rate - finite(log_allowed))
    residual = tl.load(Residual, mask=has_draft, other=0.0).to(tl.float64)
    part = tl.where(cost > 0, residual, part)
    goal = tl.load(Final + row) * tl.sum(part, 0)
    chunk = tl.min(tl.where((tl.cumsum(part, 0) > goal) & (part > 0), c, P), 0)
    chunk = tl.where(chunk == P, tl.max(tl.where(part > 0, c, 0), 0), chunk)
    rest = goal - tl.sum(tl.where(c < chunk, part, 0.0), 0)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    X = Target + row * t0 + chain * t1 + accepted * t2
    Y = Draft + row * d0 + chain * d1 + accepted * d2
    x = tl.load(X + v, mask=v < V, other=float("-inf")).to(tl.float32)
    y = tl.load(Y + v, mask=v < tl.where(rejected, V, 0), other=float("-inf")).to(tl.float32)
    x = masked(x, Bits + place * words, v, v < V, MASK)
    y = masked(y, Bits + place * words, v, v < V, MASK)
    _, excess, _ = excess_laws(x, y, high, finite(log_allowed), draft_high, log_draft, rate, draft_rate, cost)
    excess = tl.where(cost > 0, w, 1.0) * excess.to(tl.float64)
    token = tl.min(tl.where((tl.cumsum(excess, 0) > rest) & (excess > 0), v, V), 0)
    token = tl.where(token == V, tl.max(tl.where(excess > 0, v, 0), 0), token)

    x = tl.load(X + token).to(tl.float32)
    log_p = log_mass(x, top, log_all, one)
    some = tl.sum(part, 0) != 0
    if MASK:
        word = tl.load(Bits + place * words + token // 32)
        x = tl.where((word >> (token % 32)) & 1 != 0, x, float("-inf"))
    log_target = tl.where(some, log_mass(x, high, log_allowed, rate), float("-inf"))
    law = log_target
    if LENIENT:
        y = tl.load(Y + token, mask=rejected, other=float("-inf")).to(tl.float32)
        log_q = log_mass(y, draft_high, log_draft, draft_rate)
        lenient = log_law(log_target, log_q, costs, weights, reaches, log_leniency, j, M)
        law = tl.where(rejected & some, lenient, law)
    tl.store(OutTokens + accepted, tl.where(some, token, 0).to(tl.int64))
    tl.store(Out + LOG_TARGET * plane + accepted, log_target)
    tl.store(Out + LOG_LAW * plane + accepted, law)
    tl.store(Out + LOG_P * plane + accepted, tl.where(some, log_p, float("-inf")))
    tl.store(Out + LOG_Z * plane + accepted, log_z)
    tl.store(Out + LOG_LEFT * plane + accepted, log_left)
    if BLOCK or M > 1:  # otherwise the positions beyond are blank already
        beyond = (k > accepted) & (k <= K)
        tl.store(OutTokens + k, tl.zeros([KP], tl.int64), mask=beyond)
        for field in tl.static_range(5):
            tl.store(Out + field * plane + k, tl.zeros([KP], tl.float64), mask=beyond)


def verify(
    target: torch.Tensor,
    draft: torch.Tensor,
    tokens: torch.Tensor,
    uniform: torch.Tensor,
    final: torch.Tensor,
    temperature: float,
    draft_temperature: float,
    exponent: torch.Tensor | None,
    leniency: float,
    counts: torch.Tensor | None,
    allowed: torch.Tensor | None,
    block: bool = False,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, ...]:
    """`smcgen.kernels.verify.verify`: the fields of its verdict in order. `chunk`: tokens a program reads at a time."""
    rows, chains, positions, size = target.shape
    drafted = positions - 1
    device = target.device
    if target.stride(-1) != 1 or draft.stride(-1) != 1:
        raise ValueError("the logits of one position must lie side by side")
    chunk = min(chunk, triton.next_power_of_2(size))
    chunks = triton.cdiv(size, chunk)
    padded, levels, places = (triton.next_power_of_2(n) for n in (chunks, chains + 1, positions))
    lenient = leniency > 1
    slots = drafted if (lenient or block) and chains == 1 else 1
    parts = torch.empty(rows * chains * positions * FIELDS.value * chunks, dtype=torch.float32, device=device)
    left = torch.empty(rows * slots * 2 * chunks, dtype=torch.float32, device=device)
    level = torch.empty(rows * 3 * levels if chains > 1 else 1, dtype=torch.float64, device=device)
    out = torch.empty(RESULTS, rows, positions, dtype=torch.float64, device=device)
    committed = torch.empty(rows, positions, dtype=torch.int64, device=device)
    accepted, chain = torch.empty(2, rows, dtype=torch.int64, device=device)
    rejected = torch.empty(rows, dtype=torch.bool, device=device)

    tokens, uniform, final = tokens.contiguous(), uniform.contiguous(), final.contiguous()
    counts = None if counts is None else counts.contiguous()
    allowed = None if allowed is None else allowed.contiguous()
    exponent = None if exponent is None else exponent.contiguous()
    words = 0 if allowed is None else allowed.shape[-1]
    mask, power = allowed is not None, exponent is not None
    bits = out if allowed is None else allowed  # a pointer is wanted even where nothing is read
    exponents = out if exponent is None else exponent
    count = tokens if counts is None else counts
    heat = (float(temperature), float(draft_temperature))
    log_s = math.log(leniency)
    t0, t1, t2, _ = target.stride()
    d0, d1, d2, _ = draft.stride()
    flags = {"MASK": mask, "POWER": power}
    result = (out, committed, accepted, rejected, chain)

    masses[(rows * chains * positions, chunks)](
        target, draft, bits, exponents, parts, size, chunks, words, *heat, t0, t1, t2, d0, d1, d2,
        M=chains, K=drafted, CHUNK=chunk, **flags, num_warps=8,
    )  # fmt: skip
    if chains == 1:
        _judge[(rows,)](
            target, draft, bits, exponents, parts, tokens, count, uniform, *result,
            size, chunks, words, rows, *heat, log_s, t0, t2, d0, d2,
            K=drafted, KP=places, P=padded, **flags, COUNTS=counts is not None, LENIENT=lenient, BLOCK=block, num_warps=4,
        )  # fmt: skip
        _sums[(rows * slots, chunks)](
            target, draft, bits, exponents, parts, left, out, accepted, rejected,
            size, chunks, words, rows, *heat, float(leniency), t0, t2, d0, d2,
            K=drafted, P=padded, CHUNK=chunk, **flags, LENIENT=lenient, BLOCK=block, num_warps=8,
        )  # fmt: skip
    else:
        walk[(rows,)](
            target, draft, bits, exponents, parts, left, level, tokens, count, uniform, *result,
            size, chunks, words, rows, *heat, float(leniency), log_s, t0, t1, t2, d0, d1, d2,
            M=chains, MP=levels, K=drafted, P=padded, CHUNK=chunk, SUB=min(padded, max(1, 8192 // chunk)),
            **flags, COUNTS=counts is not None, LENIENT=lenient, num_warps=16,
        )  # fmt: skip
    _finish[(rows,)](
        target, draft, bits, exponents, parts, left, level, uniform, final, *result,
        size, chunks, words, rows, *heat, log_s, t0, t1, t2, d0, d1, d2,
        M=chains, MP=levels, K=drafted, KP=places, P=padded, CHUNK=chunk, **flags, LENIENT=lenient, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return committed, accepted, rejected, chain, *out[:-1].unbind(0)
