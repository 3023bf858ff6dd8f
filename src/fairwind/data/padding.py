"""Sequences of unequal length, padded to the longest of all clients."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fairwind.data.counter import segments
from fairwind.data.samples import Samples
from fairwind.data.values import ColumnOrder, Ragged, Values, as_values, leaves
from fairwind.errors import InputError

Pad = float | str | Mapping[str, float]
"""The padding value, or a dict of values by name; or "mask" or "lengths": zeros, and one more input of the
model."""
REMEDY = 'give pad=0 (zeros at their ends), or pad="mask" or pad="lengths" (the model gets these, too)'


def as_samples(given: Any, columns: ColumnOrder, what: str = "inputs") -> Samples:
    """A user's values as tensors; sequences of unequal length are refused."""
    values = as_values(given, what, columns, what)
    refuse_ragged("", what, values)
    return cast(Samples, values)


def refuse_ragged(where: str, what: str, values: Values) -> None:
    """Refuses sequences of unequal length, with the remedy."""
    for path, value in leaves(values):
        if isinstance(value, Ragged):
            lengths = f"{int(value.lengths.min())} to {int(value.lengths.max())}"
            remedy = REMEDY if what == "inputs" else "pad them, and give the task a loss that skips padding"
            raise InputError(
                f"{where}{what}{path and ' ' + path} are sequences of unequal length, {lengths}: {remedy}"
            )


def padded(clients: Sequence[str], inputs: Sequence[Any], pad: Pad) -> list[Any]:
    """The inputs, of clients of these names, padded along their second dimension to one length.

    Only inputs that differ in length are padded; a single tensor always counts as a sequence.
    """
    if isinstance(pad, bool) or (isinstance(pad, str) and pad not in ("mask", "lengths")):
        raise InputError(f'pad={pad!r} is unknown: give a number, "mask" or "lengths"')
    columns: dict[str, list[Tensor | Ragged]] = {path: [] for path, _ in leaves(inputs[0])}
    for client, given in zip(clients, inputs, strict=True):
        parts = dict(leaves(given))
        if parts.keys() != columns.keys():
            raise InputError(
                f"client {client!r} has inputs {_listed(parts)}, but client {clients[0]!r} has "
                f"{_listed(columns)}; give all clients the same"
            )
        for path, value in parts.items():
            columns[path].append(value)
            if _long(value) != _long(columns[path][0]):
                raise InputError(
                    f"client {client!r}: inputs{path and ' ' + path} are sequences and those of client "
                    f"{clients[0]!r} single numbers, or the reverse; give all clients the same"
                )
    if isinstance(pad, Mapping) and not pad.keys() <= columns.keys():
        raise InputError(f"pad={dict(pad)} names what is not among the inputs {_listed(columns)}")
    unequal = {path for path, column in columns.items() if len(_lengths(column)) > 1}
    sequences = unequal or {path for path, column in columns.items() if all(_long(v) for v in column)}
    if isinstance(pad, str) and not sequences:
        raise InputError(f'pad="{pad}": there are no sequences among the inputs; leave pad out')
    longest = {path: max(_lengths(columns[path])) for path in unequal}
    return [
        _padded(client, given, pad, longest, sequences) for client, given in zip(clients, inputs, strict=True)
    ]


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(path or "without a name" for path in paths)


def _long(value: Tensor | Ragged) -> bool:
    return isinstance(value, Ragged) or value.ndim > 1


def _lengths(column: list[Tensor | Ragged]) -> set[int]:
    """The lengths that occur; empty if samples are not sequences."""
    found: set[int] = set()
    for value in column:
        if isinstance(value, Ragged):
            found.update(value.lengths.tolist())
        elif value.ndim > 1:
            found.add(value.shape[1])
    return found


def _padded(client: str, given: Any, pad: Pad, longest: dict[str, int], sequences: set[str]) -> Any:
    def filled(values: Any, path: str = "") -> Any:
        if isinstance(values, dict):
            return {name: filled(part, f"{path}.{name}" if path else name) for name, part in values.items()}
        if isinstance(values, tuple):
            return tuple(filled(part, f"{path}[{i}]") for i, part in enumerate(values))
        fill = pad.get(path, 0) if isinstance(pad, Mapping) else 0 if isinstance(pad, str) else pad
        return _filled(values, longest[path], fill) if path in longest else values

    result = filled(given)
    if not isinstance(pad, str):
        return result
    known = {path: _lengths_of(value) for path, value in leaves(given) if path in sequences}
    (first, lengths), *others = known.items()
    for path, other in others:
        if not torch.equal(other, lengths):
            raise InputError(
                f"client {client!r}: inputs {first} and {path} differ in length: pad={pad!r} is ambiguous; "
                "give pad=0, and a mask of each as an input of its own"
            )
    if not lengths.all():
        raise InputError(
            f"client {client!r}: sample {int((lengths == 0).nonzero()[0])} is an empty sequence; drop it"
        )
    span = longest.get(first, int(lengths.max()))
    mask = torch.arange(span) < lengths[:, None]  # (N, T)
    if isinstance(result, dict):
        key, value = ("attention_mask", mask.long()) if pad == "mask" else ("lengths", lengths)
        return {**result, key: value} if key not in result else result
    return *(result if isinstance(result, tuple) else (result,)), mask if pad == "mask" else lengths


def _lengths_of(value: Tensor | Ragged) -> Tensor:
    return value.lengths if isinstance(value, Ragged) else torch.full((len(value),), value.shape[1])


def _filled(value: Tensor | Ragged, longest: int, fill: float) -> Tensor:
    """(N, longest, ...), with `fill` after the end of every sequence."""
    flat = value.flat if isinstance(value, Ragged) else value.flatten(0, 1)
    lengths = _lengths_of(value)
    row, place = segments(lengths)
    result = flat.new_full((len(lengths), longest, *flat.shape[1:]), fill)
    result[row, place] = flat
    return result
