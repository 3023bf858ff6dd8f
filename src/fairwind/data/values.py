"""Users' values (lists, arrays, images, data frames) as tensors, or as sequences not yet padded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor

from fairwind.errors import InputError, first_line


@dataclass(frozen=True)
class Ragged:
    """Sequences of unequal length, one after another."""

    flat: Tensor  # (sum of lengths, ...)
    lengths: Tensor  # (N,)

    def __len__(self) -> int:
        return len(self.lengths)


Values = Union[  # noqa: UP007 (a name in quotes cannot be joined by |)
    Tensor, Ragged, tuple["Values", ...], dict[str, "Values"]
]


def is_mapping(given: Any) -> bool:
    """Whether it has keys and values, as dicts do. Hugging Face's BatchEncoding is not a dict."""
    return isinstance(given, Mapping) or (hasattr(given, "keys") and not is_frame(given))


def is_frame(given: Any) -> bool:
    """Whether it is pandas' DataFrame or Series."""
    return hasattr(given, "iloc") and hasattr(given, "to_numpy")


def as_values(given: Any, what: str) -> Values:
    """As tensors: arrays and lists become one, tuples and dicts keep their structure.

    `what` starts the error message, as in "client 'ann': targets".
    """
    if is_mapping(given):
        return {str(name): as_values(given[name], f"{what} {name}") for name in given.keys()}  # noqa: SIM118
    if isinstance(given, tuple):
        return tuple(as_values(part, f"{what} [{i}]") for i, part in enumerate(given))
    if not isinstance(given, str | int | float | list | range) and not _is_array(given):
        raise InputError(f"{what} are a {type(given).__name__}: give a tensor, an array or a list")
    try:
        return _value(given, what)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        text = next(_strings(given), None)
        if text is not None:
            shown = repr(text if len(text) <= 20 else f"{text[:20]}…")
            raise InputError(
                f"{what} hold strings, such as {shown}: map labels to 0, 1, … and texts to token ids first"
            ) from None
        raise InputError(
            f"{what} do not make a tensor ({first_line(error)}): give numbers, arrays or tensors"
        ) from None


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Tensor | Ragged]]:
    """All tensors and sequences with their paths, as in "ids" or "[0]"."""
    if isinstance(values, dict):
        for name, part in values.items():
            yield from leaves(part, f"{path}.{name}" if path else name)
    elif isinstance(values, tuple):
        for i, part in enumerate(values):
            yield from leaves(part, f"{path}[{i}]")
    else:
        yield path, values


def _is_array(given: Any) -> bool:
    """Whether NumPy can read it: also an image, or an array of another library."""
    return hasattr(given, "__array__") or hasattr(given, "__array_interface__")


def _value(given: Any, what: str) -> Tensor | Ragged:
    if isinstance(given, Tensor):
        return _dense(given, what)
    if is_frame(given):
        given = given.to_numpy()
    elif not isinstance(given, list) and _is_array(given):
        given = _array(given, what)
    if isinstance(given, np.ndarray) and given.dtype.kind != "O":
        return _tensor(given)
    rows: list[Any] = given.tolist() if isinstance(given, np.ndarray) else given
    if isinstance(rows, list) and any(_is_array(row) and np.ndim(row) for row in rows):
        return _stacked([_row(row, f"{what} of sample {i}") for i, row in enumerate(rows)], what)
    if isinstance(rows, list) and any(isinstance(row, np.generic) for row in rows):
        return _tensor(np.asarray(rows))
    try:
        return torch.as_tensor(rows)
    except ValueError:
        if isinstance(rows, list) and rows and all(isinstance(row, list | tuple) for row in rows):
            flat = torch.as_tensor([each for row in rows for each in row])
            return Ragged(flat, torch.tensor([len(row) for row in rows]))
        raise


def _row(given: Any, what: str) -> Tensor:
    return _dense(given, what) if isinstance(given, Tensor) else _tensor(_array(given, what))


def _dense(given: Tensor, what: str) -> Tensor:
    """The tensor without gradients; refused if it does not simply hold its numbers."""
    if given.is_nested:
        raise InputError(f"{what} are a nested tensor: give a list of tensors, list(x.unbind())")
    if given.layout != torch.strided:
        name = str(given.layout).removeprefix("torch.").strip("_")
        raise InputError(f"{what} are a tensor of layout {name}: give x.to_dense()")
    if given.is_meta:
        raise InputError(f"{what} are a meta tensor, which holds no numbers: give one on a device")
    if hasattr(given, "get_mask"):
        raise InputError(f"{what} are a masked tensor: fill or drop what is masked, and give x.get_data()")
    return given.detach() if given.requires_grad else given


def _array(given: Any, what: str) -> np.ndarray[Any, Any]:
    """An array; refused if values are masked, since what lies below a mask is no data."""
    if np.ma.is_masked(given):
        first = np.argwhere(np.ma.getmaskarray(given))[0].tolist()
        raise InputError(f"{what} are masked, first at {first}: fill what is masked, x.filled(…), or drop it")
    return np.asarray(given)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # PyTorch hardly supports these types
        array = array.astype(np.int64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.as_tensor(array)


def _stacked(rows: list[Tensor], what: str) -> Tensor | Ragged:
    """One tensor, or sequences if the rows differ in length."""
    full = [row for row in rows if row.numel()] or rows[:1]  # an empty list has neither type nor shape
    first = full[0]
    for row in full:
        if row.ndim == 0 or row.ndim != first.ndim or row.shape[1:] != first.shape[1:]:
            raise InputError(
                f"{what} are of shapes {tuple(first.shape)} and {tuple(row.shape)}: bring all samples to one "
                "shape; only sequences may differ, in their length"
            )
    lengths = torch.tensor([len(row) if row.numel() else 0 for row in rows])
    if all(row.shape == first.shape for row in rows):
        return torch.cat(rows).view(len(rows), *first.shape)
    return Ragged(torch.cat(full), lengths)


def _strings(given: Any) -> Iterator[str]:
    if isinstance(given, str | bytes):
        yield str(given)
    elif is_frame(given):
        yield from _strings(given.to_numpy())
    elif isinstance(given, list | tuple) or (isinstance(given, np.ndarray) and given.ndim):
        for part in given:
            yield from _strings(part)
