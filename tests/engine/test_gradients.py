"""Gradients left as factors are the gradients, and are left so only where that is true."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from conftest import CLASSES, FEATURES, make_federation
from fairwind import Federation, algorithms
from fairwind.engine import tuning
from fairwind.engine.plan import Decision, ExecutionPlan
from fairwind.engine.simulation import Simulation
from fairwind.engine.tuning import MIN_FACTORED_NUMBERS as LEAST
from samples import as_tensor
from simulations import SOLVERS, assert_together, simulation, stacked_model


@pytest.fixture(autouse=True)
def _small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MIN_FACTORED_NUMBERS", 1)


def on_cpu(
    federation: Federation, names: Sequence[str] = algorithms.PAPER, **options: Any
) -> tuple[Simulation, Simulation]:
    """A simulation of all algorithms of the paper, and the same as a loop."""
    stacked = simulation(federation, names, [0, 1], device="cpu", **options)
    options["compile"] = "off"
    return stacked, simulation(federation, names, [0, 1], device="cpu", engine="loop", **options)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(-1, 1, FEATURES))
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x + self.token)))
        return out


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))
        return out


class TwiceEvaluated(Net):
    """Twice, but while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x) - super().forward(-x)


class Halves(Net):
    """A layer that gets a sample's halves, which are the same in many samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(x[:, :1] > 0, x, 0)
        out: Tensor = self.b(torch.tanh(self.a(x)) + 2 * torch.tanh(self.a(x.flip(1))))
        return out


class Elsewhere(Net):
    """A weight that others use, a little."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-5 * linear(x, self.a.weight)[:, :CLASSES]


class Pieces(Net):
    """A sample comes in pieces to one layer, and to the other as if these were samples."""

    def forward(self, x: Tensor) -> Tensor:
        both = self.a(torch.stack([x, x.tanh()], dim=1).flatten(0, 1)).view(-1, 2, FEATURES)
        out: Tensor = self.b(both).sum(1)
        return out


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.again(torch.tanh(self.a(x))))
        return out


class Aliased(Net):
    """Layers under a second name, by which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.a, nn.Tanh(), self.b)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Unused(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(x)
        return out


class OnlyEvaluated(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) if self.training else super().forward(x)


class OfToken(Net):
    """One layer sees a weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(x + self.a(self.token.expand(len(x), -1))))
        return out


class OfOneToken(Net):
    """The same, once for all samples."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(x + self.a(self.token[None])))
        return out


class Named(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(input=torch.tanh(self.a(x)))
        return out


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda layer, given, out: out if layer.training else 2 * out)
        self.a.register_forward_pre_hook(lambda layer, given: (given[0].tanh(),))


@pytest.mark.parametrize(
    ("model", "factored"),
    [
        (Net, ["a", "b"]),
        (Twice, ["b"]),
        (TwiceEvaluated, []),
        (Halves, ["b"]),
        (Elsewhere, ["b"]),
        (Pieces, []),
        (Tied, ["b"]),
        (Aliased, ["a", "b"]),
        (Unused, ["b"]),
        (OnlyEvaluated, ["b"]),
        (OfToken, ["a", "b"]),
        (OfOneToken, ["b"]),
        (Named, ["a"]),
        (Hooked, ["a", "b"]),
    ],
)
def test_only_what_is_used_once_for_each_sample_is_left_as_factors(
    ragged: Federation, model: type[nn.Module], factored: list[str]
) -> None:
    as_tensor(ragged.inputs)[0] = 0

    def made(plan: ExecutionPlan | None = None) -> Simulation:
        names = ["fedavg", "qfedavg", "adafedadam"]
        return simulation(ragged, names, [0, 1], device="cpu", model=lambda: model().double(), plan=plan)

    left = made()
    assert list(stacked_model(left).factored.values()) == factored
    formed = made(left.plan._replace(gradients=Decision("dense", "for comparison")))
    assert not stacked_model(formed).factored
    assert_together(left, formed, rounds=3)
    torch.testing.assert_close(left.loss, formed.loss, equal_nan=True)


def test_frozen_layers_dropout_and_no_bias(ragged: Federation) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        frozen = nn.Linear(FEATURES, 6).requires_grad_(False)
        layers = frozen, nn.Dropout(0.3), nn.Linear(6, 4, bias=False), nn.Dropout(0.5), nn.Linear(4, CLASSES)
        return nn.Sequential(*layers).double()

    stacked, loop = on_cpu(ragged, model=model)
    assert list(stacked_model(stacked).factored.values()) == ["2", "4"]
    assert_together(stacked, loop, rounds=3)
    assert stacked.state_dict(0).keys() == model().state_dict().keys()


def test_a_row_that_has_finished_stays_even_if_its_inputs_overflow() -> None:
    """Of two clients the short one waits beside the long one, on a batch that its model cannot take."""
    federation = make_federation([2, 45])
    as_tensor(federation.inputs)[:2] = 1e145  # after one step, what comes to the last layer is infinite

    def model() -> nn.Module:
        layers = nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        return nn.Sequential(*layers).double()

    s = simulation(federation, ["fedavg"], [0], solver=SOLVERS["sgd"], device="cpu", model=model)
    assert stacked_model(s).factored
    s.step()
    assert s.left_out.tolist() == [0]


def test_small_weights_are_not_worth_it(ragged: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MIN_FACTORED_NUMBERS", LEAST)
    assert not stacked_model(on_cpu(ragged)[0]).factored


def test_factors_are_for_plain_sgd(ragged: Federation) -> None:
    for solver in SOLVERS.values():
        stacked, _ = on_cpu(ragged, solver=solver)
        assert list(stacked_model(stacked).factored) == ([0, 2] if solver.plain else [])
