"""Gradients left as factors.

The gradient of a dense layer's weight is a product: of what comes back to the layer, and what came into it.
Formed, it is as large as the weight, and is written only to be read once. Left as two factors, it is added to
where it is wanted by the product itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """Rows' gradients backᵀ·seen (rows, out, in)."""

    back: Tensor  # (rows, B, out)
    seen: Tensor  # (rows, B, in)

    def add_to(self, sums: Tensor) -> None:
        sums.baddbmm_(self.back.mT, self.seen)

    def give(self, gradient: Tensor) -> bool:
        """Whether their product is that gradient, and says something by it."""
        formed, size = torch.zeros_like(gradient), gradient.norm()
        self.add_to(formed)
        error = (formed - gradient).norm()
        return bool(size > 0 and error <= 1000 * torch.finfo(gradient.dtype).eps * size)


def watch(layer: Any) -> Callable[[], None]:
    """Makes a layer keep what comes in, as `seen`, whenever there is a `zero` to add to what it gives.

    By the zero one finds what comes back. Ends when the function that is returned is called.
    """
    layer.register_buffer("zero", None, persistent=False)
    layer.seen = None
    hook = layer.register_forward_hook(_see, prepend=True)  # before those that change what the layer gives

    def end() -> None:
        hook.remove()
        del layer.zero, layer.seen

    return end


def _see(layer: Any, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
    if layer.zero is None:
        return out
    if layer.seen is not None:
        raise RuntimeError("the layer is used twice")
    (layer.seen,) = given
    found: Tensor = out + layer.zero
    return found
