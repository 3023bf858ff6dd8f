"""CIFAR-10: the 50,000 training images, partitioned by a Dirichlet distribution over the classes.

Krizhevsky: Learning Multiple Layers of Features from Tiny Images. 2009.
"""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fairwind.data.federation import Federation
from fairwind.data.partition import dirichlet, iid
from fairwind.data.patches import FEATURES, patch_features
from fairwind.data.source import (
    AGAIN,
    PARQUET,
    Layout,
    Like,
    Notes,
    Samples,
    Source,
    check_label,
    distinct,
    images,
)
from fairwind.errors import InputError, damaged, in_range, positive

LIKE = Like("RGB", (32, 32, 3), 10)
DEALT = (
    "class by class over the clients, shares from a Dirichlet distribution, redrawn until each client's "
    "shares sum to at least 1/(10·K) and it has a sample; iid deals each class evenly; 8:2 split by seed"
)
RULE = f"training images only, channels × height × width; {DEALT}"
FEATURES_RULE = (
    "the first training images; of each the mean responses, by quarter of the picture, to whitened random "
    f"patches, standardised over all images; {DEALT}"
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARRAYS = {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # bytes pickled by Python 3
}


def _parquet(files: list[Path]) -> Samples:
    read = images(files, "img", "label", None, LIKE)
    assert isinstance(read.inputs, np.ndarray)
    return read._replace(inputs=read.inputs.transpose(0, 3, 1, 2))


def _batches(files: list[Path]) -> Samples:
    pixels, labels = [], []
    for file in files:
        data, given = _unpickled(file)
        if not isinstance(data, np.ndarray) or not isinstance(given, list):
            raise InputError(f"{file}: data is no array, or labels are no list; {AGAIN}")
        if data.dtype != np.uint8 or data.shape != (len(given), 3072):
            kind = f"{data.dtype} of shape {data.shape}"
            raise InputError(f"{file}: data is {kind}, not uint8 of shape ({len(given)}, 3072)")
        for row, label in enumerate(given):
            check_label(f"{file}, row {row}", label, 10)
        pixels.append(data.reshape(-1, 3, 32, 32))
        labels += given
    return Samples(np.concatenate(pixels), np.array(labels, dtype=np.int64), [])


def _unpickled(file: Path) -> tuple[Any, Any]:
    bad = damaged(lambda: f"{file} is no batch of CIFAR-10's python version", AGAIN)
    with bad, open(file, "rb") as content:
        batch = _Arrays(content, encoding="bytes").load()
        return batch[b"data"], batch[b"labels"]


class _Arrays(pickle.Unpickler):
    """Unpickles arrays only; any other code in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy.core", "numpy._core"), name) in ARRAYS:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def cifar10(
    samples: Samples, *, clients: int = 16, beta: float | Literal["iid"] = 0.05, seed: int = 0
) -> tuple[Federation, Notes]:
    """CIFAR-10's training images, partitioned by Dir(beta) over the classes, or evenly with beta=iid.

    Krizhevsky: Learning Multiple Layers of Features from Tiny Images. 2009.
    """
    assert isinstance(samples.inputs, np.ndarray)
    repeated = len(samples.labels) - len(distinct(samples))
    notes = [f"{repeated:,} repeated images, kept as published"] if repeated else []
    return _dealt(np.ascontiguousarray(samples.inputs), samples, "CIFAR-10", clients, beta, seed), notes


def cifar10_features(
    samples: Samples,
    *,
    clients: int = 16,
    beta: float | Literal["iid"] = 0.05,
    images: int = 20_000,
    seed: int = 0,
) -> tuple[Federation, Notes]:
    """The first `images` of CIFAR-10 as fixed features (`patch_features`), partitioned as `cifar10` is.

    Krizhevsky: Learning Multiple Layers of Features from Tiny Images. 2009.
    """
    assert isinstance(samples.inputs, np.ndarray)
    kept = samples._replace(inputs=samples.inputs[:images], labels=samples.labels[:images])
    features = patch_features(np.ascontiguousarray(kept.inputs))
    notes = [f"the first {len(features):,} of {len(samples.labels):,} images, as {FEATURES} fixed features"]
    return _dealt(features, kept, "CIFAR-10 features", clients, beta, seed), notes


def _dealt(
    inputs: np.ndarray[Any, Any],
    samples: Samples,
    name: str,
    clients: int,
    beta: float | Literal["iid"],
    seed: int,
) -> Federation:
    if beta == "iid":
        owner, name = iid(samples.labels, clients, seed), f"{name}, IID"
    else:
        owner, name = dirichlet(samples.labels, clients, beta, seed), f"{name}, Dir({beta:g})"
    federation = Federation.from_owners(
        inputs,
        samples.labels,
        owner,
        names=[str(k) for k in range(clients)],
        seed=seed,
        name=name,
        classes=10,
    )
    return replace(federation, class_names=CLASSES)


def _check_features(clients: int, beta: float | Literal["iid"], images: int, seed: int) -> None:
    in_range(1, 50_001, images=images)
    _check(clients, beta, seed)


def _check(clients: int, beta: float | Literal["iid"], seed: int) -> None:
    in_range(1, 50_001, clients=clients)
    in_range(0, 2**32, seed=seed)
    if beta != "iid":
        positive(beta=beta)


SOURCE = Source(
    folder="cifar10",
    repository="uoft-cs/cifar10",
    revision="main",
    files="plain_text/train*.parquet",
    layouts=(
        Layout("the hub's parquet files", PARQUET, _parquet),
        Layout("the python batches", ("**/data_batch_[1-5]",), _batches),
    ),
    published=50_000,
    check=_check,
    rule=RULE,
    federate=cifar10,
)
FEATURES_SOURCE = replace(SOURCE, rule=FEATURES_RULE, federate=cifar10_features, check=_check_features)
