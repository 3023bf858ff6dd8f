"""Users' values (lists, arrays, images, data frames) as tensors, or as sequences not yet padded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Table:
    """Numbers (N, C) under the names of their columns, where there is no data frame."""

    numbers: np.ndarray[Any, Any]
    columns: tuple[str, ...]

    def to_numpy(self) -> np.ndarray[Any, Any]:
        return self.numbers


ColumnNames = Mapping[str, Sequence[str]]
"""The names of the columns of tables, by where these are, as in "inputs", "inputs.ids" or "targets[0]"."""
CLASSES = "classes"  # where names of classes are among those of columns


@dataclass
class ColumnOrder:
    """The columns of tables. All tables at one place are brought into the order of the first."""

    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # as `ColumnNames`
    first: dict[str, str] = field(default_factory=dict)  # by place, which table has given the order
    moved: dict[str, str] = field(default_factory=dict)  # one that had another order
    nameless: dict[str, str] = field(default_factory=dict)  # something without names

    @classmethod
    def of(cls, columns: ColumnNames, whose: str) -> "ColumnOrder":
        """The order that is known already, as of "those of training"."""
        return cls({place: tuple(names) for place, names in columns.items()}, dict.fromkeys(columns, whose))

    def arranged(self, array: Any, given: Sequence[Any], place: str, what: str) -> Any:
        """An array, whose last dimension has these columns, in the order of the first; refuses other ones."""
        mine = tuple(map(str, given))
        if len(set(mine)) < len(mine):
            twice = next(name for name in mine if mine.count(name) > 1)
            raise InputError(f"{what} have two columns {twice!r}: rename one")
        known = self.names.setdefault(place, mine)
        first = self.first.setdefault(place, what)
        if mine == known:
            return array
        if set(mine) != set(known):
            lists = {
                "missing": [n for n in known if n not in mine],
                "not there": [n for n in mine if n not in known],
            }
            raise InputError(
                f"{what} have other columns than {first} ("
                + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in lists.items() if names)
                + "): give the same, or rename them"
            )
        self.moved.setdefault(place, what)
        return array[..., [mine.index(name) for name in known]]

    def refuse_nameless(self) -> None:
        """Refuses arrays beside tables whose columns come in several orders."""
        for place in self.moved.keys() & self.nameless.keys():
            raise InputError(
                f"{self.nameless[place]} have no column names, and those of {self.first[place]} and of "
                f"{self.moved[place]} come in two orders: give names to all, or one order"
            )


def is_mapping(given: Any) -> bool:
    """Whether it has keys and values, as dicts do. Hugging Face's BatchEncoding is not a dict."""
    return isinstance(given, Mapping) or (hasattr(given, "keys") and not is_frame(given))


def is_frame(given: Any) -> bool:
    """Whether it is pandas' DataFrame or Series, or a table of ours."""
    return isinstance(given, Table) or (hasattr(given, "iloc") and hasattr(given, "to_numpy"))


def as_values(given: Any, what: str, columns: ColumnOrder, place: str = "inputs") -> Values:
    """As tensors: arrays and lists become one, tuples and dicts keep their structure.

    `what` starts the error message, as in "client 'ann': targets". Columns of tables are noted in `columns`,
    and brought into the order that is known there of this `place`.
    """
    if is_mapping(given):
        return {
            str(name): as_values(given[name], f"{what} {name}", columns, f"{place}.{name}")
            for name in given.keys()  # noqa: SIM118
        }
    if isinstance(given, tuple):
        return tuple(
            as_values(part, f"{what} [{i}]", columns, f"{place}[{i}]") for i, part in enumerate(given)
        )
    if not isinstance(given, str | int | float | list | range | Table) and not _is_array(given):
        raise InputError(f"{what} are a {type(given).__name__}: give a tensor, an array or a list")
    if hasattr(given, "to_pandas") and hasattr(given, "columns"):
        raise InputError(
            f"{what} are a {type(given).__name__}: give x.to_pandas(), which has columns by name"
        )
    try:
        return _value(_without_names(given, what, columns, place), what)
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


def _without_names(given: Any, what: str, columns: ColumnOrder, place: str) -> Any:
    """Arrays in place of data frames, their columns in the order that is known of the place."""
    if isinstance(given, list) and any(is_frame(row) or hasattr(row, "_fields") for row in given):
        return [_arranged(row, _names(row, sample=True), what, columns, place) for row in given]
    return _arranged(given, _names(given), what, columns, place)


def _arranged(given: Any, names: Sequence[Any], what: str, columns: ColumnOrder, place: str) -> Any:
    array = given.to_numpy() if is_frame(given) else np.asarray(given) if len(names) else given
    if len(names) and set(names) != set(range(len(names))):
        return columns.arranged(array, names, place, what)
    empty = not given if isinstance(given, list) else getattr(array, "shape", (1,))[:1] in ((), (0,))
    if not empty:
        columns.nameless.setdefault(place, what)
    return array[..., np.argsort(names)] if len(names) else array  # pandas' own names are positions


def _names(given: Any, *, sample: bool = False) -> Sequence[Any]:
    """The names of a table's columns, or a series' own; of a sample, those of its entries."""
    if sample and hasattr(given, "_fields"):  # as of DataFrame.itertuples
        return list(given._fields)
    if not is_frame(given):
        return ()
    if hasattr(given, "columns"):
        return list(given.columns)
    if sample:
        return list(given.index) if all(isinstance(name, str) for name in given.index) else ()
    return () if given.name is None else (given.name,)


def _value(given: Any, what: str) -> Tensor | Ragged:
    if isinstance(given, Tensor):
        return _dense(given, what)
    if not isinstance(given, list) and _is_array(given):
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
    if given.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return _tensor(given.cpu().numpy()).to(given.device)
    return given.detach() if given.requires_grad else given


def _array(given: Any, what: str) -> np.ndarray[Any, Any]:
    """An array; refused if values are masked, since what lies below a mask is no data."""
    if np.ma.is_masked(given):
        first = np.argwhere(np.ma.getmaskarray(given))[0].tolist()
        raise InputError(f"{what} are masked, first at {first}: fill what is masked, x.filled(…), or drop it")
    return np.asarray(given)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # PyTorch hardly supports these types
        if array.size and array.max() >= 2**63:
            raise OverflowError(f"{array.max()} is larger than any int64")
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
