"""The accelerated and heterogeneous algorithms: golden, reductions, closed forms, and both executors.

Clients are quadratics F_k(w) = ½·Σ a_k·(w − c_k)², each with a curvature a_k and a centre c_k of its own. All
samples of a client are alike, so that no order of batches matters.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from conftest import CLASSES, DEVICE, FEATURES, Point, compiler_found, make_federation
from fairwind import Federation, Settings, Solver, algorithms
from fairwind.aggregation import contribute, first_state, refuses
from fairwind.contract import AnyAlgorithm, LocalAlgorithm, MemoryAlgorithm, Report
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError
from fairwind.testing import check_algorithm, client_numbers, rehearse, reports
from samples import as_tensor
from simulations import SOLVERS, Spoilt, assert_together, simulation

Vector = NDArray[np.float64]

NAMES = ["fedavgm", "fedexp", "fedprox", "fedcm", "mimelite", "mime", "scaffold", "feddyn"]
BY_STEPS = {"fedcm", "scaffold"}  # what divides by τη
LR, BATCH, P = 0.1, 4, 3
SIZES = [4, 8, 24, 12]
DRAW = np.random.default_rng(5)
CURVES = DRAW.uniform(0.5, 3.0, (len(SIZES), P))  # a_k
CENTRES = DRAW.normal(size=(len(SIZES), P))  # c_k
START = np.array([1.0, -1.0, 0.5])


def quadratics(sizes: list[int]) -> Federation:
    """Clients with so many training samples and one for testing."""
    train, each = torch.tensor(sizes), torch.tensor(sizes) + 1
    targets = torch.from_numpy(np.concatenate([CURVES, CENTRES], 1)[: len(sizes)]).repeat_interleave(each, 0)
    names = tuple(map(str, range(len(sizes))))
    inputs = torch.zeros(len(targets), 1)
    return Federation(inputs, targets, each.cumsum(0) - each, train, torch.ones_like(train), names)


def curved(outputs: Tensor, targets: Tensor) -> Tensor:
    curve, centre = targets.chunk(2, 1)
    return (curve * (outputs - centre) ** 2).sum(1) / 2


def start() -> nn.Module:
    model = Point(P)
    model.w.data.copy_(torch.from_numpy(START))
    return model


def trained(
    built: dict[str, AnyAlgorithm], rounds: int, sizes: list[int] = SIZES, **options: Any
) -> Simulation:
    solver = options.pop("solver", Solver(lr=LR, batch_size=BATCH))
    own: dict[str, Any] = {"rounds": rounds, "eval_every": rounds, "compile": "off", "workers": 1} | options
    runs = [Run(name, algorithm, 0) for name, algorithm in built.items()]
    made = Simulation(
        start(), quadratics(sizes), runs, Settings(solver=solver, **own), loss=curved, score=curved
    )
    made.start()
    return made


class Papers:
    """A federation in NumPy, and the algorithms on it as their papers write them."""

    def __init__(self, rho: float = 0.0):
        self.rho = rho  # momentum of the clients' SGD

    def gradient(self, k: int, y: Vector) -> Vector:
        out: Vector = CURVES[k] * (y - CENTRES[k])
        return out

    def descend(self, k: int, x: Vector, direction: Callable[[Vector], Vector]) -> Vector:
        """The model of a client after its local steps from x."""
        y, buffer = x.copy(), np.zeros_like(x)
        for _ in range(-(-SIZES[k] // BATCH)):
            buffer = self.rho * buffer + direction(y)
            y = y - LR * buffer
        return y

    def rate(self, k: int) -> float:
        """Kη: how far a client goes down a constant gradient of 1."""
        return -float(self.descend(k, np.zeros(1), lambda y: np.ones(1))[0])

    def mean(self, vectors: dict[int, Vector]) -> Vector:
        """By size."""
        return np.average(list(vectors.values()), axis=0, weights=[SIZES[k] for k in vectors])

    def plain(self, x: Vector, who: list[int]) -> dict[int, Vector]:
        return {k: self.descend(k, x, partial(self.gradient, k)) for k in who}

    def fedavgm(self, chosen: list[list[int]]) -> Iterator[Vector]:
        x, v = START, np.zeros(P)
        for who in chosen:
            change = x - self.mean(self.plain(x, who))
            v = 0.9 * v + change
            x = x - v
            yield x

    def slowmo(self, chosen: list[list[int]]) -> Iterator[Vector]:
        """SlowMo's Algorithm 1, with slow momentum 0.9 and slow rate 1."""
        x, u = START, np.zeros(P)
        for who in chosen:
            u = 0.9 * u + (x - self.mean(self.plain(x, who))) / LR
            x = x - 1.0 * LR * u
            yield x

    def fedexp(self, chosen: list[list[int]]) -> Iterator[Vector]:
        x = START
        for who in chosen:
            models = self.plain(x, who)
            weights = np.array([SIZES[k] for k in who]) / sum(SIZES[k] for k in who)
            updates = np.array([models[k] - x for k in who])
            mean = weights @ updates
            eta = max(1.0, weights @ (updates**2).sum(1) / (2 * (mean @ mean + 1e-3)))
            x = x + eta * mean
            yield x

    def fedprox(self, chosen: list[list[int]]) -> Iterator[Vector]:
        x = START
        for who in chosen:
            models = {
                k: self.descend(k, x, lambda y, k=k, x=x: self.gradient(k, y) + 0.01 * (y - x))  # type: ignore[misc]
                for k in who
            }
            x = self.mean(models)
            yield x

    def fedcm(self, chosen: list[list[int]]) -> Iterator[Vector]:
        x, moved = START, np.zeros(P)
        for who in chosen:
            models = {
                k: self.descend(k, x, lambda y, k=k, d=moved: 0.1 * self.gradient(k, y) + 0.9 * d)  # type: ignore[misc]
                for k in who
            }
            mean = self.mean(models)
            moved = (x - mean) / np.average([self.rate(k) for k in who], weights=[SIZES[k] for k in who])
            x = mean
            yield x

    def mimelite(self, chosen: list[list[int]], corrected: bool = False) -> Iterator[Vector]:
        x, m = START, np.zeros(P)
        for who in chosen:
            full = self.mean({k: self.gradient(k, x) for k in who})

            def direction(k: int, y: Vector, x: Vector = x, m: Vector = m, full: Vector = full) -> Vector:
                g = self.gradient(k, y)
                if corrected:
                    g = g - self.gradient(k, x) + full
                return 0.1 * g + 0.9 * m

            models = {k: self.descend(k, x, lambda y, k=k, go=direction: go(k, y)) for k in who}  # type: ignore[misc]
            m = 0.1 * full + 0.9 * m
            x = self.mean(models)
            yield x

    def mime(self, chosen: list[list[int]]) -> Iterator[Vector]:
        return self.mimelite(chosen, corrected=True)

    def scaffold(self, chosen: list[list[int]]) -> Iterator[Vector]:
        x, c, own = START, np.zeros(P), np.zeros((len(SIZES), P))
        for who in chosen:
            moves, changes = [], []
            for k in who:
                y = self.descend(k, x, lambda y, k=k, c=c: self.gradient(k, y) - own[k] + c)  # type: ignore[misc]
                new = own[k] - c + (x - y) / self.rate(k)
                moves.append(y - x)
                changes.append(new - own[k])
                own[k] = new
            x = x + np.mean(moves, axis=0)
            c = c + len(who) / len(SIZES) * np.mean(changes, axis=0)
            yield x

    def feddyn(self, chosen: list[list[int]], exact: bool = False) -> Iterator[Vector]:
        """`exact` solves the clients' problems in closed form."""
        alpha, theta, h, grads = 0.01, START, np.zeros(P), np.zeros((len(SIZES), P))
        for who in chosen:
            models = []
            for k in who:
                if exact:
                    wanted = CURVES[k] * CENTRES[k] + grads[k] + alpha * theta
                    models.append(wanted / (CURVES[k] + alpha))
                else:
                    models.append(
                        self.descend(
                            k,
                            theta,
                            lambda y, k=k, x=theta: self.gradient(k, y) - grads[k] + alpha * (y - x),  # type: ignore[misc]
                        )
                    )
                grads[k] = grads[k] - alpha * (models[-1] - theta)
            h = h - alpha / len(SIZES) * sum(model - theta for model in models)
            theta = np.mean(models, axis=0) - h / alpha
            yield theta


def chosen(made: Simulation, rounds: int) -> list[list[int]]:
    """Who trains in each round."""
    return [made.planner.plan([0], t).client.tolist() for t in range(rounds)]


def path(made: Simulation, rounds: int) -> Vector:
    """The models (T, R, P) after each round."""
    found = []
    for _ in range(rounds):
        made.step()
        found.append(made.x.cpu().numpy().copy())
    return np.stack(found)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_golden(engine: str, participation: float, momentum: float) -> None:
    solver = Solver(lr=LR, batch_size=BATCH, momentum=momentum)
    built = {name: algorithms.build(name) for name in NAMES}
    made = trained(built, 6, solver=solver, engine=engine, participation=participation)
    who, ours = chosen(made, 6), path(made, 6)
    assert (len({*map(tuple, who)}) > 1) == (participation < 1)
    for r, name in enumerate(NAMES):
        theirs = np.array(list(getattr(Papers(momentum), name)(who)))
        np.testing.assert_allclose(ours[:, r], theirs, rtol=1e-10, atol=1e-12, err_msg=name)


def test_slowmo_is_fedavgm_while_the_local_rate_stays() -> None:
    made = trained({"fedavgm": algorithms.fedavgm()}, 6)
    theirs = np.array(list(Papers().slowmo(chosen(made, 6))))
    np.testing.assert_allclose(path(made, 6)[:, 0], theirs, rtol=1e-10)


def test_feddyn_solves_the_papers_local_problem() -> None:
    solver = Solver(lr=0.3, batch_size=100, epochs=120)  # as good as to the end
    made = trained({"feddyn": algorithms.feddyn()}, 4, solver=solver)
    theirs = np.array(list(Papers().feddyn(chosen(made, 4), exact=True)))
    np.testing.assert_allclose(path(made, 4)[:, 0], theirs, rtol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_the_contract(name: str) -> None:
    check_algorithm(algorithms.build(name))


# Reductions


def same_path(one: AnyAlgorithm, other: AnyAlgorithm, sizes: list[int] = SIZES, **options: Any) -> bool:
    ours, theirs = path(trained({"one": one, "other": other}, 5, sizes, **options), 5).transpose(1, 0, 2)
    return np.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("is_fedavg", "is_not"),
    [
        ("fedavgm:beta=0", "fedavgm:beta=0.1"),
        ("fedprox:mu=0", "fedprox:mu=0.1"),
        ("fedcm:alpha=1", "fedcm:alpha=0.9"),
        ("fedexp:eps=1e9", "fedexp:eps=1e-9"),
        ("mimelite:beta=0", "mimelite:beta=0.1"),
    ],
)
def test_special_cases_of_fedavg(is_fedavg: str, is_not: str) -> None:
    assert same_path(algorithms.build(is_fedavg), algorithms.fedavg())
    assert not same_path(algorithms.build(is_not), algorithms.fedavg())


def test_one_full_step_makes_scaffold_fedavg_where_sizes_are_equal() -> None:
    """Corrections add up to zero over all clients, and with one step each enters unchanged."""
    one, several = Solver(lr=LR, batch_size=8), Solver(lr=LR, batch_size=4)
    scaffold, fedavg = algorithms.scaffold(), algorithms.fedavg()
    assert same_path(scaffold, fedavg, [8, 8, 8, 8], solver=one)
    assert not same_path(scaffold, fedavg, [8, 8, 8, 8], solver=several)
    assert not same_path(scaffold, fedavg, solver=Solver(lr=LR, batch_size=100))


@pytest.mark.parametrize("name", ["mimelite", "mime"])
def test_one_step_of_mime_is_momentum_on_full_gradients(name: str) -> None:
    made = trained({name: algorithms.build(name)}, 6, solver=Solver(lr=LR, batch_size=100))
    shares = np.array(SIZES) / sum(SIZES)
    x, m = START, np.zeros(P)
    for ours in path(made, 6)[:, 0]:
        m = 0.9 * m + 0.1 * (shares @ (CURVES * (x - CENTRES)))
        x = x - LR * m
        np.testing.assert_allclose(ours, x, rtol=1e-10)


def test_the_first_step_of_feddyn_goes_twice_as_far_as_the_proximal_mean() -> None:
    """Without memories h = α·mean δ: the mean of models, and as far again."""
    built: dict[str, Any] = {"feddyn": algorithms.feddyn(alpha=0.3), "fedprox": algorithms.fedprox(mu=0.3)}
    (dyn, prox), *_ = path(trained(built, 1, [8, 8, 8, 8]), 1)
    np.testing.assert_allclose(dyn - START, 2 * (prox - START), rtol=1e-12)


def exponent(delta: Tensor, size: list[float], eps: float = 1e-12) -> float:
    """FedExP's server rate for updates δ (K, P)."""
    algorithm, x = algorithms.fedexp(eps=eps), torch.zeros(delta.shape[1], dtype=torch.float64)
    one = torch.ones(len(delta), dtype=torch.float64)
    report = Report(torch.tensor(size, dtype=torch.float64), one, one, delta.norm(dim=1), one, one, one)
    found = rehearse(algorithm, x, algorithm.init(x), report, delta)
    mean = torch.tensor(size, dtype=torch.float64) @ delta / sum(size)
    torch.testing.assert_close(-found.x, found.state.server_lr * mean)
    return float(found.state.server_lr)


def test_fedexp_extrapolates_by_how_much_updates_differ() -> None:
    alike = torch.ones(4, 6, dtype=torch.float64)
    assert exponent(alike, [1, 2, 3, 4]) == 1
    apart = torch.eye(6, dtype=torch.float64)  # orthogonal updates of one length: M/2
    assert exponent(apart, [5.0] * 6) == pytest.approx(3)
    assert exponent(apart, [5.0] * 6, eps=1 / 6) == pytest.approx(1.5)  # (1/2)/(1/6 + 1/6)
    assert exponent(apart[:2], [3.0, 1.0]) == 1  # (1/2)/(10/16) = 0.8


# Where they rest

EQUAL = [12, 12, 12, 12]  # three steps each
OPTIMUM = (CURVES * CENTRES).sum(0) / CURVES.sum(0)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_fedavg_rests_beside_the_optimum(engine: str) -> None:
    made = trained({"fedavg": algorithms.fedavg()}, 100, EQUAL, engine=engine)
    made.run()
    pulled = 1 - (1 - LR * CURVES) ** 3  # the share of the way to its centre that a client goes
    np.testing.assert_allclose(made.x[0].cpu().numpy(), (pulled * CENTRES).sum(0) / pulled.sum(0), rtol=1e-9)
    assert np.linalg.norm(made.x[0].cpu().numpy() - OPTIMUM) > 0.02


@pytest.mark.parametrize("engine", ["stacked", pytest.param("loop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_scaffold_feddyn_and_mime_find_the_optimum(engine: str, participation: float) -> None:
    names = ["scaffold", "feddyn:alpha=3"] + ["mime:beta=0.5"] * (participation == 1)
    built = {name: algorithms.build(name) for name in names}
    made = trained(built, 100, EQUAL, engine=engine, participation=participation)
    made.run()
    for name, x in zip(names, made.x.cpu().numpy(), strict=True):
        np.testing.assert_allclose(x, OPTIMUM, rtol=1e-7, atol=1e-9, err_msg=name)


def test_scaffold_and_feddyn_count_clients_alike_whatever_their_sizes_and_steps() -> None:
    made = trained({name: algorithms.build(name) for name in ("scaffold", "feddyn:alpha=3")}, 100)
    made.run()
    by_size = (np.array(SIZES)[:, None] * CURVES * CENTRES).sum(0) / (np.array(SIZES) @ CURVES)
    assert np.linalg.norm(by_size - OPTIMUM) > 0.1
    for x in made.x.cpu().numpy():
        np.testing.assert_allclose(x, OPTIMUM, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_the_server_knows_the_mean_of_all_memories(engine: str, name: str) -> None:
    made = trained({name: algorithms.build(name)}, 5, engine=engine, participation=0.5)
    for _ in range(5):
        made.step()
        kept = made.states[0].c if name == "scaffold" else made.states[0].h
        torch.testing.assert_close(kept, made.memories.values[0].mean(0), rtol=1e-10, atol=1e-12)


# Both executors


@pytest.mark.parametrize("options", [{}, {"participation": 0.5}], ids=["all", "half"])
@pytest.mark.parametrize("solver", ["momentum", "adam"])
def test_both_executors_agree(ragged: Federation, solver: str, options: dict[str, Any]) -> None:
    """Adam, too, takes a modified direction as it takes a gradient."""
    names = NAMES if solver == "momentum" else [name for name in NAMES if name not in BY_STEPS]
    taken = Solver(lr=0.01, batch_size=10, optimizer="adam") if solver == "adam" else SOLVERS[solver]
    one, other = (
        simulation(ragged, names, [0, 1], solver=taken, engine=engine, **options)
        for engine in ("stacked", "loop")
    )
    assert_together(one, other, rounds=4, tolerance=1e-8)
    for r, kept in one.memories.values.items():
        torch.testing.assert_close(kept, other.memories.values[r], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_resumed_is_as_uninterrupted(ragged: Federation, engine: str) -> None:
    options = {"solver": SOLVERS["sgd"], "engine": engine, "participation": 0.5}
    one, other = (simulation(ragged, NAMES, [0], **options) for _ in range(2))
    for _ in range(2):
        one.step()
    assert any(kept.any() for kept in one.memories.values.values())
    other.restore(one.checkpoint())
    for _ in range(3):
        one.step()
        other.step()
    assert torch.equal(one.x, other.x)
    for state, again in zip(one.states, other.states, strict=True):
        assert all(map(torch.equal, state, again))
    for r, kept in one.memories.values.items():
        assert torch.equal(kept, other.memories.values[r])


def test_alone_is_as_beside_others(ragged: Federation) -> None:
    together = simulation(ragged, ["fedavg", *NAMES], [0], solver=SOLVERS["uneven"])
    for _ in range(3):
        together.step()
    for r, name in enumerate(["fedavg", *NAMES]):
        alone = simulation(ragged, [name], [0], solver=SOLVERS["uneven"])
        for _ in range(3):
            alone.step()
        torch.testing.assert_close(alone.x[0], together.x[r], rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(torch.device(DEVICE)), reason="needs a compiler")
def test_compiled_is_eager(ragged: Federation) -> None:
    def model() -> nn.Module:
        return nn.Linear(FEATURES, CLASSES).double()

    eager = simulation(ragged, ["fedavg", *NAMES], [0, 1], solver=SOLVERS["sgd"], model=model)
    compiled = Simulation(model, ragged, eager.runs, replace(eager.settings, compile="on"))
    assert_together(eager, compiled, rounds=3)


@pytest.mark.parametrize("name", NAMES)
def test_all_stays_on_the_device_of_what_is_given(name: str) -> None:
    """On the meta device, where a tensor that is made elsewhere shows."""
    algorithm, x = algorithms.build(name), torch.ones(P, device="meta")
    state = first_state(algorithm, x, 4)
    report = Report(*[torch.ones(4, dtype=torch.float64, device="meta")] * len(Report._fields))
    found = rehearse(algorithm, x, state, report, torch.ones(4, P, dtype=torch.float64, device="meta"))
    numbers = client_numbers(algorithm, state, report)
    assert all(tensor.is_meta for tensor in (*state, found.x, *found.state))
    assert all(tensor.is_meta for tensor in numbers if tensor.ndim)


# What is refused, and what is survived


def test_a_client_whose_memory_would_not_be_finite_is_left_out() -> None:
    report, _ = reports(3, seed=2)
    for spoilt in (report.lr * torch.tensor([1, 0, 1]), report.lr * torch.tensor([1, torch.nan, 1])):
        _, usable = contribute(algorithms.scaffold(), report._replace(lr=spoilt))
        assert usable.tolist() == [True, False, True]


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("name", NAMES)
def test_a_solver_without_steps_is_refused_by_those_who_divide_by_them(
    ragged: Federation, name: str, optimizer: Any
) -> None:
    solver = Solver(optimizer=optimizer)
    assert refuses(algorithms.build(name), steps=torch.nan) == (name in BY_STEPS)
    if name not in BY_STEPS:
        simulation(ragged, [name], [0], solver=solver)
        return
    with pytest.raises(InputError, match=rf"{name} divides by its clients' steps .* {optimizer} does not"):
        simulation(ragged, [name], [0], solver=solver)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 1e-320, 1e-200, 1e200, 1e308, torch.inf, torch.nan])
@pytest.mark.parametrize("field", Report._fields)
def test_hostile_reports_leave_all_finite(name: str, field: str, value: float) -> None:
    algorithm = algorithms.build(name)
    report, delta = reports(6, seed=1)
    spoilt = getattr(report, field).clone()
    spoilt[2] = value
    x = torch.ones(delta.shape[1], dtype=torch.float64)
    state = first_state(algorithm, x, 6)
    for _ in range(3):
        x, state, _ = rehearse(algorithm, x, state, report._replace(**{field: spoilt}), delta)
        assert all(torch.isfinite(tensor).all() for tensor in (x, *state))
        if isinstance(algorithm, LocalAlgorithm | MemoryAlgorithm) and algorithm.local.shared:
            assert torch.isfinite(algorithm.local.shared(state)).all()
    assert all(torch.isfinite(number).all() for number in client_numbers(algorithm, state, report))


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_a_client_that_diverges_does_not_spoil_memories(engine: str) -> None:
    federation = make_federation([12, 9, 15])
    inputs = as_tensor(federation.inputs).clone()
    inputs[federation.start[1] : federation.start[1] + federation.train[1], 0] = 1000
    spoilt = Federation(
        inputs, federation.targets, federation.start, federation.train, federation.test, federation.names
    )
    assert inputs.shape[1] == FEATURES
    made = simulation(spoilt, NAMES, [0], model=Spoilt, engine=engine, solver=SOLVERS["sgd"])
    for _ in range(3):
        made.step()
    assert made.left_out.tolist() == [3] * len(NAMES)
    assert made.stalled.sum() == 0
    assert torch.isfinite(made.x).all()
    for kept in made.memories.values.values():
        assert torch.isfinite(kept).all()
        assert not kept[1].any()
        assert kept[0].any()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("fedavgm", {"beta": 1.0}),
        ("fedavgm", {"lr": -1.0}),
        ("fedexp", {"eps": 0.0}),
        ("fedprox", {"mu": -0.1}),
        ("fedcm", {"alpha": 0.0}),
        ("fedcm", {"alpha": 1.5}),
        ("fedcm", {"lr": float("nan")}),
        ("mimelite", {"beta": 1.0}),
        ("mime", {"lr": -1.0}),
        ("scaffold", {"lr": float("inf")}),
        ("feddyn", {"alpha": 0.0}),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        algorithms.REGISTRY[name](**bad)
