"""The baseline of training alone: each client's model is that of a loop over its own samples."""

import pytest
import torch
from torch import nn

import fairwind as fw
from batches import batches_by_hand
from conftest import make_federation, make_model
from fairwind import Solver
from samples import as_tensor

SIZES = [30, 12, 60, 25]


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_each_client_trains_alone(engine: str) -> None:
    """As in a loop by hand, with the engine's batches; scores are of each client's own model."""
    federation, solver = make_federation(SIZES), Solver(lr=0.1, batch_size=4)
    task = fw.Task(make_model, federation, rounds=3, solver=solver)
    compared = fw.compare(task, ["fedavg", "local"], engine=engine, progress=False)  # type: ignore[arg-type]
    run = compared["local"]
    assert [each.algorithm for each in compared.runs] == ["fedavg", "local"]
    inputs, targets = as_tensor(federation.inputs), as_tensor(federation.targets)
    test = federation.part("test")
    for k in range(len(SIZES)):
        torch.manual_seed(0)
        model = make_model()
        for round in range(3):
            size, start = int(federation.train[k]), int(federation.start[k])
            for batch in batches_by_hand(size, -(-size // 4), 0, round, k):
                rows = [start + place for place in batch]
                loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
                for weight, g in zip(
                    model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
                ):
                    weight.data -= 0.1 * g
        for name, value in model.state_dict().items():
            torch.testing.assert_close(run.state_dict[name][k], value, rtol=1e-9, atol=1e-12)
        own = slice(int(test[0][k]), int(test[0][k] + test[1][k]))
        right = model(inputs[own]).argmax(1) == targets[own]
        assert float(run.score[k]) == pytest.approx(100 * float(right.double().mean()))


def test_it_sends_nothing_and_is_in_no_set() -> None:
    task = fw.Task(make_model, make_federation(SIZES), rounds=2)
    row = fw.compare(task, ["local", "fedavg"], progress=False).results["runs"][0]
    assert row["cost"]["bytes_up"] == row["cost"]["bytes_down"] == 0
    assert "local" not in fw.algorithms.with_sets(["all"])
