"""Gradients left as factors are the gradients, and are left so only where that is true."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from conftest import CLASSES, FEATURES, make_federation
from fairwind import Federation, algorithms
from fairwind.engine.cohort import LARGE
from fairwind.engine.simulation import _compiler_found
from test_engine import SOLVERS, assert_together, simulation


@pytest.fixture(autouse=True)
def _small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairwind.engine.cohort.LARGE", 1)


def on_cpu(federation: Federation, **options: object):
    """A simulation of all algorithms of the paper, and the same as a loop."""
    names = list(algorithms.PAPER)
    stacked = simulation(federation, names, [0, 1], device="cpu", **options)
    options["compile"] = "off"
    return stacked, simulation(federation, names, [0, 1], device="cpu", engine="loop", **options)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("memory", [None, 1e-6])
def test_the_loop_is_what_factors_give(ragged: Federation, solver: str, memory: float | None) -> None:
    stacked, loop = on_cpu(ragged, solver=SOLVERS[solver], memory=memory)
    plain = not (SOLVERS[solver].momentum or SOLVERS[solver].weight_decay)
    assert list(stacked.cohort.factored) == ([0, 2] if plain else [])
    assert not loop.cohort.factored
    assert_together(stacked, loop)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mixing(torch.tanh(self.mixing(x)))))


class Elsewhere(Twice):
    """One weight is used by others too; a sample comes to the other in pieces."""

    def forward(self, x: Tensor) -> Tensor:
        bent = self.mixing(x) + 0.01 * linear(x.tanh(), self.mixing.weight)
        return self.last(torch.stack([bent, bent.tanh()], dim=1)).sum(1)


class Folded(Twice):
    """Pieces of a sample come as if they were samples."""

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.mixing(torch.stack([x, x.tanh()], dim=1).flatten(0, 1))
        return self.last(pieces.view(-1, 2, FEATURES).sum(1))


class Tied(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.mixing.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(torch.tanh(self.mixing(x))))


@pytest.mark.parametrize(
    ("model", "factored"),
    [(Twice, ["last"]), (Elsewhere, []), (Folded, ["last"]), (Tied, ["last"])],
)
def test_only_what_is_used_once_for_each_sample_is_left_as_factors(
    ragged: Federation, model: type[nn.Module], factored: list[str]
) -> None:
    stacked, loop = on_cpu(ragged, model=lambda: model().double())
    assert list(stacked.cohort.factored.values()) == factored
    assert_together(stacked, loop, rounds=3)


def test_frozen_layers_dropout_and_no_bias(ragged: Federation) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        frozen = nn.Linear(FEATURES, 6).requires_grad_(False)
        layers = frozen, nn.Dropout(0.3), nn.Linear(6, 4, bias=False), nn.Dropout(0.5), nn.Linear(4, CLASSES)
        return nn.Sequential(*layers).double()

    stacked, loop = on_cpu(ragged, model=model)
    assert list(stacked.cohort.factored.values()) == ["2", "4"]
    assert_together(stacked, loop, rounds=3)
    assert stacked.cohort.state_dict(stacked.x[0]).keys() == model().state_dict().keys()


@pytest.mark.skipif(not _compiler_found("cpu"), reason="needs a compiler")
def test_compiled(ragged: Federation) -> None:
    stacked, loop = on_cpu(ragged, compile="on")
    assert stacked.cohort.factored
    assert_together(stacked, loop, rounds=3)


def test_a_row_that_has_finished_stays_even_if_its_inputs_overflow() -> None:
    """Of two clients the short one waits beside the long one, on a batch that its model cannot take."""
    federation = make_federation([2, 45])
    federation.inputs[:2] = 1e145  # after one step, what comes to the last layer is infinite

    def model() -> nn.Module:
        layers = nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        return nn.Sequential(*layers).double()

    s = simulation(federation, ["fedavg"], [0], solver=SOLVERS["sgd"], device="cpu", model=model)
    assert s.cohort.factored
    s.step()
    assert s.left_out.tolist() == [0]


def test_small_weights_are_not_worth_it(ragged: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairwind.engine.cohort.LARGE", LARGE)
    assert not on_cpu(ragged)[0].cohort.factored
