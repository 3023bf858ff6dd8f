"""Samples: a tensor, or a tuple or dict of tensors, whose first dimension counts samples."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Union

import numpy as np
import torch
from torch import Tensor

Samples = Union[  # noqa: UP007 (a name in quotes cannot be joined by |)
    Tensor, tuple["Samples", ...], dict[str, "Samples"]
]


def mapped(function: Callable[[Tensor], Any], samples: Any) -> Any:
    """The same structure with the function applied to every tensor."""
    if isinstance(samples, dict):
        return {name: mapped(function, part) for name, part in samples.items()}
    if isinstance(samples, tuple | list):
        parts = [mapped(function, part) for part in samples]
        return type(samples)(*parts) if hasattr(samples, "_fields") else type(samples)(parts)
    return function(samples) if isinstance(samples, Tensor) else samples


def tensors(samples: Any) -> list[Tensor]:
    return [value for _, value in named(samples)]


def named(samples: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors with their paths, as in "ids" or "[0]"; the path of a single tensor is empty."""
    if isinstance(samples, Tensor):
        yield path, samples
    elif isinstance(samples, dict):
        for name, part in samples.items():
            yield from named(part, f"{path}.{name}" if path else str(name))
    elif isinstance(samples, tuple | list):
        for i, part in enumerate(samples):
            yield from named(part, f"{path}[{i}]")


def take(samples: Samples, index: Tensor | slice) -> Any:
    """Some of the samples."""
    return mapped(lambda value: value[index], samples)


def cast(samples: Any, dtype: torch.dtype) -> Any:
    """The same with floating-point tensors in another type."""
    return mapped(lambda value: value.to(dtype) if value.is_floating_point() else value, samples)


def kind(samples: Any) -> str:
    """Type and shape of samples, in words."""
    parts = []
    for path, value in named(samples):
        text = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape[1:])} per sample"
        parts.append(f"{path}: {text}" if path else text)
    return "; ".join(parts)


def class_count(targets: Samples) -> int | None:
    """One more than the largest label, if targets are class labels."""
    if not isinstance(targets, Tensor) or targets.ndim != 1 or targets.is_floating_point():
        return None
    return int(targets.max()) + 1 if len(targets) and int(targets.min()) >= 0 else None


class Hash(Protocol):
    """The interface of hashlib's hashes."""

    def update(self, data: Any, /) -> None: ...


def hash_into(seen: Hash, values: Iterable[Tensor]) -> None:
    """Adds types, shapes and numbers of tensors to a hash."""
    for value in values:
        if value.dtype == torch.bfloat16:  # NumPy has no such type
            seen.update(b"bfloat16")
            value = value.view(torch.int16)
        array = value.cpu().contiguous().numpy()
        seen.update(f"{array.dtype.str}{array.shape}".encode())
        seen.update(array.reshape(-1).view(np.uint8))
