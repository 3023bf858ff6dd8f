"""Layer and group normalization as plain operations.

The batching rules of PyTorch's kernels make the compiler fix the number of rows.

Ba, Kiros, Hinton: Layer Normalization. 2016; Wu, He: Group Normalization. 2018.
"""

import torch
from torch import Tensor, nn

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
        # Also where nothing is compiled: under `vmap` PyTorch's refuses some memory layouts.
        grouped = torch.unflatten(input, 1, (self.num_groups, -1))
        y = normalized(grouped, grouped.dim() - 2, self.eps).flatten(1, 2)
        return _scaled(y.movedim(1, -1), self.weight, self.bias).movedim(-1, 1)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {nn.LayerNorm: LayerNorm, nn.GroupNorm: GroupNorm}
