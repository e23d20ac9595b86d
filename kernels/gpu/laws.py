"""What the kernels of `smcgen.kernels.gpu.verify` share: how the masses of chunks lie in memory, and laws made of them.

A mass is exp(k (x - m)) in float32 with m the largest logit of its chunk or row and k = exponent / temperature. Logs of single
tokens and joins of chunks are float64, so nothing underflows that could be drawn.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

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
def wide(number):
    """A number from the host, which arrives as float32, as float64."""
    return tl.cast(tl.cast(number, tl.float32), tl.float64)


@triton.jit
def finite(top):
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def masked(x, Bits, v, ok, MASK: tl.constexpr):
    if MASK:
        word = tl.load(Bits + v // 32, mask=ok, other=0)
        x = tl.where((word >> (v % 32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def join(At, ok, chunks, top_field, sum_field, rate, AXIS: tl.constexpr):
    """Chunks joined along AXIS: the largest logit, and the sum of the masses relative to it, float64."""
    tops = tl.load(At + top_field * chunks, mask=ok, other=float("-inf")).to(tl.float64)
    sums = tl.load(At + sum_field * chunks, mask=ok, other=0.0).to(tl.float64)
    top = tl.max(tops, AXIS)
    base = finite(top)
    if AXIS == 1:
        base = base[:, None]
    return top, tl.sum(sums * tl.exp((tops - base) * rate), AXIS)


@triton.jit
def target_masses(At, ok, chunks, rate, one, power, AXIS: tl.constexpr, MASK: tl.constexpr, POWER: tl.constexpr):
    """Of the local target: the largest allowed logit, log of the sum of masses relative to it, log Z_t, log of the share that
    the mask leaves; and of p: the largest logit and the log of the sum relative to it."""
    top, total = join(At, ok, chunks, TOP, ALL, one, AXIS)
    log_all = tl.log(total)
    if MASK or POWER:
        high, allowed = join(At, ok, chunks, ALLOWED_TOP, ALLOWED, rate, AXIS)
        log_allowed = tl.log(allowed)
    else:
        high, log_allowed = top, log_all
    log_mass = rate * (high - finite(top)) + log_allowed  # log of the sum of (p / p of the likeliest)**exponent
    log_z = tl.where(high == float("-inf"), float("-inf"), log_mass - power * log_all)
    # A NaN may stand behind the mask, which the sum over all tokens shows; and a model that allows no token at all is as bad.
    log_z = tl.where((log_all == log_all) & (top != float("-inf")), log_z, float("nan"))
    log_left = log_allowed - log_allowed
    if MASK:
        log_powered = log_all
        if POWER:
            _, powered = join(At, ok, chunks, TOP, POWERED, rate, AXIS)
            log_powered = tl.log(powered)
        log_left = tl.where(high == float("-inf"), float("-inf"), log_mass - log_powered)
    return high, log_allowed, log_z, log_left, top, log_all


@triton.jit
def log_mass(x, top, log_total, rate):
    """log probability of tokens with logits x; -inf where there is none, though nothing else has mass either."""
    return tl.where(x == float("-inf"), float("-inf"), rate * (x.to(tl.float64) - finite(top)) - log_total)


@triton.jit
def log_excess(log_p, log_q, cost):
    """log (p - cost q)+"""
    ratio = tl.minimum(cost * tl.exp(log_q - finite(log_p)), 1.0)
    return tl.where(log_p == float("-inf"), float("-inf"), log_p + tl.log(1.0 - ratio))


@triton.jit
def log_add(a, b):
    top = tl.maximum(a, b)
    base = finite(top)
    return base + tl.log(tl.exp(a - base) + tl.exp(b - base))


@triton.jit
def rates(Exponent, row, temperature, POWER: tl.constexpr):
    """1 / temperature, the exponent, and their product, float64."""
    one = 1.0 / wide(temperature)
    power = one * 0.0 + 1.0
    if POWER:
        power = tl.load(Exponent + row)
    return one, power, one * power


@triton.jit
def excess_laws(x, y, high, log_allowed, draft_high, log_draft, rate, draft_rate, cost):
    """p and (p - cost q)+ and q of logits x and y, float32; p is the local target."""
    p = tl.exp((x - finite(high).to(tl.float32)) * rate.to(tl.float32)) * tl.exp(-log_allowed).to(tl.float32)
    q = tl.exp((y - finite(draft_high).to(tl.float32)) * draft_rate.to(tl.float32)) * tl.exp(-log_draft).to(tl.float32)
    return p, tl.maximum(p - cost.to(tl.float32) * q, 0.0), q


@triton.jit
def log_law(log_p, log_q, costs, masses, reaches, log_s, j, M: tl.constexpr):
    """log L of one token, from the levels j = 0 ... M; the reach of a level without a candidate is 0."""
    log_r = log_excess(log_p, log_q, costs) - tl.log(masses)
    log_m = tl.where(j < M, tl.minimum(log_q, log_r + log_s), log_r)
    terms = tl.where(j <= M, tl.log(reaches) + log_m, float("-inf"))
    base = finite(tl.max(terms, 0))
    return base + tl.log(tl.sum(tl.exp(terms - base), 0))


@triton.jit
def _sum(x, k, top):
    return tl.sum(tl.exp((x - finite(top)) * k), 0)


@triton.jit
def masses(
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
    rate = 1.0 / wide(temperature)
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
        z = masked(x, Bits, v, ok, MASK)
        high = tl.max(z, 0)
        tl.store(Parts + ALLOWED_TOP * chunks, high)
        tl.store(Parts + ALLOWED * chunks, _sum(z, k, high))
    if t < K:
        y = masked(y, Bits, v, ok, MASK)
        high = tl.max(y, 0)
        tl.store(Parts + DRAFT_TOP * chunks, high)
        tl.store(Parts + DRAFT * chunks, _sum(y, (1.0 / wide(draft_temperature)).to(tl.float32), high))
