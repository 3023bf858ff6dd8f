"""Quadratics F_k(w) = ½‖w − c_k‖², where descent has a formula and every algorithm a resting place."""

from typing import Any

import pytest
import torch

from conftest import Point, half_square, points
from fairwind import Settings, Solver, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation

LR = 0.1
SIZES = [4, 8, 24]
STEPS = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)  # of batch size 4
CENTRES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-2.0, 3.0]], dtype=torch.float64)
P = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
PULLED = 1 - (1 - LR) ** STEPS  # the share of the way to its centre that a client goes in a round


def train(spec: str, rounds: int, **solver: Any) -> Simulation:
    settings = Settings(
        rounds=rounds, solver=Solver(lr=LR, batch_size=4, **solver), compile="off", eval_every=rounds
    )
    federation = points(CENTRES, SIZES)
    run = Run(spec, algorithms.build(spec), 0)
    return Simulation(Point(2), federation, [run], settings, loss=half_square, score=half_square)


def test_the_first_round_of_fedavg() -> None:
    simulation = train("fedavg", 1)
    simulation.step()
    torch.testing.assert_close(simulation.x[0], (P * PULLED) @ CENTRES)


def test_fedavg_rests_where_clients_that_step_more_pull_harder() -> None:
    simulation = train("fedavg", 300)
    simulation.run()
    weights = P * PULLED
    torch.testing.assert_close(simulation.x[0], weights @ CENTRES / weights.sum())
    assert (simulation.x[0] - P @ CENTRES).norm() > 0.1  # not the optimum


def test_fednova_rests_where_clients_pull_by_step() -> None:
    simulation = train("fednova", 300)
    simulation.run()
    weights = P * PULLED / STEPS
    torch.testing.assert_close(simulation.x[0], weights @ CENTRES / weights.sum())


@pytest.mark.parametrize("solver", [{}, {"momentum": 0.5}, {"epochs": (1, 3)}])
def test_adafedadam_with_alpha_0_finds_the_optimum_whatever_the_local_steps(
    solver: dict[str, Any],
) -> None:
    """A quadratic's updates point along its gradient, so normalised ones *are* gradients: x* = Σp_k c_k."""
    simulation = train("adafedadam:alpha=0,lr=0.02,warmup=0", 500, **solver)
    simulation.run()
    assert (simulation.x[0] - P @ CENTRES).norm() < 0.02


@pytest.mark.slow
def test_larger_alpha_holds_the_worst_lag_lower() -> None:
    """α evens out the lag I = F(x)/F(x⁰): as it grows the largest lag falls, and the mean loss rises."""
    first = (CENTRES**2).sum(1) / 2
    worst, mean = [], []
    for alpha in (0, 1, 4):
        simulation = train(f"adafedadam:alpha={alpha},lr=0.02", 500)
        simulation.run()
        losses = ((simulation.x[0] - CENTRES) ** 2).sum(1) / 2
        worst.append((losses / first).max().item())
        mean.append((P @ losses).item())
    assert worst == sorted(worst, reverse=True)
    assert mean == sorted(mean)
    assert worst[0] > 1.2 * worst[-1]


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)]
)
def test_accumulated_counts_every_gradient_as_the_solver_does(momentum: float, nesterov: bool) -> None:
    """Under a constant gradient of 1 and no decay, PyTorch's SGD moves by exactly η·‖a‖₁."""
    solver = Solver(lr=LR, momentum=momentum, nesterov=nesterov)
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    reference = torch.optim.SGD([w], LR, momentum, nesterov=nesterov)
    for steps in range(1, 30):
        w.grad = torch.ones_like(w)
        reference.step()
        told = solver.accumulated(torch.tensor(float(steps), dtype=torch.float64))
        assert -w.item() / LR == pytest.approx(told.item())
