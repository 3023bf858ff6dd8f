"""Samples: a tensor, or a tuple or dict of tensors, whose first dimension counts samples."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Union

import numpy as np
import torch
from torch import Tensor

from fairwind.errors import InputError

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


def refuse_rounded(
    value: Tensor, dtype: torch.dtype, what: str, whose: Callable[[int], str] = lambda sample: ""
) -> None:
    """Refuses columns of whole numbers that a floating-point type would round, such as times in seconds.

    `what` are the values, and `whose` is a sample, as in "client 'ann': ".
    """
    wide = value.dtype in (torch.float64, torch.int64, torch.int32) and value.dtype != dtype
    if not wide or not value.numel() or value.abs().max() <= 2**24:
        return
    exact = value.double().reshape(-1, value.shape[-1] if value.ndim > 1 else 1)
    rounded = exact.to(dtype).double()
    lost = (rounded != exact) & (exact == exact.round()).all(0) & (exact.abs() < 2**63)  # as integers are
    if lost.any():
        row = int(lost.any(1).nonzero()[0])
        number, other, name = exact[lost][0], rounded[lost][0], str(dtype).removeprefix("torch.")
        raise InputError(
            f"{whose(row * len(value) // len(exact))}{what} hold whole numbers such as {number:.0f}, which "
            f"{name} would round to {other:.0f}: subtract an offset, or take a larger unit, such as days "
            "since a first time"
        )


def narrowed(samples: Any, dtype: torch.dtype, whose: Callable[[int], str] = lambda sample: "") -> Any:
    """The inputs with floating-point tensors in another type, which must hold their whole numbers."""
    for path, value in named(samples):
        if value.is_floating_point():
            refuse_rounded(value, dtype, f"inputs{path and ' ' + path}", whose)
    return cast(samples, dtype)


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
