"""Dense layers whose weight's gradient is never formed, for plain SGD in a loop over clients.

That gradient is a product of the output's gradients and the inputs, as large as the weight. For a step of −η
times the gradient the product can be added to the weight directly.
"""

from typing import Any

import torch
from torch import Tensor, nn

LARGE = 1 << 16  # numbers of a weight from which on it is worth it


class FactoredLinear(nn.Linear):
    """A linear layer that keeps the factors of its weight's gradient until `add_gradients`."""

    factors: list[tuple[Tensor, Tensor]]

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(input)
        out: Tensor = _Product.apply(input, self.weight, self)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: FactoredLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.layer.factors.append((d_out, x))
        return d_out @ weight if ctx.needs_input_grad[0] else None, None, None


def factored(module: nn.Module) -> list[FactoredLinear]:
    """Makes, in place, the module's large trained linear layers such; returns them."""
    found: list[Any] = []
    for layer in module.modules():
        if type(layer) is not nn.Linear or not layer.weight.requires_grad or layer.weight.numel() < LARGE:
            continue
        layer.__class__ = FactoredLinear
        found.append(layer)
        found[-1].factors = []
    return found


@torch.no_grad()
def add_gradients(layers: list[FactoredLinear], scale: float) -> None:
    """Adds the gradients times `scale` to the weights."""
    for layer in layers:
        for d_out, x in layer.factors:
            layer.weight.addmm_(
                d_out.reshape(-1, d_out.shape[-1]).mT, x.reshape(-1, x.shape[-1]), alpha=scale
            )
        layer.factors.clear()
