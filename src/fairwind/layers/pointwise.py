"""Detects whether a computation on vectors is elementwise."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records the operations on vectors, matrices and so on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(t, Tensor) and t.ndim for t in tree_leaves((args, kwargs, found))):
            self.seen.add(func)
        return found

    @property
    def pointwise(self) -> bool:
        """Whether all of them are elementwise."""
        return all(torch.Tag.pointwise in func.tags or func in ALSO for func in self.seen)


ALSO = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
}
