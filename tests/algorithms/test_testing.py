"""The contract as one call, for authors of algorithms."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from conftest import DEVICE, make_federation, make_model
from fairwind import Contribution, InputError, Report, Settings, Stateless, algorithms
from fairwind.algorithms import REGISTRY, fedavg
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.testing import check_algorithm

GOOD = fedavg()


class Sums(NamedTuple):
    size: Tensor


class Memory(NamedTuple):
    steps: Tensor


@pytest.mark.parametrize("name", REGISTRY)
def test_the_algorithms_here_keep_the_contract(name: str) -> None:
    check_algorithm(REGISTRY[name]())


def normalised(r: Report) -> Contribution[Sums]:
    return Contribution(r.size / r.size.sum(), Sums(r.size))


def summed(r: Report) -> Contribution[Sums]:
    return Contribution(r.size, Sums(r.size.sum()))


def upwards(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
    return x + total / sums.size, state


def in_place(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
    return x.sub_(total / sums.size), state


def growing(x: Tensor, state: Memory, total: Tensor, sums: Sums) -> tuple[Tensor, Memory]:
    return x - total / sums.size, Memory(torch.cat([state.steps, state.steps]))


def without_coefficient(r: Report) -> Sums:
    return Sums(r.size)


def by_loss(r: Report) -> Contribution[Sums]:
    return Contribution(r.size * r.loss, Sums(r.size * r.loss))


def by_known_loss(r: Report) -> Contribution[Sums]:
    """Where it is not measured, it is made up."""
    return by_loss(r._replace(loss=r.loss.nan_to_num(1.0)))


def without_state(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> Tensor:
    return x - total / sums.size


def less_state(x: Tensor, state: Memory, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
    return x - total / sums.size, Stateless()


def mean_model(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
    return (x - total / sums.size).mean(), state


def misspelt(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
    return x - total / sums.sise, state  # type: ignore[attr-defined]


class Counting:
    """Keeps what changes in Python, where a recorded round does not see it."""

    calls = 0

    def __call__(self, x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
        self.calls += 1
        return x - total / sums.size / self.calls, state


MADE: Any = GOOD
MAKE: Any = Contribution
SEEING: Any = algorithms.afl()
KEEPING = MADE._replace(init=lambda x: Memory(x.new_zeros(1)))
RAW: list[tuple[Any, str]] = [
    (MADE._replace(client=without_coefficient), r"client gives Sums\(Tensor\), not fairwind.Contribution"),
    (
        MADE._replace(client=lambda r: MAKE(1.0, Sums(r.size))),
        r"client gives Contribution\(float, Sums",
    ),
    (
        MADE._replace(client=lambda r: MAKE(r.size, (r.size,))),
        r"client gives Contribution\(Tensor, tuple\(Tensor\)\)",
    ),
    (MADE._replace(client=lambda r: MAKE(r.size)), "fails.*TypeError: .* missing .* 'sums'"),
    (MADE._replace(server=without_state), "server gives Tensor, not the model and the new Stateless"),
    (KEEPING._replace(server=less_state), "not the model and the new Memory"),
    (MADE._replace(server=mean_model), r"server gives the model of shape \(\), not \(7,\)"),
    (MADE._replace(server=misspelt), "fails.*AttributeError: .* no attribute 'sise'"),
    (MADE._replace(client=by_loss), "reads 'loss', which clients do not measure with probe='none'"),
    (MADE._replace(init=lambda x: None), "init gives NoneType: the state is not a NamedTuple"),
    (
        SEEING._replace(weigh=lambda state, cohort: cohort.report.size),
        "weigh gives Tensor, not coefficients and the new",
    ),
]


@pytest.mark.parametrize(("broken", "said"), RAW)
@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_what_cannot_run_is_refused_by_name_before_training(broken: Any, said: str, engine: str) -> None:
    settings = Settings(rounds=1, engine=engine, compile="off", device=DEVICE)  # type: ignore[arg-type]
    runs = [Run("fedavg", GOOD, 0), Run("mine", broken, 0)]
    with pytest.raises(InputError, match=f"mine.*{said}"):
        Simulation(make_model, make_federation([6, 9]), runs, settings)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        *RAW,
        (MADE._replace(client=by_known_loss), "reads 'loss'"),
        (GOOD._replace(client=normalised), "depends on the other clients"),  # type: ignore[arg-type]
        (GOOD._replace(client=summed), "not \\(5,\\)"),  # type: ignore[arg-type]
        (GOOD._replace(server=upwards), "move against it"),  # type: ignore[arg-type]
        (GOOD._replace(server=in_place), "changes what it is given"),  # type: ignore[arg-type]
        (GOOD._replace(server=Counting()), "something else the second time"),  # type: ignore[arg-type]
        (GOOD._replace(init=lambda x: Memory(x.new_zeros(1)), server=growing), "'steps' changes its shape"),  # type: ignore[arg-type, return-value]
        (GOOD._replace(init=lambda x: x), "not a NamedTuple"),  # type: ignore[arg-type, return-value]
        (GOOD._replace(probe="losses"), "probe='losses'"),  # type: ignore[arg-type]
        ("fedavg", "is not a fairwind.Algorithm"),
    ],
)
def test_what_breaks_it_is_named(broken: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_algorithm(broken)
