"""What is not finite, or does not fit, stays with whom it belongs to."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from conftest import DEVICE, Point, half_square, make_federation, make_model, points
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.settings import Engine
from fairwind.engine.simulation import Simulation
from fairwind.engine.stacked.chunks import evenly
from samples import as_tensor
from simulations import Spoilt, run_short, simulation, stacked_of


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("name", algorithms.SETS["all"])
def test_a_client_that_turns_nan_is_left_out_and_counted(name: str, engine: Engine) -> None:
    federation = make_federation([10, 20, 30])
    broken = as_tensor(federation.inputs).clone()
    broken[10:30] += 1000  # client 1
    ill = simulation(replace(federation, inputs=broken), [name], [0], engine=engine, model=Spoilt)
    well = simulation(federation, [name], [0], engine=engine, model=Spoilt)
    for _ in range(3):
        ill.step()
        well.step()
    assert ill.left_out.tolist() == [3]
    assert ill.stalled.tolist() == [0]
    assert well.left_out.tolist() == [0]
    assert torch.isfinite(ill.x).all()
    assert not torch.allclose(ill.x, well.x)
    assert ill.score[0, 1] == 0  # a model that outputs NaN predicts nothing


@pytest.mark.parametrize("spec", ["adafedadam:alpha=40", "qfedavg:q=40"])
@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_weights_beyond_float32_do_not_stop_a_run(spec: str, engine: Engine) -> None:
    """A lag or a loss of about 0.05 to the power 40 is far below what float32 can hold."""
    federation = points(torch.tensor([[1.0], [1.02]]), [8, 8])
    solver = Solver(lr=0.2)
    settings = Settings(rounds=10, engine=engine, compile="off", solver=solver, device=DEVICE)
    model = Point(1).float()
    runs = [Run(spec, algorithms.build(spec), 0)]
    simulation = Simulation(model, federation, runs, settings, loss=half_square, score=half_square)
    simulation.start()
    simulation.x.fill_(0.7)  # F ≈ 0.05, F⁰ ≈ 0.5; 0.05⁴⁰ ≈ 1e-52, 0.1⁴⁰ = 1e-40
    path = [simulation.x.item()]
    for _ in range(10):
        simulation.step()
        path.append(simulation.x.item())
    assert simulation.x.dtype == torch.float32
    assert simulation.stalled.tolist() == [0]
    assert path == sorted(set(path))  # every round moves it towards the centres


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_with_every_client_nan_the_model_stays_and_the_run_says_so(engine: Engine) -> None:
    federation = make_federation([10, 20])
    broken = replace(federation, inputs=as_tensor(federation.inputs) + 1000)
    ill = simulation(broken, list(algorithms.PAPER), [0], engine=engine, model=Spoilt)
    start = ill.x.clone()
    ill.step()
    assert torch.equal(ill.x, start)
    assert ill.stalled.tolist() == [1] * 5
    assert ill.left_out.tolist() == [2] * 5


def test_chunks_of_one_size_keep_within_the_budget() -> None:
    costs = torch.tensor([100] * 3 + [10] * 50)
    for budget in (50, 100, 150, 400, 10_000):
        cut = evenly(costs, budget)
        assert torch.equal(torch.cat(cut), torch.arange(len(costs)))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
        assert max(int(costs[part].sum()) for part in cut) <= budget or len(cut) == len(costs)


@pytest.mark.parametrize("fits", [1, 3, 7])
def test_a_chunk_that_does_not_fit_is_halved(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    """However few rows fit, a round ends as if all had; and fewer are tried from then on."""
    names = "adafedadam", "fedavg", "scaffold", "fedmgda"
    runs = [Run(name, algorithms.build(name), i % 2) for i, name in enumerate(names)]
    settings = Settings(rounds=2, device=DEVICE, compile="off")
    whole = Simulation(make_model, ragged, runs, settings)
    failures = [run_short(monkeypatch, kind, fits) for kind in ("train", "gradient", "loss")]
    halved = Simulation(make_model, ragged, runs, settings)
    for each in (whole, halved):
        each.run()
    assert any(failures)
    assert stacked_of(halved).cutter.budget < stacked_of(whole).cutter.budget
    torch.testing.assert_close(halved.x, whole.x, rtol=1e-12, atol=1e-13)
    assert torch.equal(halved.left_out, whole.left_out)


def test_a_client_that_does_not_fit_alone_is_an_error_with_a_remedy(
    ragged: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [Run("mean", algorithms.fedavg(), 0)]
    run_short(monkeypatch, "train", 0)
    simulation = Simulation(make_model, ragged, runs, Settings(rounds=1, device=DEVICE, compile="off"))
    with pytest.raises(InputError, match=r"a single client does not fit .* smaller batch size"):
        simulation.step()


def test_a_state_that_changes_shape_is_refused_by_name(ragged: Federation) -> None:
    class State(NamedTuple):
        total: Tensor

    mean: Any = algorithms.fedavg()
    grown = mean._replace(
        init=lambda x: State(torch.zeros(())),
        server=lambda x, s, total, sums: (
            mean.server(x, mean.init(x), total, sums)[0],
            State(s.total + total),
        ),
    )
    found = Simulation(make_model, ragged, [Run("mine", grown, 0)], Settings(rounds=1, device=DEVICE))
    with pytest.raises(InputError, match=r"mine: the state's 'total' is of shape \(\) at first and \(\d+,\)"):
        found.step()
