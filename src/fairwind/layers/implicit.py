"""Convolutions of stacked models on a GPU that read windows in place, by kernels of our own.

As matrix products, convolutions write every window to memory, nine times the activations for a kernel of
3×3. These do not. They multiply numbers of 16 bits. Where float32 factors may be rounded to TF32, each row's
are scaled by a power of two and rounded to float16, which has TF32's ten bits: only numbers 2²⁸ times smaller
than the row's largest lose some of them. Sums are float32.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICES = ("cuda",)
HALF = (torch.bfloat16, torch.float16)
SMALLEST = 2.0**-100  # number that a row is scaled by
FEW = 2048  # pixels that a part of the sum over them has at least
MOST = 256  # outputs up to which the windows of 16-bit numbers cost more than a slower product


class Window(NamedTuple):
    """How windows lie in an image; two numbers each, for height and width."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  # zeros before and
    after: tuple[int, ...]  # after the image

    def out(self, spatial: Sequence[int]) -> list[int]:
        """How many windows there are."""
        sizes = zip(spatial, *self, strict=True)
        return [(n + a + z - d * (k - 1) - 1) // s + 1 for n, k, s, d, a, z in sizes]


def reads_in_place(x: Tensor, channels: int, outputs: int) -> bool:
    """Whether these kernels are faster for such inputs, and exact enough."""
    if x.device.type not in DEVICES or x.numel() * max(1, outputs / channels) >= 1 << 31:
        return False  # within a row offsets have 32 bits
    if x.dtype == torch.float32:
        return bool(_rounds())
    # Products of PyTorch's are faster than ours in themselves.
    return x.dtype in HALF and _there() and channels >= 16 and outputs <= MOST


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rounds() -> bool:
    return torch.get_float32_matmul_precision() != "highest" and _there()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _there() -> bool:
    return find_spec("triton") is not None


class Convolution(torch.autograd.Function):
    """The convolution of x (..., B, H, W, C) with a kernel (..., h, w, C, outputs)."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, window: Window) -> tuple[Tensor, ...]:
        """Outputs (..., B, H', W', outputs), and the factors in 16 bits if they were rounded."""
        (rows, x_unit), (kernels, unit) = _half(_packed(_rows(x))), _half(_rows(kernel))
        y = convolve(rows, x_unit, kernels, unit, *window[1:])
        y = y.view(*x.shape[:-4], *y.shape[1:])
        return (y,) if x_unit is None or unit is None else (y, rows, x_unit, kernels, unit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, kernel, ctx.window = inputs
        ctx.shapes = x.shape, kernel.shape
        ctx.save_for_backward(*(output[1:] or (x, kernel)))
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x_shape, kernel_shape = ctx.shapes
        how = *ctx.window.stride, *ctx.window.dilation, *ctx.window.before
        with torch.no_grad():  # there is no second derivative to prepare for
            if len(ctx.saved_tensors) == 4:
                x, x_unit, kernel, kernel_unit = ctx.saved_tensors
            else:
                x, kernel = map(_rows, ctx.saved_tensors)
                x, x_unit, kernel_unit = _packed(x), None, None
            d_y, y_unit = _half(_packed(_rows(d_y)))
            d_kernel = convolve_pixels(x, x_unit, d_y, y_unit, kernel_shape[-4:-2], how).view(kernel_shape)
            d_x = None
            if ctx.needs_input_grad[0]:
                d_x = convolve_back(d_y, y_unit, kernel, kernel_unit, x_shape[-3:-1], how).view(x_shape)
        return d_x, d_kernel, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        """Stacked models are one more leading dimension."""
        x, kernel = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(inputs[:2], in_dims[:2], strict=True)
        )
        found = Convolution.apply(x, kernel, inputs[2])  # type: ignore[no-untyped-call]
        return found, (0,) * len(found)


def _rows(t: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return t.unsqueeze(0) if t.dim() == 4 else t.flatten(0, -5)


def _packed(t: Tensor) -> Tensor:
    """Rows of contiguous numbers, wherever each begins."""
    return t[:1].contiguous().expand_as(t) if t.stride(0) == 0 else t.contiguous()


def _half(t: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows of 16-bit numbers, and each row's unit (rows,) if they were scaled."""
    if t.dtype in HALF:
        return t, None
    shared = t.stride(0) == 0
    one = t[:1] if shared else t
    largest = one.abs().amax((1, 2, 3, 4))
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two, not above it
    unit = power.clamp(min=SMALLEST) * 2.0**-14
    half = (one * (1 / unit).view(-1, 1, 1, 1, 1)).half()
    return (half.expand_as(t), unit.expand(t.shape[0]).clone()) if shared else (half, unit)


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
    # Pixels that differ by the stride see the same places of the kernel: a convolution for each such set.
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
    """Places of a kernel that see the pixels start, start + stride, …, and the windows they belong to."""

    size: int  # pixels
    places: int
    place: int  # the first, of which every
    skip: int  # one counts
    first: int  # window
    step: int  # from one place's window to the next's


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
    from fairwind.layers import kernels

    rows, samples, height, width, channels = x.shape
    out_height, out_width, outputs = d_y.shape[2:]
    pixels, terms = samples * out_height * out_width, kernel[0] * kernel[1] * channels
    m = 64 if outputs <= 64 else 128
    n, warps = (128, 4) if outputs <= 128 else (256, 8)
    n = min(n, max(32, 1 << (terms - 1).bit_length())) if outputs > 64 or terms < 64 else 64
    blocks = -(-terms // n) * -(-outputs // m)
    parts = 1  # added up in a second pass, because few programs do not fill a GPU
    while blocks * parts < 32 and pixels // (2 * parts) >= FEW:
        parts *= 2
    span = -(-pixels // (64 * parts)) * 64
    empty = _kernels(x, x_unit, d_y, y_unit, kernel, how)
    d_w = empty if parts == 1 else empty.new_empty(rows, parts, *empty.shape[1:], dtype=torch.float32)
    kernels.correlate_pixels[(blocks * parts * rows,)](
        *(x, d_y, d_w, x_unit, y_unit, x.stride(0), d_y.stride(0), pixels, height, width, channels),
        *(out_height, out_width, outputs, *kernel, *how[:2], -how[4], -how[5], *how[2:4], parts, span),
        **{"M": m, "N": n, "K": 64, "UNITS": x_unit is not None, "num_warps": warps, "num_stages": 3},
    )
    return d_w if parts == 1 else d_w.sum(1).to(empty.dtype)


convolve_pixels.register_fake(_kernels)


def _correlate(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    x_unit: Tensor | None,
    w_unit: Tensor | None,
    sizes: tuple[int, ...],
    where: tuple[int, ...],
) -> None:
    """Runs the kernel of that name; tile sizes follow from shapes alone, so that a run repeats to the bit."""
    from fairwind.layers import kernels

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
