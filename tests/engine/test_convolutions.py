"""Small convolutional networks on a CPU take their steps in C++ written for them: the same steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import DEVICE, compiler_found
from fairwind import Federation, Settings, Solver, algorithms
from fairwind.engine.backends.convolutions import Convolutions
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from simulations import assert_together, simulation, stacked_of

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="is for a CPU"),
    pytest.mark.skipif(not compiler_found(torch.device("cpu")), reason="needs a compiler"),
]
CLASSES = 3
Model = Callable[[], nn.Module]


def federation(*shape: int, dtype: torch.dtype = torch.float64) -> Federation:
    g = torch.Generator().manual_seed(0)

    def client(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, *shape, generator=g, dtype=dtype), torch.randint(CLASSES, (n,), generator=g)

    return Federation.from_clients([client(n) for n in (1, 2, 17, 70, 8, 1)], classes=CLASSES)


def network(channels: int, first: int, second: int, units: int, *more: nn.Module, **options: Any) -> Model:
    """For images of 8×7, with these layers after the first convolution."""

    def make() -> nn.Module:
        layers = [nn.Conv2d(channels, first, 3, **options), *(more or (nn.ReLU(), nn.MaxPool2d(2)))]
        layers += [nn.Conv2d(first, second, (1, 2), bias=False), nn.ReLU(), nn.Flatten()]
        shown = nn.Sequential(*layers)(torch.zeros(1, channels, 8, 7))
        dense = [nn.Linear(shown.shape[1], units), nn.ReLU(), nn.Linear(units, CLASSES)]
        return nn.Sequential(*layers, *dense).double()

    return make


class Functional(nn.Module):
    """As many write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 9, 3)
        self.dense = nn.Linear(18, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.first(x), 2))
        x = F.relu(self.second(x))
        out: Tensor = self.dense(torch.flatten(x, 1))
        return out


class Changed(Functional):
    """Computes nearly what the C++ knows."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.between(self.first(x)), 2)
        out: Tensor = self.dense(torch.flatten(F.relu(self.second(x)), 1))
        return out


def compiled(eager: Simulation, model: Model, data: Federation, **options: Any) -> Simulation:
    return Simulation(model, data, eager.runs, replace(eager.settings, compile="on", **options))


def uses(made: Simulation) -> dict[str, bool]:
    """Which kinds of steps are C++ of their own."""
    made.executor.prepare(0)
    return {
        kind: isinstance(workspace.compiled, Convolutions)
        for kind, workspace in stacked_of(made).workers.states[0].items()
    }


def uses_it(model: Model, data: Federation, **options: Any) -> bool:
    """Whether training would be C++ of its own."""
    made = simulation(data, ["fedavg"], [0], model=model, engine="stacked", compile="off", **options)
    workspace = stacked_of(made).workers.states[0]["training"]
    given = workspace.model, workspace.data, workspace.rules, made.planner.solver
    return Convolutions.applies("training", *given)


@pytest.mark.parametrize(
    ("channels", "model"),
    [
        (1, network(1, 8, 16, 5)),
        (3, network(3, 7, 17, 20, padding=1)),
        (2, network(2, 33, 4, 3, nn.MaxPool2d(3), padding=2, bias=False)),
        (1, network(1, 4, 4, 9, nn.Identity())),
        (1, Functional),
    ],
)
def test_it_trains_and_probes_as_the_uncompiled_steps_do(channels: int, model: Model) -> None:
    data, solver = federation(channels, 8, 7), Solver(lr=0.1, batch_size=5, epochs=2)
    runs = [*algorithms.PAPER, "fedprox", "scaffold"]
    eager = simulation(data, runs, [0], model=model, solver=solver, engine="stacked", compile="off")
    quick = compiled(eager, model, data, workers=2)
    assert uses(quick) == {"training": True, "gradient": True, "loss": True}
    assert_together(eager, quick, rounds=3)


def test_it_gives_the_numbers_of_the_loop_in_float32_too() -> None:
    model, data = lambda: network(1, 8, 16, 5)().float(), federation(1, 8, 7, dtype=torch.float32)
    options: dict[str, Any] = {"model": model, "solver": Solver(lr=0.05, batch_size=5)}
    quick = simulation(data, ["adafedadam"], [0], engine="stacked", compile="on", **options)
    assert uses(quick)["training"]
    loop = simulation(data, ["adafedadam"], [0], engine="loop", **options)
    for made in (quick, loop):
        made.step()
    assert torch.allclose(quick.x, loop.x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        network(2, 8, 4, 5, nn.Tanh()),
        network(2, 8, 4, 5, nn.LeakyReLU()),
        network(2, 8, 4, 5, nn.AvgPool2d(2)),
        network(2, 8, 4, 5, nn.MaxPool2d(3, 2)),
        network(2, 8, 4, 5, nn.Dropout(0.5)),
        network(2, 8, 4, 5, nn.ReLU(), stride=2),
        network(2, 8, 4, 5, nn.ReLU(), dilation=2),
        network(2, 8, 4, 5, nn.ReLU(), groups=2),
        network(2, 8, 4, 5, nn.ReLU(), padding=1, padding_mode="circular"),
    ],
)
def test_other_networks_take_the_general_path(model: Model) -> None:
    assert not uses_it(model, federation(2, 8, 7))


@pytest.mark.parametrize(
    "between",
    [
        lambda x: torch.relu(x).detach(),
        lambda x: torch.relu(x.clamp(max=50)),
        lambda x: torch.relu(x - 1e-3),
        F.relu6,
        F.gelu,
    ],
)
def test_networks_that_compute_nearly_the_same_take_the_general_path(
    between: Callable[[Tensor], Tensor],
) -> None:
    assert uses_it(Functional, federation(1, 8, 7))
    assert not uses_it(lambda: Changed(between), federation(1, 8, 7))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_other_losses_take_the_general_path(loss: nn.Module) -> None:
    assert not uses_it(Functional, federation(1, 8, 7), loss=loss)


def test_the_plan_chooses_it_where_enough_time_is_saved() -> None:
    data, model = federation(1, 8, 7), network(1, 8, 16, 5)
    settings = Settings(solver=Solver(batch_size=5), device="cpu", rounds=10**5, eval_every=10**5)
    runs = [Run("fedavg", algorithms.fedavg(), 0)]
    long = Simulation(model, data, runs, settings)
    assert (long.plan.executor.value, long.plan.steps.value) == ("stacked", "hand-written")
    again = Simulation(model, data, runs, long.settings)
    assert again.plan.steps.value == "hand-written"
    assert Simulation(model, data, runs, replace(settings, rounds=1)).plan.steps.value == "eager"
