"""Partitions: which client each sample belongs to, and which samples are for training."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairwind.data.counter import SPLIT, VALIDATION, fold, mix, segments, shuffle
from fairwind.errors import InputError, in_range, positive

Indices = NDArray[np.int64]

DRAWS = 10_000  # draws before giving up


# flwr-datasets' NaturalIdPartitioner forms the same clients (tests/data/test_partition.py), but takes only a
# Hugging Face dataset, installs matplotlib and seaborn, and pins an old rich; this is one call.
def by_key(keys: Sequence[str]) -> tuple[Indices, list[str]]:
    """One client for each key, in the order of their names: each sample's client, and the names."""
    names = sorted(set(keys))  # NumPy's strings end at a NUL, and are all as long as the longest
    index = {name: k for k, name in enumerate(names)}
    return np.array([index[key] for key in keys], dtype=np.int64), names


# flwr-datasets' DirichletPartitioner bounds a client's samples, not its share of the classes, gives up after
# ten draws, and draws from a stream that NumPy may change.
def dirichlet(labels: Indices, clients: int, beta: float, seed: int) -> Indices:
    """Shares of each class drawn from Dir(β, …, β) over the clients: each sample's client.

    Redrawn until each client's shares of the classes sum to at least 1/(10·K), as in the authors' code
    (where a comment speaks of 1/(10·K) of all data, which is ten times as much).
    """
    in_range(1, len(labels) + 1, clients=clients)
    positive(beta=beta)
    in_range(0, 2**32, seed=seed)
    draw = np.random.RandomState(seed)  # a generator that NumPy never changes
    classes = np.unique(labels)
    for _ in range(DRAWS):
        shares = draw.dirichlet([beta] * clients, len(classes))
        if shares.sum(0).min() >= 1 / (10 * clients):
            owner = _deal(draw, labels, classes, shares)
            if np.bincount(owner, minlength=clients).all():
                return owner
    raise InputError(
        f"beta={beta:g} with {clients} clients left some client almost empty in {DRAWS} draws; "
        "take a larger beta or fewer clients"
    )


# flwr-datasets' IidPartitioner splits the dataset in its order, without a seed.
def iid(labels: Indices, clients: int, seed: int) -> Indices:
    """Every class distributed evenly: each sample's client."""
    in_range(1, len(labels) + 1, clients=clients)
    in_range(0, 2**32, seed=seed)
    classes = np.unique(labels)
    shares = np.full((len(classes), clients), 1 / clients)
    return _deal(np.random.RandomState(seed), labels, classes, shares)


def _deal(
    draw: np.random.RandomState, labels: Indices, classes: Indices, shares: NDArray[np.float64]
) -> Indices:
    """Each class shuffled, then split by the clients' shares of it: each sample's client."""
    owner = np.empty(len(labels), dtype=np.int64)
    for c, share in zip(classes, shares, strict=True):
        members = np.flatnonzero(labels == c)
        draw.shuffle(members)
        ends = np.floor(share.cumsum() * len(members) + 1e-9).astype(np.int64)
        ends[-1] = len(members)
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return owner


def drawn_split(owner: Tensor, size: Tensor, train: float, seed: int) -> tuple[Tensor, Tensor]:
    """The samples client by client, shuffled within each, and each client's number of training samples."""
    segment, place = segments(size)
    keys = mix(fold(SPLIT, seed), torch.arange(len(size)))
    within = (size.cumsum(0) - size)[segment] + shuffle(segment, place, keys, len(owner))
    kept = torch.minimum(taken(size, train).clamp(min=1), size)
    return torch.argsort(owner, stable=True)[within], kept


def drawn_validation(
    start: Tensor, train: Tensor, test: Tensor, share: float, seed: int
) -> tuple[Tensor, Tensor]:
    """All samples with a share of each client's moved from its training part to behind it, and what is left.

    Samples that stay in a part keep their order.
    """
    moving = torch.minimum(taken(train + test, share), train - 1)
    segment, place = segments(train)
    keys = mix(fold(VALIDATION, seed), torch.arange(len(train)))
    drawn = torch.empty_like(place)
    first = (train.cumsum(0) - train)[segment]
    drawn[first + shuffle(segment, place, keys, int(train.max()))] = place
    moved = drawn >= (train - moving)[segment]
    order = torch.arange(int((start + train + test).max()))
    at = start[segment] + place
    order[at] = at[torch.argsort(2 * segment + moved, stable=True)]
    return order, train - moving


def taken(size: Tensor, share: float) -> Tensor:
    """A share of each client's samples, rounded down."""
    return (size.double() * share + 1e-9).floor().long()
