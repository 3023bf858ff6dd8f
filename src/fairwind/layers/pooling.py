"""Pooling over windows as plain operations, where it is compiled.

The batching rules of PyTorch's kernels make the compiler fix the number of rows. Options that are rare,
`ceil_mode` for example, are left to these kernels.
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
        ):  # PyTorch's asks how its input lies in memory, which has no answer
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
    def larger(a: Tensor, b: Tensor) -> Tensor:
        return torch.where((b > a) | b.isnan(), b, a)  # of equals the first, as PyTorch's

    return reduce(larger, _views(layer, x, dims, -math.inf))


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
