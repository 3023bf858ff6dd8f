"""Losses below zero: refused where a formula needs them not to be, and only there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conftest import DEVICE, make_model
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.aggregation import refuses
from fairwind.engine.executor import Run
from fairwind.engine.losses.loss import cross_entropy
from fairwind.engine.settings import Engine
from fairwind.engine.simulation import Simulation


def shifted(by: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) - by

    return loss


def simulation(federation: Federation, spec: str, by: float, engine: Engine) -> Simulation:
    settings = Settings(
        rounds=30, eval_every=5, solver=Solver(lr=0.5), compile="off", device=DEVICE, engine=engine
    )
    runs = [Run(spec, algorithms.build(spec), 0)]
    return Simulation(make_model, federation, runs, settings, loss=shifted(by))


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("spec", ["qfedavg", "adafedadam", "qfedavg:q=0.5"])
def test_they_are_refused_at_the_start(ragged: Federation, spec: str, engine: Engine) -> None:
    with pytest.raises(InputError, match=rf"{spec}: the loss of client '\d' is -"):
        simulation(ragged, spec, 5.0, engine).run()


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_they_are_refused_when_training_reaches_them(ragged: Federation, engine: Engine) -> None:
    """Every loss is positive at first, if barely, and falls."""
    spec = "adafedadam:lr=0.1"
    plain = simulation(ragged, spec, 0.0, engine)
    plain.start()
    s = simulation(ragged, spec, float(plain.loss0.min()) - 0.001, engine)
    s.start()
    assert (s.loss0 > 0).all()
    with pytest.raises(InputError, match=r"lr=0.1: the loss of a client is -.*add a constant to the loss"):
        s.run()
    assert 0 < s.round < 30


@pytest.mark.parametrize("spec", ["fedavg", "fednova", "fedadam", "adafedadam:alpha=0"])
def test_whoever_does_not_read_losses_does_not_mind(ragged: Federation, spec: str) -> None:
    moved, plain = (simulation(ragged, spec, by, "stacked") for by in (5.0, 0.0))
    for s in (moved, plain):
        s.run()
    torch.testing.assert_close(moved.x, plain.x)


def test_what_an_algorithm_needs_is_found_by_asking_it() -> None:
    needs = {name: refuses(build(), loss=-1.0) for name, build in algorithms.REGISTRY.items()}
    assert [name for name, needed in needs.items() if needed] == ["qfedavg", "adafedadam", "aaggff"]
    steps = {name: refuses(build(), steps=torch.nan) for name, build in algorithms.REGISTRY.items()}
    assert [name for name, needed in steps.items() if needed] == ["fednova", "fedcm", "scaffold"]
