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
    value: Tensor,
    dtype: torch.dtype,
    what: str,
    whose: Callable[[int], str] = lambda sample: "",
    *,
    whole_only: bool = False,
) -> None:
    """Refuses columns that a floating-point type would round too much, such as times in seconds.

    That is, of mostly whole numbers, if one is rounded; and of any, unless `whole_only`, if hardly a digit
    is left in which its values differ. `what` are the values; `whose` is a sample, as in "client 'ann': ".
    """
    wide = value.dtype in (torch.float64, torch.int64, torch.int32) and value.dtype != dtype
    if not wide or not value.numel():
        return
    exact = value.reshape(-1, value.shape[-1] if value.ndim > 1 else 1)
    lost = exact.to(dtype).to(exact.dtype) != exact
    refused = torch.zeros_like(lost)
    if (exact.double().abs() > 2**24).any():
        whole = (exact == exact.round()) & (exact.double().abs() < 2.0**64)  # as integers are
        refused = lost & whole & (whole.double().mean(0) > 0.5)
    if not refused.any() and not whole_only:
        refused = lost & _close(exact.double(), dtype)
    if refused.any():
        row = int(refused.any(1).nonzero()[0])
        number, name = exact[refused][0], str(dtype).removeprefix("torch.")
        numbers = [each.item() for each in (number, number.to(dtype))]
        whole_ones = bool(number == number.round())
        first, other = (int(each) if whole_ones else f"{each:.15g}" for each in numbers)
        raise InputError(
            f"{whose(row * len(value) // len(exact))}{what} hold "
            f"{'whole numbers' if whole_ones else 'numbers close to each other'} such as {first}, which "
            f"{name} would round to {other}: subtract an offset, or take a larger unit, such as days "
            "since a first time"
        )


def _close(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Of columns, whether most of the distinct values (of many, some) are rounded, and half differ by little.

    Float64 must tell them apart, so that a constant with errors of rounding is none.
    """
    values = exact[:: 1 + exact.numel() // 2**22].sort(0).values
    values[1:][values.diff(dim=0) == 0] = torch.inf
    values = values.sort(0).values
    last = (values.isfinite().sum(0) - 1).clamp(min=0)
    low, high = (values.gather(0, at[None])[0] for at in (last // 4, last - last // 4))
    size, spread = torch.maximum(low.abs(), high.abs()), high - low
    most = (values.to(dtype).double() != values).sum(0) > last / 2  # infinite ones stay so
    little = (1e-11 * size < spread) & (spread < torch.finfo(dtype).eps ** 0.5 / 4 * size)
    found: Tensor = most & little & (last > 1)
    return found


def narrowed(
    samples: Any,
    dtype: torch.dtype,
    whose: Callable[[int], str] = lambda sample: "",
    *,
    whole_only: bool = False,
) -> Any:
    """The inputs with floating-point tensors in another type, unless it rounds too much."""
    for path, value in named(samples):
        if value.is_floating_point():
            refuse_rounded(value, dtype, f"inputs{path and ' ' + path}", whose, whole_only=whole_only)
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
