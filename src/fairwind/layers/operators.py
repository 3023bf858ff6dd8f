"""The products of a convolution as custom PyTorch operators, opaque to the compiler.

Tile sizes follow from shapes alone, so that results are reproducible to the bit.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.engine import tuning


class Window(NamedTuple):
    """The geometry of windows in an image; two numbers each, for height and width."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  # zeros before and
    after: tuple[int, ...]  # after the image

    def out(self, spatial: Sequence[int]) -> list[int]:
        """How many windows there are."""
        sizes = zip(spatial, *self, strict=True)
        return [(n + a + z - d * (k - 1) - 1) // s + 1 for n, k, s, d, a, z in sizes]


def _outputs(
    x: Tensor,
    x_unit: Tensor | None,
    w: Tensor,
    w_unit: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
) -> Tensor:
    window = Window(*map(tuple, (w.shape[1:3], stride, dilation, before, after)))
    dtype = x.dtype if x_unit is None else torch.float32
    return x.new_empty(*x.shape[:2], *window.out(x.shape[2:4]), w.shape[4], dtype=dtype)


@torch.library.custom_op("fairwind::convolve", mutates_args=())
def convolve(
    x: Tensor,
    x_unit: Tensor | None,
    w: Tensor,
    w_unit: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
) -> Tensor:
    """Outputs (R, B, H', W', outputs) of x (R, B, H, W, C) with kernels (R, h, w, C, outputs)."""
    y = _outputs(x, x_unit, w, w_unit, stride, dilation, before, after)
    sizes = *y.shape[2:4], *w.shape[1:3], *stride, *(-n for n in before), *dilation
    where = 0, *w.stride()[1:], 0, *y.stride()[1:4]
    _correlate(x, w, y, x_unit, w_unit, sizes, where)
    return y


convolve.register_fake(_outputs)


def _inputs(
    d_y: Tensor,
    y_unit: Tensor | None,
    w: Tensor,
    w_unit: Tensor | None,
    spatial: Sequence[int],
    how: Sequence[int],
) -> Tensor:
    dtype = d_y.dtype if y_unit is None else torch.float32
    return d_y.new_empty(*d_y.shape[:2], *spatial, w.shape[3], dtype=dtype)


@torch.library.custom_op("fairwind::convolve_back", mutates_args=())
def convolve_back(
    d_y: Tensor,
    y_unit: Tensor | None,
    w: Tensor,
    w_unit: Tensor | None,
    spatial: Sequence[int],
    how: Sequence[int],  # stride, dilation and zeros before, two numbers each
) -> Tensor:
    """The gradient with respect to x."""
    d_x = _inputs(d_y, y_unit, w, w_unit, spatial, how)
    _, w_h, w_w, w_channel, w_output = w.stride()
    _, d_sample, d_h, d_w, _ = d_x.stride()
    # Pixels that differ by the stride use the same kernel positions: one convolution for each such set.
    sets = [
        [_seen_by(start, size, *rest) for start in range(rest[1])]
        for size, *rest in zip(spatial, w.shape[1:3], how[:2], how[2:4], how[4:], strict=True)
    ]
    for at_h, h in enumerate(sets[0]):
        for at_w, v in enumerate(sets[1]):
            sizes = h.size, v.size, h.places, v.places, 1, 1, h.first, v.first, h.step, v.step
            where = h.place * w_h + v.place * w_w, h.skip * w_h, v.skip * w_w, w_output, w_channel
            to = at_h * d_h + at_w * d_w, d_sample, how[0] * d_h, how[1] * d_w
            _correlate(d_y, w, d_x, y_unit, w_unit, sizes, (*where, *to))
    return d_x


convolve_back.register_fake(_inputs)


class _Seen(NamedTuple):
    """Kernel positions that use the pixels start, start + stride, …, and their windows."""

    size: int  # pixels
    places: int
    place: int  # the first, of which every
    skip: int  # one counts
    first: int  # window
    step: int  # from one position's window to the next's


def _seen_by(start: int, size: int, kernel: int, stride: int, dilation: int, before: int) -> _Seen:
    places = [k for k in range(kernel) if (start + before - k * dilation) % stride == 0]
    count, skip = max(0, -(-(size - start) // stride)), stride // math.gcd(stride, dilation)
    place = places[0] if places else 0
    first = (start + before - place * dilation) // stride
    return _Seen(count, len(places), place, skip, first, -skip * dilation // stride)


def _kernels(
    x: Tensor,
    x_unit: Tensor | None,
    d_y: Tensor,
    y_unit: Tensor | None,
    kernel: Sequence[int],
    how: Sequence[int],
) -> Tensor:
    dtype = x.dtype if x_unit is None else torch.float32
    return x.new_empty(x.shape[0], *kernel, x.shape[4], d_y.shape[4], dtype=dtype)


@torch.library.custom_op("fairwind::convolve_pixels", mutates_args=())
def convolve_pixels(
    x: Tensor,
    x_unit: Tensor | None,
    d_y: Tensor,
    y_unit: Tensor | None,
    kernel: Sequence[int],
    how: Sequence[int],
) -> Tensor:
    """The gradient with respect to the kernels (R, h, w, C, outputs)."""
    from fairwind.layers.gpu import kernels

    rows, samples, height, width, channels = x.shape
    out_height, out_width, outputs = d_y.shape[2:]
    pixels, terms = samples * out_height * out_width, kernel[0] * kernel[1] * channels
    m = 64 if outputs <= 64 else 128
    n, warps = (128, 4) if outputs <= 128 else (256, 8)
    n = min(n, max(32, 1 << (terms - 1).bit_length())) if outputs > 64 or terms < 64 else 64
    blocks = -(-terms // n) * -(-outputs // m)
    parts, span = _parts(blocks * rows, pixels, 64)
    empty = _kernels(x, x_unit, d_y, y_unit, kernel, how)
    d_w = empty if parts == 1 else empty.new_empty(rows, parts, *empty.shape[1:], dtype=torch.float32)
    kernels.correlate_pixels[(blocks * parts * rows,)](
        *(x, d_y, d_w, x_unit, y_unit, x.stride(0), d_y.stride(0), pixels, height, width, channels),
        *(out_height, out_width, outputs, *kernel, *how[:2], -how[4], -how[5], *how[2:4], parts, span),
        **{"M": m, "N": n, "K": 64, "UNITS": x_unit is not None, "num_warps": warps, "num_stages": 3},
    )
    return d_w if parts == 1 else d_w.sum(1).to(empty.dtype)


convolve_pixels.register_fake(_kernels)


def _parts(programs: int, pixels: int, step: int) -> tuple[int, int]:
    """The number of parts of a sum over pixels, and the pixels of each, a multiple of the kernel's step."""
    parts = 1  # added up in a second pass
    while programs * parts < tuning.MIN_GPU_PROGRAMS and pixels // (2 * parts) >= tuning.MIN_SUMMED_PIXELS:
        parts *= 2
    return parts, -(-pixels // (step * parts)) * step


@torch.library.custom_op("fairwind::sum_pixels", mutates_args=())
def sum_pixels(d_y: Tensor) -> Tensor:
    """The gradient with respect to the bias (R, outputs).

    Hidden from the compiler, which would compute d_y a second time inside a slow sum.
    """
    from fairwind.layers.gpu import kernels

    rows, pixels, outputs = d_y.shape[0], d_y.shape[1:4].numel(), d_y.shape[4]
    m = min(64, max(16, 1 << (outputs - 1).bit_length()))
    k = 4096 // m
    blocks = -(-outputs // m)
    parts, span = _parts(blocks * rows, pixels, k)
    sums = d_y.new_empty(rows, parts, outputs, dtype=torch.float32)
    kernels.add_pixels[(blocks * parts * rows,)](
        d_y, sums, d_y.stride(0), pixels, outputs, parts, span, M=m, K=k, num_warps=4
    )
    return sums.sum(1).to(d_y.dtype)


sum_pixels.register_fake(lambda d_y: d_y.new_empty(d_y.shape[0], d_y.shape[4]))


def _correlate(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    x_unit: Tensor | None,
    w_unit: Tensor | None,
    sizes: tuple[int, ...],
    where: tuple[int, ...],
) -> None:
    """Runs the kernel of that name."""
    from fairwind.layers.gpu import kernels

    rows, samples, height, width, channels = x.shape
    pixels, outputs = samples * sizes[0] * sizes[1], y.shape[4]
    if not pixels:
        return
    k = math.gcd(channels, 64)
    aligned = k >= 16
    m, n = (128 if pixels > 256 else 64), (64 if outputs <= 64 else 128)
    if not aligned:
        m, k = 256, 16
    grid = (-(-pixels // m) * -(-outputs // n) * rows,)
    kernels.correlate[grid](
        *(x, w, y, x_unit, w_unit, x.stride(0), w.stride(0), y.stride(0), pixels, height, width, channels),
        *(sizes[0], sizes[1], outputs, *sizes[2:], *where),
        **{"M": m, "N": n, "K": k, "ALIGNED": aligned, "UNITS": x_unit is not None},
        **{"num_warps": 4, "num_stages": 3},
    )
