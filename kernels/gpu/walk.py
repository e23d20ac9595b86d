"""Acceptance with several chains: one program walks along each row. See `smcgen.kernels.gpu.verify`."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from smcgen.kernels.gpu.laws import (
    DRAFT,
    DRAFT_TOP,
    FIELDS,
    LOG_LAW,
    LOG_LEFT,
    LOG_P,
    LOG_TARGET,
    LOG_Z,
    TINY,
    excess_laws,
    join,
    log_excess,
    log_law,
    log_mass,
    masked,
    rates,
    target_masses,
    wide,
)


@triton.jit
def walk(
    Target, Draft, Bits, Exponent, Parts, Left, Levels, Tokens, Counts, Uniform, Out, OutTokens, Accepted, Rejected, Chain,
    V, chunks, words, rows, temperature, draft_temperature, s, log_s, t0, t1, t2, d0, d1, d2,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
    MASK: tl.constexpr, POWER: tl.constexpr, COUNTS: tl.constexpr, LENIENT: tl.constexpr,
):  # fmt: skip
    """Several chains: one program per row, position after position and candidate after candidate."""
    row = tl.program_id(0).to(tl.int64)
    c, j = tl.arange(0, P), tl.arange(0, MP)
    one, power, rate = rates(Exponent, row, temperature, POWER)
    draft_rate = 1.0 / wide(draft_temperature)
    log_leniency = wide(log_s)
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
            high, log_allowed, log_z, log_left, top, log_all = target_masses(
                At, c < chunks, chunks, rate, one, power, 0, MASK, POWER
            )
            draft_high, draft_total = join(At, c < chunks, chunks, DRAFT_TOP, DRAFT, draft_rate, 0)
            log_draft = tl.log(draft_total)
            X = Target + row * t0 + chain * t1 + k * t2
            Y = Draft + row * d0 + chain * d1 + k * d2
            token = tl.load(Tokens + (row * M + j) * K + k, mask=j < M, other=0)
            token = tl.minimum(tl.maximum(token, 0), V - 1)
            x = tl.load(X + token, mask=j < M, other=float("-inf")).to(tl.float32)
            y = tl.load(Y + token, mask=j < M, other=float("-inf")).to(tl.float32)
            log_p = log_mass(x, top, log_all, one)
            log_target = log_mass(masked(x, Bits + place * words, token, j < M, MASK), high, log_allowed, rate)
            log_q = log_mass(y, draft_high, log_draft, draft_rate)
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
                        log_r = log_excess(log_target, log_q, cost) - tl.log(mass)
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
                                xs = masked(xs, Bits + place * words, v, v < V, MASK)
                                ys = masked(ys, Bits + place * words, v, v < V, MASK)
                                p, excess, q = excess_laws(
                                    xs, ys, high, log_allowed, draft_high, log_draft, rate, draft_rate, after
                                )
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
                        law = log_law(log_target_x, log_q_x, costs, masses, reaches, log_leniency, j, M)
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
