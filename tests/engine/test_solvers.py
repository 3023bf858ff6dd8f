"""Local solvers: stacked they are PyTorch's own, and what a solver cannot tell is asked of nobody."""

from functools import partial
from typing import Any, get_args

import pytest
import torch

from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.engine.solver import Method
from simulations import assert_together, dropout_model, simulation

SOLVERS = {
    "adam": Solver(lr=0.01, optimizer="adam", batch_size=7, epochs=2),
    "adam, decay, betas": Solver(lr=0.01, optimizer="adam", weight_decay=0.1, betas=(0.5, 0.9), eps=1e-3),
    "adamw": Solver(lr=0.01, optimizer="adamw", weight_decay=0.1, batch_size=4),
    "rmsprop": Solver(lr=0.01, optimizer="rmsprop", smoothing=0.9, batch_size=7),
    "rmsprop, momentum": Solver(lr=0.01, optimizer="rmsprop", momentum=0.8, weight_decay=0.1),
    "clipped": Solver(lr=0.5, clip=0.3, batch_size=5),
    "clipped adam": Solver(lr=0.01, optimizer="adam", clip=0.05),
    "decaying": Solver(lr=0.3, lr_decay=0.5),
    "scheduled": Solver(lr=0.3, momentum=0.5, lr_schedule=lambda round: 1 / (1 + round)),
}
NAMES = ["fedavg", "qfedavg", "adafedadam"]


def test_every_method_is_compared_with_pytorch() -> None:
    assert {solver.optimizer for solver in SOLVERS.values()} == set(get_args(Method))


@pytest.mark.parametrize("name", SOLVERS)
def test_stacked_it_is_pytorchs(ragged: Federation, name: str) -> None:
    options = {"solver": SOLVERS[name], "model": dropout_model}
    stacked = simulation(ragged, NAMES, [0, 1], **options)
    loop = simulation(ragged, NAMES, [0, 1], engine="loop", **options)
    start = stacked.x.clone()
    assert_together(stacked, loop, rounds=3, tolerance=1e-8)
    assert not torch.allclose(stacked.x, start)


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, partial(torch.optim.Adadelta, rho=0.5)])
def test_any_optimiser_of_pytorchs_trains_one_client_after_another(
    ragged: Federation, optimizer: Any
) -> None:
    s = simulation(ragged, NAMES, [0], solver=Solver(lr=0.01, optimizer=optimizer), engine="auto")
    assert s.settings.engine == "loop"
    assert "is not one of the optimizers that are stacked" in s.plan.executor.why
    start = s.x.clone()
    s.step()
    assert not torch.allclose(s.x, start)


def test_the_learning_rate_follows_the_rounds(ragged: Federation) -> None:
    """With one full batch a round, FedAvg's update is the rate times the gradient."""
    changed = Solver(lr=0.1, batch_size=100, lr_decay=0.5)
    s = simulation(ragged, ["fedavg"], [0], solver=changed)
    once = simulation(ragged, ["fedavg"], [0], solver=Solver(lr=0.05, batch_size=100))
    s.step()
    once.x.copy_(s.x)
    before = s.x.clone()
    s.step()
    once.step()
    torch.testing.assert_close(s.x - before, once.x - before)
    assert [changed.rate(t) for t in range(3)] == [0.1, 0.05, 0.025]


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_adafedadam_is_told_the_rate_of_the_round(engine: str, ragged: Federation) -> None:
    """One local step of SGD has C = 1 at any rate, if the rate that is reported is the one that was used."""
    solver = Solver(lr=0.1, batch_size=100, lr_decay=0.3)
    s = simulation(ragged, ["adafedadam"], [0], solver=solver, engine=engine)
    for _ in range(3):
        s.step()
        assert s.states[0].certainty.item() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop", torch.optim.NAdam])
def test_fednova_refuses_a_solver_without_weights_of_gradients(ragged: Federation, optimizer: Any) -> None:
    runs = [Run("fednova", algorithms.fednova(), 0)]
    settings = Settings(solver=Solver(optimizer=optimizer))
    name = getattr(optimizer, "__name__", optimizer)
    with pytest.raises(InputError, match=rf"fednova divides by its clients' steps .* {name} does not have"):
        Simulation(dropout_model, ragged, runs, settings)


def test_bad_solvers_are_refused_by_name() -> None:
    for options, message in (
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm': did you mean 'adam'"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is for SGD and RMSprop"),
        ({"optimizer": "adam", "nesterov": True}, "nesterov needs SGD"),
        ({"clip": 0}, "clip=0"),
        ({"lr_decay": -1}, "lr_decay=-1"),
        ({"betas": (0.9, 1.0)}, "betas=1.0"),
        ({"batch_size": 99999999999999999999}, "batch_size=99999999999999999999 is out of range"),
    ):
        with pytest.raises(InputError, match=message):
            Solver(**options)
    with pytest.raises(InputError, match="the learning rate in round 3 is 0"):
        Solver(lr_schedule=lambda round: 0).rate(3)
