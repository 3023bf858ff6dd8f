"""A federation: the samples of all clients, one client after another."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fairwind.data.counter import HELD_OUT, fold, mix, segments
from fairwind.data.given import Joined, joined, read_given
from fairwind.data.groups import Groups, group_sizes, read_groups
from fairwind.data.padding import Pad, as_samples
from fairwind.data.partition import drawn_split, drawn_validation, taken
from fairwind.data.samples import (
    Samples,
    class_count,
    hash_into,
    kind,
    mapped,
    named,
    narrowed,
    take,
    tensors,
)
from fairwind.data.table import read_dataset, read_frame, read_partitions
from fairwind.data.values import CLASSES, ColumnNames, ColumnOrder
from fairwind.errors import InputError, python_numbers, unknown, whole
from fairwind.runs.schema import FederationFacts, Origin, Part

NewClients = float | Sequence[str]  # a share of the clients, or their names


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients' samples, one client after another; within a client training, then validation, then test."""

    inputs: Samples  # a tensor (N, ...), or a tuple or dict of such
    targets: Samples  # likewise
    start: Tensor  # (K,) where a client's samples start
    train: Tensor  # (K,) training samples of each client
    test: Tensor  # (K,) test samples of each client
    names: tuple[str, ...]
    name: str = "federation"
    classes: int | None = None  # where targets are class labels
    words: tuple[str, ...] = ()  # if inputs are token ids: the word of each
    embedding: Tensor | None = None  # (len(words), D) pretrained word vectors, if any
    class_names: tuple[str, ...] = ()  # names of the classes, if known
    origin: Origin = field(default_factory=Origin)  # source, rule and digest of prepared data
    compute_device: torch.device | None = None  # the computing device, if samples are kept on the host
    groups: tuple[str, ...] = ()  # each client's label, if clients are in groups; also given by their names
    validation: Tensor = field(default_factory=lambda: torch.empty(0))  # (K,) likewise; none if empty
    new_clients: "Federation | None" = None  # other clients, which take no part in training
    columns: ColumnNames = field(default_factory=dict)  # of inputs and targets, where they have names

    def __post_init__(self) -> None:
        if not self.validation.any():  # of a copy with other clients, too
            object.__setattr__(self, "validation", torch.zeros_like(self.train))
        if len(self.validation) != len(self.train):
            many = f"{len(self.train)} and {len(self.validation)} clients"
            raise InputError(f"training and validation samples are counted for {many}: give both as many")
        object.__setattr__(self, "groups", read_groups(self.names, self.groups))
        if (self.train < 1).any():
            empty = self.names[int((self.train < 1).nonzero()[0])]
            raise InputError(f"client {empty!r} has no training samples; leave it out of the federation")
        if self.new_clients is not None:
            new = self.new_clients.arranged(self.meanings, "those of training")
            object.__setattr__(self, "new_clients", new)

    @classmethod
    def from_clients(
        cls,
        clients: Any,
        *,
        names: Sequence[str] | None = None,
        groups: Groups | None = None,
        train: float = 0.8,
        validation: float = 0.0,
        new_clients: NewClients = 0.0,
        seed: int = 0,
        pad: Pad | None = None,
        name: str = "federation",
        classes: int | None = None,
    ) -> "Federation":
        """From a list of clients, or a dict of them by name.

        A client is (inputs, targets): tensors, arrays or lists; or tuples or dicts of these. Or it is a
        PyTorch dataset that returns (input, target) for an index; each sample is read once. Or it is
        {"train": …, "test": …} of these, perhaps with a "validation", which keeps your own split.

        A model is called with a tensor as `model(x)`, a tuple as `model(*x)`, a dict as `model(**x)`.
        A share `train` of each client's samples (rounded down, at least one) is for training, chosen by
        `seed`; the rest are its test samples. A share `validation` of each client's samples is taken from
        those for training: stopping early and choosing look at it, and the test samples stay the same.
        `new_clients`, a share of all or a list of names, take no part in training: see `with_new_clients`.
        `classes` is one more than the largest label unless given.
        `groups` are labels of the clients, a dict by name or a list: metrics are then also given by group.

        Columns of data frames are matched by their names, and a model gets them in the order of the first
        client's. Arrays have no names: their columns are matched by position.

        Sequences of unequal length are padded at the end to the longest. `pad` is the padding value, such as
        0, or a dict of values by the names of inputs (0 for others). With pad="lengths" or "mask", the
        padding is 0 and the model gets one more input: lengths (B,), or a mask (B, T) that is true where
        there is no padding. Inputs in a dict get `lengths`, or `attention_mask` of ones and zeros.
        """
        labels, parts, columns = read_given(clients, names)
        samples = joined(labels, parts, columns, pad)
        return cls._from_joined(
            samples,
            groups=groups,
            train=train,
            validation=validation,
            new_clients=new_clients,
            seed=seed,
            name=name,
            classes=classes,
        )

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        client: str,
        target: str,
        inputs: str | Sequence[str] | None = None,
        split: str | None = None,
        group: str | None = None,
        train: float = 0.8,
        validation: float = 0.0,
        new_clients: NewClients = 0.0,
        seed: int = 0,
        name: str = "federation",
        classes: int | None = None,
    ) -> "Federation":
        """From a pandas data frame with one row per sample, and columns for its client and target.

        Inputs are float32 (N, columns): all other columns, unless `inputs` names them. Targets in a column of
        integers are class labels. A column `split` says train, validation or test in each row, a column
        `group` the label of the client's group.
        """
        names, parts, groups, columns = read_frame(frame, client, target, inputs, split, group)
        samples = joined(names, parts, columns)
        return cls._from_joined(
            samples,
            groups=groups,
            train=train,
            validation=validation,
            new_clients=new_clients,
            seed=seed,
            name=name,
            classes=classes,
        )

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        client: str,
        inputs: str | Sequence[str] = "image",
        targets: str | Sequence[str] = "label",
        split: str | None = None,
        group: str | None = None,
        train: float = 0.8,
        validation: float = 0.0,
        new_clients: NewClients = 0.0,
        seed: int = 0,
        pad: Pad | None = None,
        name: str = "federation",
        classes: int | None = None,
    ) -> "Federation":
        """From a Hugging Face dataset with a column for each sample's client.

        `inputs` and `targets` are columns of numbers, lists or images, which become uint8 arrays (height,
        width, channels). A list of columns gives a dict. A column `split` says train, validation or test in
        each row; instead, `dataset` may be a dict of these. A column `group` says the label of the client's
        group.
        `pad` is as for `from_clients`.
        """
        names, parts, groups, class_names = read_dataset(dataset, client, inputs, targets, split, group)
        classes = classes if classes is not None else len(class_names) or None
        samples = joined(names, parts, {}, pad)
        made = cls._from_joined(
            samples,
            groups=groups,
            train=train,
            validation=validation,
            new_clients=new_clients,
            seed=seed,
            name=name,
            classes=classes,
        )
        return replace(made, class_names=class_names)

    @classmethod
    def from_owners(
        cls,
        inputs: Any,
        targets: Any,
        owner: Any,
        *,
        names: Sequence[str],
        test: Any = None,
        groups: Groups | None = None,
        train: float = 0.8,
        validation: Any = 0.0,
        new_clients: NewClients = 0.0,
        seed: int = 0,
        name: str = "federation",
        classes: int | None = None,
        columns: ColumnNames | None = None,
    ) -> "Federation":
        """From all samples together and, for each, the index into `names` of the client it belongs to.

        `test`, if given, says for each whether it is a test sample; then there is no random split, and
        samples keep their order. `validation` is a share, or, beside `test`, likewise. `columns` are names of
        columns, as {"inputs": ["age", "weight"]}; those of data frames are known.
        """
        train, seed, classes, validation = python_numbers((train, seed, classes, validation))
        whole(0, seed=seed)
        if not isinstance(train, int | float) or not 0 < train <= 1:
            raise InputError(f"train={train!r} is out of range: the training share lies in (0, 1]")
        found = ColumnOrder.of(columns or {}, "those of columns=")
        inputs, targets = as_samples(inputs, found), as_samples(targets, found, "targets")
        owner = torch.as_tensor(owner)
        values = dict((*named(inputs, "inputs"), *named(targets, "targets")))
        for place, each in found.names.items():
            wide = values[place].shape[-1] if place in values and values[place].ndim > 1 else 1
            if place not in values or len(each) not in (1, wide):
                raise InputError(
                    f"columns name {', '.join(each)} of {place!r}, which are not the columns of "
                    f"{', '.join(values)}: give a name for each column of these"
                )
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
        share, own = (validation, None) if isinstance(validation, int | float) else (0.0, validation)
        chosen = torch.zeros_like(size)
        if test is not None:
            test = torch.as_tensor(test, dtype=torch.bool)
            own = torch.zeros_like(test) if own is None else torch.as_tensor(own, dtype=torch.bool)
            if not len(test) == len(own) == len(owner):
                raise InputError(f"test and validation say it for each of {len(owner)} samples: give as many")
            if (test & own).any():
                raise InputError("a sample is for testing and for validation: it can be one of them")
            order = torch.argsort(3 * owner + 2 * test + own.long(), stable=True)
            kept = torch.bincount(owner[~test & ~own], minlength=len(names))
            chosen = torch.bincount(owner[own], minlength=len(names))
        elif own is not None:
            raise InputError("validation says it for each sample: then give test for each sample, too")
        else:
            if train <= share < 1:
                raise InputError(
                    f"train={train:g} and validation={share:g} leave nothing to train on: validation samples "
                    "are taken from those for training, so give a smaller share of them"
                )
            order, kept = drawn_split(owner, size, train, seed)
        order = order.to(tensors(inputs)[0].device)
        classes = class_count(targets) if classes is None else classes
        start, rest = size.cumsum(0) - size, size - kept - chosen
        made = cls(
            take(inputs, order),
            take(targets, order),
            start,
            kept,
            rest,
            tuple(names),
            name,
            classes,
            groups=read_groups(names, groups),
            validation=chosen,
            columns=found.names,
        )
        return made.with_validation(share, seed).with_new_clients(new_clients, seed)

    def of_clients(self, clients: Tensor) -> "Federation":
        """The federation of some of the clients, by their indices (n,), in that order."""
        sizes = self.sizes[clients]
        segment, place = segments(sizes)
        index = (self.start[clients][segment] + place).to(tensors(self.inputs)[0].device)
        chosen = clients.tolist()
        return replace(
            self,
            inputs=take(self.inputs, index),
            targets=take(self.targets, index),
            start=sizes.cumsum(0) - sizes,
            train=self.train[clients],
            validation=self.validation[clients],
            test=self.test[clients],
            names=tuple(self.names[k] for k in chosen),
            groups=tuple(self.groups[k] for k in chosen) if self.groups else (),
            new_clients=None,
        )

    def held_out(self, clients: NewClients, seed: int = 0) -> tuple["Federation", "Federation"]:
        """Two federations: the clients that train, and those that are held out.

        `clients` are the names of these, or a share of all, drawn by the seed.
        """
        clients, seed = python_numbers((clients, seed))
        whole(0, seed=seed)
        new = self._named(clients) if isinstance(clients, list | tuple) else self._drawn(clients, seed)
        if not 0 < int(new.sum()) < len(self):
            raise InputError(
                f"new_clients={clients!r} of {len(self)} clients is {int(new.sum())}: none is left of one "
                "kind"
            )
        return self.of_clients((~new).nonzero()[:, 0]), self.of_clients(new.nonzero()[:, 0])

    def _named(self, clients: Sequence[str]) -> Tensor:
        """Which clients have one of these names (K,)."""
        for name in clients:
            if name not in self.names:
                raise unknown("new client", str(name), self.names)
        return torch.tensor([name in clients for name in self.names])

    def _drawn(self, share: Any, seed: int) -> Tensor:
        """A share of the clients (K,)."""
        if not isinstance(share, int | float) or not 0 < share < 1:
            raise InputError(
                f"new_clients={share!r} is neither a share of the clients, in (0, 1), nor a list of names"
            )
        order = torch.argsort(mix(fold(HELD_OUT, seed), torch.arange(len(self))), stable=True)
        return torch.zeros(len(self), dtype=torch.bool).index_fill(0, order[: round(share * len(self))], True)

    def with_new_clients(self, clients: NewClients, seed: int = 0) -> "Federation":
        """The same federation, of which some clients take no part in training: names, or a share of all.

        Which, is drawn by the seed. Trained models are evaluated on the test samples of the new clients,
        apart from the others; only fine-tuning uses their training samples. They are in `new_clients`.
        """
        if not isinstance(clients, list | tuple) and clients == 0:
            return self
        if self.new_clients is not None:
            raise InputError("the federation has new clients already: leave new_clients= out")
        old, new = self.held_out(clients, seed)
        if not new.test.any():
            raise InputError(f"new_clients={clients!r}: none of them has test samples; name others")
        return replace(old, new_clients=new)

    def pooled(self) -> "Federation":
        """One client with the training samples of all, and no test samples: the data in one place."""
        segment, place = segments(self.train)
        index = (self.start[segment] + place).to(tensors(self.inputs)[0].device)
        none = torch.zeros(1, dtype=torch.int64)
        return replace(
            self,
            inputs=take(self.inputs, index),
            targets=take(self.targets, index),
            start=none,
            train=self.train.sum()[None],
            validation=none,
            test=none,
            names=("all",),
            groups=(),
            new_clients=None,
        )

    def for_choosing(self) -> "Federation":
        """The same federation without its test samples and new clients.

        The validation samples take the place of the test samples.
        """
        if not self.validation.any():
            raise InputError("there are no validation samples to choose on: give validation=0.1, say")
        kept = self.train + self.validation
        segment, place = segments(kept)
        index = (self.start[segment] + place).to(tensors(self.inputs)[0].device)
        return replace(
            self,
            inputs=take(self.inputs, index),
            targets=take(self.targets, index),
            start=kept.cumsum(0) - kept,
            test=self.validation,
            validation=torch.zeros_like(self.validation),
            new_clients=None,
        )

    def with_validation(self, share: float, seed: int = 0) -> "Federation":
        """The same federation with a share of each client's samples taken from training for validation.

        Which, is drawn by the seed. A client keeps at least one training sample; its test samples stay.
        """
        share, seed = python_numbers((share, seed))
        whole(0, seed=seed)
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise InputError(f"validation={share!r} is out of range: a share of the samples lies in [0, 1)")
        if not share:
            return self
        if self.validation.any():
            raise InputError("the federation has validation samples already: leave validation= out")
        wanted = taken(self.train + self.test, share)
        less = (wanted > self.train) | ((wanted == self.train) & (self.sizes == self.sizes.max()))
        if less.any():
            k = int(less.nonzero()[0])
            raise InputError(
                f"validation={share:g} of the {int(self.sizes[k])} samples of client {self.names[k]!r} "
                f"leaves none of the {int(self.train[k])} for training: give a smaller share"
            )
        order, kept = drawn_validation(self.start, self.train, self.test, share, seed)
        if (kept == self.train).all():
            largest = int((self.train + self.test).max())
            raise InputError(
                f"validation={share:g} leaves no validation samples: the largest client has {largest} samples"
            )
        order = order.to(tensors(self.inputs)[0].device)
        return replace(
            self,
            inputs=take(self.inputs, order),
            targets=take(self.targets, order),
            train=kept,
            validation=self.train - kept,
        )

    @classmethod
    def _from_joined(cls, samples: Joined, *, validation: float, **options: Any) -> "Federation":
        """Of users' own parts, or of random ones."""
        own = samples.validation is not None and bool(samples.validation.any())
        if own and validation:
            raise InputError("the federation has validation samples already: leave validation= out")
        return cls.from_owners(**(samples._asdict() | ({} if own else {"validation": validation})), **options)

    @classmethod
    def from_partitioner(
        cls,
        partitioner: Any,
        *,
        inputs: str = "image",
        targets: str = "label",
        groups: Groups | None = None,
        train: float = 0.8,
        validation: float = 0.0,
        new_clients: NewClients = 0.0,
        seed: int = 0,
        name: str = "federation",
        classes: int | None = None,
    ) -> "Federation":
        """From a Hugging Face dataset and a partitioner of flwr-datasets, whose `dataset` is set.

        `inputs` and `targets` are columns: numbers, lists of one length, or images, which become uint8
        arrays (height, width, channels).
        """
        names, clients = read_partitions(partitioner, inputs, targets)
        return cls.from_clients(
            clients,
            names=names,
            groups=groups,
            train=train,
            validation=validation,
            new_clients=new_clients,
            seed=seed,
            name=name,
            classes=classes,
        )

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        groups: Groups | None = None,
        train: float = 0.8,
        validation: float = 0.0,
        new_clients: NewClients = 0.0,
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
        return cls.from_clients(
            clients,
            names=names,
            groups=groups,
            train=train,
            validation=validation,
            new_clients=new_clients,
            seed=seed,
            name=name,
            classes=classes,
        )

    def __repr__(self) -> str:
        parts = [int(part.sum()) for part in (self.train, self.validation, self.test)]
        new = "" if self.new_clients is None else f" and {len(self.new_clients):,} new"
        counts = f"{len(self):,} clients{new}, {' + '.join(f'{n:,}' for n in parts if n)} samples"
        return f"<Federation {self.name!r}: {counts}, {kind(self.inputs)}>"

    def __len__(self) -> int:
        return len(self.names)

    @property
    def samples(self) -> int:
        """Training, validation and test samples of all clients."""
        return len(tensors(self.inputs)[0])

    @property
    def sizes(self) -> Tensor:
        """All samples of each client (K,)."""
        return self.train + self.validation + self.test

    def part(self, name: Part) -> tuple[Tensor, Tensor]:
        """Where each client's samples of a part start, and how many there are: both (K,)."""
        if name == "train":
            return self.start, self.train
        if name == "validation":
            return self.start + self.train, self.validation
        return self.start + self.train + self.validation, self.test

    @property
    def device(self) -> torch.device:
        """The device that the samples are on, or are copied to."""
        return self.compute_device or tensors(self.inputs)[0].device

    @property
    def bytes(self) -> int:
        """The size of the samples in memory."""
        return sum(t.numel() * t.element_size() for t in (*tensors(self.inputs), *tensors(self.targets)))

    def to(self, device: torch.device | str, *, keep_on_host: bool = False) -> "Federation":
        """The same federation with samples on a device, or copied there when needed; counts do not move."""
        if keep_on_host:
            return replace(self, compute_device=torch.device(device))
        inputs, targets = (mapped(lambda t: t.to(device), part) for part in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    @property
    def meanings(self) -> ColumnNames:
        """The names of columns, and of classes under "classes": what tells whether numbers mean the same."""
        return {**self.columns, **({CLASSES: self.class_names} if self.class_names else {})}

    def arranged(self, meanings: ColumnNames, whose: str) -> "Federation":
        """The same federation with its columns in the order of others; what has no names stays as it is.

        `whose` these are is said where they are not the same, and refused, as are other classes.
        """
        if not meanings:
            return self
        classes = tuple(meanings.get(CLASSES, ()))
        for k, (mine, other) in enumerate(zip(self.class_names, classes, strict=False)):
            if mine != other:
                raise InputError(
                    f"class {k} is {mine!r}, and {other!r} among {whose}: give both the same classes, in one "
                    "order, as with dataset.align_labels_with_mapping"
                )
        columns = {place: names for place, names in meanings.items() if place != CLASSES}
        order = ColumnOrder.of(columns, whose)

        def brought(samples: Samples, what: str) -> Samples:
            values = iter(
                order.arranged(value, self.columns[place], place, f"the {what}")
                if place in self.columns
                else value
                for place, value in named(samples, what)
            )
            arranged: Samples = mapped(lambda _: next(values), samples)
            return arranged

        inputs, targets = brought(self.inputs, "inputs"), brought(self.targets, "targets")
        names = max(self.class_names, classes, key=len)
        return replace(self, inputs=inputs, targets=targets, columns=order.names, class_names=names)

    def narrowed(self, dtype: torch.dtype, *, whole_only: bool = False) -> "Federation":
        """The same federation with floating-point inputs in another type; see `samples.refuse_rounded`."""
        new = self.new_clients and self.new_clients.narrowed(dtype, whole_only=True)  # as few may be alike
        inputs = narrowed(self.inputs, dtype, self.whose, whole_only=whole_only)
        return replace(self, inputs=inputs, new_clients=new)

    def whose(self, sample: int) -> str:
        """Begins a message on a sample with its client."""
        return f"client {self.client_of(sample)!r}: "

    def client_of(self, sample: int) -> str:
        """The name of the client that has a sample."""
        return self.names[int((self.start <= sample).sum()) - 1]

    def at(self, index: Tensor | slice) -> tuple[Any, Any]:
        """Inputs and targets of some samples, on the device."""
        if self.compute_device is None:
            return take(self.inputs, index), take(self.targets, index)
        here = index.cpu() if isinstance(index, Tensor) else index
        found = take(self.inputs, here), take(self.targets, here)
        brought: tuple[Any, Any] = mapped(lambda t: t.to(self.compute_device, non_blocking=True), found)
        return brought

    def describe(self) -> FederationFacts:
        """Counts, as recorded with results."""
        facts: dict[str, object] = {
            "name": self.name,
            "clients": len(self),
            "classes": self.classes,
            "train_samples": int(self.train.sum()),
            **({"validation_samples": int(self.validation.sum())} if self.validation.any() else {}),
            "test_samples": int(self.test.sum()),
            "smallest": int(self.train.min()),
            "median": float(self.train.double().quantile(0.5)),
            "largest": int(self.train.max()),
            **({"new_clients": len(self.new_clients)} if self.new_clients is not None else {}),
            **({"groups": group_sizes(self.groups)} if self.groups else {}),
            **(
                {"columns": {place: list(each) for place, each in self.meanings.items()}}
                if self.meanings
                else {}
            ),
            **self.origin,
        }
        return cast(FederationFacts, facts)

    @property
    def has_labels(self) -> bool:
        """Whether targets are class labels."""
        labels = isinstance(self.targets, Tensor) and not self.targets.is_floating_point()
        return labels and self.classes is not None

    def label_counts(self) -> Tensor:
        """Labels of each client and class: (K, classes); without those that are no class, such as −100."""
        if not self.has_labels:
            raise InputError(f"{self.name} has no class labels to count")
        assert self.classes is not None
        assert isinstance(self.targets, Tensor)
        labels = self.targets.cpu().reshape(len(self.targets), -1)
        owner = segments(self.sizes)[0][:, None].expand_as(labels)
        known = (labels >= 0) & (labels < self.classes)
        counts = torch.bincount((owner * self.classes + labels)[known], minlength=len(self) * self.classes)
        return counts.view(len(self), self.classes)

    def digest(self) -> str:
        """SHA-256 of everything that training and results depend on: samples, their order, their clients."""
        seen = hashlib.sha256(json.dumps([self.names, self.classes, self.words]).encode())
        table = () if self.embedding is None else (self.embedding,)
        for path, _ in (*named(self.inputs), *named(self.targets)):
            seen.update(path.encode())
        samples = *tensors(self.inputs), *tensors(self.targets)
        hash_into(seen, (*samples, self.start, self.train, self.test, *table))
        if self.validation.any():
            seen.update(b"validation")
            hash_into(seen, (self.validation,))
        if self.groups:
            seen.update(json.dumps(["groups", self.groups]).encode())
        if self.new_clients is not None:
            seen.update(f"new clients {self.new_clients.digest()}".encode())
        return seen.hexdigest()
