"""Dense layers whose weight gradient is never stored, for plain SGD in a loop over clients.

The gradient is the product of the output gradients and the inputs, as large as the weight. For a step of −η
times the gradient, the product can be added to the weight directly. Its norm follows from two small matrices.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fairwind.engine import tuning


class FactoredLinear(nn.Linear):
    """A linear layer that keeps the factors of its weight's gradient until they are used."""

    factors: list[tuple[Tensor, Tensor]]

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
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


def large_layers(module: nn.Module) -> list[nn.Linear]:
    """The trained linear layers that are large enough."""
    least = tuning.MIN_FACTORED_NUMBERS_LOOP
    linear = [layer for layer in module.modules() if type(layer) is nn.Linear]
    return [layer for layer in linear if layer.weight.requires_grad and layer.weight.numel() >= least]


def factored(module: nn.Module) -> list[FactoredLinear]:
    """Converts, in place, the module's large trained linear layers; returns them."""
    found: list[Any] = list(large_layers(module))
    for layer in found:
        layer.__class__ = FactoredLinear
        layer.factors = []
    return found


@torch.no_grad()
def add_gradients(layers: list[FactoredLinear], scale: float) -> None:
    """Adds the gradients times `scale` to the weights."""
    for layer in layers:
        for d_out, x in layer.factors:
            layer.weight.addmm_(_rows(d_out).mT, _rows(x), alpha=scale)
        layer.factors.clear()


def take_factors(layers: list[FactoredLinear]) -> dict[int, tuple[Tensor, Tensor]]:
    """The factors (N, out), (N, in) of the gradients, by the `id` of their weight; layers may share one."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for layer in layers:
        if layer.factors:
            found.setdefault(id(layer.weight), []).extend(layer.factors)
            layer.factors = []
    return {
        weight: (torch.cat([_rows(d_out) for d_out, _ in pairs]), torch.cat([_rows(x) for _, x in pairs]))
        for weight, pairs in found.items()
    }


def squared_norm(d_out: Tensor, x: Tensor) -> Tensor:
    """‖d_outᵀ·x‖² in float64, without computing the product unless that is less work."""
    if len(x) * (d_out.shape[1] + x.shape[1]) >= d_out.shape[1] * x.shape[1]:
        square: Tensor = torch.linalg.vector_norm(d_out.mT @ x, dtype=torch.float64).square()
    else:
        d_out, x = d_out.double(), x.double()  # sums may cancel
        square = ((d_out @ d_out.mT) * (x @ x.mT)).sum()
    return square


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
