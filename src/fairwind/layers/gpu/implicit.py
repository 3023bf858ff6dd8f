"""Convolutions of stacked models on a GPU with our own kernels, which read windows in place (implicit GEMM).

Im2col writes every window to memory, nine times the activations for a 3×3 kernel. These kernels do not. They
multiply 16-bit numbers (see `sixteen_bits`); sums are float32.
"""

from typing import Any

import torch
from torch import Tensor

from fairwind.engine import tuning
from fairwind.layers.batching import models_first
from fairwind.layers.gpu.sixteen_bits import half, may_be_half, packed
from fairwind.layers.operators import Window, convolve, convolve_back, convolve_pixels, sum_pixels


def reads_in_place(x: Tensor, channels: int, outputs: int) -> bool:
    """Whether these kernels are faster and precise enough for such inputs."""
    if not may_be_half(x) or x.numel() * max(1, outputs / channels) >= 1 << 31:
        return False  # within a row offsets have 32 bits
    # PyTorch's 16-bit products alone are faster than ours, which pays if there are three of them.
    return x.dtype == torch.float32 or outputs <= tuning.MAX_IN_PLACE_OUTPUTS or not torch.is_grad_enabled()


class Convolution(torch.autograd.Function):
    """The convolution of images (..., B, H, W, C) with kernels (..., h, w, C, outputs), plus a bias."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, bias: Tensor | None, window: Window) -> tuple[Tensor, ...]:
        """Outputs (..., B, H', W', outputs), and the factors in 16 bits if they were rounded."""
        (rows, x_unit), (kernels, unit) = half(packed(_rows(x))), half(_rows(kernel))
        y = convolve(rows, x_unit, kernels, unit, *window[1:])
        y = y.view(*x.shape[:-4], *y.shape[1:])
        y = y if bias is None else y + bias[..., None, None, None, :]
        return (y,) if x_unit is None or unit is None else (y, rows, x_unit, kernels, unit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, kernel, bias, ctx.window = inputs
        ctx.shapes = x.shape, kernel.shape, None if bias is None else bias.shape
        ctx.save_for_backward(*(output[1:] or (x, kernel)))
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x_shape, kernel_shape, bias_shape = ctx.shapes
        how = *ctx.window.stride, *ctx.window.dilation, *ctx.window.before
        with torch.no_grad():  # there is no second derivative to prepare for
            if len(ctx.saved_tensors) == 4:
                x, x_unit, kernel, kernel_unit = ctx.saved_tensors
            else:
                x, kernel = map(_rows, ctx.saved_tensors)
                x, x_unit, kernel_unit = packed(x), None, None
            d_y = packed(_rows(d_y))
            d_bias = None if bias_shape is None else sum_pixels(d_y).view(bias_shape)
            d_y, y_unit = half(d_y)
            d_kernel = convolve_pixels(x, x_unit, d_y, y_unit, kernel_shape[-4:-2], how).view(kernel_shape)
            d_x = None
            if ctx.needs_input_grad[0]:
                d_x = convolve_back(d_y, y_unit, kernel, kernel_unit, x_shape[-3:-1], how).view(x_shape)
        return d_x, d_kernel, d_bias, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        """Stacked models are one more leading dimension."""
        stacked = models_first(info.batch_size, in_dims, inputs)
        found = Convolution.apply(*stacked)  # type: ignore[no-untyped-call]
        return found, (0,) * len(found)


def _rows(t: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return t.unsqueeze(0) if t.dim() == 4 else t.flatten(0, -5)
