"""What the batching rules of our autograd functions share."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def models_first(size: int, in_dims: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """A rule's inputs with the stacked models, so many, as their first dimension. Others stay as they are."""
    return [
        (t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)) if isinstance(t, Tensor) else t
        for t, dim in zip(inputs, in_dims, strict=True)
    ]
