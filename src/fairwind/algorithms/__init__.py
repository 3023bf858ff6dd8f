"""The algorithms, by name: `fairwind.algorithms.adafedadam(alpha=2)`, or `build("adafedadam:alpha=2")`."""

from collections.abc import Callable

from fairwind.algorithms.adafedadam import adafedadam
from fairwind.algorithms.fedadam import fedadagrad, fedadam, fedyogi
from fairwind.algorithms.fedavg import fedavg
from fairwind.algorithms.fednova import fednova
from fairwind.algorithms.qfedavg import qfedavg
from fairwind.contract import AnyAlgorithm
from fairwind.spec import call

REGISTRY: dict[str, Callable[..., AnyAlgorithm]] = {
    "fedavg": fedavg,
    "fedadam": fedadam,
    "fednova": fednova,
    "qfedavg": qfedavg,
    "adafedadam": adafedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
}

PAPER = ("fedavg", "fedadam", "fednova", "qfedavg", "adafedadam")  # the paper's comparison


def build(spec: str) -> AnyAlgorithm:
    """The algorithm of a spec such as "fedavg" or "adafedadam:alpha=2,warmup=none"."""
    return call("algorithm", spec, REGISTRY)


__all__ = [
    "PAPER",
    "REGISTRY",
    "adafedadam",
    "build",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fednova",
    "fedyogi",
    "qfedavg",
]
