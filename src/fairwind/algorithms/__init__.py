"""The algorithms, by name: `fairwind.algorithms.adafedadam(alpha=2)`, or `build("adafedadam:alpha=2")`."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from fairwind.algorithms import adafedadam as _adafedadam
from fairwind.algorithms import fedadam as _fedadam
from fairwind.algorithms import fedavg as _fedavg
from fairwind.algorithms import fednova as _fednova
from fairwind.algorithms import qfedavg as _qfedavg
from fairwind.contract import AnyAlgorithm
from fairwind.spec import call, parameters, with_parameters

P = ParamSpec("P")


def _named(builder: Callable[P, AnyAlgorithm]) -> Callable[P, AnyAlgorithm]:
    """The same builder; what it makes is named by its spec, as in "adafedadam:alpha=2"."""
    defaults = {name: default for name, (_, default) in parameters(builder).items()}

    @wraps(builder)
    def build_named(*args: P.args, **given: P.kwargs) -> AnyAlgorithm:
        changed = {name: value for name, value in given.items() if value != defaults.get(name)}
        return builder(*args, **given)._replace(name=with_parameters(builder.__name__, **changed))

    return build_named


adafedadam = _named(_adafedadam.adafedadam)
fedadagrad = _named(_fedadam.fedadagrad)
fedadam = _named(_fedadam.fedadam)
fedavg = _named(_fedavg.fedavg)
fednova = _named(_fednova.fednova)
fedyogi = _named(_fedadam.fedyogi)
qfedavg = _named(_qfedavg.qfedavg)

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
    return call("algorithm", spec, REGISTRY)._replace(name=spec)


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
