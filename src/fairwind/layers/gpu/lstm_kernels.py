"""Triton kernels for LSTM layers of stacked models, which keep the recurrent weights in registers.

Imported only if there is a GPU. A program runs all tokens of B sequences of one row. Products have factors of
16 bits and sums of 32. Gates are in PyTorch's order: input, forget, cell, output.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

kernel: Callable[[Callable[..., None]], Any] = triton.jit(do_not_specialize=["batch", "tokens"])
H_UNIT = tl.constexpr(2.0**-14)  # states are at most 1


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def four(pointer, at, step, mask):  # type: ignore[no-untyped-def]
    """The parts of all gates, `step` apart."""
    a = tl.load(pointer + at, mask=mask, other=0.0)
    b = tl.load(pointer + at + step, mask=mask, other=0.0)
    c = tl.load(pointer + at + 2 * step, mask=mask, other=0.0)
    d = tl.load(pointer + at + 3 * step, mask=mask, other=0.0)
    return a, b, c, d


@kernel
def run(  # type: ignore[no-untyped-def]
    parts,
    bias,
    weight,
    unit,
    states,
    kept,
    last,
    bias_row,
    weight_row,
    batch,
    tokens,
    hidden: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    UNITS: tl.constexpr,
    BIASED: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """States h (B, T, H) and last cells (B, H) of every row, from the inputs' parts of the gates (B, T, 4H).

    If `KEEP`, gates and previous cells (B, T, 5, H) as well.
    """
    blocks = tl.cdiv(batch, B)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    b = tl.program_id(0) % blocks * B + tl.arange(0, B)
    j = tl.arange(0, H)
    k = tl.arange(0, H)
    units = j < hidden
    inside = (b < batch)[:, None] & units[None, :]
    parts += row * batch * tokens * 4 * hidden
    states += row * batch * tokens * hidden
    kept += row * batch * tokens * 5 * hidden
    weight += row * weight_row
    at_w = j[None, :] * hidden + k[:, None]
    wi, wf, wg, wo = four(weight, at_w, hidden * hidden, units[None, :] & (k < hidden)[:, None])
    scale = 1.0
    if UNITS:
        scale = tl.load(unit + row) * H_UNIT
    if BIASED:
        bi, bf, bg, bo = four(bias + row * bias_row, j, hidden, units)
    h = tl.zeros((B, H), weight.dtype.element_ty)
    c = tl.zeros((B, H), tl.float32)
    token = b[:, None] * tokens  # each sequence's first
    i, f, g, o = four(parts, token * 4 * hidden + j[None, :], hidden, inside)
    for t in range(0, tokens):
        more = inside & (t + 1 < tokens)
        # Read now, so that it arrives during the products.
        following = four(parts, (token + t + 1) * 4 * hidden + j[None, :], hidden, more)
        i = tl.dot(h, wi) * scale + i.to(tl.float32)
        f = tl.dot(h, wf) * scale + f.to(tl.float32)
        g = tl.dot(h, wg) * scale + g.to(tl.float32)
        o = tl.dot(h, wo) * scale + o.to(tl.float32)
        if BIASED:
            i += bi[None, :]
            f += bf[None, :]
            g += bg[None, :]
            o += bo[None, :]
        i, f, g, o = tl.sigmoid(i), tl.sigmoid(f), tanh(g), tl.sigmoid(o)
        if KEEP:
            at = (token + t) * 5 * hidden + j[None, :]
            tl.store(kept + at, i.to(kept.dtype.element_ty), mask=inside)
            tl.store(kept + at + hidden, f.to(kept.dtype.element_ty), mask=inside)
            tl.store(kept + at + 2 * hidden, g.to(kept.dtype.element_ty), mask=inside)
            tl.store(kept + at + 3 * hidden, o.to(kept.dtype.element_ty), mask=inside)
            tl.store(kept + at + 4 * hidden, c.to(kept.dtype.element_ty), mask=inside)
        c = f * c + i * g
        out = o * tanh(c)
        tl.store(states + (token + t) * hidden + j[None, :], out.to(states.dtype.element_ty), mask=inside)
        h = (out / H_UNIT).to(h.dtype) if UNITS else out.to(h.dtype)
        i, f, g, o = following
    at = (row * batch + b[:, None]) * hidden + j[None, :]
    tl.store(last + at, c.to(last.dtype.element_ty), mask=inside)


@kernel
def run_back(  # type: ignore[no-untyped-def]
    d_states,
    d_last,
    kept,
    weight,
    unit,
    d_parts,
    weight_row,
    batch,
    tokens,
    hidden: tl.constexpr,
    smallest,
    B: tl.constexpr,
    H: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    """The gradient (B, T, 4H) with respect to the gates before their nonlinearities, in every row.

    Factors are scaled by a power of two for each sequence.
    """
    blocks = tl.cdiv(batch, B)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    b = tl.program_id(0) % blocks * B + tl.arange(0, B)
    j = tl.arange(0, H)
    k = tl.arange(0, H)
    inside = (b < batch)[:, None] & (j < hidden)[None, :]
    d_parts += row * batch * tokens * 4 * hidden
    d_states += row * batch * tokens * hidden
    kept += row * batch * tokens * 5 * hidden
    weight += row * weight_row
    at_w = k[:, None] * hidden + j[None, :]
    wi, wf, wg, wo = four(weight, at_w, hidden * hidden, (k < hidden)[:, None] & (j < hidden)[None, :])
    scale = 1.0
    if UNITS:
        scale = tl.load(unit + row)
    dh = tl.zeros((B, H), tl.float32)
    d_last += (row * batch + b[:, None]) * hidden + j[None, :]
    dc = tl.load(d_last, mask=inside, other=0.0).to(tl.float32)
    token = b[:, None] * tokens + tokens - 1  # each sequence's last
    i, f, g, o = four(kept, token * 5 * hidden + j[None, :], hidden, inside)
    before = tl.load(kept + token * 5 * hidden + 4 * hidden + j[None, :], mask=inside, other=0.0)
    d_out = tl.load(d_states + token * hidden + j[None, :], mask=inside, other=0.0)
    for t in range(0, tokens):
        more = inside & (t + 1 < tokens)
        at = (token - 1) * 5 * hidden + j[None, :]
        following = four(kept, at, hidden, more)
        following_before = tl.load(kept + at + 4 * hidden, mask=more, other=0.0)
        following_out = tl.load(d_states + (token - 1) * hidden + j[None, :], mask=more, other=0.0)
        i, f, g, o = i.to(tl.float32), f.to(tl.float32), g.to(tl.float32), o.to(tl.float32)
        before = before.to(tl.float32)
        dh += d_out.to(tl.float32)
        now = tanh(f * before + i * g)
        dc += dh * o * (1 - now * now)
        di, df = dc * g * i * (1 - i), dc * before * f * (1 - f)
        dg, do = dc * i * (1 - g * g), dh * now * o * (1 - o)
        dc *= f
        at = token * 4 * hidden + j[None, :]
        tl.store(d_parts + at, di.to(d_parts.dtype.element_ty), mask=inside)
        tl.store(d_parts + at + hidden, df.to(d_parts.dtype.element_ty), mask=inside)
        tl.store(d_parts + at + 2 * hidden, dg.to(d_parts.dtype.element_ty), mask=inside)
        tl.store(d_parts + at + 3 * hidden, do.to(d_parts.dtype.element_ty), mask=inside)
        if UNITS:
            largest = tl.maximum(tl.maximum(tl.abs(di), tl.abs(df)), tl.maximum(tl.abs(dg), tl.abs(do)))
            power = tl.max(largest, 1).to(tl.int32, bitcast=True) & 0x7F800000
            d_unit = tl.maximum(power.to(tl.float32, bitcast=True), smallest) * H_UNIT
            d_scale = (1 / d_unit)[:, None]
            di, df, dg, do = di * d_scale, df * d_scale, dg * d_scale, do * d_scale
        half = weight.dtype.element_ty
        dh = tl.dot(di.to(half), wi)
        dh = tl.dot(df.to(half), wf, dh)
        dh = tl.dot(dg.to(half), wg, dh)
        dh = tl.dot(do.to(half), wo, dh)
        if UNITS:
            dh *= (scale * d_unit)[:, None]
        i, f, g, o = following
        before, d_out = following_before, following_out
        token -= 1
