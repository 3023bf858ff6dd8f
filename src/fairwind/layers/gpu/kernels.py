"""Triton kernels for convolutions of stacked models, which read windows in place.

Imported only if there is a GPU. Numbers have 16 bits, sums 32, and channels come last. All sizes except tile
sizes are arguments, so that few kernels are compiled; none depends on the number of rows.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# Not specialised by divisibility; other arguments are, to copy 16 bytes at once.
SIZES = [
    *("height", "width", "out_height", "out_width", "steps_h", "steps_w", "stride_h", "stride_w"),
    *("first_h", "first_w", "step_h", "step_w", "parts", "span"),
]
kernel: Callable[[Callable[..., None]], Any] = triton.jit(do_not_specialize=SIZES)


@kernel
def correlate(  # type: ignore[no-untyped-def]
    x,
    w,
    y,
    x_unit,
    w_unit,
    x_row,
    w_row,
    y_row,
    pixels,
    height,
    width,
    channels,
    out_height,
    out_width,
    outputs,
    steps_h,
    steps_w,
    stride_h,
    stride_w,
    first_h,
    first_w,
    step_h,
    step_w,
    w_first,
    w_h,
    w_w,
    w_channel,
    w_output,
    y_first,
    y_sample,
    y_h,
    y_w,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    """y[b, i, j, n] = Σ x[b, i·stride + first + s·step, …, c] · w[s, …, c, n] for every row.

    Outside its height and width x is zero. A program computes M pixels by N outputs, K terms at a time, which
    are channels of one window position if `ALIGNED`.
    """
    blocks_n = tl.cdiv(outputs, N)
    blocks = tl.cdiv(pixels, M) * blocks_n
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    x += row * x_row
    w += row * w_row + w_first
    y += row * y_row + y_first
    m = block // blocks_n * M + tl.arange(0, M)
    n = block % blocks_n * N + tl.arange(0, N)
    k = tl.arange(0, K)
    b, i, j = m // (out_height * out_width), m // out_width % out_height, m % out_width
    h, v = i * stride_h + first_h, j * stride_w + first_w
    corner = ((b * height + h) * width + v) * channels
    inside, wanted = m < pixels, n < outputs
    places = steps_h * steps_w
    total = tl.zeros((M, N), tl.float32)
    if ALIGNED:
        for t in range(0, places * (channels // K)):
            place, c = t % places, t // places * K + k
            s, u = place // steps_w, place % steps_w
            at_h, at_v = h + s * step_h, v + u * step_w
            seen = inside & (at_h >= 0) & (at_h < height) & (at_v >= 0) & (at_v < width)
            at_x = corner[:, None] + ((s * step_h * width + u * step_w) * channels + c)[None, :]
            at_w = (s * w_h + u * w_w) + c[:, None] * w_channel + n[None, :] * w_output
            window = tl.load(x + at_x, mask=seen[:, None], other=0.0)
            total = tl.dot(window, tl.load(w + at_w, mask=wanted[None, :], other=0.0), total)
    else:
        terms = places * channels
        for t in range(0, tl.cdiv(terms, K)):
            q = t * K + k
            place, c = q // channels, q % channels
            s, u = place // steps_w, place % steps_w
            at_h, at_v = h[:, None] + (s * step_h)[None, :], v[:, None] + (u * step_w)[None, :]
            seen = inside[:, None] & (q < terms)[None, :]
            seen = seen & (at_h >= 0) & (at_h < height) & (at_v >= 0) & (at_v < width)
            at_x = corner[:, None] + ((s * step_h * width + u * step_w) * channels + c)[None, :]
            at_w = (s * w_h + u * w_w + c * w_channel)[:, None] + n[None, :] * w_output
            weights = tl.load(w + at_w, mask=(q < terms)[:, None] & wanted[None, :], other=0.0)
            total = tl.dot(tl.load(x + at_x, mask=seen, other=0.0), weights, total)
    if UNITS:
        total = total * tl.load(x_unit + row) * tl.load(w_unit + row)
    at = (b * y_sample + i * y_h + j * y_w)[:, None] + n[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[:, None] & wanted[None, :])


@kernel
def correlate_pixels(  # type: ignore[no-untyped-def]
    x,
    d_y,
    d_w,
    x_unit,
    y_unit,
    x_row,
    y_row,
    pixels,
    height,
    width,
    channels,
    out_height,
    out_width,
    outputs,
    steps_h,
    steps_w,
    stride_h,
    stride_w,
    first_h,
    first_w,
    step_h,
    step_w,
    parts,
    span,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    """d_w[s, …, c, n] = Σ x[b, i·stride + first + s·step, …, c] · d_y[b, i, j, n] for every row.

    The sum is over pixels, `span` of them in each of several parts. A program computes M outputs by N
    elements of the window, K pixels at a time.
    """
    terms = steps_h * steps_w * channels
    blocks_m = tl.cdiv(outputs, M)
    blocks = tl.cdiv(terms, N) * blocks_m
    part = tl.program_id(0) // blocks  # of all rows
    block = tl.program_id(0) % blocks
    row = (part // parts).to(tl.int64)
    begin = tl.multiple_of(part % parts * span, K)
    x += row * x_row
    d_y += row * y_row
    d_w += part.to(tl.int64) * terms * outputs
    m = block % blocks_m * M + tl.arange(0, M)
    q = block // blocks_m * N + tl.arange(0, N)
    place, c = q // channels, q % channels
    s, u = place // steps_w * step_h, place % steps_w * step_w
    shift = (s * width + u) * channels + c
    wanted_m, wanted_q = m < outputs, q < terms
    total = tl.zeros((M, N), tl.float32)
    for start in range(begin, min(begin + span, pixels), K):
        k = start + tl.arange(0, K)
        b, i, j = k // (out_height * out_width), k // out_width % out_height, k % out_width
        h, v = i * stride_h + first_h, j * stride_w + first_w
        corner = ((b * height + h) * width + v) * channels
        inside = k < pixels
        at_h, at_v = h[:, None] + s[None, :], v[:, None] + u[None, :]
        seen = inside[:, None] & wanted_q[None, :]
        seen = seen & (at_h >= 0) & (at_h < height) & (at_v >= 0) & (at_v < width)
        at_y = k[None, :] * outputs + m[:, None]
        d = tl.load(d_y + at_y, mask=inside[None, :] & wanted_m[:, None], other=0.0)
        window = tl.load(x + corner[:, None] + shift[None, :], mask=seen, other=0.0)
        total = tl.dot(d, window, total)
    if UNITS:
        total = total * tl.load(x_unit + row) * tl.load(y_unit + row)
    at = q[None, :] * outputs + m[:, None]
    tl.store(d_w + at, total.to(d_w.dtype.element_ty), mask=wanted_m[:, None] & wanted_q[None, :])


@kernel
def add_pixels(  # type: ignore[no-untyped-def]
    d_y, sums, y_row, pixels, outputs, parts, span, M: tl.constexpr, K: tl.constexpr
) -> None:
    """sums[n] = Σ d_y[pixel, n] for every row, over `span` pixels in each of several parts.

    A program computes M outputs, K pixels at a time.
    """
    blocks = tl.cdiv(outputs, M)
    part = tl.program_id(0) // blocks  # of all rows
    begin = tl.multiple_of(part % parts * span, K)
    d_y += (part // parts).to(tl.int64) * y_row
    m = tl.program_id(0) % blocks * M + tl.arange(0, M)
    wanted = m < outputs
    total = tl.zeros((K, M), tl.float32)
    for start in range(begin, min(begin + span, pixels), K):
        k = start + tl.arange(0, K)
        inside = (k < pixels)[:, None] & wanted[None, :]
        total += tl.load(d_y + k[:, None] * outputs + m[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + part.to(tl.int64) * outputs + m, tl.sum(total, 0), mask=wanted)
