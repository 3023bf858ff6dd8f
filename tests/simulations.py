"""Simulations that several tests make, and how two are compared."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, DEVICE, FEATURES, make_model
from fairwind import Federation, Settings, Solver
from fairwind.engine.executor import Run
from fairwind.engine.layout import ALL_SHARED
from fairwind.engine.loop.executor import Loop
from fairwind.engine.losses.loss import cross_entropy
from fairwind.engine.ranks import join
from fairwind.engine.simulation import Simulation
from fairwind.engine.stacked.executor import Stacked
from fairwind.engine.stacked.model import StackedModel
from fairwind.engine.stacked.steps import Rows, Step
from own_algorithms import built

SOLVERS = {
    "sgd": Solver(lr=0.1, batch_size=10),
    "momentum": Solver(lr=0.1, momentum=0.9, batch_size=10),
    "nesterov": Solver(lr=0.1, momentum=0.9, nesterov=True, batch_size=10, epochs=2),
    "decay": Solver(lr=0.1, weight_decay=0.1, momentum=0.5, batch_size=7),
    "uneven": Solver(lr=0.1, batch_size=4, epochs=(1, 3)),
    "steps": Solver(lr=0.1, batch_size=4, steps=5),
}


def simulation(federation: Federation, names: Sequence[str], seeds: list[int], **options: Any) -> Simulation:
    """Stacked and uncompiled, unless told otherwise; already at its start."""
    runs = [Run(name, algorithm, seed) for name in names for algorithm in [built(name)] for seed in seeds]
    model = options.pop("model", make_model)
    loss, plan = options.pop("loss", cross_entropy), options.pop("plan", None)
    sharing = options.pop("sharing", ALL_SHARED)
    own: dict[str, Any] = {
        "rounds": 6,
        "eval_every": 2,
        "compile": "off",
        "engine": "stacked",
        "device": DEVICE,
        "workers": 1,
    }
    settings, ranks = Settings(**own | options), join()
    made = Simulation(model, federation, runs, settings, loss=loss, sharing=sharing, ranks=ranks, plan=plan)
    made.start()
    return made


def assert_together(a: Simulation, b: Simulation, rounds: int = 5, tolerance: float = 1e-10) -> None:
    """Two simulations of the same runs, side by side, round by round."""
    for _ in range(rounds):
        a.step()
        b.step()
        torch.testing.assert_close(a.x, b.x, rtol=tolerance, atol=tolerance)
        for one, other in zip(a.states, b.states, strict=True):
            torch.testing.assert_close(tuple(one), tuple(other), rtol=tolerance, atol=tolerance)


def scarce(step: Step, fits: int, failures: list[int]) -> Step:
    """A step for which memory lasts for so many rows."""

    def limited(rows: Rows, *rest: Any) -> Any:
        if len(rows.loss) > fits:
            failures.append(len(rows.loss))
            raise torch.OutOfMemoryError("CUDA out of memory, so to say")
        return step(rows, *rest)

    return limited


def run_short(monkeypatch: pytest.MonkeyPatch, kind: str, fits: int) -> list[int]:
    """Lets memory run short in steps of a kind from now on; returns the numbers of rows that failed."""
    import fairwind.engine.stacked.executor as stacked

    failures: list[int] = []
    made = getattr(stacked, f"{kind}_step")
    monkeypatch.setattr(stacked, f"{kind}_step", lambda *given: scarce(made(*given), fits, failures))
    return failures


def normed_model() -> nn.Sequential:
    layers = nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES)
    return nn.Sequential(*layers).double()


def dropout_model() -> nn.Sequential:
    layers = nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
    return nn.Sequential(*layers).double()


class Spoilt(nn.Module):
    """A linear model whose output is NaN where the first feature is above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * torch.where(x[:, :1] > 100, torch.nan, 1.0)
        return out


def stacked_of(made: Simulation) -> Stacked:
    """The stacked executor of a simulation that has one."""
    assert isinstance(made.executor, Stacked)
    return made.executor


def loop_of(made: Simulation) -> Loop:
    """Likewise the loop."""
    assert isinstance(made.executor, Loop)
    return made.executor


def stacked_model(made: Simulation) -> StackedModel:
    """The model that the stacked executor trains."""
    assert made.stacked is not None
    return made.stacked
