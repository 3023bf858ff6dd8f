"""Pooling as plain operations, for compiled steps.

The batching rules of PyTorch's kernels make the compiler fix the number of rows. Rare options, such as
`ceil_mode`, still use these kernels.
"""

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.utils import _ntuple

from fairwind.layers.convolution import shifted
from fairwind.layers.tracing import is_traced


class MaxPool1d(nn.MaxPool1d):
    def forward(self, input: Tensor) -> Tensor:
        return _largest(self, input, 1) if _plain(self) else super().forward(input)


class MaxPool2d(nn.MaxPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return _largest(self, input, 2) if _plain(self) else super().forward(input)


class AvgPool1d(nn.AvgPool1d):
    def forward(self, input: Tensor) -> Tensor:
        return _mean(self, input, 1) if _plain(self) else super().forward(input)


class AvgPool2d(nn.AvgPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return _mean(self, input, 2) if _plain(self) else super().forward(input)


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    def forward(self, input: Tensor) -> Tensor:
        if self.output_size in (
            1,
            (1, 1),
        ):  # PyTorch's asks for the memory format, which is undefined here
            return input.mean((-2, -1), keepdim=True)
        return super().forward(input)


def _plain(layer: Any) -> bool:
    rare = (
        layer.ceil_mode
        or getattr(layer, "return_indices", False)
        or not getattr(layer, "count_include_pad", True)
    )
    return is_traced() and not rare


def _largest(layer: Any, x: Tensor, dims: int) -> Tensor:
    every = _ntuple(dims)  # type: ignore[no-untyped-call]
    kernel, sizes = every(layer.kernel_size), x.shape[-dims:]
    simple = (
        kernel == every(layer.stride)
        and not any(every(layer.padding))
        and every(layer.dilation) == (1,) * dims
    )
    if simple and not any(size % k for size, k in zip(sizes, kernel, strict=True)):
        found: tuple[Tensor, Tensor] = LargestOfTile.apply(x, kernel)  # type: ignore[no-untyped-call]
        return found[0]
    return _larger(_views(layer, x, dims, -math.inf))[0]


def _larger(views: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The maximum over the views, and its index; the first of equals, as in PyTorch."""
    most, which = views[0], torch.zeros_like(views[0], dtype=torch.uint8)
    for place, view in enumerate(views[1:], 1):
        larger = (view > most) | view.isnan()
        most, which = torch.where(larger, view, most), torch.where(larger, place, which)
    return most, which


class LargestOfTile(torch.autograd.Function):
    """Max pooling without overlap or gaps: gradients are looked up, not added."""

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The maximum of every tile of x (..., *spatial), and its position in the tile."""
        return _larger(shifted(x, x.dim() - len(kernel), kernel, kernel, (1,) * len(kernel)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kernel = inputs[1]
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (which,) = ctx.saved_tensors
        sizes = d_y.shape[d_y.dim() - len(ctx.kernel) :]
        lead = d_y.shape[: -len(sizes)]
        each = [n for size in sizes for n in (size, 1)]  # (..., height, 1, width, 1)
        inside = [n for k in ctx.kernel for n in (1, k)]  # (1, kernel's height, 1, kernel's width)
        with torch.no_grad():  # there is no second derivative to prepare for
            places = torch.arange(math.prod(ctx.kernel), device=d_y.device, dtype=which.dtype).view(inside)
            d_x = torch.where(which.reshape(*lead, *each) == places, d_y.reshape(*lead, *each), 0)
        return d_x.reshape(*lead, *(n * k for n, k in zip(sizes, ctx.kernel, strict=True))), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, kernel: tuple[int, ...]) -> tuple[Any, Any]:
        """Stacked models are one more leading dimension."""
        return LargestOfTile.apply(x.movedim(in_dims[0], 0), kernel), (0, 0)  # type: ignore[no-untyped-call]


def _mean(layer: Any, x: Tensor, dims: int) -> Tensor:
    views = _views(layer, x, dims, 0)
    total: Tensor = reduce(torch.add, views)
    return total / (getattr(layer, "divisor_override", None) or len(views))


def _views(layer: Any, x: Tensor, dims: int, padding: float) -> list[Tensor]:
    every = _ntuple(dims)  # type: ignore[no-untyped-call]
    pads = [n for n in reversed(every(layer.padding)) for _ in range(2)]
    if any(pads):
        x = F.pad(x, pads, value=padding)
    dilation = getattr(layer, "dilation", 1)
    return shifted(x, x.dim() - dims, every(layer.kernel_size), every(layer.stride), every(dilation))


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.MaxPool1d: MaxPool1d,
    nn.MaxPool2d: MaxPool2d,
    nn.AvgPool1d: AvgPool1d,
    nn.AvgPool2d: AvgPool2d,
    nn.AdaptiveAvgPool2d: AdaptiveAvgPool2d,
}
