"""Convolutions as matrix products.

Under vmap, PyTorch turns convolutions with other weights in every row into one grouped convolution, which is
slow; matrix products become one batched product. Inside, channels come last, so that the windows of a
convolution are shifted views side by side.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairwind.layers.tracing import is_traced, must_be_contiguous


def shifted(
    x: Tensor, first: int, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[Tensor]:
    """What each place of a kernel sees of x, whose spatial dimensions start at `first`: strided views."""
    sizes = zip(x.shape[first:], kernel, dilation, strict=False)
    spans = [size - d * (k - 1) for size, k, d in sizes]  # how many places a window may start at
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
        if depthwise and not is_traced():  # stacked it is depthwise, too, for which
            return self._conv_forward(input, self.weight, self.bias)  # PyTorch has kernels
        dims = len(self.kernel_size)
        if input.dim() not in (dims + 1, dims + 2):
            raise RuntimeError(f"expected {dims + 1}-D or {dims + 2}-D input, got {input.dim()}-D")
        x = self._padded(input if input.dim() == dims + 2 else input.unsqueeze(0))
        x = torch.unflatten(x, -1, (self.groups, -1)).movedim(-2, 0)
        kernel = torch.unflatten(self.weight, 0, (self.groups, -1)).flatten(3)
        kernel = kernel.permute(0, 3, 2, 1)  # (groups, places, channels of a group, outputs of a group)
        views = shifted(x, 2, self.kernel_size, self.stride, self.dilation)
        y = _summed(views, kernel) if depthwise else _product(views, kernel)
        y = y.movedim(0, -2).flatten(-2)  # (B, ..., outputs)
        if self.bias is not None:
            y = y + self.bias
        y = y.movedim(-1, 1)
        y = y.contiguous() if must_be_contiguous() else y
        return y if input.dim() == dims + 2 else y.squeeze(0)

    def _padded(self, x: Tensor) -> Tensor:
        """Padded inputs (B, ..., channels), contiguous."""
        pads = self._reversed_padding_repeated_twice
        if self.padding_mode != "zeros":
            return F.pad(x, pads, mode=self.padding_mode).movedim(1, -1)
        x = x.movedim(1, -1)
        return F.pad(x, (0, 0, *pads)) if any(pads) else x.contiguous()


def _product(views: list[Tensor], kernel: Tensor) -> Tensor:
    """One product for each group, (groups, B, ..., outputs of a group)."""
    # Not `cat`, whose batching rule makes the compiler fix the number of rows.
    windows = torch.stack(views, dim=-2) if len(views) > 1 else views[0].unsqueeze(-2)
    columns = windows.flatten(-2).flatten(1, -2)  # (groups, B · ..., places · channels of a group)
    kernel = kernel.flatten(1, 2)
    short = -kernel.shape[1] % 8  # tensor cores want columns in eights
    if short:
        columns, kernel = F.pad(columns, (0, short)), F.pad(kernel, (0, 0, 0, short))
    return (columns @ kernel).view(*windows.shape[:-2], -1)


def _summed(views: list[Tensor], kernel: Tensor) -> Tensor:
    """The same for groups of one channel, place by place: the compiler makes one kernel of it."""
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
