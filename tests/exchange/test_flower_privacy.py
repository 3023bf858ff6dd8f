"""Differential privacy on Flower: ε in every round and in the results, and no release that is forgotten."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

from flwr.app import Context, RecordDict

from conftest import make_federation
from exchanged import task_of
from fairwind import InputError, Task, algorithms
from fairwind.exchange import Bounds, LocalClient, Privacy
from fairwind.flower import AlgorithmStrategy, SecureStrategy, WeightsStrategy, client_app, nodes, server_app
from flower_grid import InProcessGrid

OPTIONS: dict[str, Any] = {"clip": 1.0, "weight": 20.0, "noise": 2.0, "delta": 1e-2, "further": 3.0}


@pytest.fixture
def task() -> Task:
    return task_of(make_federation([12, 20, 45, 8, 26], dtype=torch.float32), torch.float32)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PAUSE", 0.01)


def grid_of(task: Task) -> InProcessGrid:
    return InProcessGrid(client_app(task), len(task.federation))


def test_epsilon_is_in_every_round_in_the_history_and_in_the_results(task: Task, tmp_path: Any) -> None:
    strategy = AlgorithmStrategy("adafedadam", task, privacy=Privacy(**OPTIONS), out=tmp_path / "run")
    result = strategy.start(grid_of(task), num_rounds=3, timeout=5)
    told: list[Any] = [result.train_metrics_clientapp[number]["epsilon"] for number in (1, 2, 3)]
    assert 0 < told[0] < told[1] < told[2]
    assert result.train_metrics_clientapp[3]["delta"] == 1e-2
    assert [line.get("epsilon") for line in strategy.evaluations.history] == [0, *told]
    found = json.loads((tmp_path / "run" / "results.json").read_text())["runs"][0]["privacy"]
    assert found["epsilon"] == told[-1]
    assert found["adjacency"] == "replace one client"
    assert OPTIONS.items() <= found.items()
    assert found["releases"] == [[1, 1, 3]]


def test_a_training_killed_before_its_evaluation_has_counted_the_round(
    task: Task, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of a round is saved, and paid for, before any node is sent it."""
    own: dict[str, Any] = {"privacy": Privacy(**OPTIONS), "out": tmp_path / "run"}
    first = AlgorithmStrategy("fedavg", task, **own)

    def killed(*_: Any) -> list[Any]:
        if first.aggregator.round == 2:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(first, "configure_evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        first.start(grid_of(task), num_rounds=4, timeout=5)
    second = AlgorithmStrategy("fedavg", task, **own)
    second.start(grid_of(task), num_rounds=4, timeout=5)
    assert second.aggregator.accountant is not None
    assert second.aggregator.accountant.record() == [[1, 1, 4]]
    assert second.evaluations.rounds == [2, 3, 4]
    assert all("epsilon" in line for line in second.evaluations.history)
    other = AlgorithmStrategy("fedavg", task, **{**own, "privacy": Privacy(**OPTIONS | {"noise": 1.0})})
    with pytest.raises(InputError, match="another training"):
        other.start(grid_of(task), num_rounds=4, timeout=5)


def test_who_takes_part_is_drawn_in_secret_and_accounted_for(task: Task) -> None:
    drawn: list[Any] = []
    for _ in range(2):
        strategy = AlgorithmStrategy(
            "fedavg", task, privacy=Privacy(**OPTIONS), clients_per_round=2, eval_every=100
        )
        drawn.append([])
        for number in range(12):
            drawn[-1].append(strategy.nodes.sample(grid_of(task), number + 1))
        assert all(len(set(each)) == 2 for each in drawn[-1])
    assert drawn[0] != drawn[1]  # by chance once in 10¹²
    strategy.start(grid_of(task), num_rounds=2, timeout=5)
    assert strategy.aggregator.accountant is not None
    assert strategy.aggregator.accountant.record() == [[2, 5, 2]]


def test_a_node_that_joins_late_is_told_of_no_other(task: Task) -> None:
    grid = grid_of(task)
    strategy = AlgorithmStrategy("adafedadam", task, privacy=Privacy(**OPTIONS))
    late = grid.contexts.pop(104)
    strategy.start(grid, num_rounds=1, timeout=5)
    grid.contexts[104] = late
    received = strategy.aggregator.weights()
    strategy.start(grid, num_rounds=2, timeout=5)
    own = LocalClient(task, algorithms.adafedadam(), 4).loss(received)
    assert late.state["fairwind"]["first-loss"] == pytest.approx(own)


def test_a_run_config_asks_for_it(task: Task, tmp_path: Any) -> None:
    said: dict[str, Any] = {f"privacy-{name}": value for name, value in OPTIONS.items()}
    said |= {"algorithm": "adafedadam", "num-server-rounds": 2, "out": str(tmp_path / "o"), "share": 1.0}

    def run(**changed: Any) -> None:
        context = Context(1, 0, {}, RecordDict(), {**said, **changed})
        server_app(task)(grid_of(task), context)

    run()
    results = json.loads((tmp_path / "o" / "results.json").read_text())
    assert results["config"]["privacy"] == OPTIONS
    assert results["runs"][0]["privacy"]["epsilon"] > 0
    with pytest.raises(InputError, match="privacy needs privacy-delta, too"):
        run(**{"privacy-delta": ""})
    with pytest.raises(InputError, match=r"give share=1\.0"):
        run(share=0.1)


def test_where_it_cannot_be_had_it_is_refused(task: Task) -> None:
    with pytest.raises(InputError, match="can clip none"):
        SecureStrategy("fedavg", task, privacy=Privacy(**OPTIONS))
    with pytest.raises(InputError, match="leave them out"):
        WeightsStrategy("fedavg", task, privacy=Privacy(**OPTIONS), bounds=Bounds())
