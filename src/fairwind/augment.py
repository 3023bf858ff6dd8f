"""Random changes of images and other inputs, drawn anew at every local step: `Task(augment=…)`.

They take inputs as they are stored, bytes or floating-point numbers (B, …), and stack. Images are (B, H, W),
(B, H, W, C) or (B, C, H, W) with 1, 3 or 4 channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fairwind.errors import positive, whole
from fairwind.models.pixels import channels_last

Augment = Callable[[Tensor], Tensor]


def flip(x: Tensor) -> Tensor:
    """Mirrors each image, left to right, with probability 1/2."""
    chosen = torch.rand(len(x), device=x.device) < 0.5
    return torch.where(chosen.view(-1, *[1] * (x.dim() - 1)), x.flip(_axes(x)[1]), x)


def crop(padding: int = 4) -> Augment:
    """Shifts each image by up to so many pixels either way: a random crop after padding with zeros."""
    whole(1, padding=padding)

    def augment(x: Tensor) -> Tensor:
        for axis in _axes(x):
            by = torch.randint(-padding, padding + 1, (len(x),), device=x.device)
            x = _shifted(x, axis, by)
        return x.contiguous()

    augment.__name__ = f"crop(padding={padding})"
    return augment


def noise(std: float) -> Augment:
    """Adds normal noise; its standard deviation is relative to white, which is 255, for bytes."""
    positive(std=std)

    def augment(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x + std * torch.randn_like(x)
        noisy = x + 255 * std * torch.randn(x.shape, device=x.device)
        return noisy.round().clamp(0, 255).to(x.dtype)

    augment.__name__ = f"noise(std={std})"
    return augment


def _axes(x: Tensor) -> tuple[int, int]:
    """Where the height and the width of images are."""
    return (1, 2) if x.dim() == 3 or channels_last(x.shape) else (2, 3)


def _shifted(x: Tensor, axis: int, by: Tensor) -> Tensor:
    """Each sample's pixels from so many places further along an axis, and zeros from outside."""
    lines, size = x.movedim(axis, 1), x.shape[axis]  # (B, size, …)
    source = by[:, None] + torch.arange(size, device=x.device)
    # Of PyTorch's ways to gather, this one compiles for any number of rows.
    moved = lines[torch.arange(len(x), device=x.device)[:, None], source.clamp(0, size - 1)]
    inside = ((source >= 0) & (source < size)).view(*source.shape, *[1] * (x.dim() - 2))
    return torch.where(inside, moved, 0).movedim(1, axis)
