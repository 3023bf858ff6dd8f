"""Two synthetic federations from the literature, generated in memory."""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fairwind.data.federation import Federation
from fairwind.errors import InputError, in_range

Floats = NDArray[np.float64]
Draws = np.random.RandomState | np.random.Generator
Sizes = Literal["leaf", "li"]
Labels = Literal["described", "script"]

MOST = 10_000_000  # clients, features or classes that are generated

SIZES: dict[str, Callable[[Draws, int], NDArray[np.int64]]] = {
    "leaf": lambda draw, k: np.minimum(draw.lognormal(3, 2, k).astype(np.int64) + 5, 1000),
    "li": lambda draw, k: draw.lognormal(4, 2, k).astype(np.int64) + 50,
}


def synthetic(
    *,
    clients: int = 100,
    classes: int = 10,
    features: int = 60,
    sizes: Sizes = "leaf",
    labels: Labels = "described",
    seed: int = 931231,
) -> Federation:
    """LEAF's Synthetic with one cluster: labelling rules equal up to a factor, inputs that differ by client.

    Caldas et al.: LEAF: A Benchmark for Federated Settings. 2018. Seed and order of draws are LEAF's own.
    With labels=described a label is the class with the highest score. With labels=script, scores first go
    through the softmax of LEAF's published script, over a client's samples instead of the classes.
    """
    if labels not in get_args(Labels):
        raise InputError(f"labels={labels!r} is not one of {', '.join(get_args(Labels))}")
    _check(clients, classes, features, seed)
    counts = _sizes(sizes, np.random.RandomState(seed), clients)
    draw = np.random.RandomState(seed)  # LEAF seeds again after the sizes
    Q = draw.normal(size=(features + 1, classes))
    mean = draw.normal(draw.normal(), 1)  # μ of the one cluster
    data = []
    for n in counts:
        draw.random_sample()  # the choice among clusters, of which there is one
        x = _inputs(draw, draw.normal(), n, features)
        W = Q * draw.normal(mean, 0.1)
        scores = np.c_[np.ones(n), x] @ W + draw.normal(0, 0.1, (n, classes))
        if labels == "script":
            scores = scores - np.logaddexp.reduce(scores, axis=0)  # the softmax's logarithm: the same order
        data.append((x.astype(np.float32), scores.argmax(1)))
    by = ", labels of LEAF's script" if labels == "script" else ""
    name = f"LEAF Synthetic, {sizes} sizes, {classes} classes{by}"
    return Federation.from_clients(data, name=name, classes=classes)


def synthetic_li(
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 100,
    classes: int = 10,
    features: int = 60,
    sizes: Sizes = "li",
    seed: int = 0,
) -> Federation:
    """Synthetic(α, β): α sets how far clients' labelling rules differ, β how far their inputs do.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. 2020.
    """
    in_range(0, np.inf, alpha=alpha, beta=beta)
    _check(clients, classes, features, seed)
    rng = np.random.default_rng(seed)
    counts = _sizes(sizes, rng, clients)
    data = []
    for n in counts:
        a, b = rng.normal(0, alpha), rng.normal(0, beta)
        x = _inputs(rng, b, n, features)
        scores = x @ rng.normal(a, 1, (features, classes)) + rng.normal(a, 1, classes)
        data.append((x.astype(np.float32), scores.argmax(1)))
    name = f"Synthetic({alpha:g}, {beta:g}), {sizes} sizes, {classes} classes"
    return Federation.from_clients(data, name=name, classes=classes)


def _check(clients: int, classes: int, features: int, seed: int) -> None:
    in_range(1, MOST + 1, clients=clients, features=features)
    in_range(2, MOST + 1, classes=classes)
    in_range(0, 2**32, seed=seed)


def _sizes(sizes: str, draw: Draws, clients: int) -> NDArray[np.int64]:
    if sizes not in SIZES:
        raise InputError(f"sizes={sizes!r} is not one of {', '.join(SIZES)}")
    return SIZES[sizes](draw, clients)


def _inputs(draw: Draws, mean: float, n: int, features: int) -> Floats:
    """Samples of N(v, Σ) with v ~ N(mean, 1) and Σ = diag(j^−1.2), j = 1, 2, …"""
    scale = np.arange(1, features + 1) ** -0.6
    return draw.normal(mean, 1, features) + scale * draw.normal(size=(n, features))
