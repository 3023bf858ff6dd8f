"""AdaFedAdam where its formulas have holes; the behaviour is described in docs/algorithms.md."""

import numpy as np
import pytest
import torch

from conftest import Point, half_square, points
from fairwind import InputError, Settings, Solver, algorithms
from fairwind.aggregation import advance, contribute
from fairwind.contract import Report
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation


def report(**changes: list[float]) -> Report:
    normal = {
        "size": [10.0, 20.0],
        "steps": [2.0, 4.0],
        "lr": [0.1, 0.1],
        "update_norm": [0.5, 0.7],
        "loss": [1.0, 2.0],
        "loss0": [2.0, 2.0],
        "grad_norm": [3.0, 4.0],
    }
    return Report(**{k: torch.tensor(v, dtype=torch.float64) for k, v in (normal | changes).items()})


@pytest.mark.parametrize(
    "silent",
    [
        {"grad_norm": [0.0, 4.0]},
        {"update_norm": [0.0, 0.7]},
        {"grad_norm": [0.0, 4], "update_norm": [0.0, 0.7]},
    ],
)
def test_a_client_with_no_gradient_or_no_update_has_nothing_to_say(silent: dict[str, list[float]]) -> None:
    """Zero update, C = 1, its weight counted."""
    part, usable = contribute(algorithms.adafedadam(), report(**silent))
    assert usable.all()
    assert part.coef[0] == 0
    assert part.sums.weight[0] == 10 * 0.5
    assert part.sums.certainty[0] == part.sums.weight[0]
    normal, _ = contribute(algorithms.adafedadam(), report())
    assert torch.equal(part.coef[1], normal.coef[1])


def test_a_first_loss_of_0_measures_no_lag() -> None:
    part, usable = contribute(algorithms.adafedadam(alpha=2), report(loss0=[0.0, 2.0], loss=[5.0, 1.0]))
    assert usable.all()
    assert part.sums.weight.tolist() == [10.0, 20 * 0.25]


def test_a_loss_of_0_weighs_nothing() -> None:
    part, usable = contribute(algorithms.adafedadam(), report(loss=[0.0, 2.0]))
    assert usable.all()
    assert part.sums.weight[0] == 0
    assert part.coef[0] == 0


def test_certainty_is_floored_at_0() -> None:
    """η′ so small that log(η′/η) + 1 = −3 counts as 0, and one between 0 and 1 as itself."""
    eta = 0.1 * np.exp([-4.0, -0.5])
    part, _ = contribute(algorithms.adafedadam(alpha=0), report(update_norm=(eta * [3, 4]).tolist()))
    certainty = part.sums.certainty / part.sums.weight
    assert certainty[0] == 0
    assert certainty[1].item() == pytest.approx(0.5)


@pytest.mark.parametrize("warmup", [0, 6, None])
@pytest.mark.parametrize("before", [0, 1, 8])
def test_a_certainty_of_0_leaves_the_model_where_it_is(warmup: int | None, before: int) -> None:
    """In the first round, in warm-up and after it, and with nothing divided by zero."""
    algorithm = algorithms.adafedadam(warmup=warmup)
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    state = algorithm.init(x)
    total = torch.tensor([3.0, 5.0], dtype=torch.float64)
    clients = torch.tensor(2)
    for _ in range(before):
        part, _ = contribute(algorithm, report())
        x, state, _ = advance(
            algorithm, x, state, total, type(part.sums)(*(s.sum() for s in part.sums)), clients
        )
    part, _ = contribute(algorithm, report(update_norm=[1e-9, 1e-9]))
    sums = type(part.sums)(*(s.sum() for s in part.sums))
    assert sums.certainty == 0
    still, after = algorithm.server(x, state, total, sums)
    assert torch.equal(still, x)
    assert all(torch.isfinite(number).all() for number in after)
    assert torch.equal(after.m, state.m)
    assert torch.equal(after.v, state.v)
    assert after.product1 == state.product1
    part, _ = contribute(algorithm, report())
    moved, _ = algorithm.server(still, after, total, type(part.sums)(*(s.sum() for s in part.sums)))
    assert torch.isfinite(moved).all()
    assert not torch.equal(moved, still)


def test_the_three_rules_for_the_step() -> None:
    """One coordinate and constant g: Adam's step is ηₜ itself, so each round's change shows the rule."""
    told = report(size=[10.0, 10.0], update_norm=[0.6, 0.6], grad_norm=[3.0, 3.0], loss=[2.0, 2.0])
    c = float(np.log(0.2 / 0.1) + 1)
    expected = {0: [c] * 8, None: [1.0] * 8, 6: [1.0] * 6 + [c] * 2, 3: [1.0] * 3 + [c] * 5}
    for warmup, factors in expected.items():
        algorithm = algorithms.adafedadam(warmup=warmup, lr=0.01, eps=1e-30)
        part, _ = contribute(algorithm, told)
        sums = type(part.sums)(*(s.sum() for s in part.sums))
        x = torch.zeros(1, dtype=torch.float64)
        state = algorithm.init(x)
        steps = []
        for _ in range(8):
            new, state = algorithm.server(x, state, torch.tensor([4.0], dtype=torch.float64), sums)
            steps.append((x - new).item())
            x = new
        assert steps == pytest.approx([0.01 * f for f in factors])


def test_when_every_loss_is_0_the_model_stays_and_the_run_says_so() -> None:
    """All weights are 0, and 0/0 must not reach the model."""
    federation = points(torch.zeros(3, 2, dtype=torch.float64), [4, 5, 6])
    built = {name: algorithms.build(name) for name in algorithms.REGISTRY}
    runs = [Run(name, algorithm, 0) for name, algorithm in built.items()]
    settings = Settings(rounds=2, solver=Solver(lr=0.5), compile="off")
    model = Point(2)
    model.w.data.fill_(1)
    simulation = Simulation(model, federation, runs, settings, loss=half_square, score=half_square)
    simulation.start()
    simulation.x.zero_()  # every F is 0, and no F⁰ is
    simulation.step()
    assert torch.equal(simulation.x, torch.zeros_like(simulation.x))
    assert simulation.left_out.sum() == 0
    stalled = dict(zip(built, simulation.stalled.tolist(), strict=True))
    assert stalled.pop("adafedadam") == 1  # its weights are all 0; the others average zero updates
    assert set(stalled.values()) == {0}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("adafedadam", {"alpha": -1.0}),
        ("adafedadam", {"beta1": 1.0}),
        ("adafedadam", {"warmup": -1}),
        ("fedadam", {"beta2": 1.5}),
        ("fedavg", {"lr": float("nan")}),
        ("qfedavg", {"q": -0.1}),
        ("fedyogi", {"eps": -1e-3}),
        ("fedyogi", {"beta2": 5.0}),
        ("fedadam", {"beta2": -3.0, "corrected": False}),
        ("adafedadam", {"eps": 0.0}),
    ],
)
def test_hyper_parameters_out_of_range_are_refused_by_name(name: str, bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        algorithms.REGISTRY[name](**bad)
