"""Linear classifiers on a CPU take their steps in C++ written for them: the same steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, DEVICE, FEATURES, compiler_found
from fairwind import Federation, Settings, Solver, algorithms
from fairwind.engine.backends.backend import compile_steps
from fairwind.engine.backends.classifier import Classifier
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.engine.stacked.chunks import Kind
from samples import as_tensor
from simulations import SOLVERS, assert_together, simulation, stacked_of

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="is for a CPU"),
    pytest.mark.skipif(not compiler_found(CPU), reason="needs a compiler"),
]


def federation(
    features: int, classes: int, dtype: torch.dtype = torch.float64, scale: float = 1
) -> Federation:
    """Clients with 1 to 150 samples, so that probes have several batches too."""
    g = torch.Generator().manual_seed(0)

    def client(n: int) -> tuple[Tensor, Tensor]:
        x = scale * (torch.randn(n, features, generator=g, dtype=dtype) + torch.randn((), generator=g))
        return x, torch.randint(classes, (n,), generator=g)

    return Federation.from_clients([client(n) for n in (1, 2, 3, 17, 150, 8, 40, 1, 26)], classes=classes)


def compiled(
    eager: Simulation, model: Callable[[], nn.Module], data: Federation, **options: Any
) -> Simulation:
    return Simulation(model, data, eager.runs, replace(eager.settings, compile="on", **options))


def uses(made: Simulation) -> dict[str, bool]:
    """Which kinds of steps are C++ of their own."""
    made.executor.prepare(0)
    return {
        kind: isinstance(workspace.compiled, Classifier)
        for kind, workspace in stacked_of(made).workers.states[0].items()
    }


@pytest.mark.parametrize(
    ("features", "classes", "bias", "batch"),
    [
        (5, 3, True, 10),
        (60, 10, True, 10),
        (7, 2, False, 1),
        (3, 8, True, 7),
        (4, 17, False, 33),
        (2, 62, True, 9),
    ],
)
def test_it_trains_and_probes_as_the_uncompiled_steps_do(
    features: int, classes: int, bias: bool, batch: int
) -> None:
    def model() -> nn.Module:
        return nn.Linear(features, classes, bias=bias).double()

    data, solver = federation(features, classes), Solver(lr=0.1, batch_size=batch, epochs=2)
    eager = simulation(data, list(algorithms.PAPER), [0, 1], model=model, solver=solver)
    quick = compiled(eager, model, data, workers=2)
    assert uses(quick) == {"training": True, "gradient": True, "loss": True}
    assert_together(eager, quick, rounds=3)
    # Chunks of one and of two rows
    stacked_of(quick).cutter.budget = 1
    stacked_of(quick).kept.clear()
    assert_together(eager, quick, rounds=1)


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["adafedadam", "propfair"], {"gradient"}),
        (["mime", "fedavg"], {"training", "gradient"}),
    ],
)
def test_other_modified_steps_are_left_to_general_code(
    names: list[str], kinds: set[Kind], recwarn: pytest.WarningsRecorder
) -> None:
    """An s that depends on the loss, and g(y) − g(x)."""

    def model() -> nn.Module:
        return nn.Linear(6, 3).double()

    data = federation(6, 3)
    eager = simulation(data, names, [0, 1], model=model, solver=Solver(lr=0.1, epochs=2))
    quick = compiled(eager, model, data)
    stacked_of(quick).uncompiled = False  # other kinds of steps would take long to compile
    for kind in kinds:
        states = stacked_of(quick).workers.states
        compile_steps("hand-written", kind, [states[0][kind]], quick.settings.solver)
    assert {kind for kind, used in uses(quick).items() if used} == kinds
    assert_together(eager, quick, rounds=3)
    assert not recwarn.list


def test_in_float32_it_differs_by_rounding(ragged: Federation) -> None:
    def model() -> nn.Module:
        return nn.Linear(FEATURES, CLASSES)

    eager = simulation(ragged, list(algorithms.PAPER), [0], model=model, solver=SOLVERS["uneven"])
    quick = compiled(eager, model, ragged)
    assert_together(eager, quick, rounds=3, tolerance=2e-5)
    torch.testing.assert_close(eager.lowest, quick.lowest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_of_large_scores_are_exact(dtype: torch.dtype) -> None:
    """Probabilities far below the smallest number, and sums that only a logarithm of sums survives."""

    def model() -> nn.Module:
        return nn.Linear(6, 4).to(dtype)

    data = federation(6, 4, dtype, scale=300)
    eager = simulation(data, ["adafedadam", "qfedavg"], [0], model=model, solver=Solver(lr=1e-4))
    quick = compiled(eager, model, data)
    for made in (eager, quick):
        made.step()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(eager.lowest, quick.lowest, rtol=tolerance, atol=0)
    torch.testing.assert_close(eager.x, quick.x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clients_that_diverge_are_left_out_alike(dtype: torch.dtype) -> None:
    def model() -> nn.Module:
        return nn.Linear(6, 4).to(dtype)

    data = federation(6, 4, dtype)
    largest = torch.finfo(dtype).max
    as_tensor(data.inputs)[data.start[4] : data.start[4] + data.train[4]] *= largest / 10
    as_tensor(data.inputs)[data.start[6]] = torch.nan
    eager = simulation(data, ["fedavg", "adafedadam"], [0], model=model)
    quick = compiled(eager, model, data)
    for made in (eager, quick):
        made.step()
    assert eager.left_out.tolist() == quick.left_out.tolist()
    assert eager.left_out.min() >= 2
    torch.testing.assert_close(eager.x, quick.x, rtol=1e-5, atol=1e-6)


class Own(nn.Module):
    """W·x + b by hand, of images."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.w = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.w.T + self.b


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class EvaluatedTwice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x + x)


def behind_a_frozen_layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    return model


IMAGES = {
    "own": Own,
    "flattened": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)),
}
OTHERS = {
    "two layers": lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)),
    "scaled": lambda: Scaled(6, 3),
    "another in evaluation": lambda: EvaluatedTwice(6, 3),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)),
    "frozen": behind_a_frozen_layer,
    "half": lambda: nn.Linear(6, 3).bfloat16(),
}


@pytest.mark.parametrize("name", IMAGES)
def test_it_is_for_modules_that_are_linear_however_they_are_written(name: str) -> None:
    data = federation(6, 3, torch.float32)
    data = replace(data, inputs=as_tensor(data.inputs).view(-1, 1, 2, 3))
    eager = simulation(data, ["fedavg", "adafedadam"], [0], model=IMAGES[name])
    quick = compiled(eager, IMAGES[name], data)
    assert uses(quick) == {"training": True, "gradient": True, "loss": False}
    assert_together(eager, quick, rounds=2, tolerance=2e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_it_is_not_for_others(name: str) -> None:
    made = simulation(federation(6, 3, torch.float32), ["fedavg", "adafedadam"], [0], model=OTHERS[name])
    assert not applied(made, "training")


@pytest.mark.parametrize(
    ("algorithm", "solver", "loss", "training", "probes"),
    [
        ("fedavg", Solver(), nn.CrossEntropyLoss(), True, True),
        ("fedavg", Solver(momentum=0.5), None, False, True),
        ("fedavg", Solver(optimizer="adam"), None, False, True),
        ("fedprox", Solver(), None, True, True),
        ("propfair", Solver(), None, False, True),
        ("fedavg", Solver(), nn.CrossEntropyLoss(label_smoothing=0.1), False, False),
        ("fedavg", Solver(), lambda outputs, targets: outputs.square().sum(1), False, False),
    ],
)
def test_which_steps_it_takes(
    algorithm: str, solver: Solver, loss: Any, training: bool, probes: bool
) -> None:
    settings = Settings(rounds=2, device="cpu", solver=solver, compile="off", engine="stacked")
    runs = [Run(algorithm, algorithms.build(algorithm), 0)]
    given = {} if loss is None else {"loss": loss}
    made = Simulation(lambda: nn.Linear(6, 3), federation(6, 3, torch.float32), runs, settings, **given)
    assert applied(made, "training") is training
    assert applied(made, "gradient") is applied(made, "loss") is probes


def applied(made: Simulation, kind: Kind) -> bool:
    workspace = stacked_of(made).workers.states[0][kind]
    return Classifier.applies(kind, workspace.model, workspace.data, workspace.rules, made.settings.solver)


def test_short_runs_are_compiled_too_because_it_takes_seconds() -> None:
    data = federation(60, 10, torch.float32)
    longer = Solver(batch_size=1, epochs=10)

    def compiles(model: nn.Module) -> str:
        runs = [Run("fedavg", algorithms.fedavg(), 0)]
        return Simulation(
            model, data, runs, Settings(rounds=10, device="cpu", solver=longer)
        ).settings.compile

    assert compiles(nn.Linear(60, 10)) == "on"
    assert compiles(nn.Sequential(nn.Linear(60, 4), nn.Tanh(), nn.Linear(4, 10))) == "off"
