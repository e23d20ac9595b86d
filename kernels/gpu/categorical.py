"""Draws from, and scores under, rows of logits, in two launches: the masses of chunks of each row, then one program per row,
which joins them, goes to the chunk where the uniform falls and then to the token.

A mass is exp(k (x - m)) in float32, m being the largest logit of its chunk and k = exponent / temperature; masses are summed
in float64, and chunks are brought to a common scale in float64. The second kernel forms the same masses again, so a chunk adds
up to what the first kernel said.
"""
# Triton's own types do not describe its language.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from smcgen.kernels.gpu.rows import Lead, lay, lead, offset

CHUNK = 2048  # tokens per program of the first kernel: the draw of a row depends on it (by rounding), so it is one constant

# What the first kernel leaves for each (row, field, chunk), float64.
TOP = tl.constexpr(0)  # the largest logit
ALL = tl.constexpr(1)  # sum over all tokens of exp((x - TOP) / temperature)
ALLOWED_TOP = tl.constexpr(2)
ALLOWED = tl.constexpr(3)  # sum over the allowed tokens of exp((x - ALLOWED_TOP) * exponent / temperature)
POWERED = tl.constexpr(4)  # sum over all tokens of exp((x - TOP) * exponent / temperature)
FIELDS = tl.constexpr(5)

NO_MASK, FLAGS, BITS = 0, 1, 2  # how a mask comes: not at all, as a byte or as a bit per token


@triton.jit
def _logits(X, Mask, v, inside, MASK: tl.constexpr):
    """Logits of the tokens v in float32, and the same with -inf where the mask says no."""
    x = tl.load(X + v, mask=inside, other=float("-inf")).to(tl.float32)
    y = x
    if MASK == 1:
        y = tl.where(tl.load(Mask + v, mask=inside, other=0) != 0, x, float("-inf"))
    if MASK == 2:
        word = tl.load(Mask + v // 32, mask=inside, other=0)
        y = tl.where((word >> (v % 32)) & 1 != 0, x, float("-inf"))
    return x, y


@triton.jit
def _finite(top):
    """The maximum, or 0 where nothing has mass, so that -inf minus it is -inf and not NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _masses(X, Mask, Exponent, Parts, V, chunks, temperature, d1, d2, x0, x1, x2, m0, m1, m2, e0, e1, e2,
            CHUNK: tl.constexpr, MASK: tl.constexpr, POWER: tl.constexpr):  # fmt: skip
    """One program per (row, chunk)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    X += offset(row, d1, d2, x0, x1, x2)
    Mask += offset(row, d1, d2, m0, m1, m2)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x, y = _logits(X, Mask, v, v < V, MASK)
    top = tl.max(x, 0)
    base = _finite(top)
    rate = 1.0 / tl.cast(tl.cast(temperature, tl.float32), tl.float64)
    Parts += row * FIELDS * chunks + chunk
    tl.store(Parts + TOP * chunks, top.to(tl.float64))
    tl.store(Parts + ALL * chunks, tl.sum(tl.exp((x - base) * rate.to(tl.float32)).to(tl.float64), 0))
    if POWER:
        rate *= tl.load(Exponent + offset(row, d1, d2, e0, e1, e2))
    k = rate.to(tl.float32)
    if MASK:
        high = tl.max(y, 0)
        tl.store(Parts + ALLOWED_TOP * chunks, high.to(tl.float64))
        tl.store(Parts + ALLOWED * chunks, tl.sum(tl.exp((y - _finite(high)) * k).to(tl.float64), 0))
    if POWER:
        tl.store(Parts + POWERED * chunks, tl.sum(tl.exp((x - base) * k).to(tl.float64), 0))


@triton.jit
def _join(Parts, chunks, rate, TOP_FIELD: tl.constexpr, SUM_FIELD: tl.constexpr, P: tl.constexpr):
    """Over the chunks of a row: their largest logit, the scale that brings each to it, their masses in that scale."""
    c = tl.arange(0, P)
    inside = c < chunks
    top = tl.load(Parts + TOP_FIELD * chunks + c, mask=inside, other=float("-inf"))
    high = tl.max(top, 0)
    scale = tl.exp((top - _finite(high)) * rate)
    return high, top, scale, tl.load(Parts + SUM_FIELD * chunks + c, mask=inside, other=0.0) * scale


@triton.jit
def _log_p(X, token, high, temperature, log_all):
    """log softmax at one token; `high` is the largest logit of the row, `log_all` the log of all masses in its scale."""
    x = tl.load(X + token).to(tl.float32) - high.to(tl.float32)
    return tl.div_rn(x, tl.cast(temperature, tl.float32)).to(tl.float64) - log_all


@triton.jit
def _draw(X, Mask, Exponent, Uniform, Parts, Token, Out, V, chunks, temperature, rows, d1, d2, x0, x1, x2, m0, m1, m2,
          e0, e1, e2, u0, u1, u2, CHUNK: tl.constexpr, P: tl.constexpr, MASK: tl.constexpr, POWER: tl.constexpr):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    X += offset(row, d1, d2, x0, x1, x2)
    Mask += offset(row, d1, d2, m0, m1, m2)
    Parts += row * FIELDS * chunks
    inverse = 1.0 / tl.cast(tl.cast(temperature, tl.float32), tl.float64)
    rate = inverse
    exponent = 1.0
    if POWER:
        exponent = tl.load(Exponent + offset(row, d1, d2, e0, e1, e2))
        rate *= exponent
    all_high, all_top, scale, mass = _join(Parts, chunks, inverse, TOP, ALL, P)
    log_all = tl.log(tl.sum(mass, 0))
    high, top = all_high, all_top
    log_powered = log_all
    if POWER:
        high, top, scale, mass = _join(Parts, chunks, rate, TOP, POWERED, P)
        log_powered = tl.log(tl.sum(mass, 0))
    if MASK:
        high, top, scale, mass = _join(Parts, chunks, rate, ALLOWED_TOP, ALLOWED, P)
    total = tl.sum(mass, 0)
    alive = total > 0  # not so if nothing is allowed, and not if a logit is NaN

    c = tl.arange(0, P)
    goal = tl.load(Uniform + offset(row, d1, d2, u0, u1, u2)) * total
    chunk = tl.min(tl.where((tl.cumsum(mass, 0) > goal) & (mass > 0), c, P), 0)
    chunk = tl.minimum(chunk, tl.max(tl.where(mass > 0, c, 0), 0))  # rounding at the upper end
    rest = goal - tl.sum(tl.where(c < chunk, mass, 0.0), 0)
    rest = rest / tl.maximum(tl.sum(tl.where(c == chunk, scale, 0.0), 0), 1e-300)
    base = _finite(tl.sum(tl.where(c == chunk, top, 0.0), 0)).to(tl.float32)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    _, y = _logits(X, Mask, v, v < V, MASK)
    p = tl.exp((y - base) * rate.to(tl.float32)).to(tl.float64)
    token = tl.min(tl.where((tl.cumsum(p, 0) > rest) & (p > 0), v, V), 0)
    token = tl.minimum(token, tl.max(tl.where(p > 0, v, 0), 0))
    token = tl.where(alive, token, 0)

    log_p = _log_p(X, token, all_high, temperature, log_all)
    log_mass = tl.log(total) + (_finite(high) - _finite(all_high)) * rate  # on the scale of `log_powered`
    log_z = log_mass - exponent * log_all
    log_left = 0.0
    if MASK:
        log_left = log_mass - log_powered
    tl.store(Token + row, token.to(tl.int64))
    tl.store(Out + row, tl.where(alive, exponent * log_p - log_z, float("-inf")))
    tl.store(Out + rows + row, log_z)
    tl.store(Out + 2 * rows + row, log_p)
    tl.store(Out + 3 * rows + row, log_left)


@triton.jit
def _score(X, Tokens, Parts, Out, chunks, temperature, d1, d2, x0, x1, x2, t0, t1, t2, P: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    rate = 1.0 / tl.cast(tl.cast(temperature, tl.float32), tl.float64)
    high, _, _, mass = _join(Parts + row * FIELDS * chunks, chunks, rate, TOP, ALL, P)
    token = tl.load(Tokens + offset(row, d1, d2, t0, t1, t2))
    X += offset(row, d1, d2, x0, x1, x2)
    tl.store(Out + row, _log_p(X, token, high, temperature, tl.log(tl.sum(mass, 0))))


def _launch_masses(
    logits: torch.Tensor,
    temperature: float,
    axes: Lead,
    x: Lead,
    exponent: torch.Tensor | None = None,
    e: Lead = (0, 0, 0),
    mask: torch.Tensor | None = None,
    m: Lead = (0, 0, 0),
) -> tuple[torch.Tensor, int]:
    """The parts float64 [rows, FIELDS, chunks] and the number of chunks."""
    size = logits.shape[-1]
    chunks = triton.cdiv(size, CHUNK)
    rows = math.prod(axes)
    parts = torch.empty(rows, FIELDS.value, chunks, dtype=torch.float64, device=logits.device)
    _masses[(rows, chunks)](
        logits, logits if mask is None else mask, logits if exponent is None else exponent, parts, size, chunks, temperature,
        *axes[1:], *x, *m, *e, CHUNK, _kind(mask), exponent is not None, num_warps=4,
    )  # fmt: skip
    return parts, chunks


def _kind(mask: torch.Tensor | None) -> int:
    if mask is None:
        return NO_MASK
    return BITS if mask.dtype == torch.int32 else FLAGS


def power_draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: float = 1.0,
    exponent: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `kernels.categorical.power_draw`: token, log_q, log_z, log_p and log_left."""
    shape, axes = logits.shape[:-1], lead(logits.shape[:-1])
    rows = math.prod(axes)
    token = torch.empty(shape, dtype=torch.int64, device=logits.device)
    out = torch.empty(4, *shape, dtype=torch.float64, device=logits.device)
    if rows > 0:
        logits, x = lay(logits, shape)
        uniform, u = lay(uniform[..., None], shape)
        mask, m, e = None, (0, 0, 0), (0, 0, 0)
        if allowed is not None:
            mask, m = lay(allowed if allowed.dtype == torch.int32 else allowed.view(torch.uint8), shape)
        if exponent is not None:
            exponent, e = lay(exponent[..., None], shape)
        parts, chunks = _launch_masses(logits, temperature, axes, x, exponent, e, mask, m)
        _draw[(rows,)](
            logits, logits if mask is None else mask, logits if exponent is None else exponent, uniform, parts, token, out,
            logits.shape[-1], chunks, temperature, rows, *axes[1:], *x, *m, *e, *u,
            CHUNK, triton.next_power_of_2(chunks), _kind(mask), exponent is not None, num_warps=8,
        )  # fmt: skip
    log_q, log_z, log_p, log_left = out.unbind()
    return token, log_q, log_z, log_p, log_left


def score(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """As `kernels.categorical.score`."""
    shape, axes = logits.shape[:-1], lead(logits.shape[:-1])
    out = torch.empty(shape, dtype=torch.float64, device=logits.device)
    if out.numel() > 0:
        logits, x = lay(logits, shape)
        tokens, t = lay(tokens[..., None], shape)
        parts, chunks = _launch_masses(logits, temperature, axes, x)
        columns = triton.next_power_of_2(chunks)
        _score[(out.numel(),)](logits, tokens, parts, out, chunks, temperature, *axes[1:], *x, *t, columns, num_warps=1)
    return out
