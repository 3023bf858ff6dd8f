"""A federation: the samples of all clients one after another, and which of them are whose."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairwind.counter import SPLIT, fold, mix, segments, shuffle
from fairwind.data.samples import Samples, as_samples, kind, mapped, named, take, tensors
from fairwind.errors import InputError


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients' samples, one client after another; within a client first training, then test samples."""

    inputs: Samples  # a tensor (N, ...), or a tuple or dict of such
    targets: Samples  # likewise
    start: Tensor  # (K,) where a client's samples begin
    train: Tensor  # (K,) training samples of each client
    test: Tensor  # (K,) test samples of each client
    names: tuple[str, ...]
    name: str = "federation"
    classes: int | None = None  # where targets are class labels
    words: tuple[str, ...] = ()  # where inputs are token ids: what each stands for
    embedding: Tensor | None = None  # (len(words), D) their pretrained vectors, if there are any
    class_names: tuple[str, ...] = ()  # what the labels stand for, if known
    origin: Mapping[str, Any] = field(default_factory=dict)  # source, rule and digest of prepared data

    def __post_init__(self) -> None:
        if (self.train < 1).any():
            empty = self.names[int((self.train < 1).nonzero()[0])]
            raise InputError(f"client {empty!r} has no training samples; leave it out of the federation")

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[tuple[Any, Any]],
        *,
        names: Sequence[str] | None = None,
        train: float = 0.8,
        seed: int = 0,
        name: str = "federation",
        classes: int | None = None,
    ) -> "Federation":
        """From each client's (inputs, targets): tensors, arrays or lists; or tuples or dicts of these.

        A model is called with a tensor as model(x), with a tuple as model(*x), with a dict as model(**x).
        A share `train` of each client's samples (rounded down, at least one) is for training, chosen by
        `seed`; the rest are its test samples. `classes` is one more than the largest label unless given.
        """
        if not clients:
            raise InputError("a federation needs at least one client")
        labels = tuple(names) if names is not None else tuple(str(k) for k in range(len(clients)))
        if len(labels) != len(clients):
            raise InputError(f"{len(labels)} names for {len(clients)} clients")
        parts = [
            _check(label, as_samples(x), as_samples(y)) for label, (x, y) in zip(labels, clients, strict=True)
        ]
        for label, (x, y) in zip(labels, parts, strict=True):
            for what, value, first in (("inputs", x, parts[0][0]), ("targets", y, parts[0][1])):
                if kind(value) != kind(first):
                    raise InputError(
                        f"client {label!r}: {what} are {kind(value)}, but those of client {labels[0]!r} are "
                        f"{kind(first)}; give all clients the same shape and type"
                    )
        owner = torch.repeat_interleave(torch.tensor([len(tensors(x)[0]) for x, _ in parts]))
        inputs, targets = _joined([x for x, _ in parts]), _joined([y for _, y in parts])
        return cls.from_owners(
            inputs, targets, owner, names=labels, train=train, seed=seed, name=name, classes=classes
        )

    @classmethod
    def from_owners(
        cls,
        inputs: Any,
        targets: Any,
        owner: Any,
        *,
        names: Sequence[str],
        train: float = 0.8,
        seed: int = 0,
        name: str = "federation",
        classes: int | None = None,
    ) -> "Federation":
        """From all samples together and, for each, the index into `names` of the client it belongs to."""
        if not 0 < train <= 1:
            raise InputError(f"train={train} is out of range: the training share lies in (0, 1]")
        inputs, targets, owner = as_samples(inputs), as_samples(targets), torch.as_tensor(owner)
        counts = [{len(value) for value in tensors(samples)} for samples in (inputs, targets)]
        if not counts[0] == counts[1] == {len(owner)}:
            many, labels = (" or ".join(map(str, sorted(each))) for each in counts)
            raise InputError(f"{many} inputs, {labels} targets and {len(owner)} owners do not match")
        if len(owner) and not 0 <= int(owner.min()) <= int(owner.max()) < len(names):
            raise InputError(f"owners must be indices of the {len(names)} names, 0 to {len(names) - 1}")
        if len(set(names)) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise InputError(f"client {twice!r} is named twice; give every client a name of its own")
        size = torch.bincount(owner, minlength=len(names))
        keys = mix(fold(SPLIT, seed), torch.arange(len(size)))
        segment, place = segments(size)
        start = size.cumsum(0) - size
        within = start[segment] + shuffle(segment, place, keys, len(owner))
        order = torch.argsort(owner, stable=True)[within].to(tensors(inputs)[0].device)
        kept = torch.minimum((size.double() * train + 1e-9).floor().long().clamp(min=1), size)
        labelled = isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()
        if classes is None and labelled and len(targets) and int(targets.min()) >= 0:
            assert isinstance(targets, Tensor)
            classes = int(targets.max()) + 1
        parts = take(inputs, order), take(targets, order), start, kept, size - kept
        return cls(*parts, tuple(names), name, classes)

    @classmethod
    def from_partitioner(
        cls,
        partitioner: Any,
        *,
        inputs: str = "image",
        targets: str = "label",
        train: float = 0.8,
        seed: int = 0,
        name: str = "federation",
        classes: int | None = None,
    ) -> "Federation":
        """From a Hugging Face dataset cut by a partitioner of flwr-datasets, whose `dataset` is set.

        `inputs` and `targets` are columns: numbers, lists of one length, or images, which become uint8
        arrays (height, width, channels).
        """
        try:
            count = partitioner.num_partitions
            parts = [partitioner.load_partition(k) for k in range(count)]
        except AttributeError as error:
            raise InputError(
                f"{type(partitioner).__name__} cannot be partitioned: {error}; "
                "give a flwr-datasets partitioner and set its dataset first"
            ) from None
        known = getattr(partitioner, "partition_id_to_natural_id", {})
        names = [str(known.get(k, k)) for k in range(count)]
        clients = []
        for label, part in zip(names, parts, strict=True):
            for column in (inputs, targets):
                if column not in part.column_names:
                    raise InputError(
                        f"the dataset has no column {column!r}; it has {', '.join(part.column_names)}"
                    )
            rows = part.select_columns([inputs, targets]).with_format("numpy")[:]
            for column in (inputs, targets):
                if rows[column].dtype.kind not in "biuf":
                    raise InputError(
                        f"client {label!r}: column {column!r} does not hold numbers or images of one shape; "
                        "map it to such first"
                    )
            clients.append((rows[inputs], rows[targets]))
        return cls.from_clients(clients, names=names, train=train, seed=seed, name=name, classes=classes)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        train: float = 0.8,
        seed: int = 0,
        name: str | None = None,
        classes: int | None = None,
    ) -> "Federation":
        """From a folder with a file for each client: NAME.npz, NAME.safetensors or NAME.csv.

        The first two hold the arrays `inputs` and `targets`; a CSV file has a header and numbers, and its
        column `target` is the target.
        """
        from fairwind.data.folder import read_clients

        names, clients = read_clients(Path(path))
        name = name or Path(path).name
        return cls.from_clients(clients, names=names, train=train, seed=seed, name=name, classes=classes)

    def __repr__(self) -> str:
        counts = f"{len(self):,} clients, {int(self.train.sum()):,} + {int(self.test.sum()):,} samples"
        return f"<Federation {self.name!r}: {counts}, {kind(self.inputs)}>"

    def __len__(self) -> int:
        return len(self.names)

    @property
    def samples(self) -> int:
        """Training and test samples of all clients."""
        return len(tensors(self.inputs)[0])

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return tensors(self.inputs)[0].device

    def to(self, device: torch.device | str) -> "Federation":
        """The same federation with its samples on a device; the counts stay on the host."""
        inputs, targets = (mapped(lambda t: t.to(device), part) for part in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def describe(self) -> dict[str, Any]:
        """Counts, as recorded with results."""
        return {
            "name": self.name,
            "clients": len(self),
            "classes": self.classes,
            "train_samples": int(self.train.sum()),
            "test_samples": int(self.test.sum()),
            "smallest": int(self.train.min()),
            "median": float(self.train.double().quantile(0.5)),
            "largest": int(self.train.max()),
            **self.origin,
        }

    def label_counts(self) -> Tensor:
        """Samples of each client and class: (K, classes)."""
        if self.classes is None or not isinstance(self.targets, Tensor):
            raise InputError(f"{self.name} has no class labels to count")
        owner, _ = segments(self.train + self.test)
        counts = torch.bincount(owner * self.classes + self.targets.cpu(), minlength=len(self) * self.classes)
        return counts.view(len(self), self.classes)

    def digest(self) -> str:
        """SHA-256 of everything that training can see: samples, their order, and whose they are."""
        seen = hashlib.sha256(json.dumps([self.names, self.classes, self.words]).encode())
        table = () if self.embedding is None else (self.embedding,)
        for part in (self.inputs, self.targets):
            for path, _ in named(part):
                seen.update(path.encode())
        samples = *tensors(self.inputs), *tensors(self.targets)
        for value in (*samples, self.start, self.train, self.test, *table):
            if value.dtype == torch.bfloat16:  # NumPy has no such type
                seen.update(b"bfloat16")
                value = value.view(torch.int16)
            array = value.cpu().contiguous().numpy()
            seen.update(f"{array.dtype.str}{array.shape}".encode())
            seen.update(memoryview(array.reshape(-1).view(np.uint8)))
        return seen.hexdigest()


def _joined(parts: Sequence[Any]) -> Any:
    """All clients' samples, one after another."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(each) for each in zip(*parts, strict=True))
    return torch.cat(list(parts))


def _check(label: str, x: Samples, y: Samples) -> tuple[Samples, Samples]:
    if isinstance(y, Tensor) and not y.is_floating_point():
        y = y.long()
    shapes = [tuple(value.shape) for value in (*tensors(x), *tensors(y))]
    if not tensors(x) or not tensors(y):
        raise InputError(f"client {label!r}: there are no tensors in its inputs or targets")
    if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        split = len(tensors(x))
        of_inputs, of_targets = (", ".join(map(str, part)) for part in (shapes[:split], shapes[split:]))
        raise InputError(f"client {label!r}: inputs {of_inputs} and targets {of_targets} differ in length")
    for what, samples in (("inputs", x), ("targets", y)):
        for path, value in named(samples):
            if value.is_floating_point() and not torch.isfinite(value).all():
                row = int((~torch.isfinite(value.reshape(len(value), -1))).any(1).nonzero()[0])
                raise InputError(
                    f"client {label!r}: {what}{path and ' ' + path} of sample {row} hold NaN or infinity; "
                    "clean or drop it"
                )
    return x, y
