"""The execution plan: one record of how a comparison is computed, with the reason for each part."""

import json
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fairwind as fw
from fairwind.engine.builder import build_engine
from fairwind.engine.loop.executor import Loop
from fairwind.engine.machine import Machine
from fairwind.engine.plan import Case, Counts, Decision, ExecutionPlan, StackedCounts, decide, place
from fairwind.engine.settings import Settings
from fairwind.engine.simulation import Simulation
from fairwind.engine.stacked.executor import Stacked
from simulations import assert_together
from simulations import simulation as simulated


def simulation(**options: Any) -> Simulation:
    return simulated(task().federation, ["fedavg"], [0], model=task().model, **options)


def task(width: int = 16, samples: int = 12) -> fw.Task:
    torch.manual_seed(0)
    clients = [(torch.randn(samples, 8), torch.randint(3, (samples,))) for _ in range(5)]
    model = lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))  # noqa: E731
    return fw.Task(model, fw.Federation.from_clients(clients), rounds=3)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_the_executor_is_the_planned_one(engine: str) -> None:
    s = simulation(engine=engine)
    assert tuple(s.plan.executor) == (engine, f"engine={engine}")
    assert isinstance(s.executor, Stacked if engine == "stacked" else Loop)
    assert s.settings.engine == s.plan.executor.value
    assert (s.settings.compile == "on") == (s.plan.steps.value != "eager")
    assert s.executor.threads == s.plan.threads.value
    assert len(s.executor.workers.states) == s.plan.workers.value


def test_every_part_has_a_reason_in_results_and_on_paper(tmp_path: Path) -> None:
    compared = fw.compare(task(), ["fedavg"], seeds=[0], out=tmp_path / "run", progress=False)
    assert list(compared.plan) == list(ExecutionPlan._fields)
    assert all(part["why"] and part["value"] != "" for part in compared.plan.values())
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    assert stored["plan"] == compared.plan


def test_given_settings_are_the_reason() -> None:
    s = simulation(engine="stacked", compile="off", workers=1, memory=0.5, device="cpu")
    assert tuple(s.plan.steps) == ("eager", "compile=off")
    assert s.plan.workers == (1, "workers=1")
    assert s.plan.memory == (0.5, "memory=0.5")
    assert s.plan.device == ("cpu", "device=cpu")


COUNTS = Counts(  # of a small model
    rows=100,
    repeats=True,
    mean_steps=5.0,
    most_steps=9,
    summed=True,
    phases=False,
    own_parts=False,
    kept_numbers=0,
    batch_size=10,
    plain_sgd=True,
    own_optimizer="",
    parameters=200,
    number_bytes=4,
    operations=20,
    convolutions=0,
    recurrent=0,
    flops=400,
    replaces_functions=False,
    channels_last=False,
    draws_by_generator=False,
)
STACKED = StackedCounts(
    per_sample=30,
    row_numbers=2000,
    operations=60,
    factored_layers=0,
    handwritten="none",
    recurrent_layers=0,
    by_token=0,
    waits=False,
)
HOST = Machine("cpu", 16 << 30, 4, "", runs_kernels=False, world=1)
GPU = Machine("cuda", 64 << 30, 1, "", runs_kernels=True, world=1)


def decided(
    machine: Machine, settings: Settings, stacking: StackedCounts | str = STACKED, **counts: Any
) -> ExecutionPlan:
    """What is decided from counts alone: no model, no data, no device."""
    case = Case(settings, machine, COUNTS._replace(**counts))
    return decide(case, place(settings, machine, 1000), stacking)


@pytest.mark.parametrize(
    ("setting", "rounds", "missing", "value", "why"),
    [
        ("off", 10**9, "", "eager", "compile=off"),
        ("on", 1, "g++", "ahead-of-time", "compile=on"),
        ("auto", 10**4, "", "ahead-of-time", "takes about 30 s, and saves about 90 s in 10000 rounds"),
        ("auto", 10**3, "", "eager", "takes about 30 s, and saves about 9 s in 1000 rounds"),
        ("auto", 10**4, "g++", "eager", "g++ was not found"),
    ],
)
def test_steps_are_compiled_where_it_saves_time(
    setting: Any, rounds: int, missing: str, value: str, why: str
) -> None:
    settings = Settings(compile=setting, rounds=rounds, engine="stacked")
    steps = decided(HOST._replace(missing=missing), settings).steps
    assert steps.value == value
    assert steps.why.endswith(why)


def test_handwritten_steps_take_seconds_to_build() -> None:
    settings = Settings(rounds=1000, engine="stacked")
    assert decided(HOST, settings, STACKED._replace(handwritten="all")).steps.value == "hand-written"
    assert decided(HOST, settings, STACKED._replace(handwritten="some")).steps.value == "eager"
    settings = Settings(rounds=1, engine="stacked", compile="on")
    assert decided(HOST, settings, STACKED._replace(handwritten="some")).steps.value == "hand-written"


def test_the_loops_threads_follow_the_model() -> None:
    def threads(cores: int, **counts: Any) -> tuple[int, int, str]:
        plan = decided(HOST._replace(cores=cores), Settings(), "it cannot", **counts)
        return plan.workers.value, plan.threads.value, plan.workers.why + plan.threads.why

    assert threads(4, rows=2)[:2] == (1, 4)
    assert "fewer than 4 cores" in threads(4, rows=2)[2]
    assert threads(4)[:2] == (1, 1)  # a small model
    assert threads(4, flops=10**8)[:2] == (4, 1)  # a long step
    assert threads(4, flops=10**9)[:2] == (1, 4)
    assert threads(4, flops=10**8, draws_by_generator=True)[:2] == (1, 1)
    assert "one core" in threads(1)[2]


def test_channels_last_is_for_convolutions_in_the_loop_of_a_cpu() -> None:
    def convolutions(machine: Machine, stacking: StackedCounts | str, **counts: Any) -> str:
        return decided(machine, Settings(), stacking, **counts).convolutions.value

    assert convolutions(HOST, "it cannot") == "none"
    assert convolutions(HOST, "it cannot", convolutions=2) == "as called"
    may = {"convolutions": 2, "channels_last": True, "flops": 10**6}
    assert convolutions(HOST, "it cannot", **may) == "channels last"
    assert convolutions(HOST, "it cannot", **may | {"flops": 10**4}) == "as called"
    assert convolutions(GPU, "it cannot", **may) == "as called"
    assert convolutions(GPU, STACKED, convolutions=2) == "products"


def test_a_plan_of_a_gpu() -> None:
    plan = decided(GPU, Settings())
    values = {name: decision.value for name, decision in plan._asdict().items()}
    assert values == {
        "device": "cuda",
        "data": "device",
        "precision": "tf32",
        "executor": "stacked",
        "steps": "eager",
        "gradients": "dense",
        "convolutions": "none",
        "graphs": "rounds",
        "workers": 1,
        "threads": 1,
        "memory": 16.0,
        "client_vectors": "device",
        "scorer": "all",
    }


@pytest.mark.parametrize(
    ("counts", "part", "value"),
    [
        ({"repeats": False}, "graphs", "steps"),
        ({"summed": False}, "graphs", "steps"),
        ({"own_parts": True}, "graphs", "steps"),
        ({"kept_numbers": 1 << 31}, "client_vectors", "host"),
        ({"kept_numbers": 1 << 31}, "graphs", "steps"),
        ({"flops": 10**8}, "scorer", "one"),
    ],
)
def test_what_changes_a_gpus_plan(counts: dict[str, Any], part: str, value: str) -> None:
    assert getattr(decided(GPU, Settings()), part).value != value
    assert getattr(decided(GPU, Settings(), **counts), part).value == value


def test_samples_stay_on_the_host_if_they_take_more_than_half_of_a_gpu() -> None:
    settings = Settings()
    assert place(settings, GPU, 32 << 30).data.value == "device"
    assert place(settings, GPU, 33 << 30).data.value == "host"
    assert place(settings, HOST, 33 << 30).data.value == "device"
    assert place(Settings(data_on="device"), GPU, 33 << 30).data.value == "device"


def test_recurrent_layers_are_compiled_where_our_kernels_run_them() -> None:
    settings, lstm = Settings(rounds=10**9), STACKED._replace(recurrent_layers=1)
    assert decided(GPU, settings, lstm).steps.value == "torch.compile"
    assert decided(GPU, settings, lstm._replace(by_token=1)).steps.value == "eager"
    assert decided(GPU._replace(runs_kernels=False), settings, lstm).steps.value == "eager"
    assert decided(GPU, Settings(rounds=10**9, precision="float32"), lstm).steps.value == "eager"


@pytest.mark.parametrize(
    ("settings", "machine", "remedy"),
    [
        ({"engine": "stacked"}, HOST, "engine=loop trains it"),
        ({"precision": "bf16"}, HOST, "with precision=float32"),
        ({}, HOST._replace(world=2), "without torchrun"),
    ],
)
def test_a_model_that_must_be_stacked_and_cannot_is_refused(
    settings: dict[str, Any], machine: Machine, remedy: str
) -> None:
    with pytest.raises(fw.InputError, match=f"it cannot; {remedy}"):
        decided(machine, Settings(**settings), "it cannot")


@pytest.mark.parametrize(
    ("part", "value", "options"),
    [
        ("gradients", "dense", {"width": 1 << 13}),
        ("gradients", "dense", {"width": 1 << 13, "engine": "loop"}),
        ("scorer", "one", {}),
        ("workers", 2, {"workers": 1}),
        ("threads", 2, {"engine": "loop"}),
        ("executor", "loop", {}),
    ],
)
def test_a_plan_is_switched_by_replacing_a_decision(part: str, value: Any, options: dict[str, Any]) -> None:
    """Another path to the same numbers, for an ablation or a test."""
    model = task(options.pop("width", 16)).model
    options = {"model": lambda: model().double(), "compile": "off", "device": "cpu"} | options
    ours = simulated(task().federation, ["adafedadam"], [0], **options)
    plan = ours.plan._replace(**{part: Decision(value, "for comparison")})
    assert plan != ours.plan
    other = simulated(task().federation, ["adafedadam"], [0], **options, plan=plan)
    assert other.plan == plan
    assert_together(ours, other, rounds=3, tolerance=1e-9)


def test_with_the_settings_of_a_plan_the_same_is_decided_again() -> None:
    for engine in ("auto", "loop", "stacked"):
        first = simulation(engine=engine)
        again = simulation(**{f.name: getattr(first.settings, f.name) for f in fields(first.settings)})
        assert again.settings == first.settings
        assert [d.value for d in again.plan] == [d.value for d in first.plan]


def test_explain_shows_the_plan_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fairwind.cli import main

    monkeypatch.chdir(tmp_path)
    words = ["fairwind", "compare", "synthetic:clients=5", "--rounds", "2", "--explain"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="0"):
        main()
    shown = capsys.readouterr().out
    for part in ExecutionPlan._fields:
        assert f"\n{part} " in f"\n{shown}"
    assert not list(tmp_path.iterdir())


def test_simulations_and_federated_clients_are_built_by_one_function() -> None:
    """So that a client of a real federation trains as the simulated one."""
    modules = [import_module(f"fairwind.{name}") for name in ("engine.simulation", "exchange.client")]
    used = [vars(module)["build_engine"] for module in modules]
    assert used == [build_engine] * 2
