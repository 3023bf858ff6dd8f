"""`benchmarks/kept_momentum.py` trains as the package and PyTorch do."""

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kept_momentum
from conftest import CLASSES, FEATURES, make_federation
from fairwind import Federation, Settings, Solver, Task, algorithms, setups
from fairwind.engine.checks import build
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from kept_momentum import REPORTED, STARTS, KeptMomentum
from narrowed import known
from samples import as_tensor

SEEDS = 0, 1
ROUNDS = 3
MOMENTUM = {
    "heavy-ball": Solver(lr=0.1, momentum=0.9, batch_size=4),
    "nesterov": Solver(lr=0.1, momentum=0.9, nesterov=True, batch_size=4),
}
by_solver = pytest.mark.parametrize("solver", MOMENTUM.values(), ids=MOMENTUM)


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).double()


def copies() -> Federation:
    """Clients whose training samples are copies of one, so that their order does not matter."""
    tested = make_federation([7] * 5)
    clients = []
    for k, n in enumerate([3, 17, 9, 1, 8]):  # part of a batch, several and a part, one, two whole ones
        x, y = (each[7 * k : 7 * (k + 1)] for each in (as_tensor(tested.inputs), as_tensor(tested.targets)))
        clients.append({"train": (x[:1].repeat(n, 1), y[:1].repeat(n)), "test": (x[1:], y[1:])})
    return Federation.from_clients(clients, classes=CLASSES)


def assert_as_in_the_package(task: Task, solver: Solver) -> None:
    """Weights and metrics of a start from zero, over some rounds of the paper's algorithms and two seeds."""
    built: dict[str, Any] = {name: algorithms.build(name) for name in algorithms.PAPER}
    own = KeptMomentum(task, solver, [(algorithm, "zero") for algorithm in built.values()], SEEDS)
    runs = [Run(name, algorithm, seed) for name, algorithm in built.items() for seed in SEEDS]
    settings = Settings(solver=solver, rounds=ROUNDS, eval_every=1, compile="off", device="cpu", workers=1)
    package = Simulation(task.model, task.federation, runs, settings)
    package.start()
    for _ in range(ROUNDS):
        own.step()
        package.step()
        x = own.x.permute(2, 0, 3, 1)  # (algorithms, seeds, classes, features + 1)
        weights = torch.cat([x[..., :-1].flatten(2), x[..., -1]], 2).flatten(0, 1)
        torch.testing.assert_close(weights, package.x, rtol=1e-9, atol=1e-10)
    found = [metrics for by_seed in own.metrics() for metrics in by_seed]
    for line, metrics in zip(package.history[-len(runs) :], found, strict=True):
        for name in REPORTED:
            assert metrics[name] == pytest.approx(known(line.get(name)), rel=1e-9)
    assert own.left_out == 0


@by_solver
def test_momentum_from_zero_is_the_packages(solver: Solver) -> None:
    """With several steps a round, and batches of several sizes."""
    assert_as_in_the_package(Task(linear, copies()), solver)


def test_losses_gradients_and_scores_on_synthetic_are_the_packages() -> None:
    """With all samples of a client in one batch, whose order does not matter."""
    task = setups.task("synthetic:clients=5")
    solver = Solver(lr=0.01, momentum=0.9, batch_size=int(task.federation.train.max()))
    assert_as_in_the_package(Task(lambda: task.model().double(), task.federation), solver)


def fedavg_of_kept_optimizers(task: Task, solver: Solver, orders: list[tuple[Tensor, ...]]) -> Tensor:
    """The weights after FedAvg's rounds, in each of which clients go through their samples as ordered."""
    model = build(task.model, 0)
    clients = [deepcopy(model) for _ in orders[0]]
    optimizers = [
        torch.optim.SGD(c.parameters(), lr=solver.lr, momentum=solver.momentum, nesterov=solver.nesterov)
        for c in clients
    ]
    for order in orders:
        for client, optimizer, samples in zip(clients, optimizers, order, strict=True):
            client.load_state_dict(model.state_dict())
            for batch in samples.split(solver.batch_size):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                outputs = client(task.federation.inputs[batch])
                torch.autograd.backward(
                    nn.functional.cross_entropy(outputs, as_tensor(task.federation.targets)[batch])
                )
                optimizer.step()
        sizes = torch.tensor([len(samples) for samples in order], dtype=torch.float64)
        trained = [client.state_dict() for client in clients]
        shares = sizes / sizes.sum()
        model.load_state_dict(
            {n: sum(s * own[n] for s, own in zip(shares, trained, strict=True)) for n in trained[0]}
        )
    assert isinstance(model, nn.Linear)
    return torch.cat([model.weight.T, model.bias[None]]).detach()


@by_solver
def test_kept_momentum_is_that_of_pytorchs_optimizers_kept_by_clients(
    ragged: Federation, solver: Solver
) -> None:
    task, fedavg = Task(linear, ragged), algorithms.fedavg()
    own = KeptMomentum(task, solver, [(fedavg, start) for start in STARTS], [0])
    orders = []
    for _ in range(ROUNDS):
        orders.append(own.shuffled()[0].split(own.train.tolist()))  # type: ignore[no-untyped-call]
        own.step()
    zero, kept = own.x[0].unbind(1)
    torch.testing.assert_close(kept, fedavg_of_kept_optimizers(task, solver, orders), rtol=1e-9, atol=1e-10)
    assert (kept - zero).abs().max() > 0.01


def test_every_client_goes_through_its_own_training_samples_in_another_order_each_round(
    ragged: Federation,
) -> None:
    runs = [(algorithms.fedavg(), "zero")]
    own = KeptMomentum(Task(linear, ragged), MOMENTUM["nesterov"], runs, SEEDS)
    first = own.shuffled()
    own.step()
    for order in (*first, *own.shuffled()):
        for samples, begin, size in zip(order.split(own.train.tolist()), own.start, own.train, strict=True):
            assert samples.sort().values.tolist() == list(range(begin, begin + size))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, own.shuffled())


def test_the_benchmark_records_a_row_for_each_algorithm_solver_and_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--algorithms", "fedavg", "--solvers", "momentum", "--seeds", "0", "1", "--rounds", "1")
    given = ["kept_momentum.py", *words, "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", given)
    kept_momentum.main()
    zero, kept = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (zero.pop("start"), kept.pop("start")) == STARTS
    assert zero == kept  # nothing is kept before the first round
    assert set(zero) == {"algorithm", "solver", *REPORTED}
