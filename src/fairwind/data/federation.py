"""A federation: the samples of all clients in one tensor, and which of them are whose."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fairwind.counter import SPLIT, fold, mix, segments, shuffle
from fairwind.errors import InputError


@dataclass(frozen=True)
class Federation:
    """Clients' samples, one client after another; within a client first training, then test samples."""

    inputs: Tensor  # (N, ...)
    targets: Tensor  # (N, ...)
    start: Tensor  # (K,) where a client's samples begin
    train: Tensor  # (K,) training samples of each client
    test: Tensor  # (K,) test samples of each client
    names: tuple[str, ...]
    name: str = "federation"
    classes: int | None = None  # where targets are class labels

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
        """From each client's (inputs, targets): tensors, arrays or lists.

        A share `train` of each client's samples (rounded down, at least one) is for training, chosen by
        `seed`; the rest are its test samples. `classes` is one more than the largest label unless given.
        """
        if not clients:
            raise InputError("a federation needs at least one client")
        if not 0 < train <= 1:
            raise InputError(f"train={train} is out of range: the training share lies in (0, 1]")
        labels = tuple(names) if names is not None else tuple(str(k) for k in range(len(clients)))
        if len(labels) != len(clients):
            raise InputError(f"{len(labels)} names for {len(clients)} clients")
        parts = [
            _check(label, torch.as_tensor(x), torch.as_tensor(y))
            for label, (x, y) in zip(labels, clients, strict=True)
        ]
        for label, (x, y) in zip(labels, parts, strict=True):
            for what, value, first in (("inputs", x, parts[0][0]), ("targets", y, parts[0][1])):
                if value.shape[1:] != first.shape[1:] or value.dtype != first.dtype:
                    raise InputError(
                        f"client {label!r}: {what} are {kind(value)}, but those of client {labels[0]!r} are "
                        f"{kind(first)}; give all clients the same shape and type"
                    )
        size = torch.tensor([len(x) for x, _ in parts])
        start = size.cumsum(0) - size
        inputs, targets = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        keys = mix(fold(SPLIT, seed), torch.arange(len(size)))
        order = shuffle(*segments(size), keys).to(inputs.device)
        kept = torch.minimum((size.double() * train + 1e-9).floor().long().clamp(min=1), size)
        if classes is None and not targets.is_floating_point():
            classes = int(targets.max()) + 1
        return cls(inputs[order], targets[order], start, kept, size - kept, labels, name, classes)

    def __len__(self) -> int:
        return len(self.names)

    def to(self, device: torch.device | str) -> "Federation":
        """The same federation with its samples on a device; the counts stay on the host."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

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
        }


def _check(label: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if y.dtype in (torch.int32, torch.int16, torch.uint8):
        y = y.long()
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
        raise InputError(
            f"client {label!r}: inputs {tuple(x.shape)} and targets {tuple(y.shape)} differ in length"
        )
    for what, value in (("inputs", x), ("targets", y)):
        if value.is_floating_point() and not torch.isfinite(value).all():
            row = int((~torch.isfinite(value.reshape(len(value), -1))).any(1).nonzero()[0])
            raise InputError(
                f"client {label!r}: {what} of sample {row} hold NaN or infinity; clean or drop it"
            )
    return x, y


def kind(value: Tensor) -> str:
    """Type and shape of samples, in words."""
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape[1:])} per sample"
