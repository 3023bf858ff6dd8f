"""A setup: data, model, local solver and rounds that belong together, under one name."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from fairwind.data.federation import Federation
from fairwind.data.synthetic import synthetic, synthetic_li
from fairwind.engine.solver import Solver
from fairwind.errors import unknown
from fairwind.models import linear
from fairwind.spec import call


class Setup(NamedTuple):
    """The parameters of a setup's spec are those of its `data`."""

    data: Callable[..., Federation]
    model: Callable[[Federation], nn.Module]
    solver: Solver
    rounds: int


def _linear(federation: Federation) -> nn.Module:
    assert federation.classes is not None
    return linear(federation.inputs.shape[1], federation.classes)


SETUPS = {
    "synthetic": Setup(synthetic, _linear, Solver(lr=0.01, batch_size=10, epochs=1), rounds=1000),
    "synthetic-li": Setup(synthetic_li, _linear, Solver(lr=0.01, batch_size=10, epochs=1), rounds=1000),
}


def find(spec: str) -> Setup:
    """The setup that a spec such as "synthetic:classes=5,sizes=li" names."""
    name = spec.partition(":")[0]
    if name not in SETUPS:
        raise unknown("setup", name, SETUPS)
    return SETUPS[name]


def data(spec: str) -> Federation:
    """The data of a spec, by its parameters."""
    return call("setup", spec, {name: setup.data for name, setup in SETUPS.items()})
