"""Users' clients: inputs and targets, own train and test parts, or PyTorch datasets."""

from collections.abc import Iterable, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fairwind.data.padding import Pad, padded, refuse_ragged
from fairwind.data.samples import Samples, kind, named, tensors
from fairwind.data.values import ColumnNames, ColumnOrder, Values, as_values, is_frame, is_mapping, leaves
from fairwind.errors import InputError

PLAIN = (str, bytes, tuple, list, range, Tensor, np.ndarray)  # they can be indexed, but are not datasets
PARTS = ("train", "validation", "test")
FORMS = 'give (inputs, targets), a Dataset, or {"train": …, "test": …} of these'


class Part(NamedTuple):
    """Samples of one client: all, or one of its parts."""

    client: str
    of: str  # one of PARTS, or "" for samples without a split
    inputs: Values
    targets: Values


class Joined(NamedTuple):
    """All clients' samples, as arguments of `Federation.from_owners`."""

    inputs: Samples
    targets: Samples
    owner: Tensor  # (N,)
    names: tuple[str, ...]
    test: Tensor | None  # (N,) whether it is a test sample; None for a random split
    validation: Tensor | None  # (N,) likewise
    columns: ColumnNames


def read_given(clients: Any, names: Sequence[str] | None) -> tuple[tuple[str, ...], list[Part], ColumnNames]:
    """The clients' names, the parts of each, and the columns of their tables."""
    _refuse_whole(clients)
    if is_mapping(clients):
        if names is not None:
            raise InputError("the clients have names already, as keys; leave names= out")
        if set(PARTS) & set(clients):
            raise InputError(
                'train and test are parts of a client, not clients: give {"name": {"train": …, "test": …}}'
            )
        labels, values = tuple(str(key) for key in clients), [clients[key] for key in clients]
    else:
        values = list(clients)
        labels = tuple(map(str, names)) if names is not None else tuple(str(k) for k in range(len(values)))
    if not values:
        raise InputError("a federation needs at least one client")
    if len(labels) != len(values):
        raise InputError(f"{len(labels)} names for {len(values)} clients")
    columns = ColumnOrder()
    parts = [
        part for label, client in zip(labels, values, strict=True) for part in _parts(label, client, columns)
    ]
    columns.refuse_nameless()
    for part in parts:
        if bool(part.of) != bool(parts[0].of):
            split, other = (part, parts[0]) if part.of else (parts[0], part)
            raise InputError(
                f"client {split.client!r} has its own train and test parts, but client {other.client!r} has "
                "not; split all of them or none"
            )
    return labels, parts, columns.names


def joined(
    names: tuple[str, ...], parts: Sequence[Part], columns: ColumnNames, pad: Pad | None = None
) -> Joined:
    """All samples, client after client, after checking that shapes and types agree."""
    filled = [part for part in parts if not _is_empty(part)]
    trained = {part.client for part in filled if part.of in ("train", "")}
    for name in names:
        if name not in trained:
            others = [part.of for part in filled if part.client == name]
            only = f", only {' and '.join(others)} samples" if others else ""
            raise InputError(f"client {name!r} has no training samples{only}; leave it out of the federation")
    if pad is not None:
        inputs = padded([part.client for part in filled], [part.inputs for part in filled], pad)
        if isinstance(pad, str) and isinstance(inputs[0], tuple) and not isinstance(filled[0].inputs, tuple):
            columns = {"inputs[0]" if place == "inputs" else place: columns[place] for place in columns}
        filled = [part._replace(inputs=x) for part, x in zip(filled, inputs, strict=True)]
    checked = [_check(part) for part in filled]
    for part, samples in zip(filled, checked, strict=True):
        for what, value, wanted in zip(("inputs", "targets"), samples, checked[0], strict=True):
            if _kinds(value) != _kinds(wanted):
                raise InputError(
                    f"client {part.client!r}: {what} are {kind(value)}, but those of client "
                    f"{filled[0].client!r} are {kind(wanted)}; give all clients the same shape and type"
                )
    sizes = torch.tensor([len(tensors(x)[0]) for x, _ in checked])
    place = {name: k for k, name in enumerate(names)}
    owner = torch.tensor([place[part.client] for part in filled]).repeat_interleave(sizes)
    x, y = _joined([x for x, _ in checked]), _joined([y for _, y in checked])
    if not filled[0].of:
        return Joined(x, y, owner, names, None, None, columns)
    test, validation = (
        torch.tensor([part.of == of for part in filled]).repeat_interleave(sizes)
        for of in ("test", "validation")
    )
    return Joined(x, y, owner, names, test, validation, columns)


def _kinds(samples: Samples) -> dict[str, str]:
    """Type and shape by path; dicts are the same in any order."""
    return {path: kind(value) for path, value in named(samples)}


def _is_empty(part: Part) -> bool:
    """Whether there are no inputs. Single numbers, which are not samples, are refused later."""
    return not any((isinstance(v, Tensor) and v.ndim == 0) or len(v) for _, v in leaves(part.inputs))


def _refuse_whole(clients: Any) -> None:
    """Refuses anything but a collection of clients, and names the right constructor."""
    if isinstance(clients, list | tuple):
        return
    remedy = ""
    if is_frame(clients):
        remedy = "use Federation.from_frame(frame, client=…, target=…)"
    elif hasattr(clients, "column_names"):  # Hugging Face's Dataset and DatasetDict
        remedy = "use Federation.from_dataset(dataset, client=…)"
    elif hasattr(clients, "load_partition"):
        remedy = "use Federation.from_partitioner(partitioner)"
    elif isinstance(clients, DataLoader):
        remedy = "give a list with the dataset of each client: [loader.dataset, …]"
    elif isinstance(clients, str) or hasattr(clients, "__fspath__"):
        remedy = "use Federation.from_folder(path)"
    elif isinstance(clients, Tensor | np.ndarray):
        remedy = "give a list with (inputs, targets) of each client"
    elif hasattr(clients, "__getitem__") and not isinstance(clients, Sequence) and not is_mapping(clients):
        remedy = "give a list with a Dataset of each client, such as torch.utils.data.Subset(dataset, rows)"
    elif not isinstance(clients, Iterable):
        remedy = "give a list or a dict of clients"
    if remedy:
        raise InputError(f"clients are given as {type(clients).__name__}: {remedy}")


def _parts(client: str, given: Any, columns: ColumnOrder) -> list[Part]:
    if not is_mapping(given):
        return [_part(client, "", given, columns)]
    keys = set(given)
    if not keys & set(PARTS):
        raise InputError(f"client {client!r} is a dict of {', '.join(map(str, given)) or 'nothing'}: {FORMS}")
    if keys - set(PARTS):
        other = ", ".join(repr(key) for key in given if key not in PARTS)
        raise InputError(f"client {client!r} has a part {other}: there are 'train', 'validation' and 'test'")
    return [_part(client, of, given[of], columns) for of in PARTS if of in keys]


def _part(client: str, of: str, given: Any, columns: ColumnOrder) -> Part:
    where = f"client {client!r}" + (of and f", {of}")
    x, y = (
        as_values(each, f"{where}: {what}", columns, what)
        for what, each in zip(("inputs", "targets"), _pair(where, given), strict=True)
    )
    return Part(client, of, x, y)


def _pair(where: str, given: Any) -> tuple[Any, Any]:
    name = type(given).__name__
    if isinstance(given, DataLoader):
        raise InputError(f"{where} is a DataLoader: give its dataset, loader.dataset")
    if isinstance(given, tuple | list):
        samples = len(given) > 0 and all(isinstance(each, tuple) and len(each) == 2 for each in given)
        if samples and (len(given) != 2 or any(_is_number(y) for _, y in given)):
            raise InputError(
                f"{where} is a {name} of (input, target) samples: give the inputs and the targets apart, "
                "([x for x, _ in samples], [y for _, y in samples])"
            )
        if len(given) != 2:
            raise InputError(f"{where} is a {name} of {len(given)}, not of inputs and targets: {FORMS}")
        if any(_is_dataset(each) or isinstance(each, DataLoader) for each in given):
            raise InputError(f'{where} is a pair of datasets: give {{"train": …, "test": …}}')
        return given[0], given[1]
    if _is_dataset(given):
        return _read_dataset(where, given)
    shape = f" of shape {tuple(given.shape)}" if isinstance(given, Tensor | np.ndarray) else ""
    remedy = "use Federation.from_frame" if is_frame(given) else FORMS
    raise InputError(f"{where} is one {name}{shape}: {remedy}")


def _is_number(given: Any) -> bool:
    return isinstance(given, str | int | float) or getattr(given, "ndim", 1) == 0


def _is_dataset(given: Any) -> bool:
    """Whether it is a map-style dataset, with a length and samples by index."""
    if isinstance(given, PLAIN) or is_frame(given) or is_mapping(given):
        return False
    return isinstance(given, IterableDataset) or (isinstance(given, Sized) and hasattr(given, "__getitem__"))


def _read_dataset(where: str, dataset: Any) -> tuple[Any, Any]:
    """All inputs and all targets: every sample is read once."""
    if isinstance(dataset, IterableDataset):
        raise InputError(f"{where} is an IterableDataset: give one with a length and samples by number")
    samples = [dataset[i] for i in range(len(dataset))]
    for i, sample in enumerate(samples):
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            many = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
            remedy = (
                "use Federation.from_dataset" if is_mapping(sample) else "several inputs are ((a, b), target)"
            )
            raise InputError(
                f"{where}: sample {i} of its dataset is a {type(sample).__name__}{many}, "
                f"not (input, target); {remedy}"
            )
    x, y = ([sample[side] for sample in samples] for side in (0, 1))
    return _collated(f"{where}: inputs", x), _collated(f"{where}: targets", y)


def _collated(what: str, values: list[Any]) -> Any:
    """A list for each tensor that a sample consists of."""
    if not values:
        return values
    first = values[0]
    if is_mapping(first):
        if any(not is_mapping(value) or set(value) != set(first) for value in values):
            raise InputError(f"{what} are dicts with other keys in other samples; give all the same")
        return {key: _collated(what, [value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        if any(not isinstance(value, tuple) or len(value) != len(first) for value in values):
            raise InputError(f"{what} are tuples of other lengths in other samples; give all the same")
        return tuple(_collated(what, list(each)) for each in zip(*values, strict=True))
    return values


def _joined(parts: Sequence[Any]) -> Any:
    """All clients' samples, one after another."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(each) for each in zip(*parts, strict=True))
    return torch.cat(list(parts))


def _check(part: Part) -> tuple[Samples, Samples]:
    """Its tensors: as many targets as inputs, and all of them numbers."""
    client = part.client
    x: Any = part.inputs
    y: Any = part.targets
    for what, values in (("inputs", x), ("targets", y)):
        refuse_ragged(f"client {client!r}: ", what, values)
    if isinstance(y, Tensor) and not y.is_floating_point():
        y = y.long()
    if not tensors(x) or not tensors(y):
        raise InputError(f"client {client!r}: there are no tensors in its inputs or targets")
    shapes = [tuple(value.shape) for value in (*tensors(x), *tensors(y))]
    if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        split = len(tensors(x))
        of_inputs, of_targets = (", ".join(map(str, each)) for each in (shapes[:split], shapes[split:]))
        pairs = isinstance(x, tuple) and isinstance(y, tuple)
        remedy = ': for own parts give {"train": (x, y), "test": (x, y)}' if pairs else ""
        raise InputError(
            f"client {client!r}: inputs {of_inputs} and targets {of_targets} differ in length{remedy}"
        )
    for what, samples in (("inputs", x), ("targets", y)):
        for path, value in named(samples):
            if value.is_floating_point() and not torch.isfinite(value).all():
                row = int((~torch.isfinite(value.reshape(len(value), -1))).any(1).nonzero()[0])
                raise InputError(
                    f"client {client!r}: {what}{path and ' ' + path} of sample {row} hold NaN or infinity; "
                    "clean or drop it"
                )
    return x, y
