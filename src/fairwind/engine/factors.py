"""Gradients left as factors.

The gradient of a dense layer's weight is a product: of what comes back to the layer, and what came into it.
Formed, it is as large as the weight, and is written only to be read once. Left as two factors, it is added to
where it is wanted by the product itself.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn


class Factors(NamedTuple):
    """Rows' gradients backᵀ·seen (rows, out, in)."""

    back: Tensor  # (rows, B, out)
    seen: Tensor  # (rows, B, in)

    def add_to(self, sums: Tensor) -> None:
        sums.baddbmm_(self.back.mT, self.seen)


class Dense(nn.Linear):
    """A linear layer that, given a zero to add, by which to find what comes back, keeps what came in."""

    zero: Tensor | None

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.register_buffer("zero", None, persistent=False)
        self.seen: Tensor | None = None

    @classmethod
    def of(cls, layer: nn.Linear) -> "Dense":
        dense = cls(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        dense.weight, dense.bias = layer.weight, layer.bias
        return dense.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.zero is None:
            return out
        self.seen = x
        return out + self.zero

    def taken(self) -> Tensor:
        """What came in, which is then forgotten."""
        seen, self.seen = self.seen, None
        assert seen is not None
        return seen
