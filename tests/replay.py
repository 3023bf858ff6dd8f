"""A stand-in for CUDA graphs on a CPU: operations are recorded, and replayed on the very same memory.

Like a graph, a replay repeats no Python: a number that was read, or memory that was new, is stale in it.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A GPU would have to be waited for, or memory of unknown size be taken.
FORBIDDEN = ("_local_scalar_dense", "nonzero", "_unique", "unique", "bincount", "lift_fresh", "masked_select")


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(operation) for name in FORBIDDEN), f"{operation} cannot be recorded"
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for operation, args, kwargs, before in self.calls:
            if operation.is_view:
                continue
            for old, new in zip(tree_leaves(before), tree_leaves(operation(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Replayer:
    """What CUDA graphs are on a GPU."""

    def __init__(self, device: torch.device, *, on: bool) -> None:
        self.on = on
        self.recorded: dict[Hashable, Recording | None] = {}
        self.replays = 0

    def forget(self) -> None:
        self.recorded.clear()

    def do(self, what: Hashable, work: Callable[[], None]) -> None:
        if not self.on or what not in self.recorded:
            self.recorded[what] = None
            return work()
        kept = self.recorded[what]
        if kept is None:
            # What recording does must not be seen: a graph that is recorded does not run.
            recording = Recording()
            with torch.no_grad(), recording:
                work()
            self.recorded[what] = recording
            return None
        self.replays += 1
        kept.replay()
        return None
