"""Local solvers: stacked they are PyTorch's own, and what a solver cannot tell is asked of nobody."""

from functools import partial
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, FEATURES
from fairwind import Federation, InputError, Settings, Solver, Task, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.engine.solver import Method
from fairwind.runs.recipe import to_jsonable
from fairwind.runs.rehearsal import rehearsed
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


def small_model(dtype: torch.dtype) -> nn.Module:
    """Without dropout, whose layers of 16 bits draw other numbers."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


class Scale(nn.Module):
    """Inputs times a number, the parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.scale * x)
        return out


class Halving:
    """A schedule that is an object."""

    def __call__(self, round: int) -> float:
        return 0.5**round


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


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_trains_as_in_32(ragged: Federation, dtype: torch.dtype, name: str) -> None:
    """Only weights are rounded: 0.999 and the squares of small gradients are beyond 16 bits."""
    options = {"solver": SOLVERS[name]}
    exact = simulation(ragged, ["fedavg"], [0], model=lambda: small_model(torch.float32), **options)
    moves = []
    for engine in ("stacked", "loop"):
        s = simulation(ragged, ["fedavg"], [0], model=lambda: small_model(dtype), engine=engine, **options)
        start = s.x.float()
        s.step()
        assert s.left_out.tolist() == [0]
        moves.append(s.x.float() - start)
    start = exact.x.clone()
    exact.step()
    for move in moves:
        assert (move - (exact.x - start)).norm() < 0.1 * (exact.x - start).norm()


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedprox", "fedcm", "mime", "ditto"])
def test_steps_with_a_vector_train_in_16_bits_too(ragged: Federation, name: str) -> None:
    moves = []
    for dtype, engine in ((torch.float32, "loop"), (torch.bfloat16, "loop"), (torch.bfloat16, "stacked")):
        options = {"model": partial(small_model, dtype), "engine": engine, "solver": Solver(lr=1.0)}
        s = simulation(ragged, [name], [0], **options)
        start = s.x.float().clone()
        for _ in range(3):
            s.step()
        assert s.left_out.tolist() == [0]
        moves.append(s.x.float() - start)
    for move in moves[1:]:
        assert (move - moves[0]).norm() < 0.2 * moves[0].norm()


def test_a_parameter_without_dimensions_is_clipped_with_the_others(ragged: Federation) -> None:
    options = {"solver": Solver(lr=0.5, clip=0.3, batch_size=5), "model": Scale}
    stacked = simulation(ragged, NAMES, [0], **options)
    loop = simulation(ragged, NAMES, [0], engine="loop", **options)
    assert_together(stacked, loop, rounds=2, tolerance=1e-8)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.LBFGS, "optimizer=LBFGS cannot train this model: TypeError: .*closure"),
        (partial(cast(Any, torch.optim.SGD), rho=1), r"optimizer=SGD\(rho=1\) cannot .* unexpected keyword"),
        (torch.optim.SparseAdam, "optimizer=SparseAdam cannot .* dense gradients"),
        (lambda parameters, lr: None, "optimizer=.*<lambda> cannot train .* 'NoneType'"),  # never plain SGD
    ],
)
def test_an_optimizer_that_cannot_train_the_model_is_refused(
    ragged: Federation, optimizer: Any, said: str
) -> None:
    solver = Solver(optimizer=optimizer)
    s = simulation(ragged, ["fedavg"], [0], solver=solver, engine="loop")
    with pytest.raises(InputError, match=said):
        s.step()
    with pytest.raises(InputError, match=said):  # as where the task is kept in a directory
        rehearsed(Task(lambda: nn.Linear(FEATURES, CLASSES), ragged, solver=solver), solver)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr_decay": 1e-5}, "the learning rate in round 99 is 0"),
        ({"lr_decay": 1e9}, "the learning rate in round 99 is inf"),
        ({"lr_schedule": lambda round: None}, "lr_schedule gives no number for round 0: TypeError"),
        ({"lr_schedule": lambda round: [1.0, 0.5][round]}, "no number for round 2: IndexError"),
        ({"lr_schedule": lambda round: 1 - round / 50}, "in round 50 is 0"),
        ({"lr_schedule": lambda round: float("nan")}, "in round 0 is nan"),
    ],
)
def test_a_rate_that_is_of_no_use_in_some_round_is_refused_before_the_first(
    ragged: Federation, options: Any, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        simulation(ragged, ["fedavg"], [0], solver=Solver(**{"lr": 0.01} | options), rounds=100)


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
        ({"betas": (0.9,)}, r"betas=\(0.9,\) is not a pair"),
        ({"betas": [0.9, 0.99, 0.999]}, r"betas=\(0.9, 0.99, 0.999\) is not a pair"),
        ({"betas": 0.9}, "betas=0.9 is not a pair"),
        ({"optimizer": torch.optim.NAdam, "weight_decay": 0.1}, "weight_decay is not passed on to .*NAdam"),
        ({"optimizer": torch.optim.NAdam, "betas": (0.5, 0.9)}, "betas is not passed on to .*NAdam"),
        ({"lr_schedule": 0.5}, "lr_schedule=0.5 is not a function of the round"),
        ({"batch_size": 99999999999999999999}, "batch_size=99999999999999999999 is out of range"),
    ):
        with pytest.raises(InputError, match=message):
            Solver(**options)
    with pytest.raises(InputError, match="the learning rate in round 3 is 0"):
        Solver(lr_schedule=lambda round: 0).rate(3)


def test_functions_are_recorded_by_name_whatever_they_are() -> None:
    """A partial one with its arguments, which decide a run's numbers, an object by its class."""
    names = [
        to_jsonable(function)
        for function in (
            torch.optim.NAdam,
            partial(torch.optim.SGD, momentum=0.9),
            Halving(),
            partial(cast(Any, Halving()), scale=object()),
            Halving().__call__,
        )
    ]
    assert names == [
        "torch.optim.nadam:NAdam",
        "torch.optim.sgd:SGD(momentum=0.9)",
        f"{__name__}:Halving",
        f"{__name__}:Halving(scale=object)",
        f"{__name__}:Halving.__call__",
    ]
