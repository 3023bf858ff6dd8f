"""Differential privacy: what one client can change is bounded, the noise is what it says, and ε is right."""

import itertools
import math
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import CLASSES, FEATURES, make_federation
from exchanged import SOLVER, Exchange, task_of
from fairwind import Federation, InputError, Settings, Task, algorithms
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.engine.executor import Run
from fairwind.engine.layout import Layout
from fairwind.engine.simulation import Simulation
from fairwind.exchange import Aggregator, Bounds, Privacy, Reply
from fairwind.exchange.accounting import Accountant
from fairwind.exchange.capping import Term
from fairwind.exchange.privacy import PrivateSum, gaussian
from privacy import private

LAYOUT = Layout((("w",),), (torch.Size([8]),), ((1,),), torch.float32)
OPTIONS: dict[str, Any] = {"clip": 0.5, "weight": 50.0, "noise": 1.0, "delta": 1e-3, "further": 3.0}
ONLY_CLIPS = Privacy(**OPTIONS | {"noise": 0.0})
SPECS = ["fedavg", "adafedadam", "qfedavg", "fednova", "fedexp", "term"]


def privacy(**changed: Any) -> Privacy:
    return Privacy(**{**OPTIONS, "draw": random.Random(0).randbytes, **changed})


def server(spec: str, own: Privacy | None = ONLY_CLIPS, **options: Any) -> Aggregator:
    return Aggregator(algorithms.build(spec), LAYOUT, torch.zeros(8), privacy=own, **options)


def reply(aggregator: Aggregator, scale: float = 1.0, seed: int = 0, **numbers: Any) -> Reply:
    """An honest client's report, but for what is given."""
    draw = np.random.default_rng(seed)
    usual = {"size": 40, "steps": 10.0, "lr": 0.1, "loss": 1.0, "loss0": 2.0, "grad_norm": 4.0} | numbers
    asked = (*aggregator.form.numbers, *aggregator.form.optional)
    w = (scale * draw.normal(size=8)).astype(np.float32)
    return Reply({"w": w}, {name: float(value) for name, value in usual.items() if name in asked})


def released(aggregator: Aggregator) -> torch.Tensor:
    """The sum of the round under way, in units of the public scales, and without noise."""
    own: Any = aggregator.sum
    total, sums = own.total, own.sums
    scales = ONLY_CLIPS.scales(len(sums))
    return torch.cat([total / scales[0], torch.tensor(sums, dtype=torch.float64) / torch.tensor(scales[1:])])


# ---- what one client can change ----

NUMBERS = {name: st.floats(1e-300, 1e300) for name in ("size", "steps", "lr", "loss", "loss0", "grad_norm")}


@given(
    spec=st.sampled_from(SPECS),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 1e6, 1e37]),
    numbers=st.fixed_dictionaries(NUMBERS),
)
def test_whatever_a_client_reports_it_moves_the_sum_by_no_more_than_the_sensitivity(
    spec: str, scale: float, numbers: dict[str, float]
) -> None:
    limit = ONLY_CLIPS.limit(len(server(spec).sums._fields))
    found = []
    lies: list[dict[str, Any] | None] = [None, {"scale": -scale, **numbers}, {"scale": 1e6, "size": 1e9}]
    for mine in lies:
        each = server(spec)
        for k in range(3):
            assert not each.accept(str(k), reply(each, seed=k))
        if mine is not None:
            each.accept("it", reply(each, **mine))  # or it is refused, and adds nothing
        found.append(released(each))
    without, one, other = found
    assert float((one - without).norm()) <= limit * (1 + 1e-9)
    assert float((one - other).norm()) <= 2 * limit * (1 + 1e-9)


@given(
    arrays=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8),
    weight=st.floats(0, 1e308),
    certainty=st.floats(0, 1e308),
)
def test_nor_does_it_with_sums_of_its_own_making(
    arrays: list[float], weight: float, certainty: float
) -> None:
    each = server("adafedadam", sends="sums")
    numbers = {"weight": weight, "certainty": certainty, "first_loss": 1.0, "first_losses": 1.0}
    each.accept("it", Reply({"w": np.array(arrays, np.float32)}, numbers))
    found = released(each)
    assert float(found.norm()) <= ONLY_CLIPS.limit(2) * (1 + 1e-9)


def test_a_bound_is_reached_and_no_further() -> None:
    """Else the sensitivity would be overstated, and the tests above too easy."""
    each = server("fedavg")
    each.accept("it", reply(each, 1e6, size=1e6))
    assert float(released(each).norm()) == pytest.approx(ONLY_CLIPS.limit(1))


@pytest.mark.parametrize("spec", SPECS)
def test_a_client_within_all_bounds_counts_in_full(spec: str) -> None:
    wide = Privacy(clip=1e9, weight=1e9, further=1e9, noise=0.0, delta=1e-3)
    plain, bounded = server(spec, None, bounds=Bounds(share=1.0)), server(spec, wide)
    for k, each in itertools.product(range(3), (plain, bounded)):
        assert not each.accept(str(k), reply(each, seed=k, size=10 * (k + 1)))
    assert bounded.finish().moved
    plain.finish()
    torch.testing.assert_close(bounded.x, plain.x)


def test_a_clipped_client_keeps_direction_and_length_to_its_weight() -> None:
    found = PrivateSum(8, 1, ONLY_CLIPS)
    update = torch.arange(8.0)
    found.add(Term("it", 100.0, update.clone(), (100.0,), float(update.norm())))
    torch.testing.assert_close(found.total / found.sums[0], update.double())


@pytest.mark.parametrize("sends", ["report", "sums"])
@pytest.mark.parametrize("spec", ["fedavg", "adafedadam", "qfedavg"])
def test_what_a_client_adds_does_not_depend_on_other_clients(
    ragged: Federation, spec: str, sends: str
) -> None:
    """A neighbour that reports absurd numbers, from the first round on, changes nothing but its own part."""
    task, found = task_of(ragged), []
    for loud in (False, True):
        exchange = Exchange(task, spec, bounds=None, sends=sends, privacy=ONLY_CLIPS)
        for _ in range(2):
            kept = exchange.server.x.clone(), exchange.server.state
            for k in range(7):
                mine = exchange.reply(k)
                if loud and k == 0:
                    numbers = {name: 1e3 * value for name, value in mine.numbers.items()}
                    mine = Reply({name: 1e3 * a for name, a in mine.arrays.items()}, numbers)
                exchange.server.accept(str(k), mine)
            exchange.server.finish()
            exchange.server.x, exchange.server.state = kept  # the same model is received in both worlds
        late = exchange.reply(7)  # it takes part for the first time
        assert exchange.server.first_loss("8") is None
        exchange.server.accept("7", late)
        exchange.server.accept("3", exchange.reply(3))
        world: Any = exchange.server.sum
        found.append(world)
    assert torch.equal(found[0].total, found[1].total)
    assert found[0].sums == found[1].sums


# ---- the noise ----


def test_the_noise_has_the_standard_deviation_that_is_stated() -> None:
    """200,000 draws: the estimate's own standard deviation is 0.16 %, and 1 % is allowed."""
    own = privacy(noise=2.0)
    found = PrivateSum(200_000, 2, own)
    told = found.finish()
    in_total = 2.0 * math.sqrt(1 + 2 * 0.25) * 0.5 * 50.0
    assert own.deviations(2) == pytest.approx((in_total, 4 * in_total, 12 * in_total))
    assert float(told.total.std()) == pytest.approx(in_total, rel=0.01)
    assert abs(float(told.total.mean())) < 4 * in_total / math.sqrt(200_000)
    sums = np.array([own.noised(torch.zeros(1), (1e6, 1e6))[1] for _ in range(5_000)]) - 1e6
    assert sums.std(0) == pytest.approx(np.array(own.deviations(2)[1:]), rel=0.05)
    assert abs(np.array(np.corrcoef(sums.T))[0, 1]) < 0.06


def test_the_noise_is_normal() -> None:
    """Kolmogorov and Smirnov's distance at 100,000 draws: 0.0061 is passed by one sample in a thousand."""
    drawn = np.sort(gaussian(100_000, random.Random(1).randbytes))
    normal = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in drawn])
    assert np.abs(normal - np.arange(1, 100_001) / 100_000).max() < 0.0062
    assert len(gaussian(7, random.Random(1).randbytes)) == 7
    assert np.isfinite(gaussian(2, lambda count: bytes(count))).all()


def test_it_is_drawn_anew_every_time_and_not_by_any_seed() -> None:
    own = Privacy(**OPTIONS)
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        found.append(PrivateSum(8, 1, own).finish().total)
    assert len({tuple(each.tolist()) for each in found}) == 3
    same = [PrivateSum(8, 1, privacy()).finish().total for _ in range(2)]
    assert torch.equal(*same)


def test_a_weight_that_is_lost_in_the_noise_moves_nothing() -> None:
    pytest.importorskip("dp_accounting")
    moved = []
    for seed in range(40):
        each = server("fedavg", privacy(noise=100.0, draw=random.Random(seed).randbytes))
        each.accept("it", reply(each))
        done = each.finish()
        moved.append(done.moved)
        assert done.moved or done.lines() == [
            "the model stays as it was: the clients' weight is lost in the noise"
        ]
        assert each.accountant is not None
        assert each.accountant.releases == {(1, 1): 1}  # it was released all the same
    assert sum(moved) < 6  # two standard deviations: one in 44 by chance


@pytest.mark.parametrize("spec", ["fedavg", "adafedadam"])
def test_the_benchmark_simulates_what_a_server_does(ragged: Federation, spec: str) -> None:
    pytest.importorskip("dp_accounting")
    task = task_of(ragged)
    own: dict[str, Any] = {"clip": 1.0, "weight": 5.0, "noise": 0.1}
    exchange = Exchange(task, spec, bounds=None, privacy=privacy(**own))
    plain: Any = algorithms.build(spec)
    run = Run(spec, private(plain, partial(privacy, **own)), 0)
    settings = Settings(solver=task.solver, rounds=3, compile="off", device="cpu", workers=1, eval_every=3)
    simulation = Simulation(task.model, task.federation, [run], settings)
    simulation.start()
    start = exchange.server.x.clone()
    for _ in range(3):
        assert exchange.round().moved
        simulation.step()
    assert float((exchange.server.x - start).norm()) > 1e-3
    torch.testing.assert_close(exchange.server.x, simulation.x[0], rtol=1e-9, atol=1e-10)


# ---- the accounting ----


def closed_form(noise: float, rounds: int, delta: float) -> float:
    """ε of the composed Gaussian mechanism, from its definition: the smallest whose δ(ε) is at most δ.

    Balle and Wang 2018, Theorem 8, with μ = 2·√rounds/noise.
    """
    mu = 2 * math.sqrt(rounds) / noise

    def normal(value: float) -> float:
        return math.erfc(-value / math.sqrt(2)) / 2

    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        log = middle + math.log(max(normal(-mu / 2 - middle / mu), 1e-320))
        low, high = (middle, high) if normal(mu / 2 - middle / mu) - math.exp(log) > delta else (low, middle)
    return high


def integrated(epsilon: float, noise: float, rounds: int) -> float:
    """δ(ε) of so many releases, from the definition: the integral of (p − e^ε·q)₊ over their privacy loss.

    The loss of one release is normal, N(μ²/2, μ²) with μ = 2/noise; those of several are independent.
    """
    variance = rounds * (2 / noise) ** 2
    loss = np.linspace(epsilon, variance / 2 + 40 * math.sqrt(variance) + epsilon, 2_000_001)
    density = np.exp(-((loss - variance / 2) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
    return float(np.trapezoid(density * -np.expm1(epsilon - loss), loss))


@pytest.mark.parametrize(
    ("noise", "rounds"), [(4.0, 1), (10.0, 50), (20.0, 200), (100.0, 1000), (5.0, 200), (0.5, 3)]
)
def test_epsilon_without_drawing_is_exact(noise: float, rounds: int) -> None:
    """By the closed form and by integration; Rényi orders, on a fine grid, give a looser bound."""
    pytest.importorskip("dp_accounting")
    delta, rho = 1e-4, 2 * rounds / noise**2
    found = Accountant(privacy(noise=noise, delta=delta), [(1, 1, rounds)]).epsilon()
    assert found == pytest.approx(closed_form(noise, rounds, delta), rel=1e-6)
    assert integrated(found, noise, rounds) == pytest.approx(delta, rel=1e-3)
    orders = 1 + np.geomspace(1e-2, 1e4, 200_000)
    converted = rho * orders + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    assert found < converted.min()


def test_the_numbers_of_the_documentation_are_the_accountants() -> None:
    pytest.importorskip("dp_accounting")
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    for noise in (5.0, 10.0, 20.0):
        epsilon = Accountant(privacy(noise=noise, delta=1e-3), [(1, 1, 200)]).epsilon()
        assert f"| noise {noise:.0f} | {epsilon:.3g} |" in page


def test_secret_drawing_helps_and_never_harms() -> None:
    pytest.importorskip("dp_accounting")
    own = privacy(noise=10.0)
    every, few, most = (Accountant(own, [(drawn, 100, 50)]).epsilon() for drawn in (100, 5, 95))
    assert Accountant(own, [(1, 1, 50)]).epsilon() == every
    assert few < every / 3
    assert most <= every


@pytest.mark.parametrize(
    ("spec", "task_options", "told"),
    [
        ("fedavg", {}, [[2, 5, 2]]),
        ("fedavg", {"personal": "0.*"}, [[1, 1, 2]]),
        ("adafedadam", {}, [[1, 1, 2]]),  # a first loss tells when a client took part first
    ],
)
def test_drawing_does_not_count_where_clients_remember_that_they_took_part(
    ragged: Federation, spec: str, task_options: dict[str, Any], told: list[list[int]]
) -> None:
    pytest.importorskip("dp_accounting")
    exchange = Exchange(task_of(ragged, **task_options), spec, privacy=privacy(noise=10.0), bounds=None)
    for _ in range(2):
        exchange.server.begin((2, 5))
        exchange.round([1, 2])
    assert exchange.server.accountant is not None
    assert exchange.server.accountant.record() == told


def test_rounds_add_up_and_a_resumed_training_goes_on_counting(tmp_path: Any) -> None:
    pytest.importorskip("dp_accounting")
    own = privacy(noise=10.0)
    straight, broken = server("fedavg", own), server("fedavg", own)
    told = []
    for drawn in [(3, 10), (3, 10), None, (4, 4)]:
        fresh = server("fedavg", own)
        found, refused = load_checkpoint(tmp_path, "me")
        assert refused == []
        if found is not None:
            fresh.restore(found)
        broken = fresh
        for each in (straight, broken):
            each.begin(drawn)
            for k in range(3):
                assert not each.accept(str(k), reply(each, seed=k))
            each.finish()
        save_checkpoint(tmp_path, broken.checkpoint(), "me")
        assert broken.spent() == straight.spent()
        told.append(broken.spent()["epsilon"])
    assert told == sorted(set(told))
    assert broken.checkpoint().record["releases"] == [[3, 10, 2], [1, 1, 2]]
    assert {"clip": 0.5, "noise": 10.0, "delta": 1e-3}.items() <= broken.spent().items()


def test_without_noise_nothing_is_promised() -> None:
    each = server("fedavg")
    each.accept("it", reply(each))
    each.finish()
    assert each.spent()["epsilon"] == math.inf
    assert each.accountant is not None
    assert each.accountant.described()["epsilon"] is None


# ---- what is refused ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0.0},
        {"clip": -1.0},
        {"clip": math.nan},
        {"clip": "1"},
        {"weight": 0},
        {"weight": math.inf},
        {"further": 0.0},
        {"weight": 1e-200, "clip": 1e-200},
        {"noise": -1.0},
        {"noise": math.nan},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": math.nan},
    ],
    ids=str,
)
def test_wrong_values_are_named_in_a_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))) as error:
        Privacy(**OPTIONS | wrong)
    assert str(error.value).isprintable()


def test_bounds_that_compare_clients_are_refused() -> None:
    with pytest.raises(InputError, match="leave them out"):
        server("fedavg", bounds=Bounds())


def test_secret_sums_are_refused() -> None:
    with pytest.raises(InputError, match="clips each client"):
        server("fedavg", sends="sums").take_sum(torch.zeros(8), {"size": 1.0}, 1)


def test_shared_statistics_of_batch_norm_are_refused() -> None:
    """They would be sent beside the sum that is clipped and noised."""
    federation = make_federation([12, 21, 45])
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, CLASSES), torch.nn.BatchNorm1d(CLASSES)).double()
    for batch_norm in ("local", "shared"):
        task = Task(lambda: model, federation, solver=SOLVER, batch_norm=batch_norm)
        if batch_norm == "local":
            assert Exchange(task, "fedavg", privacy=ONLY_CLIPS, bounds=None).round().used == 3
            continue
        with pytest.raises(InputError, match='batch_norm="local"'):
            Exchange(task, "fedavg", privacy=ONLY_CLIPS, bounds=None)


def test_sums_below_zero_are_refused_by_name() -> None:
    each = server("adafedadam", sends="sums")
    numbers = {"weight": 1.0, "certainty": -1.0, "first_loss": 1.0, "first_losses": 1.0}
    assert "its certainty is -1: with privacy" in each.accept(
        "it", Reply({"w": np.ones(8, np.float32)}, numbers)
    )


@pytest.mark.parametrize("spec", ["scaffold", "mime", "ditto", "afl"])
def test_what_needs_more_than_a_sum_is_refused_as_without_privacy(spec: str) -> None:
    with pytest.raises(InputError, match="algorithm of one sum"):
        server(spec)


def test_who_lacks_the_library_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"pip install 'fairwind\[privacy\]'"):
        server("fedavg", privacy())
