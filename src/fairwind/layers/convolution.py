"""Convolutions as matrix products.

Under vmap, PyTorch turns convolutions with different weights in every row into one grouped convolution,
which is slow; matrix products become one batched product. Internally, channels come last, so that the
elements of a window are contiguous.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairwind.layers.batching import models_first
from fairwind.layers.gpu import implicit
from fairwind.layers.operators import Window
from fairwind.layers.tracing import is_traced, must_be_contiguous


def shifted(
    x: Tensor, first: int, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[Tensor]:
    """For each kernel position, a strided view of x, whose spatial dimensions start at `first`."""
    sizes = zip(x.shape[first:], kernel, dilation, strict=False)
    spans = [size - d * (k - 1) for size, k, d in sizes]  # number of windows
    if min(spans) < 1:
        raise RuntimeError("the kernel is larger than the padded input")
    views = []
    for place in product(*map(range, kernel)):
        cuts = [slice(i * d, i * d + n, s) for i, d, n, s in zip(place, dilation, spans, stride, strict=True)]
        views.append(x[(*[slice(None)] * first, *cuts)])
    return views


class Product(nn.modules.conv._ConvNd):
    """The forward pass of a convolution in any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:
        depthwise = 1 < self.groups == self.in_channels
        if depthwise and not is_traced():  # stacked, it is depthwise as well, for which
            return self._conv_forward(input, self.weight, self.bias)  # PyTorch has kernels
        dims = len(self.kernel_size)
        if input.dim() not in (dims + 1, dims + 2):
            raise RuntimeError(f"expected {dims + 1}-D or {dims + 2}-D input, got {input.dim()}-D")
        if input.shape[-1 - dims] != self.in_channels:
            raise RuntimeError(f"expected {self.in_channels} channels, got {input.shape[-1 - dims]}")
        x = input if input.dim() == dims + 2 else input.unsqueeze(0)
        y = self._in_place(x) if self._reads_in_place(x) else self._by_windows(x, depthwise)
        y = y.movedim(-1, 1)
        y = y.contiguous() if must_be_contiguous() else y
        return y if input.dim() == dims + 2 else y.squeeze(0)

    def _reads_in_place(self, x: Tensor) -> bool:
        simple = x.dim() == 4 and self.groups == 1 and self.padding_mode == "zeros"
        return simple and implicit.reads_in_place(x, self.in_channels, self.out_channels)

    def _in_place(self, x: Tensor) -> Tensor:
        """Outputs (B, ..., outputs), without storing windows."""
        pads = self._reversed_padding_repeated_twice
        before, after = tuple(pads[-2::-2]), tuple(pads[::-2])
        window = Window(self.kernel_size, self.stride, self.dilation, before, after)
        if min(window.out(x.shape[2:])) < 1:
            raise RuntimeError("the kernel is larger than the padded input")
        kernel = self.weight.permute(2, 3, 1, 0)
        y: Tensor = implicit.Convolution.apply(  # type: ignore[no-untyped-call]
            x.movedim(1, -1), kernel, self.bias, window
        )[0]
        return y

    def _by_windows(self, x: Tensor, depthwise: bool) -> Tensor:
        """Outputs (B, ..., outputs), as products of windows."""
        x = self._padded(x)
        x = torch.unflatten(x, -1, (self.groups, -1)).movedim(-2, 0)
        kernel = torch.unflatten(self.weight, 0, (self.groups, -1)).flatten(3)
        kernel = kernel.permute(0, 3, 2, 1)  # (groups, places, channels of a group, outputs of a group)
        if depthwise:
            y = _summed(shifted(x, 2, self.kernel_size, self.stride, self.dilation), kernel)
        else:
            sizes = Sizes(self.kernel_size, self.stride, self.dilation)
            y, _ = WindowProduct.apply(x, kernel, sizes)  # type: ignore[no-untyped-call]
        y = y.movedim(0, -2).flatten(-2)
        return y if self.bias is None else y + self.bias

    def _padded(self, x: Tensor) -> Tensor:
        """Padded inputs (B, ..., channels), contiguous."""
        pads = self._reversed_padding_repeated_twice
        if self.padding_mode != "zeros":
            return F.pad(x, pads, mode=self.padding_mode).movedim(1, -1)
        x = x.movedim(1, -1)
        return F.pad(x, (0, 0, *pads)) if any(pads) else x.contiguous()


class Sizes(NamedTuple):
    """Parameters of a convolution, along each spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


class WindowProduct(torch.autograd.Function):
    """The product of all windows of x with a kernel, with a hand-written backward pass.

    Autograd would add up the gradients of overlapping windows position by position. Where it pays, the
    gradient with respect to x is computed as a convolution of the outputs' gradient with the reversed kernel.
    """

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Outputs (..., B, *windows, outputs) of x (..., B, *spatial, channels), and its columns (im2col).

        The kernel is (..., places, channels, outputs).
        """
        columns, shape = _columns(x, sizes)
        return _outputs(columns, kernel, shape), columns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, kernel, ctx.sizes = inputs
        ctx.spatial = x.shape[-1 - len(ctx.sizes.kernel) : -1]
        ctx.save_for_backward(kernel, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor, None]:
        kernel, columns = ctx.saved_tensors
        sizes, dims = ctx.sizes, len(ctx.sizes.kernel)
        with torch.no_grad():  # there is no second derivative to prepare for
            d_kernel = columns.mT @ d_y.flatten(-2 - dims, -2)
            numbers = kernel.shape[-3] * kernel.shape[-2]
            d_kernel = torch.unflatten(d_kernel[..., :numbers, :], -2, kernel.shape[-3:-1])
            d_x = None
            if ctx.needs_input_grad[0]:
                reverse = _reversing_pays(d_y, kernel, sizes)
                d_x = (_reversed if reverse else _place_by_place)(d_y, kernel, ctx.spatial, sizes)
        return d_x, d_kernel, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        """Stacked models are one more leading dimension."""
        stacked = models_first(info.batch_size, in_dims, inputs)
        return WindowProduct.apply(*stacked), (0, 0)  # type: ignore[no-untyped-call]


def _columns(x: Tensor, sizes: Sizes) -> tuple[Tensor, tuple[int, ...]]:
    """Windows of x as matrices (..., B · windows, places · channels), and the shape (..., B, *windows)."""
    dims = len(sizes.kernel)
    first = x.dim() - 1 - dims
    for d, (kernel, stride, dilation) in enumerate(zip(*sizes, strict=True)):
        if kernel > 1 or stride > 1:
            x = x.unfold(first + d, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        else:
            x = x.unsqueeze(-1)
    windows = x.movedim(first + dims, -1)  # (..., B, *windows, *kernel, channels)
    columns = windows.flatten(-1 - dims).flatten(first - 1, -2)
    short = -columns.shape[-1] % 8  # tensor cores need multiples of eight columns
    return F.pad(columns, (0, short)) if short else columns, windows.shape[: first + dims]


def _outputs(columns: Tensor, kernel: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The product of columns and a kernel (..., places, channels, outputs), in that shape."""
    weights = kernel.flatten(-3, -2)
    short = columns.shape[-1] - weights.shape[-2]
    return (columns @ (F.pad(weights, (0, 0, 0, short)) if short else weights)).view(*shape, -1)


def _reversing_pays(d_y: Tensor, kernel: Tensor, sizes: Sizes) -> bool:
    """Whether the windows of d_y are smaller than the gradients of x's windows."""
    channels, outputs = kernel.shape[-2:]
    pixels = d_y.shape[-2 - len(sizes.kernel) : -1].numel()
    return all(s == 1 for s in sizes.stride) and outputs * (pixels + channels) < channels * pixels


def _reversed(d_y: Tensor, kernel: Tensor, spatial: tuple[int, ...], sizes: Sizes) -> Tensor:
    """The gradient with respect to x as a convolution, for stride 1."""
    pads = [0, 0]
    for size, dilation in zip(sizes.kernel[::-1], sizes.dilation[::-1], strict=True):
        pads += [dilation * (size - 1)] * 2
    columns, shape = _columns(F.pad(d_y, pads) if any(pads) else d_y, sizes)
    return _outputs(columns, kernel.flip(-3).mT, shape)


def _place_by_place(d_y: Tensor, kernel: Tensor, spatial: tuple[int, ...], sizes: Sizes) -> Tensor:
    """The gradient with respect to x as a sum over the kernel's positions."""
    dims, channels = len(spatial), kernel.shape[-2]
    columns = d_y.flatten(-2 - dims, -2) @ kernel.flatten(-3, -2).mT
    d_windows = columns.view(*d_y.shape[:-1], kernel.shape[-3], channels).unbind(-2)
    if all(s == 1 for s in sizes.stride):  # one expression, for the compiler
        ends = [d * (k - 1) for k, d in zip(sizes.kernel, sizes.dilation, strict=True)]
        places = product(*(range(0, end + 1, d) for end, d in zip(ends, sizes.dilation, strict=True)))
        terms = []
        for part, place in zip(d_windows, places, strict=True):
            pads = [n for at, end in zip(place[::-1], ends[::-1], strict=True) for n in (at, end - at)]
            terms.append(F.pad(part, (0, 0, *pads)))
        return reduce(torch.add, terms)
    d_x = d_y.new_zeros(*d_y.shape[: -1 - dims], *spatial, channels)
    for part, view in zip(d_windows, shifted(d_x, d_x.dim() - 1 - dims, *sizes), strict=True):
        view.add_(part)
    return d_x


def _summed(views: list[Tensor], kernel: Tensor) -> Tensor:
    """The same for groups of one channel, position by position, which the compiler fuses into one kernel."""
    ones = (1,) * (views[0].dim() - 2)
    parts = kernel.unbind(1)  # (groups, 1, outputs of a group) each
    terms = [view * part.view(len(part), *ones, -1) for view, part in zip(views, parts, strict=True)]
    return reduce(torch.add, terms)


class Conv1d(Product, nn.Conv1d):
    pass


class Conv2d(Product, nn.Conv2d):
    pass


class Conv3d(Product, nn.Conv3d):
    pass


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
}
