"""What a round costs is what the engine does in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairwind as fw
from fairwind import algorithms
from fairwind.engine.schedule import Planner
from fairwind.engine.settings import Settings
from fairwind.runs.cost import Cost, per_round, round_cost
from fairwind.study import read_runs

SIZES = torch.tensor([3, 10, 25])
P = 7


def cost(spec: str, sizes: Tensor = SIZES, **settings: Any) -> Cost:
    solver = fw.Solver(batch_size=10, **settings.pop("solver", {}))
    return round_cost(algorithms.build(spec), sizes, Settings(solver=solver, **settings), P)


def test_a_probe_of_gradients_costs_an_epoch_and_one_of_losses_none() -> None:
    assert cost("fedavg").sample_gradients == 38
    assert cost("qfedavg").sample_gradients == 38
    assert cost("adafedadam").sample_gradients == 2 * 38
    assert cost("adafedadam", solver={"epochs": 2}).sample_gradients == 3 * 38
    assert cost("adafedadam", probe_samples=5).sample_gradients == 38 + 3 + 5 + 5


def test_parts_of_epochs_and_numbers_of_steps_count_their_samples() -> None:
    assert cost("fedavg", solver={"epochs": 0.5}).sample_gradients == 3 + 10 + 20  # batches, rounded up
    assert cost("fedavg", solver={"steps": 4}).sample_gradients == 4 * 3 + 4 * 10 + (25 + 10)
    assert cost("fedavg", solver={"epochs": (1, 3)}).sample_gradients == 2 * 38
    assert cost("fedavg", participation=2 / 3).sample_gradients == pytest.approx(38 * 2 / 3)


@pytest.mark.parametrize(
    ("spec", "gradients", "up", "down"),
    [
        ("fedavg", 1, 1, 1),
        ("scaffold", 1, 2, 2),  # changes of memories; the server's vector
        ("fedcm", 1, 1, 2),
        ("mime", 3, 2, 3),  # batches at both models and the full gradient; momentum and mean gradient
        ("ditto", 2, 1, 1),
        ("fedmgda", 1, 1, 1),
    ],
)
def test_the_type_of_an_algorithm_says_what_else_it_sends(
    spec: str, gradients: int, up: int, down: int
) -> None:
    vector = 4 * P * 3
    assert cost(spec) == (gradients * 38, up * vector, down * vector)
    assert cost(spec, clients_per_round=1).bytes_up == up * vector / 3


def test_the_samples_are_those_of_the_plan() -> None:
    """Of drawn epochs, the mean over many rounds."""
    inputs = torch.zeros(int(SIZES.sum()), 1)
    clients = [(inputs[:n], torch.zeros(n, dtype=torch.long)) for n in SIZES.tolist()]
    federation = fw.Federation.from_clients([(x.repeat(2, 1), y.repeat(2)) for x, y in clients], train=0.5)
    solver = fw.Solver(batch_size=10, epochs=(1, 3))
    planner = Planner(federation, solver)
    plans = [planner.plan([0], t) for t in range(400)]
    drawn = sum(int((plan.size * plan.epochs).sum()) for plan in plans) / len(plans)
    expected = round_cost(algorithms.build("fedavg"), federation.train, Settings(solver=solver), P)
    assert drawn == pytest.approx(expected.sample_gradients, rel=0.05)


def test_results_say_what_a_run_cost(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 4, generator=draw), torch.arange(20) % 2) for _ in range(3)]
    federation = fw.Federation.from_clients(clients, train=0.5)
    task = fw.Task(lambda: nn.Linear(4, 2), federation, rounds=5)
    compared = fw.compare(task, ["fedavg", "adafedadam"], seeds=[0], progress=False)
    plain, ours = (run["cost"] for run in compared.results["runs"])
    assert plain == {"sample_gradients": 5 * 30, "bytes_up": 5 * 3 * 40, "bytes_down": 5 * 3 * 40}
    assert ours["sample_gradients"] == 2 * plain["sample_gradients"]


def test_stored_runs_say_what_they_cost() -> None:
    found, _ = read_runs(Path(__file__).parents[2] / "results" / "runs" / "femnist-h200")
    costs = {run.row["algorithm"]: per_round(run.row) for run in found}
    parameters = 784 * 128 + 128 + 128 * 62 + 62
    assert costs["fedavg"] == (47552, 4 * parameters * 374, 4 * parameters * 374)
    assert costs["adafedadam"] == (2 * 47552, 4 * parameters * 374, 4 * parameters * 374)
