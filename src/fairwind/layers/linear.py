"""Dense layers, as explicit products where the compiler needs it."""

from torch import Tensor, nn
from torch.nn import functional as F

from fairwind.layers.tracing import is_traced


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`, which under `vmap` cannot be compiled for three dimensions of which one is dynamic."""
    if bias is None or x.dim() < 3 or not is_traced():
        return F.linear(x, weight, bias)
    return x @ weight.mT + bias


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


STACKABLE: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Linear}
