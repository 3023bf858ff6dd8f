"""Counter-based dropout: the mask is a hash of a key, the layer's index and the position.

So a mask does not depend on the other models in the stack; nor on the batch size, if samples come first.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairwind.data.counter import MASK, mix

KEY = "dropout_key"  # the name of a layer's buffer
ALPHA = 1.7580993408473766  # SELU's limit for small inputs, negated


def dropout(x: Tensor, p: float, key: Tensor, *numbers: int, shape: tuple[int, ...] | None = None) -> Tensor:
    """Zeros with probability p, and x / (1 - p) elsewhere.

    The mask is the hash of the key, the numbers and the position. It has the given shape, or else x's.
    """
    if p == 1:
        return torch.zeros_like(x)
    return torch.where(_kept(shape or x.shape, p, key.to(x.device), *numbers), x / (1 - p), 0)


def dropout1d(x: Tensor, p: float, key: Tensor, *numbers: int) -> Tensor:
    """Dropout of whole channels of x (N, C, L) or (C, L)."""
    return dropout(x, p, key, *numbers, shape=_channels(x, x.dim() - 1))


def dropout2d(x: Tensor, p: float, key: Tensor, *numbers: int) -> Tensor:
    """Dropout of whole channels of x (N, C, ...); like PyTorch's, it does not accept (C, H, W)."""
    return dropout(x, p, key, *numbers, shape=_channels(x, 2))


def dropout3d(x: Tensor, p: float, key: Tensor, *numbers: int) -> Tensor:
    """Dropout of whole channels of x (N, C, D, H, W) or (C, D, H, W)."""
    return dropout(x, p, key, *numbers, shape=_channels(x, x.dim() - 3))


def alpha_dropout(
    x: Tensor, p: float, key: Tensor, *numbers: int, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Dropout to SELU's limit, scaled and shifted to keep mean 0 and variance 1 (Klambauer et al. 2017)."""
    if p == 1:
        return torch.zeros_like(x)
    a: float = ((1 - p) * (1 + p * ALPHA**2)) ** -0.5
    mask = _kept(shape or x.shape, p, key.to(x.device), *numbers)
    return torch.where(mask, x * a, -ALPHA * a) + ALPHA * a * p


def feature_alpha_dropout(x: Tensor, p: float, key: Tensor, *numbers: int) -> Tensor:
    """Alpha dropout of whole channels of x (N, C, ...)."""
    return alpha_dropout(x, p, key, *numbers, shape=_channels(x, 2))


def _kept(shape: tuple[int, ...], p: float, key: Tensor, *numbers: int) -> Tensor:
    for number in numbers:
        key = mix(key, number)
    place = torch.arange(torch.Size(shape).numel(), device=key.device).view(shape)
    drawn: Tensor = mix(key, place)
    return drawn >= p * MASK


def _channels(x: Tensor, dims: int) -> tuple[int, ...]:
    """The shape of a mask with the first dimensions of x, broadcast over the others."""
    return (*x.shape[:dims], *(1,) * (x.dim() - dims))


class Counted(nn.Module):
    """The forward pass of a counter-based dropout layer."""

    p: float
    drop: ClassVar[Callable[..., Tensor]]
    dropout_key: Tensor
    dropout_layer: int

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        return type(self).drop(input, self.p, self.dropout_key, self.dropout_layer)


class Dropout(Counted, nn.Dropout):
    drop = staticmethod(dropout)


class Dropout1d(Counted, nn.Dropout1d):
    drop = staticmethod(dropout1d)


class Dropout2d(Counted, nn.Dropout2d):
    drop = staticmethod(dropout2d)


class Dropout3d(Counted, nn.Dropout3d):
    drop = staticmethod(dropout3d)


class AlphaDropout(Counted, nn.AlphaDropout):
    drop = staticmethod(alpha_dropout)


class FeatureAlphaDropout(Counted, nn.FeatureAlphaDropout):
    drop = staticmethod(feature_alpha_dropout)


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: Dropout1d,
    nn.Dropout2d: Dropout2d,
    nn.Dropout3d: Dropout3d,
    nn.AlphaDropout: AlphaDropout,
    nn.FeatureAlphaDropout: FeatureAlphaDropout,
}


def add_key(layer: nn.Module, number: int) -> None:
    """Adds the buffer for its key, and its index, to a layer with dropout."""
    p: Any = layer.p if isinstance(layer, Counted) else getattr(layer, "dropout", 0)
    if isinstance(p, int | float) and p > 0:  # a TransformerEncoderLayer's `dropout` is a layer itself
        layer.register_buffer(KEY, torch.zeros((), dtype=torch.int64), persistent=False)
        setattr(layer, "dropout_layer", number)  # noqa: B010


def key_names(module: nn.Module) -> list[str]:
    """The names of the buffers that hold dropout keys, one of each layer."""
    return [name for name, _ in module.named_buffers() if name.rpartition(".")[2] == KEY]
