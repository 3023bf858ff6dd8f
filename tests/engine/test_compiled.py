"""Compiled steps are the steps, for any number of rows."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, DEVICE, FEATURES, compiler_found, make_federation, make_model
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.engine.backends.compiling import traced
from fairwind.engine.executor import Run
from fairwind.engine.plan import Decision, Steps
from fairwind.engine.settings import Switch
from fairwind.engine.simulation import Simulation
from fairwind.errors import SlowPathWarning
from fairwind.models import Pixels
from simulations import simulation, stacked_of
from tasks import TASKS


def test_a_step_that_cannot_be_compiled_for_all_row_counts_runs_uncompiled(ragged: Federation) -> None:
    """Upsampling fixes the number of models in compiled code: say so, and go on."""

    class Upsampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: Tensor) -> Tensor:
            twice = nn.functional.interpolate(x[:, None], scale_factor=2.0, mode="linear")
            out: Tensor = self.layers(twice[:, 0, ::2])
            return out

    runs = [Run("fedavg", algorithms.fedavg(), 0)]

    def step(compile: Switch) -> Simulation:
        settings = Settings(rounds=2, compile=compile, device=DEVICE, engine="stacked")
        made = Simulation(Upsampled, ragged, runs, settings)
        made.step()
        return made

    with pytest.warns(SlowPathWarning, match="uncompiled, and slower"):
        compiled = step("on")
    torch.testing.assert_close(compiled.x, step("off").x)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compiled as for a GPU, up to the code that is generated in the end."""
    for module in ("backend", "compiling"):
        monkeypatch.setattr(f"fairwind.engine.backends.{module}.find_spec", lambda name: name, raising=False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def trained(plan: Steps, module: nn.Module, federation: Federation, **options: Any) -> Simulation:
    """After two rounds, with steps of a kind."""
    options |= {"model": module, "participation": 0.7}
    chosen = simulation(federation, ["adafedadam"], [0], **options).plan
    made = simulation(
        federation,
        ["adafedadam"],
        [0],
        plan=chosen._replace(steps=Decision(plan, "as told")),
        **options,
    )
    for _ in range(2):
        made.step()
    return made


@pytest.mark.usefixtures("on_a_gpu")
def test_steps_compiled_for_a_gpu_are_the_steps(ragged: Federation) -> None:
    """Also those of a second engine in the process, whose samples have other shapes."""
    g = torch.Generator().manual_seed(0)
    pictures = [
        (
            torch.randint(256, (n, 6, 5, 3), generator=g, dtype=torch.uint8),
            torch.randint(2, (n,), generator=g),
        )
        for n in (2, 9, 5, 14)
    ]
    convolution = nn.Sequential(Pixels(), nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
    for module, federation in (
        (make_model(), ragged),
        (convolution.double(), Federation.from_clients(pictures, train=0.7)),
    ):
        eager, compiled = (trained(steps, module, federation) for steps in ("eager", "torch.compile"))
        torch.testing.assert_close(compiled.x, eager.x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("setup", ["synthetic", "femnist", "cifar10", "sent140"])
def test_the_setups_steps_are_compiled_for_any_number_of_models(setup: str) -> None:
    task = TASKS[setup]
    runs = [Run("adafedadam", algorithms.adafedadam(), 0)]
    settings = Settings(rounds=1, engine="stacked", compile="off", workers=1, solver=task.solver)
    data = task.data(2)
    if setup == "sent140":  # token by token, all of which are alike
        assert isinstance(data.inputs, Tensor)
        data = replace(data, inputs=data.inputs[:, :3])
    training = stacked_of(Simulation(task.model, data, runs, settings))._needed()["training"]
    assert traced(training.step, *training.example()).graph.graph.nodes


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bf16_trains_as_float32_but_for_its_rounding(compiled: bool) -> None:
    """Weights, sums and norms stay float32: steps too small for bf16 are not lost."""
    if compiled and not compiler_found(torch.device(DEVICE)):
        pytest.skip("needs a compiler")
    federation = make_federation([30, 4, 17, 9], dtype=torch.float32)
    names = ["fedavg", "fednova"] if compiled else algorithms.PAPER  # to compile takes long
    runs = [Run(name, algorithms.build(name), 0) for name in names]
    solver = Solver(lr=1e-4, batch_size=5, momentum=0.5)
    exact, rounded = (
        Simulation(
            lambda: nn.Linear(FEATURES, CLASSES),
            federation,
            runs,
            Settings(
                rounds=5, device=DEVICE, precision=p, solver=solver, compile="on" if compiled else "off"
            ),
        )
        for p in ("float32", "bf16")
    )
    start = exact.x.clone()
    for _ in range(3):
        exact.step()
        rounded.step()
    assert rounded.x.dtype == torch.float32
    moved, apart = (exact.x - start).norm(dim=1), (rounded.x - exact.x).norm(dim=1)
    assert (moved > 0).all()
    assert (apart > 0).all()  # it was another computation
    assert (apart < 0.03 * moved).all()
    # bf16 has 8 bits: of weights that were kept in it, most would not have moved at all
    assert (exact.x[0] - start[0]).abs().median() < 2**-8 * start[0].abs().median()


def test_precision_is_refused_where_it_cannot_be_kept(ragged: Federation) -> None:
    for options, message in (
        ({"precision": "fp8"}, "precision='fp8' is not one of auto, float32, tf32, bf16"),
        ({"precision": "bf16", "engine": "loop"}, "precision bf16 needs the stacked engine"),
        *([({"precision": "tf32"}, "precision tf32 needs a GPU")] if DEVICE == "cpu" else []),
    ):
        with pytest.raises(InputError, match=message):
            simulation(ragged, ["fedavg"], [0], **options)


def test_a_model_that_insists_on_float32_is_told_of_precision() -> None:
    class Stubborn(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    federation = make_federation([10, 10], dtype=torch.float32)
    with pytest.raises(InputError, match=r"cannot be stacked.*precision=float32 avoids that"):
        simulation(federation, ["fedavg"], [0], precision="bf16", model=lambda: Stubborn(FEATURES, CLASSES))


def test_without_a_compiler_a_long_run_says_so_once_and_goes_on(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairwind.engine.machine.missing_compiler", lambda device: "g++")
    runs = [Run("mean", algorithms.fedavg(), 0)]
    short = Simulation(make_model, ragged, runs, Settings(rounds=2, device=DEVICE))
    assert short.settings.compile == "off"
    with pytest.warns(UserWarning, match="was not found: steps run uncompiled") as said:
        long = Simulation(make_model, ragged, runs, Settings(rounds=10**12, device=DEVICE))
    assert len(said) == 1
    assert long.settings.compile == "off"
    long.step()


def test_bf16_with_dropout_frozen_parameters_and_buffers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(FEATURES, 8).requires_grad_(False)
            self.register_buffer("scale", torch.tensor(0.5))
            self.layers = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(self.frozen(x) * self.scale)
            return out

    federation = make_federation([30, 4, 17], dtype=torch.float32)
    model = Mixed()
    found = {
        p: simulation(federation, ["adafedadam", "qfedavg"], [0], precision=p, model=model)
        for p in ("float32", "bf16")
    }
    start = found["bf16"].x.clone()
    for s in found.values():
        for _ in range(3):
            s.step()
    moved = (found["float32"].x - start).norm()
    assert 0 < (found["bf16"].x - found["float32"].x).norm() < 0.1 * moved
    state = found["bf16"].state_dict(0)
    assert torch.equal(state["frozen.weight"].cpu(), model.frozen.weight)
