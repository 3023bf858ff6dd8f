"""VGG11 for 32×32 images, with convolutions written as matrix products.

Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition. 2015.

A cohort's convolutions have other weights in every row. PyTorch stacks those as one grouped convolution,
which is slow; as matrix products they stack into one batched product. Activations are (B, height, width,
channels), so that a convolution's windows are nine shifted views side by side.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from fairwind.models.dense import Pixels

Init = Literal["pytorch", "he"]


class Convolution(nn.Conv2d):
    """A 3×3 convolution with padding 1 over (B, height, width, channels), with nn.Conv2d's parameters."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return self.product(x) + self.bias

    def product(self, x: Tensor) -> Tensor:
        """The convolution without its bias."""
        height, width = x.shape[1:3]
        padded = nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
        shifted = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        # Not `cat`, whose batching rule makes the compiler fix the number of rows.
        windows = torch.stack(shifted, dim=-2).flatten(-2)  # (B, height, width, 9·inputs)
        kernel = self.weight.permute(2, 3, 1, 0).flatten(0, 2)  # (9·inputs, outputs)
        short = -len(kernel) % 8  # tensor cores want columns in eights
        if short:
            windows = nn.functional.pad(windows, (0, short))
            kernel = nn.functional.pad(kernel, (0, 0, 0, short))
        return (windows.flatten(0, 2) @ kernel).view(*x.shape[:3], -1)


class Block(Convolution):
    """Convolution, pooling over 2×2 if `pooled`, and ReLU."""

    def __init__(self, inputs: int, outputs: int, *, pooled: bool):
        super().__init__(inputs, outputs)
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        y = self.product(x)
        if self.pooled:  # before bias and ReLU, which keep the order of numbers
            upper, lower = y[:, ::2], y[:, 1::2]
            y = torch.maximum(
                torch.maximum(upper[:, :, ::2], upper[:, :, 1::2]),
                torch.maximum(lower[:, :, ::2], lower[:, :, 1::2]),
            )
        return torch.relu(y + self.bias)


class ChannelsLast(nn.Module):
    """(B, channels, height, width) as (B, height, width, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


def vgg11(classes: int = 10, *, init: Init = "pytorch") -> nn.Module:
    """VGG11 for (3, 32, 32) images, without batch norm, with one dense layer: 9.2 M parameters.

    `init` draws initial weights as PyTorch's layers do, or by He et al.: N(0, 2 / inputs), biases zero.
    """
    widths = (
        (64, True),
        (128, True),
        (256, False),
        (256, True),
        (512, False),
        (512, True),
        (512, False),
        (512, True),
    )
    blocks, inputs = [], 3
    for outputs, pooled in widths:
        blocks.append(Block(inputs, outputs, pooled=pooled))
        inputs = outputs
    last = nn.Linear(inputs, classes)
    if init == "he":
        for name, parameter in [p for layer in (*blocks, last) for p in layer.named_parameters()]:
            if name == "weight":
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            else:
                nn.init.zeros_(parameter)
    return nn.Sequential(Pixels(), ChannelsLast(), *blocks, nn.Flatten(), last)
