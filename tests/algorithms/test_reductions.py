"""Special cases in which one algorithm must become another."""

import pytest
import torch

from conftest import make_federation, make_model
from fairwind import Federation, Settings, Solver, algorithms
from fairwind.contract import AnyAlgorithm, Report
from fairwind.engine.executor import Run
from fairwind.engine.losses.loss import cross_entropy
from fairwind.engine.simulation import Simulation
from samples import as_tensor

ROUNDS = 5


def models(federation: Federation, runs: dict[str, AnyAlgorithm], solver: Solver) -> torch.Tensor:
    """The models (R, P) after a few rounds."""
    settings = Settings(rounds=ROUNDS, solver=solver, compile="off")
    simulation = Simulation(make_model, federation, [Run(n, a, 0) for n, a in runs.items()], settings)
    simulation.run()
    return simulation.x


def test_q_0_is_the_unweighted_mean() -> None:
    """FedAvg weighs by size, so it is the unweighted mean where clients are of one size but not otherwise."""
    solver = Solver(lr=0.1)
    runs: dict[str, AnyAlgorithm] = {"q": algorithms.qfedavg(q=0), "mean": algorithms.fedavg()}
    q, mean = models(make_federation([20, 20, 20]), runs, solver)
    torch.testing.assert_close(q, mean)
    q, mean = models(make_federation([5, 20, 40]), runs, solver)
    assert not torch.allclose(q, mean)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_steps_make_fednova_fedavg(momentum: float) -> None:
    solver = Solver(lr=0.1, momentum=momentum)
    runs: dict[str, AnyAlgorithm] = {"nova": algorithms.fednova(), "avg": algorithms.fedavg()}
    nova, avg = models(
        make_federation([21, 22, 23]), runs, solver
    )  # 16 to 18 training samples: two steps each
    torch.testing.assert_close(nova, avg)
    nova, avg = models(make_federation([5, 20, 60]), runs, solver)
    assert not torch.allclose(nova, avg)


def full_gradients(federation: Federation, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each client's gradient (K, P) and loss (K,) over its training samples, with ordinary autograd."""
    model = make_model()
    gradients, losses = [], []
    for start, size in zip(federation.start.tolist(), federation.train.tolist(), strict=True):
        w = x.clone().requires_grad_()
        mine = slice(start, start + size)
        parts, at = {}, 0
        for name, p in model.named_parameters():
            parts[name], at = w[at : at + p.numel()].view(p.shape), at + p.numel()
        outputs = torch.func.functional_call(model, parts, (as_tensor(federation.inputs)[mine],))
        loss = cross_entropy(outputs, as_tensor(federation.targets)[mine]).mean()
        gradients.append(torch.autograd.grad(loss, w)[0])
        losses.append(loss.detach())
    return torch.stack(gradients), torch.stack(losses)


@pytest.mark.parametrize("warmup", [0, 2, None])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_one_local_step_makes_adafedadam_adam_on_the_weighted_gradient(
    alpha: float, warmup: int | None
) -> None:
    federation = make_federation([4, 9, 30])
    algorithm = algorithms.adafedadam(alpha=alpha, warmup=warmup)
    settings = Settings(rounds=ROUNDS, solver=Solver(lr=0.05, batch_size=100), compile="off")
    simulation = Simulation(make_model, federation, [Run("a", algorithm, 0)], settings)
    w = simulation.x[0].clone().requires_grad_()
    adam = torch.optim.Adam([w], lr=1e-3)
    first = None
    for _ in range(ROUNDS):
        gradients, losses = full_gradients(federation, w.detach())
        first = losses if first is None else first
        weights = federation.train * (losses / first) ** alpha
        w.grad = weights @ gradients / weights.sum()
        adam.step()
        simulation.step()
        assert simulation.states[0].certainty.item() == pytest.approx(1, abs=1e-12)
        torch.testing.assert_close(simulation.x[0], w.detach(), rtol=1e-9, atol=1e-9)


def test_alpha_0_weighs_by_size_alone() -> None:
    """With α = 0 losses do not matter: scaling them leaves every contribution as it was."""
    by_size = algorithms.adafedadam(alpha=0)
    one = torch.ones(3, dtype=torch.float64)
    size = torch.tensor([1.0, 5.0, 9.0], dtype=torch.float64)
    report = Report(size, one, one * 0.1, one * 2, one, one, one * 3)
    lagging = report._replace(loss=torch.tensor([9.0, 0.1, 3.0], dtype=torch.float64))
    assert torch.equal(by_size.client(report).sums.weight, size)
    assert torch.equal(by_size.client(lagging).coef, by_size.client(report).coef)
    fair = algorithms.adafedadam(alpha=2).client(lagging).sums.weight
    torch.testing.assert_close(fair, size * lagging.loss**2)


def test_fedadam_is_torchs_adam_on_the_mean_update() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, generator=g, dtype=torch.float64)
    algorithm = algorithms.fedadam(lr=0.01)
    state = algorithm.init(x)
    w = x.clone().requires_grad_()
    adam = torch.optim.Adam([w], lr=0.01)
    for _ in range(10):
        mean = torch.randn(5, generator=g, dtype=torch.float64)
        w.grad = mean.clone()
        adam.step()
        sums = algorithm.client(_sized(7.0)).sums
        x, state = algorithm.server(x, state, 7.0 * mean, sums)
        torch.testing.assert_close(x, w.detach())


def _sized(size: float) -> Report:
    return Report(*[torch.tensor(size, dtype=torch.float64)] * 7)
