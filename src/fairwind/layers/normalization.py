"""Layer and group normalization as plain operations.

The batching rules of PyTorch's kernels make the compiler fix the number of rows.

Ba, Kiros, Hinton: Layer Normalization. 2016; Wu, He: Group Normalization. 2018.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fairwind.layers.batching import models_first
from fairwind.layers.tracing import is_traced


def normalized(x: Tensor, dims: int, eps: float) -> Tensor:
    """x with mean 0 and variance 1 over its last dimensions, computed in float32 at least."""
    over = tuple(range(-dims, 0))
    wide = x if x.dtype.itemsize >= 4 else x.float()
    centred = wide - wide.mean(over, keepdim=True)
    variance = centred.square().mean(over, keepdim=True)
    return (centred * (variance + eps).rsqrt()).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        if not is_traced():
            return super().forward(input)
        dims = len(self.normalized_shape)
        if input.shape[-dims:] != self.normalized_shape:
            raise RuntimeError(f"expected input (..., {self.normalized_shape}), got {tuple(input.shape)}")
        return _scaled(normalized(input, dims, self.eps), self.weight, self.bias)


class GroupNorm(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        # Also uncompiled: under `vmap` PyTorch's kernel refuses some memory layouts.
        groups = self.num_groups, -1
        grouped = torch.unflatten(input, 1, groups)  # (B, groups, channels, ...)
        if self.weight is None or input.dim() < 3:
            y = normalized(grouped, grouped.dim() - 2, self.eps).flatten(1, 2)
            return _scaled(y.movedim(1, -1), self.weight, self.bias).movedim(-1, 1)
        weight, bias = (torch.unflatten(p, 0, groups) for p in (self.weight, self.bias))
        y = Grouped.apply(grouped.flatten(3), weight, bias, self.eps)[0]  # type: ignore[no-untyped-call]
        return torch.unflatten(y.flatten(1, 2), 2, input.shape[2:])


class Grouped(torch.autograd.Function):
    """Group normalization with a hand-written backward pass, which reads activations twice.

    All three gradients follow from sums over the pixels of a channel; autograd would compute each separately.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs like x (..., B, groups, channels, pixels), and the means and scales of groups.

        Weight and bias are (..., groups, channels).
        """
        wide = x if x.dtype.itemsize >= 4 else x.float()
        mean = wide.mean((-2, -1), keepdim=True)
        centred = wide - mean
        scale = (centred.square().mean((-2, -1), keepdim=True) + eps).rsqrt()
        y = centred * scale * _of_channels(weight) + _of_channels(bias)
        return y.to(x.dtype), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:2], *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, scale = ctx.saved_tensors
        with torch.no_grad():  # there is no second derivative to prepare for
            wide = d_y.to(mean.dtype)
            centred = (x - mean) * scale
            d_bias, d_weight = wide.sum(-1), (wide * centred).sum(-1)  # (..., B, groups, channels)
            of_group = [(sums * weight.unsqueeze(-3)).sum(-1)[..., None, None] for sums in (d_bias, d_weight)]
            a, b = (sums / x.shape[-2:].numel() for sums in of_group)
            d_x = scale * (wide * _of_channels(weight) - a - centred * b)
        return d_x.to(x.dtype), d_weight.sum(-3).to(weight.dtype), d_bias.sum(-3).to(weight.dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        """Stacked models are one more leading dimension."""
        stacked = models_first(info.batch_size, in_dims, inputs)
        return Grouped.apply(*stacked), (0, 0, 0)  # type: ignore[no-untyped-call]


def _of_channels(p: Tensor) -> Tensor:
    """Values per channel (..., groups, channels), broadcastable to (..., B, groups, channels, pixels)."""
    return p.unsqueeze(-3).unsqueeze(-1)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {nn.LayerNorm: LayerNorm, nn.GroupNorm: GroupNorm}
