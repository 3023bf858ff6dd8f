"""The execution plan: one record of how a comparison is computed, with the reason for each part."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fairwind as fw
from fairwind.engine.builder import build_executor
from fairwind.engine.loop.executor import Loop
from fairwind.engine.plan import ExecutionPlan, compiling, loop_threads
from fairwind.engine.simulation import Simulation
from fairwind.engine.stacked.executor import Stacked
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


@pytest.mark.parametrize(
    ("setting", "saved", "takes", "missing", "compiled", "why"),
    [
        ("off", 1e9, 1.0, "", False, "compile=off"),
        ("on", 0.0, 9.0, "g++", True, "compile=on"),
        ("auto", 100.0, 30.0, "", True, "takes about 30 s, and saves about 100 s in 50 rounds"),
        ("auto", 10.0, 30.0, "", False, "takes about 30 s, and saves about 10 s in 50 rounds"),
        ("auto", 100.0, 30.0, "g++", False, "g++ was not found"),
    ],
)
def test_steps_are_compiled_where_it_saves_time(
    setting: str, saved: float, takes: float, missing: str, compiled: bool, why: str
) -> None:
    found = compiling(setting, 50, saved, takes, missing)
    assert found[0] == compiled
    assert found[1].endswith(why)


def test_the_loops_threads_follow_the_model() -> None:
    plain = simulation(engine="loop").plain
    workers, threads = loop_threads(plain, 10, rows=2, cores=4)
    assert (workers.value, threads.value) == (1, 4)
    assert "fewer than 4 cores" in threads.why
    workers, threads = loop_threads(plain, 10, rows=100, cores=4)  # a small model
    assert (workers.value, threads.value) == (1, 1)
    workers, threads = loop_threads(plain, 10**6, rows=100, cores=4)  # a long step
    assert int(workers.value) * int(threads.value) == 4
    assert loop_threads(plain, 10, rows=100, cores=1)[0].why == "one core"


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
    used = [vars(module)["build_executor"] for module in modules]
    assert used == [build_executor] * 2
