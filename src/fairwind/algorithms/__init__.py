"""The algorithms, by name: `fairwind.algorithms.adafedadam(alpha=2)`, or `build("adafedadam:alpha=2")`."""

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fairwind.algorithms import aaggff as _aaggff
from fairwind.algorithms import adafedadam as _adafedadam
from fairwind.algorithms import afl as _afl
from fairwind.algorithms import ditto as _ditto
from fairwind.algorithms import fedadam as _fedadam
from fairwind.algorithms import fedavg as _fedavg
from fairwind.algorithms import fedavgm as _fedavgm
from fairwind.algorithms import fedcm as _fedcm
from fairwind.algorithms import feddyn as _feddyn
from fairwind.algorithms import fedeba as _fedeba
from fairwind.algorithms import fedexp as _fedexp
from fairwind.algorithms import fedfv as _fedfv
from fairwind.algorithms import fedmgda as _fedmgda
from fairwind.algorithms import fednova as _fednova
from fairwind.algorithms import fedprox as _fedprox
from fairwind.algorithms import gifair as _gifair
from fairwind.algorithms import local as _local
from fairwind.algorithms import mime as _mime
from fairwind.algorithms import pooled as _pooled
from fairwind.algorithms import propfair as _propfair
from fairwind.algorithms import qfedavg as _qfedavg
from fairwind.algorithms import scaffold as _scaffold
from fairwind.algorithms import term as _term
from fairwind.contract import (
    Algorithm,
    AnyAlgorithm,
    CohortAlgorithm,
    GradientAlgorithm,
    GramAlgorithm,
    LocalAlgorithm,
    MemoryAlgorithm,
    PersonalAlgorithm,
    PooledAlgorithm,
)
from fairwind.errors import python_numbers, unknown
from fairwind.runs.spec import call, parameters, with_parameters

P = ParamSpec("P")
A = TypeVar("A", bound=AnyAlgorithm)
T = TypeVar("T")


def _named(builder: Callable[P, A]) -> Callable[P, A]:
    """The same builder, whose algorithms are named by their spec, as in "adafedadam:alpha=2"."""
    defaults = {name: default for name, (_, default) in parameters(builder).items()}

    @wraps(builder)
    def build_named(*args: P.args, **given: P.kwargs) -> A:
        plain: Any = {name: python_numbers(value) for name, value in given.items()}
        changed = {name: value for name, value in plain.items() if value != defaults.get(name)}
        name = with_parameters(builder.__name__, **changed)
        return builder(*args, **plain)._replace(name=name)  # type: ignore[return-value]

    return build_named


aaggff = _named(_aaggff.aaggff)
adafedadam = _named(_adafedadam.adafedadam)
afl = _named(_afl.afl)
ditto = _named(_ditto.ditto)
fedadagrad = _named(_fedadam.fedadagrad)
fedadam = _named(_fedadam.fedadam)
fedavg = _named(_fedavg.fedavg)
fedavgm = _named(_fedavgm.fedavgm)
fedcm = _named(_fedcm.fedcm)
feddyn = _named(_feddyn.feddyn)
fedeba = _named(_fedeba.fedeba)
fedexp = _named(_fedexp.fedexp)
fedfv = _named(_fedfv.fedfv)
fedmgda = _named(_fedmgda.fedmgda)
fednova = _named(_fednova.fednova)
fedprox = _named(_fedprox.fedprox)
fedyogi = _named(_fedadam.fedyogi)
gifair = _named(_gifair.gifair)
local = _named(_local.local)
mime = _named(_mime.mime)
mimelite = _named(_mime.mimelite)
pooled = _named(_pooled.pooled)
propfair = _named(_propfair.propfair)
qfedavg = _named(_qfedavg.qfedavg)
scaffold = _named(_scaffold.scaffold)
term = _named(_term.term)

REGISTRY: dict[str, Callable[..., AnyAlgorithm]] = {
    "fedavg": fedavg,
    "fedadam": fedadam,
    "fednova": fednova,
    "qfedavg": qfedavg,
    "adafedadam": adafedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
    "term": term,
    "afl": afl,
    "fedmgda": fedmgda,
    "fedfv": fedfv,
    "propfair": propfair,
    "gifair": gifair,
    "aaggff": aaggff,
    "fedeba": fedeba,
    "ditto": ditto,
    "fedavgm": fedavgm,
    "fedexp": fedexp,
    "fedprox": fedprox,
    "fedcm": fedcm,
    "mimelite": mimelite,
    "mime": mime,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "local": local,
    "pooled": pooled,
}
BASELINES = ("local", "pooled")  # no federated algorithms: they are in no set

PAPER = ("fedavg", "fedadam", "fednova", "qfedavg", "adafedadam")  # the paper's comparison
FAIR = (
    "adafedadam",
    "qfedavg",
    "term",
    "fedeba",
    "propfair",
    "afl",
    "aaggff",
    "gifair",
    "fedmgda",
    "fedfv",
    "ditto",
)
ACCELERATED = (
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "fedavgm",
    "fedexp",
    "fednova",
    "fedprox",
    "fedcm",
    "mimelite",
    "mime",
    "scaffold",
    "feddyn",
)
SETS = {
    "paper": PAPER,
    "fair": FAIR,
    "accelerated": ACCELERATED,
    "all": tuple(name for name in REGISTRY if name not in BASELINES),
}

NEEDS: dict[type, str] = {
    Algorithm: "one sum over clients: run anywhere, also under secure aggregation",
    LocalAlgorithm: "one sum, and modified local steps",
    GradientAlgorithm: "also the clients' mean full gradient",
    MemoryAlgorithm: "a vector that each client keeps between rounds",
    PersonalAlgorithm: "a personal model for each client",
    PooledAlgorithm: "the samples of all clients in one place: no federation",
    CohortAlgorithm: "a server that sees all reports before it weights the clients",
    GramAlgorithm: "also the inner products of all updates",
}


def with_sets(given: Iterable[T]) -> tuple[T | str, ...]:
    """Names and specs, with sets such as "fair" replaced by their members, without duplicates.

    A text may hold several, separated by commas.
    """
    several: list[T | str] = []
    for each in given:
        several += _specs(each) if isinstance(each, str) else [each]
    found: list[T | str] = []
    for one in several:
        if isinstance(one, str) and one in SETS:
            found += [name for name in SETS[one] if name not in found and name not in several]
        else:
            found.append(one)
    return tuple(found)


def _specs(text: str) -> list[str]:
    """The specs of "fedavg,adafedadam:alpha=2,warmup=0,fedprox"; commas in braces separate nothing."""
    found: list[str] = []
    for part in filter(None, map(str.strip, re.split(r",(?![^{}]*\})", text))):
        if found and _is_parameter(part, found[-1]):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _is_parameter(part: str, spec: str) -> bool:
    """Whether the text after a comma is a parameter of the spec before it."""
    name, colon, _ = part.partition(":")
    if ":" not in spec or "=" in name:
        return ":" in spec
    return spec.partition(":")[0] in REGISTRY and not colon and name not in (*REGISTRY, *SETS)


def build(spec: str) -> AnyAlgorithm:
    """The algorithm of a spec such as "fedavg" or "adafedadam:alpha=2,warmup=none"."""
    name = spec.partition(":")[0]
    if name not in REGISTRY:
        raise unknown("algorithm", name, (*REGISTRY, *SETS))
    return call("algorithm", spec, REGISTRY)._replace(name=spec)


__all__ = [
    "ACCELERATED",
    "BASELINES",
    "FAIR",
    "NEEDS",
    "PAPER",
    "REGISTRY",
    "SETS",
    "aaggff",
    "adafedadam",
    "afl",
    "build",
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedcm",
    "feddyn",
    "fedeba",
    "fedexp",
    "fedfv",
    "fedmgda",
    "fednova",
    "fedprox",
    "fedyogi",
    "gifair",
    "local",
    "mime",
    "mimelite",
    "pooled",
    "propfair",
    "qfedavg",
    "scaffold",
    "term",
    "with_sets",
]
