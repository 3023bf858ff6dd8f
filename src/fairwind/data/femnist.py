"""FEMNIST: handwritten digits and letters, one client per writer.

Caldas et al.: LEAF: A Benchmark for Federated Settings. 2018.
"""

from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Literal

import numpy as np

from fairwind.data.federation import Federation
from fairwind.data.partition import by_key, dirichlet, iid
from fairwind.data.source import (
    AGAIN,
    LEAF,
    PARQUET,
    Layout,
    Like,
    Notes,
    Pixels,
    Samples,
    Source,
    distinct,
    images,
    leaf,
)
from fairwind.errors import InputError, damaged, in_range, positive, whole

LIKE = Like("L", (28, 28), 62)
CLASSES = tuple(digits + ascii_uppercase + ascii_lowercase)
RULE = (
    "a client for each writer, in the order of their names; of a writer's equal images with equal label one "
    "is kept; pixels inverted, so that ink is 255; 8:2 split by seed"
)
POOLED_RULE = (
    "all writers' images together, of a writer's equal images with equal label one; class by class over the "
    "clients, shares from a Dirichlet distribution, redrawn until each client's shares sum to at least "
    "1/(10·K) and it has a sample; iid deals each class evenly; pixels inverted, so that ink is 255; "
    "8:2 split by seed"
)


def _parquet(files: list[Path]) -> Samples:
    return images(files, "image", "character", "writer_id", LIKE)


def _leaf(files: list[Path]) -> Samples:
    pixels: list[Pixels] = []
    labels: list[int] = []
    owners: list[str] = []
    for file in files:
        for user, x, y in leaf(file):
            for i, (values, label) in enumerate(zip(x, y, strict=True)):
                pixels.append(_picture(f"{file}, user {user!r}, sample {i}", values, label))
            labels += y
            owners += [user] * len(y)
    return Samples(LIKE.stack(pixels), np.array(labels, dtype=np.int64), owners)


def _picture(where: str, values: object, label: object) -> Pixels:
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        raise InputError(f"{where}: x does not hold numbers")
    if len(values) != 784:
        raise InputError(f"{where}: the image has {len(values)} pixels, not 28×28")
    with damaged(lambda: f"{where}: pixels lie outside 0 to 1", AGAIN):  # an integer beyond all floats
        grey = np.array(values, dtype=np.float64)
    if not ((grey >= 0) & (grey <= 1)).all():
        raise InputError(f"{where}: pixels lie outside 0 to 1")
    return LIKE.check(where, np.rint(grey * 255).astype(np.uint8).reshape(28, 28), label)


def femnist(samples: Samples, *, clients: int | None = None, seed: int = 0) -> tuple[Federation, Notes]:
    """FEMNIST by writer, 28×28 pixels, 62 classes; `clients` takes the first so many writers by name.

    Caldas et al.: LEAF: A Benchmark for Federated Settings. 2018.
    """
    assert isinstance(samples.inputs, np.ndarray)
    keep = distinct(samples)
    repeated = len(samples.labels) - len(keep)
    notes = [f"{repeated:,} repeated images of a writer left out"] if repeated else []
    owner, names = by_key([samples.owners[i] for i in keep])
    if clients is not None:
        if clients > len(names):
            raise InputError(f"clients={clients}, but the data has {len(names)} writers")
        notes.append(f"the first {clients:,} of {len(names):,} writers by name")
        keep, owner, names = keep[owner < clients], owner[owner < clients], names[:clients]
    federation = Federation.from_owners(
        255 - samples.inputs[keep],
        samples.labels[keep],
        owner,
        names=names,
        seed=seed,
        name="FEMNIST by writer",
        classes=62,
    )
    return replace(federation, class_names=CLASSES), notes


def _check(clients: int | None, seed: int) -> None:
    if clients is not None:
        whole(1, clients=clients)
    in_range(0, 2**32, seed=seed)


def femnist_pooled(
    samples: Samples, *, clients: int = 16, beta: float | Literal["iid"] = 0.05, seed: int = 0
) -> tuple[Federation, Notes]:
    """FEMNIST's images of all writers, dealt out by Dir(beta) over the classes, or evenly with beta=iid.

    Caldas et al.: LEAF: A Benchmark for Federated Settings. 2018.
    """
    assert isinstance(samples.inputs, np.ndarray)
    keep = distinct(samples)
    labels = samples.labels[keep]
    if beta == "iid":
        owner, name = iid(labels, clients, seed), "FEMNIST pooled, IID"
    else:
        owner, name = dirichlet(labels, clients, beta, seed), f"FEMNIST pooled, Dir({beta:g})"
    federation = Federation.from_owners(
        255 - samples.inputs[keep],
        labels,
        owner,
        names=[str(k) for k in range(clients)],
        seed=seed,
        name=name,
        classes=62,
    )
    return replace(federation, class_names=CLASSES), ["not by writer: all images pooled and dealt out again"]


def _check_pooled(clients: int, beta: float | Literal["iid"], seed: int) -> None:
    whole(1, clients=clients)
    in_range(0, 2**32, seed=seed)
    if beta != "iid":
        positive(beta=beta)


SOURCE = Source(
    folder="femnist",
    repository="flwrlabs/femnist",
    revision="main",
    files="data/*.parquet",
    layouts=(
        Layout("the hub's parquet files", PARQUET, _parquet),
        *(Layout("LEAF's JSON files", patterns, _leaf) for patterns in LEAF),
    ),
    published=814_277,  # on the hub; LEAF lists 817,851, with one image of each writer twice
    rule=RULE,
    federate=femnist,
    check=_check,
)
POOLED = replace(SOURCE, rule=POOLED_RULE, federate=femnist_pooled, check=_check_pooled)
