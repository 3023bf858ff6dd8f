"""The layer that turns images, as they are stored, into inputs of a convolution."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fairwind.errors import InputError

Channels = Literal["auto", "first", "last"]
NUMBERS = (1, 3, 4)  # of channels: grey, colour, with transparency


class Pixels(nn.Module):
    """Scales bytes from 0–255 to 0–1, with channels in front: (B, H, W, C) or (B, H, W) become (B, C, H, W).

    `channels` says where they are. "auto" looks for a dimension of 1, 3 or 4, and None leaves the shape as
    it is, and so do bytes (B, F). Floating-point numbers pass unchanged.
    """

    white: Tensor

    def __init__(self, channels: Channels | None = "auto") -> None:
        super().__init__()
        if channels is not None and channels not in get_args(Channels):
            raise InputError(f"channels={channels!r} is not one of {', '.join(get_args(Channels))}, or None")
        self.channels = channels
        self.register_buffer("white", torch.tensor(255.0), persistent=False)  # of the model's own type

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x
        if self.channels is not None and x.dim() == 3:
            x = x.unsqueeze(1)
        elif self._last(x):
            x = x.movedim(-1, 1).contiguous()  # as bytes, of which a copy is cheap
        return x / self.white

    def _last(self, x: Tensor) -> bool:
        """Whether the channels are last, and not to stay there."""
        if self.channels == "auto" and x.dim() == 4:
            return channels_last(x.shape, "; say where they are, with Pixels(channels='first') or 'last'")
        return self.channels == "last" and x.dim() > 3


def channels_last(shape: tuple[int, ...], remedy: str = "") -> bool:
    """Whether images (B, ·, ·, ·) have their channels last; those that may have them anywhere are refused."""
    if len(shape) != 4:
        raise InputError(f"images are (B, H, W), (B, H, W, C) or (B, C, H, W), not {tuple(shape)}")
    first, last = (shape[at] in NUMBERS for at in (1, 3))
    if first == last:
        found = "both first and last" if first else "neither first nor last"
        raise InputError(f"images of shape {tuple(shape[1:])} have 1, 3 or 4 channels {found}{remedy}")
    return last
