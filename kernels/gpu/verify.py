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

CHUNK = 4096

# What the first launch leaves for each (row, chain, position, field, chunk), float32.
ALLOWED_TOP = tl.constexpr(0)  # the largest allowed logit of the target
ALLOWED = tl.constexpr(1)  # sum over allowed tokens of exp((x - ALLOWED_TOP) * exponent / temperature)
TOP = tl.constexpr(2)  # the largest logit of the target
ALL = tl.constexpr(3)  # sum over all tokens of exp((x - TOP) / temperature)
POWERED = tl.constexpr(4)  # sum over all tokens of exp((x - TOP) * exponent / temperature)
DRAFT_TOP = tl.constexpr(5)  # the same as the first two, of the draft
DRAFT = tl.constexpr(6)
FIELDS = tl.constexpr(7)

# Fields of the result, float64 [RESULTS, rows, K + 1]; the last is for the kernels themselves.
LOG_TARGET = tl.constexpr(0)
LOG_LAW = tl.constexpr(1)
LOG_P = tl.constexpr(2)
LOG_Z = tl.constexpr(3)
LOG_LEFT = tl.constexpr(4)
LOG_Q = tl.constexpr(5)
RESULTS = 6

TINY = tl.constexpr(1e-300)


@triton.jit
def _wide(number):
    """A number from the host, which arrives as float32, as float64."""
    return tl.cast(tl.cast(number, tl.float32), tl.float64)


@triton.jit
def _finite(top):
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _masked(x, Bits, v, ok, MASK: tl.constexpr):
    if MASK:
        word = tl.load(Bits + v // 32, mask=ok, other=0)
        x = tl.where((word >> (v % 32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def _sum(x, k, top):
    return tl.sum(tl.exp((x - _finite(top)) * k), 0)


@triton.jit
def _masses(
    Target, Draft, Bits, Exponent, Parts, V, chunks, words, temperature, draft_temperature, t0, t1, t2, d0, d1, d2,
    M: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, MASK: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """One program per (row, chain, position) and chunk: of the target there, and of the draft where it drafted."""
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, chain, t = place // (M * (K + 1)), place // (K + 1) % M, place % (K + 1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    ok = v < V
    Bits += place * words
    Parts += place * FIELDS * chunks + chunk
    x = tl.load(Target + row * t0 + chain * t1 + t * t2 + v, mask=ok, other=float("-inf")).to(tl.float32)
    y = tl.load(Draft + row * d0 + chain * d1 + t * d2 + v, mask=v < tl.where(t < K, V, 0), other=float("-inf")).to(tl.float32)
    rate = 1.0 / _wide(temperature)
    one = rate.to(tl.float32)
    if POWER:
        rate *= tl.load(Exponent + row)
    k = rate.to(tl.float32)
    top = tl.max(x, 0)
    tl.store(Parts + TOP * chunks, top)
    tl.store(Parts + ALL * chunks, _sum(x, one, top))
    if POWER:
        tl.store(Parts + POWERED * chunks, _sum(x, k, top))
    if MASK or POWER:
        z = _masked(x, Bits, v, ok, MASK)
        high = tl.max(z, 0)
        tl.store(Parts + ALLOWED_TOP * chunks, high)
        tl.store(Parts + ALLOWED * chunks, _sum(z, k, high))
    if t < K:
        y = _masked(y, Bits, v, ok, MASK)
        high = tl.max(y, 0)
        tl.store(Parts + DRAFT_TOP * chunks, high)
        tl.store(Parts + DRAFT * chunks, _sum(y, (1.0 / _wide(draft_temperature)).to(tl.float32), high))


@triton.jit
def _join(At, ok, chunks, top_field, sum_field, rate, AXIS: tl.constexpr):
    """Chunks joined along AXIS: the largest logit, and the sum of the masses relative to it, float64."""
    tops = tl.load(At + top_field * chunks, mask=ok, other=float("-inf")).to(tl.float64)
    sums = tl.load(At + sum_field * chunks, mask=ok, other=0.0).to(tl.float64)
    top = tl.max(tops, AXIS)
    base = _finite(top)
    if AXIS == 1:
        base = base[:, None]
    return top, tl.sum(sums * tl.exp((tops - base) * rate), AXIS)


@triton.jit
def _target_masses(At, ok, chunks, rate, one, power, AXIS: tl.constexpr, MASK: tl.constexpr, POWER: tl.constexpr):
    """Of the local target: the largest allowed logit, log of the sum of masses relative to it, log Z_t, log of the share that
    the mask leaves; and of p: the largest logit and the log of the sum relative to it."""
    top, total = _join(At, ok, chunks, TOP, ALL, one, AXIS)
    log_all = tl.log(total)
    if MASK or POWER:
        high, allowed = _join(At, ok, chunks, ALLOWED_TOP, ALLOWED, rate, AXIS)
        log_allowed = tl.log(allowed)
    else:
        high, log_allowed = top, log_all
    log_mass = rate * (high - _finite(top)) + log_allowed  # log of the sum of (p / p of the likeliest)**exponent
    log_z = tl.where(high == float("-inf"), float("-inf"), log_mass - power * log_all)
    # A NaN may stand behind the mask, which the sum over all tokens shows; and a model that allows no token at all is as bad.
    log_z = tl.where((log_all == log_all) & (top != float("-inf")), log_z, float("nan"))
    log_left = log_allowed - log_allowed
    if MASK:
        log_powered = log_all
        if POWER:
            _, powered = _join(At, ok, chunks, TOP, POWERED, rate, AXIS)
            log_powered = tl.log(powered)
        log_left = tl.where(high == float("-inf"), float("-inf"), log_mass - log_powered)
    return high, log_allowed, log_z, log_left, top, log_all


@triton.jit
def _log_mass(x, top, log_total, rate):
    """log probability of tokens with logits x; -inf where there is none, though nothing else has mass either."""
    return tl.where(x == float("-inf"), float("-inf"), rate * (x.to(tl.float64) - _finite(top)) - log_total)


@triton.jit
def _log_excess(log_p, log_q, cost):
    """log (p - cost q)+"""
    ratio = tl.minimum(cost * tl.exp(log_q - _finite(log_p)), 1.0)
    return tl.where(log_p == float("-inf"), float("-inf"), log_p + tl.log(1.0 - ratio))


@triton.jit
def _log_add(a, b):
    top = tl.maximum(a, b)
    base = _finite(top)
    return base + tl.log(tl.exp(a - base) + tl.exp(b - base))


@triton.jit
def _rates(Exponent, row, temperature, POWER: tl.constexpr):
    """1 / temperature, the exponent, and their product, float64."""
    one = 1.0 / _wide(temperature)
    power = one * 0.0 + 1.0
    if POWER:
        power = tl.load(Exponent + row)
    return one, power, one * power


@triton.jit
def _laws(x, y, high, log_allowed, draft_high, log_draft, rate, draft_rate, cost):
    """p and (p - cost q)+ and q of logits x and y, float32; p is the local target."""
    p = tl.exp((x - _finite(high).to(tl.float32)) * rate.to(tl.float32)) * tl.exp(-log_allowed).to(tl.float32)
    q = tl.exp((y - _finite(draft_high).to(tl.float32)) * draft_rate.to(tl.float32)) * tl.exp(-log_draft).to(tl.float32)
    return p, tl.maximum(p - cost.to(tl.float32) * q, 0.0), q


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
    one, power, rate = _rates(Exponent, row, temperature, POWER)
    draft_rate = 1.0 / _wide(draft_temperature)
    high, log_allowed, log_z, log_left, top, log_all = _target_masses(
        At, drafted[:, None] & (c < chunks)[None, :], chunks, rate, one, power, 1, MASK, POWER
    )
    draft_high, draft_total = _join(At, drafted[:, None] & (c < chunks)[None, :], chunks, DRAFT_TOP, DRAFT, draft_rate, 1)
    token = tl.load(Tokens + row * K + k, mask=drafted, other=0)
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    x = tl.load(Target + row * t0 + k * t2 + token, mask=drafted, other=float("-inf")).to(tl.float32)
    y = tl.load(Draft + row * d0 + k * d2 + token, mask=drafted, other=float("-inf")).to(tl.float32)
    log_p = _log_mass(x, top, log_all, one)
    z = _masked(x, Bits + place * words, token, drafted, MASK)
    log_target = _log_mass(z, high, log_allowed, rate)
    log_q = _log_mass(y, draft_high, tl.log(draft_total), draft_rate)
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
    take = judged & (tl.log(uniform) + log_q < log_target + _wide(log_s))
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
        _, _, rate = _rates(Exponent, row, temperature, POWER)
        draft_rate = 1.0 / _wide(draft_temperature)
        if MASK or POWER:
            high, total = _join(At, c < chunks, chunks, ALLOWED_TOP, ALLOWED, rate, 0)
        else:
            high, total = _join(At, c < chunks, chunks, TOP, ALL, rate, 0)
        log_allowed = tl.log(total)
        draft_high, draft_total = _join(At, c < chunks, chunks, DRAFT_TOP, DRAFT, draft_rate, 0)
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(Target + row * t0 + t * t2 + v, mask=v < V, other=float("-inf")).to(tl.float32)
        y = tl.load(Draft + row * d0 + t * d2 + v, mask=v < V, other=float("-inf")).to(tl.float32)
        x = _masked(x, Bits + place * words, v, v < V, MASK)
        y = _masked(y, Bits + place * words, v, v < V, MASK)
        p, excess, q = _laws(x, y, high, log_allowed, draft_high, tl.log(draft_total), rate, draft_rate, rate * 0.0 + 1.0)
        if BLOCK:
            w = tl.exp(tl.load(Out + LOG_Q * ((row * 0 + rows) * (K + 1)) + place))
            excess = tl.maximum(w.to(tl.float32) * p - q, 0.0)
        Left += tl.program_id(0).to(tl.int64) * 2 * chunks + chunk
        tl.store(Left, tl.sum(excess, 0))
        if LENIENT:
            tl.store(Left + chunks, tl.sum(tl.maximum(q - s * p, 0.0), 0))


@triton.jit
def _walk(
    Target, Draft, Bits, Exponent, Parts, Left, Levels, Tokens, Counts, Uniform, Out, OutTokens, Accepted, Rejected, Chain,
    V, chunks, words, rows, temperature, draft_temperature, s, log_s, t0, t1, t2, d0, d1, d2,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
    MASK: tl.constexpr, POWER: tl.constexpr, COUNTS: tl.constexpr, LENIENT: tl.constexpr,
):  # fmt: skip
    """Several chains: one program per row, position after position and candidate after candidate."""
    row = tl.program_id(0).to(tl.int64)
    c, j = tl.arange(0, P), tl.arange(0, MP)
    one, power, rate = _rates(Exponent, row, temperature, POWER)
    draft_rate = 1.0 / _wide(draft_temperature)
    log_leniency = _wide(log_s)
    live = (j < M).to(tl.int32)
    count = tl.full([MP], K, tl.int64)
    if COUNTS:
        count = tl.load(Counts + row * M + j, mask=j < M, other=0)
    chain = row * 0
    accepted, rejected = tl.sum(live, 0) * 0, tl.sum(live, 0) * 0
    going = accepted + 1
    Out += row * (K + 1)
    plane = (row * 0 + rows) * (K + 1)
    for k in range(0, K):
        candidate = tl.where(k < count, live, 0)
        if (going != 0) & (tl.sum(candidate, 0) == 0):
            going = going * 0
        if going != 0:
            place = (row * M + chain) * (K + 1) + k
            At = Parts + place * FIELDS * chunks + c
            high, log_allowed, log_z, log_left, top, log_all = _target_masses(
                At, c < chunks, chunks, rate, one, power, 0, MASK, POWER
            )
            draft_high, draft_total = _join(At, c < chunks, chunks, DRAFT_TOP, DRAFT, draft_rate, 0)
            log_draft = tl.log(draft_total)
            X = Target + row * t0 + chain * t1 + k * t2
            Y = Draft + row * d0 + chain * d1 + k * d2
            token = tl.load(Tokens + (row * M + j) * K + k, mask=j < M, other=0)
            token = tl.minimum(tl.maximum(token, 0), V - 1)
            x = tl.load(X + token, mask=j < M, other=float("-inf")).to(tl.float32)
            y = tl.load(Y + token, mask=j < M, other=float("-inf")).to(tl.float32)
            log_p = _log_mass(x, top, log_all, one)
            log_target = _log_mass(_masked(x, Bits + place * words, token, j < M, MASK), high, log_allowed, rate)
            log_q = _log_mass(y, draft_high, log_draft, draft_rate)
            uniform = tl.load(Uniform + (row * M + j) * K + k, mask=j < M, other=0.5)
            which = accepted * 0 + M
            if log_z == float("-inf"):  # nothing is allowed here
                going = going * 0
            else:
                cost, mass, reach = rate * 0.0, rate * 0.0 + 1.0, rate * 0.0 + 1.0
                costs, masses = tl.zeros([MP], tl.float64), tl.full([MP], 1.0, tl.float64)
                reaches = tl.full([MP], 1.0, tl.float64)
                for i in range(0, M):
                    if tl.sum(tl.where(j == i, candidate, 0), 0) > 0:
                        log_r = _log_excess(log_target, log_q, cost) - tl.log(mass)
                        fits = (j == i) & (tl.log(uniform) + log_q < log_r + log_leniency)
                        if (which == M) & (tl.sum(fits.to(tl.int32), 0) > 0):
                            which = i + accepted * 0
                        needed = (which == M).to(tl.int32)
                        if LENIENT:
                            needed = needed * 0 + 1
                        if needed != 0:
                            after = cost + mass
                            scale = (s / mass).to(tl.float32)
                            left, above = rate * 0.0, rate * 0.0
                            for start in range(0, chunks, SUB):
                                n = start + tl.arange(0, SUB)
                                v = n[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
                                xs = tl.load(X + v, mask=v < V, other=float("-inf")).to(tl.float32)
                                ys = tl.load(Y + v, mask=v < V, other=float("-inf")).to(tl.float32)
                                xs = _masked(xs, Bits + place * words, v, v < V, MASK)
                                ys = _masked(ys, Bits + place * words, v, v < V, MASK)
                                p, excess, q = _laws(xs, ys, high, log_allowed, draft_high, log_draft, rate, draft_rate, after)
                                part = tl.sum(excess, 1)
                                tl.store(Left + row * 2 * chunks + n, part, mask=n < chunks)
                                left += tl.sum(part.to(tl.float64), 0)
                                if LENIENT:
                                    r = tl.maximum(p - cost.to(tl.float32) * q, 0.0)
                                    above += tl.sum(tl.sum(tl.maximum(q - scale * r, 0.0), 1).to(tl.float64), 0)
                            if LENIENT:
                                reach *= above
                            # Nothing left over: the candidate is accepted for certain, and any law will do for the next.
                            cost = tl.where(left > TINY, after, 0.0)
                            mass = tl.where(left > TINY, left, 1.0)
                    costs = tl.where(j > i, cost, costs)
                    masses = tl.where(j > i, mass, masses)
                    reaches = tl.where(j > i, reach, reaches)
                reaches = tl.where((j == M) | (candidate > 0), reaches, 0.0)
                if which < M:
                    taken = j == which
                    chosen = tl.sum(tl.where(taken, token, 0), 0)
                    log_target_x = tl.sum(tl.where(taken, log_target, 0.0), 0)
                    law = log_target_x
                    if LENIENT:
                        log_q_x = tl.sum(tl.where(taken, log_q, 0.0), 0)
                        law = _log_law(log_target_x, log_q_x, costs, masses, reaches, log_leniency, j, M)
                    tl.store(OutTokens + row * (K + 1) + k, chosen)
                    tl.store(Out + LOG_TARGET * plane + k, log_target_x)
                    tl.store(Out + LOG_LAW * plane + k, law)
                    tl.store(Out + LOG_P * plane + k, tl.sum(tl.where(taken, log_p, 0.0), 0))
                    tl.store(Out + LOG_Z * plane + k, log_z)
                    tl.store(Out + LOG_LEFT * plane + k, log_left)
                    live = tl.where((j >= which) & (token == chosen), live, 0)
                    chain = which.to(tl.int64)
                    accepted += 1
                else:
                    rejected += 1
                    going = going * 0
                    Level = Levels + row * 3 * MP + j
                    tl.store(Level, costs)
                    tl.store(Level + MP, masses)
                    tl.store(Level + 2 * MP, reaches)
    tl.store(Accepted + row, accepted.to(tl.int64))
    tl.store(Rejected + row, rejected > 0)
    tl.store(Chain + row, chain)


@triton.jit
def _log_law(log_p, log_q, costs, masses, reaches, log_s, j, M: tl.constexpr):
    """log L of one token, from the levels j = 0 ... M; the reach of a level without a candidate is 0."""
    log_r = _log_excess(log_p, log_q, costs) - tl.log(masses)
    log_m = tl.where(j < M, tl.minimum(log_q, log_r + log_s), log_r)
    terms = tl.where(j <= M, tl.log(reaches) + log_m, float("-inf"))
    base = _finite(tl.max(terms, 0))
    return base + tl.log(tl.sum(tl.exp(terms - base), 0))


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
    log_leniency = _wide(log_s)
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

    one, power, rate = _rates(Exponent, row, temperature, POWER)
    draft_rate = 1.0 / _wide(draft_temperature)
    place = (row * M + chain) * (K + 1) + accepted
    At = Parts + place * FIELDS * chunks + c
    high, log_allowed, log_z, log_left, top, log_all = _target_masses(At, inside, chunks, rate, one, power, 0, MASK, POWER)
    has_draft = c < tl.where(rejected, chunks, 0)
    draft_high, draft_total = _join(At, has_draft, chunks, DRAFT_TOP, DRAFT, draft_rate, 0)
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
            log_r = _log_excess(log_p, log_q, tl.where(n > TINY, 1.0, 0.0)) - tl.log(tl.where(n > TINY, n, 1.0))
            law = _log_add(tl.minimum(log_q, log_p + log_leniency), tl.log(b) + log_r)
            tl.store(Out + LOG_LAW * plane + k, law, mask=k < accepted)
            reach = tl.sum(tl.load(Left + slot * 2 * chunks + chunks + c, mask=has_draft, other=0.0).to(tl.float64), 0)
        Residual = Left + slot * 2 * chunks + c
        left = tl.sum(tl.load(Residual, mask=has_draft, other=0.0).to(tl.float64), 0)
        cost = tl.where(left > TINY, cost + 1.0 / w, cost)
        mass = tl.where(left > TINY, left, mass)
        costs, masses = tl.where(j == 1, cost, 0.0), tl.where(j == 1, mass, 1.0)
        reaches = tl.where(j == 1, reach, 1.0)
    else:
        Residual = Left + row * 2 * chunks + c
        Level = Levels + row * 3 * MP + j
        ok = j < tl.where(rejected, M + 1, 0)
        costs = tl.load(Level, mask=ok, other=0.0)
        masses = tl.load(Level + MP, mask=ok, other=1.0)
        reaches = tl.load(Level + 2 * MP, mask=ok, other=0.0)
        cost = tl.sum(tl.where(j == M, costs, 0.0), 0)

    # First the chunk where the uniform falls, then the token in it.
    if MASK or POWER:
        tops = tl.load(At + ALLOWED_TOP * chunks, mask=inside, other=float("-inf")).to(tl.float64)
        sums = tl.load(At + ALLOWED * chunks, mask=inside, other=0.0).to(tl.float64)
    else:
        tops = tl.load(At + TOP * chunks, mask=inside, other=float("-inf")).to(tl.float64)
        sums = tl.load(At + ALL * chunks, mask=inside, other=0.0).to(tl.float64)
    part = sums * tl.exp((tops - _finite(high)) * rate - _finite(log_allowed))
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
    x = _masked(x, Bits + place * words, v, v < V, MASK)
    y = _masked(y, Bits + place * words, v, v < V, MASK)
    _, excess, _ = _laws(x, y, high, _finite(log_allowed), draft_high, log_draft, rate, draft_rate, cost)
    excess = tl.where(cost > 0, w, 1.0) * excess.to(tl.float64)
    token = tl.min(tl.where((tl.cumsum(excess, 0) > rest) & (excess > 0), v, V), 0)
    token = tl.where(token == V, tl.max(tl.where(excess > 0, v, 0), 0), token)

    x = tl.load(X + token).to(tl.float32)
    log_p = _log_mass(x, top, log_all, one)
    some = tl.sum(part, 0) != 0
    if MASK:
        word = tl.load(Bits + place * words + token // 32)
        x = tl.where((word >> (token % 32)) & 1 != 0, x, float("-inf"))
    log_target = tl.where(some, _log_mass(x, high, log_allowed, rate), float("-inf"))
    law = log_target
    if LENIENT:
        y = tl.load(Y + token, mask=rejected, other=float("-inf")).to(tl.float32)
        log_q = _log_mass(y, draft_high, log_draft, draft_rate)
        lenient = _log_law(log_target, log_q, costs, masses, reaches, log_leniency, j, M)
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

    _masses[(rows * chains * positions, chunks)](
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
        _walk[(rows,)](
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
