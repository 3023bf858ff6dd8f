"""The fair family: arithmetic done again in NumPy, reductions, closed forms, hostile reports."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import DEVICE, Point, half_square, points
from fairwind import Federation, InputError, Settings, Solver, algorithms
from fairwind.aggregation import first_state
from fairwind.algorithms.simplex import least, project
from fairwind.contract import AnyAlgorithm, Cohort, Report
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.testing import check_algorithm, rehearse
from minimax import Floats, least_quadratic, minimax
from samples import as_tensor
from simulations import SOLVERS, assert_together, simulation

K, P, ROUNDS = 6, 4, 8
SPECS = [
    "term",
    "fedeba",
    "fedeba:size=1",
    "afl",
    "fedmgda",
    "fedmgda:eps=1,size=1,decay=0.9",
    "fedfv",
    "fedfv:alpha=0",
    "propfair",
    "propfair:m=0.9",
    "gifair:lam=0.5",
    "aaggff",
    "aaggff:form=device,cdf=gumbel",
    "ditto",
]
SEEING = [spec for spec in SPECS if spec.split(":")[0] in ("afl", "fedmgda", "fedfv", "gifair", "aaggff")]

Told = dict[str, Any]


def rounds(seed: int = 0) -> list[Told]:
    """What clients report in each round, and which of them are there: all, then some."""
    rng = np.random.default_rng(seed)
    told = []
    for t in range(ROUNDS):
        here = np.arange(K) if t < 3 else np.sort(rng.choice(K, rng.integers(2, K), replace=False))
        told.append(
            {
                "delta": rng.normal(size=(K, P)) * 0.3,
                "size": rng.integers(5, 80, K).astype(float),
                "loss": rng.uniform(0.2, 2, K) / (1 + 0.2 * t),
                "here": here,
            }
        )
    return told


def report(told: Told) -> Report:
    absent = np.setdiff1d(np.arange(K), told["here"])
    size = told["size"].copy()
    size[absent] = 0  # whoever has no samples is not usable
    t = {name: torch.from_numpy(np.asarray(value)) for name, value in told.items()}
    one = torch.ones(K, dtype=torch.float64)
    return Report(torch.from_numpy(size), one, 0.05 * one, t["delta"].norm(dim=1), t["loss"], one, one)


def ours(algorithm: AnyAlgorithm) -> list[Floats]:
    x = torch.linspace(-1, 1, P, dtype=torch.float64)
    state, path = first_state(algorithm, x, K), []
    for told in rounds():
        x, state, moved = rehearse(algorithm, x, state, report(told), torch.from_numpy(told["delta"]))
        assert moved
        path.append(x.numpy().copy())
    return path


def theirs(weigh: Callable[[int, Told], Floats]) -> list[Floats]:
    """x − Σcoef·δ with coefficients of the clients present, from what these report."""
    x, path = np.linspace(-1, 1, P), []
    for t, told in enumerate(rounds()):
        here = told.pop("here")
        told = {name: value[here] for name, value in told.items()}
        x = x - weigh(t, told | {"here": here}) @ told["delta"]
        path.append(x)
    return path


def assert_same_path(a: list[Floats], b: list[Floats], tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Arithmetic


@pytest.mark.parametrize("t", [0.0, 0.1, 3.0])
def test_term(t: float) -> None:
    def weigh(_: int, told: Told) -> Floats:
        tilted = told["size"] * np.exp(t * (told["loss"] - told["loss"].max()))
        out: Floats = tilted / tilted.sum()
        return out

    assert_same_path(ours(algorithms.term(t=t)), theirs(weigh))


@pytest.mark.parametrize("sized", [False, True])
def test_fedeba(sized: bool) -> None:
    def weigh(_: int, told: Told) -> Floats:
        prior = told["size"] if sized else np.ones(len(told["size"]))
        tilted = prior * np.exp((told["loss"] - told["loss"].max()) / 0.3)
        out: Floats = 0.7 * tilted / tilted.sum()
        return out

    assert_same_path(ours(algorithms.fedeba(tau=0.3, size=float(sized), lr=0.7)), theirs(weigh))


def nearest(v: Floats) -> Floats:
    """The point of the simplex nearest to v, by bisection on what is taken from each entry."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(v - middle, 0, None).sum() > 1 else (low, middle)
    out: Floats = np.clip(v - low, 0, None)
    return out


def test_afl() -> None:
    """λ weighs before it climbs; absent clients count with the mean loss."""
    memory = {"mixture": np.full(K, 1 / K)}

    def weigh(_: int, told: Told) -> Floats:
        used = memory["mixture"][told["here"]]
        losses = np.full(K, told["loss"].mean())
        losses[told["here"]] = told["loss"]
        memory["mixture"] = nearest(memory["mixture"] + 0.2 * losses)
        out: Floats = 0.9 * used / used.sum()
        return out

    algorithm = algorithms.afl(lr_lambda=0.2, lr=0.9)
    path = ours(algorithm)
    assert_same_path(path, theirs(weigh))
    x = torch.linspace(-1, 1, P, dtype=torch.float64)
    state = first_state(algorithm, x, K)
    assert algorithm.averaged_model is not None
    assert torch.equal(algorithm.averaged_model(state), x)
    for told in rounds():
        x, state, _ = rehearse(algorithm, x, state, report(told), torch.from_numpy(told["delta"]))
    np.testing.assert_allclose(algorithm.averaged_model(state).numpy(), np.mean(path, 0), rtol=1e-12)


@pytest.mark.parametrize(("eps", "sized"), [(0.05, False), (0.2, True), (1.0, False)])
def test_fedmgda(eps: float, sized: bool) -> None:
    def weigh(t: int, told: Told) -> Floats:
        norm = np.linalg.norm(told["delta"], axis=1)
        unit = told["delta"] / norm[:, None]
        prior = told["size"] / told["size"].sum() if sized else np.full(len(norm), 1 / len(norm))
        low, high = np.maximum(prior - eps, 0), np.minimum(prior + eps, 1)
        mixture = least_quadratic(unit @ unit.T, np.zeros(len(norm)), low, high)
        out: Floats = 0.5 * 0.8**t * mixture / norm
        return out

    built = algorithms.fedmgda(eps=eps, size=float(sized), lr=0.5, decay=0.8)
    assert_same_path(ours(built), theirs(weigh), 1e-7)  # a λ is not unique where n > P; the step is


def fair_average(delta: Floats, loss: Floats, alpha: float) -> Floats:
    """FedFV's step with τ = 1, on the vectors themselves."""
    order, n = np.argsort(loss), len(loss)
    kept = set(order[math.ceil((n - 1) * (1 - alpha)) :]) if alpha > 0 else set()
    new = delta.copy()
    for i in set(range(n)) - kept:
        for j in order:
            if j != i and (dot := new[i] @ delta[j]) < 0:
                new[i] -= dot / (delta[j] @ delta[j]) * delta[j]
    g = new.mean(0)
    against = delta[delta @ g < 0].sum(0)
    if g @ against < 0:
        g = g - (g @ against) / (against @ against) * against
    out: Floats = g * np.linalg.norm(delta.mean(0)) / np.linalg.norm(g)
    return out


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5])
def test_fedfv(alpha: float) -> None:
    x, path = np.linspace(-1, 1, P), []
    for told in rounds():
        x = x - fair_average(told["delta"][told["here"]], told["loss"][told["here"]], alpha)
        path.append(x)
    assert_same_path(ours(algorithms.fedfv(alpha=alpha)), path)


def test_fedfv_projects_no_update_on_itself() -> None:
    """Projected on two that both oppose it, an update may come to oppose itself."""
    angles = np.deg2rad([0, 170, 190])
    delta = np.stack([np.cos(angles), np.sin(angles)], 1)
    loss = np.array([2.0, 0.5, 1.0])  # by which the first comes last
    told = {"delta": delta, "size": np.ones(3), "loss": loss}
    found = stepped(algorithms.fedfv(alpha=0.0), told)
    np.testing.assert_allclose(found, fair_average(delta, loss, 0.0), rtol=1e-9, atol=1e-12)


def stepped(algorithm: AnyAlgorithm, told: Told) -> Floats:
    """How far the model goes in one round."""
    delta = torch.from_numpy(np.asarray(told["delta"], dtype=np.float64))
    n = len(delta)
    one = torch.ones(n, dtype=torch.float64)
    size, loss = (torch.from_numpy(np.asarray(told[name], dtype=np.float64)) for name in ("size", "loss"))
    x = torch.zeros(delta.shape[1], dtype=torch.float64)
    made = Report(size, one, 0.05 * one, delta.norm(dim=1), loss, one, one)
    return -rehearse(algorithm, x, first_state(algorithm, x, n), made, delta).x.numpy()


def test_gifair() -> None:
    def weigh(_: int, told: Told) -> Floats:
        p = told["size"] / told["size"].sum()
        n = len(p)
        ranks = np.zeros(n)
        ranks[np.argsort(told["loss"])] = np.linspace(-(n - 1), n - 1, n)
        out: Floats = p + 0.6 * (p / (n - 1)).min() * ranks
        return out

    assert_same_path(ours(algorithms.gifair(lam=0.6)), theirs(weigh))


def distribution(name: str, v: Floats) -> Floats:
    erf = np.vectorize(math.erf)
    found: dict[str, Floats] = {
        "weibull": 1 - np.exp(-(v**2)),
        "exponential": 1 - np.exp(-v),
        "frechet": np.exp(-1 / v),
        "normal": 0.5 * (1 + erf((v - 1) / 2**0.5)),
        "gumbel": np.exp(-np.exp(-(v - 1))),
        "logistic": 1 / (1 + np.exp(-(v - 1))),
    }
    return found[name]


@pytest.mark.parametrize("cdf", ["weibull", "normal", "logistic"])
def test_aaggff_silo(cdf: Any) -> None:
    """Each decision from the whole past, as the objective is written."""
    past: list[tuple[Floats, Floats]] = []  # g and p of each round
    memory = {"p": np.full(K, 1 / K)}
    alpha, beta = 4.0, K / 4

    def weigh(_: int, told: Told) -> Floats:
        seen = distribution(cdf, told["loss"] / told["loss"].mean()) / K
        r = np.full(K, seen.mean())
        r[told["here"]] = seen
        past.append((-r / (1 + memory["p"] @ r), memory["p"]))
        q = alpha * np.eye(K) + beta * sum(np.outer(g, g) for g, _ in past)
        c = np.sum([g - beta * g * (g @ p) for g, p in past], axis=0)
        memory["p"] = least_quadratic(q, c, np.zeros(K), np.full(K, np.inf))
        out: Floats = memory["p"][told["here"]] / memory["p"][told["here"]].sum()
        return out

    assert_same_path(ours(algorithms.aaggff(cdf=cdf)), theirs(weigh), 1e-9)


@pytest.mark.parametrize("cdf", ["exponential", "frechet", "gumbel"])
def test_aaggff_device(cdf: Any) -> None:
    """With the whole linearised gradient, a part of which is the same for all clients."""
    memory = {"p": np.full(K, 1 / K), "sum": np.zeros(K)}

    def weigh(t: int, told: Told) -> Floats:
        share = len(told["here"]) / K
        seen = share * distribution(cdf, told["loss"] / told["loss"].mean())
        mean = seen.mean()
        robust = np.full(K, mean)
        robust[told["here"]] = (1 - 1 / share) * mean + seen / share
        common = mean * (memory["p"] @ (robust - mean)) / (1 + mean) ** 2
        memory["sum"] = memory["sum"] - robust / (1 + mean) + common
        logits = -memory["sum"] * math.sqrt(math.log(K)) / ((2 + share) * math.sqrt(t + 2))
        memory["p"] = np.exp(logits) / np.exp(logits).sum()
        out: Floats = memory["p"][told["here"]] / memory["p"][told["here"]].sum()
        return out

    assert_same_path(ours(algorithms.aaggff(form="device", cdf=cdf)), theirs(weigh))


@pytest.mark.parametrize("m", [2.0, 5.0])
def test_propfair_scales_by_the_derivative(m: float) -> None:
    scale = algorithms.propfair(m=m).local.scale
    assert callable(scale)
    loss = torch.linspace(-0.5, m - 0.2 - 1e-9, 50, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(-torch.log(1 - loss / m).sum(), loss)
    torch.testing.assert_close(scale(loss.detach()), slope)
    bad = torch.tensor([m - 0.19, m, m + 3, 1e300], dtype=torch.float64)
    torch.testing.assert_close(scale(bad), torch.full_like(bad, 1 / m))


# Reductions


def test_term_goes_from_the_size_weighted_mean_to_the_worst_client() -> None:
    told = rounds()[0]
    mean = stepped(algorithms.fedavg(), told)
    worst = told["delta"][told["loss"].argmax()]
    far = [np.linalg.norm(stepped(algorithms.term(t=t), told) - mean) for t in (0, 1e-6, 1e-3, 1)]
    assert far == sorted(far)
    assert far[0] < 1e-15
    assert far[1] < 1e-5
    near = [np.linalg.norm(stepped(algorithms.term(t=t), told) - worst) for t in (1, 10, 100, 300)]
    assert near == sorted(near, reverse=True)
    assert near[-1] < 1e-6
    np.testing.assert_allclose(
        stepped(algorithms.fedeba(tau=0.5, size=1.0), told), stepped(algorithms.term(t=2.0), told)
    )


def test_gifair_without_lambda_or_with_equal_losses_is_fedavg() -> None:
    told = rounds()[0]
    mean = stepped(algorithms.fedavg(), told)
    np.testing.assert_allclose(stepped(algorithms.gifair(lam=0.0), told), mean, rtol=1e-12)
    equal = told | {"loss": np.ones(K)}
    np.testing.assert_allclose(stepped(algorithms.gifair(lam=0.9), equal), mean, rtol=1e-12)


def test_fedmgda_without_room_takes_the_mean_direction() -> None:
    told = rounds()[0]
    unit = told["delta"] / np.linalg.norm(told["delta"], axis=1, keepdims=True)
    np.testing.assert_allclose(stepped(algorithms.fedmgda(eps=0.0), told), unit.mean(0), rtol=1e-12)
    sizes = told["size"] / told["size"].sum()
    np.testing.assert_allclose(stepped(algorithms.fedmgda(eps=0.0, size=1.0), told), sizes @ unit, rtol=1e-12)


@pytest.mark.parametrize("clients", [2, 10, 100])
@pytest.mark.parametrize("parameters", [3, 40])
def test_fedmgda_raises_no_loss_to_first_order(clients: int, parameters: int) -> None:
    rng = np.random.default_rng(clients)
    for scale in (1e-6, 1.0, 1e6):
        delta = scale * rng.normal(size=(clients, parameters))
        delta[1] = -delta[0] + 0.1 * scale  # nearly opposed
        told = {"delta": delta, "size": np.ones(clients), "loss": np.ones(clients)}
        d = stepped(algorithms.fedmgda(eps=1.0), told)
        unit = delta / np.linalg.norm(delta, axis=1, keepdims=True)
        assert (unit @ d >= d @ d - 1e-11).all()  # what the shortest vector of a hull has with all of it


def test_fedfv_without_conflicts_is_the_mean() -> None:
    told = rounds()[0] | {"delta": np.abs(rounds()[0]["delta"])}
    np.testing.assert_allclose(stepped(algorithms.fedfv(), told), told["delta"].mean(0), rtol=1e-12)


def test_fedfv_stays_where_updates_cancel() -> None:
    told = {"delta": np.array([[1.0, 0.5], [-2.0, -1.0]]), "size": np.ones(2), "loss": np.ones(2)}
    np.testing.assert_allclose(stepped(algorithms.fedfv(alpha=0.0), told), 0, atol=1e-12)


def test_aaggff_prefers_whoever_keeps_losing() -> None:
    for form in ("silo", "device"):
        algorithm = algorithms.aaggff(form=form)
        told = rounds()[0] | {"here": np.arange(K)}
        x = torch.zeros(P, dtype=torch.float64)
        state = first_state(algorithm, x, K)
        for _ in range(30):
            x, state, _ = rehearse(algorithm, x, state, report(told), torch.from_numpy(told["delta"]))
        assert state.p.argsort().tolist() == told["loss"].argsort().tolist()


# The simplex


@pytest.mark.parametrize("spec", ["afl", "afl:lr_lambda=50", "aaggff", "aaggff:form=device"])
def test_weights_stay_on_the_simplex(spec: str) -> None:
    algorithm: Any = algorithms.build(spec)
    x = torch.zeros(P, dtype=torch.float64)
    state = first_state(algorithm, x, K)
    for told in rounds() * 5:
        made = report(told)
        x, state, _ = rehearse(algorithm, x, state, made, torch.from_numpy(told["delta"]))
        assert (state[0] >= 0).all()
        assert state[0].sum().item() == pytest.approx(1, abs=1e-12)
        here = torch.from_numpy(told["here"])
        coef, _ = algorithm.weigh(state, Cohort(here, Report(*(field[here] for field in made))))
        assert (coef >= 0).all()
        assert coef.sum().item() == pytest.approx(1, abs=1e-12) or (coef == 0).all()


def test_projection_is_the_nearest_point() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        v = rng.normal(size=7) * 10 ** rng.uniform(-2, 3)
        np.testing.assert_allclose(project(torch.from_numpy(v)).numpy(), nearest(v), atol=1e-10)
    huge = torch.tensor([1e300, -1e300, 1e300], dtype=torch.float64)
    assert project(huge).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("seed", range(6))
def test_the_least_quadratic_is_the_best_of_all_cases(seed: int) -> None:
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(5, rng.integers(2, 8)))
    q, c = half @ half.T, rng.normal(size=5) * rng.choice([0, 1e-3, 10])
    low, high = rng.uniform(0, 0.15, 5), rng.uniform(0.25, 1, 5)
    start = low + (1 - low.sum()) * (high - low) / (high - low).sum()
    found = least(*map(torch.from_numpy, (q, c, low, high, start))).numpy()
    best = least_quadratic(q, c, low, high)
    assert (found >= low - 1e-15).all()
    assert (found <= high + 1e-15).all()
    assert found.sum() == pytest.approx(1, abs=1e-12)
    value, least_value = (p @ q @ p / 2 + c @ p for p in (found, best))
    assert value == pytest.approx(least_value, rel=1e-10, abs=1e-11)


# The minimax point

TWO = np.array([[1.0, 0.0], [-2.0, 1.0]]), np.array([0.0, 1.0])
THREE = np.array([[1.0, 0.0], [-2.0, 1.0], [0.0, 3.0]]), np.array([0.0, 0.3, 0.5])
IDLE = np.array([[2.0, 0.0], [-2.0, 0.0], [0.1, 0.2]]), np.zeros(3)  # the third is never the worst


def test_the_minimax_point_of_two_quadratics_is_where_their_losses_meet() -> None:
    """On the line between them: ½s² = ½(L − s)² + b at s = L/2 + b/L."""
    (a, b), offsets = TWO
    length = np.linalg.norm(b - a)
    s = length / 2 + offsets[1] / length
    w, mixture, loss = minimax(*TWO)
    np.testing.assert_allclose(w, a + s / length * (b - a))
    np.testing.assert_allclose(mixture, [1 - s / length, s / length])
    assert loss == pytest.approx(s**2 / 2)
    np.testing.assert_allclose(minimax(*IDLE)[1], [0.5, 0.5, 0], atol=1e-12)


@pytest.mark.parametrize("problem", [TWO, THREE, IDLE])
def test_afl_reaches_the_minimax_point(problem: tuple[Floats, Floats]) -> None:
    centres, offsets = map(torch.from_numpy, problem)
    n = len(centres)
    algorithm = algorithms.afl(lr_lambda=0.02)
    one = torch.ones(n, dtype=torch.float64)
    x = torch.zeros(2, dtype=torch.float64)
    state = first_state(algorithm, x, n)
    for _ in range(4000):
        delta = 0.1 * (x - centres)
        loss = ((x - centres) ** 2).sum(1) / 2 + offsets
        made = Report(one, one, 0.1 * one, delta.norm(dim=1), loss, loss, one)
        x, state, _ = rehearse(algorithm, x, state, made, delta)
    w, mixture, _ = minimax(*problem)
    assert algorithm.averaged_model is not None
    np.testing.assert_allclose(algorithm.averaged_model(state).numpy(), w, atol=5e-3)
    np.testing.assert_allclose(state.mixture.numpy(), mixture, atol=5e-3)
    np.testing.assert_allclose(x.numpy(), w, atol=5e-3)


@pytest.mark.slow
def test_afl_reaches_it_in_the_engine() -> None:
    centres = torch.from_numpy(THREE[0])
    settings = Settings(
        rounds=600, solver=Solver(lr=0.2, batch_size=64), compile="off", eval_every=600, workers=1
    )
    runs = [Run(name, algorithms.build(name), 0) for name in ("afl:lr_lambda=0.05", "fedavg")]
    made = Simulation(
        Point(2), points(centres, [8, 30, 4]), runs, settings, loss=half_square, score=half_square
    )
    made.run()
    w, _, worst = minimax(THREE[0], np.zeros(3))
    np.testing.assert_allclose(made.x[0].cpu().numpy(), w, atol=2e-2)
    largest = ((made.x.cpu().numpy()[:, None] - THREE[0]) ** 2).sum(2).max(1) / 2
    assert largest[0] == pytest.approx(worst, rel=0.02)
    assert largest[1] > 1.2 * worst


# The contract, and hostile reports


@pytest.mark.parametrize("spec", SPECS)
def test_they_keep_the_contract(spec: str) -> None:
    check_algorithm(algorithms.build(spec))


def one_round(spec: str, loss: list[float], delta: Tensor, size: float = 5.0) -> tuple[Tensor, Tensor]:
    algorithm, n = algorithms.build(spec), len(loss)
    one = torch.ones(n, dtype=torch.float64)
    x = torch.ones(delta.shape[1], dtype=torch.float64)
    losses = torch.tensor(loss, dtype=torch.float64)
    made = Report(size * one, one, 0.05 * one, delta.norm(dim=1), losses, one, one)
    new, _, moved = rehearse(algorithm, x, first_state(algorithm, x, n), made, delta)
    return new, moved


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "loss",
    [
        [1e300, 1.0, 2.0],
        [1e300, 1e300, 1e300],
        [1e-300, 1e-310, 1.0],
        [0.0, 0.0, 0.0],
        [0.7, 0.7, 0.7],
        [1e308, 1e308, 0.0],
        [3.0],
    ],
)
def test_any_losses_give_a_finite_step(spec: str, loss: list[float]) -> None:
    delta = torch.randn(len(loss), P, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    new, moved = one_round(spec, loss, delta)
    assert moved
    assert torch.isfinite(new).all()
    assert (new - 1).norm() < 10


@pytest.mark.parametrize("spec", SPECS)
def test_a_negative_loss_is_taken_or_stalls_the_round(spec: str) -> None:
    delta = torch.randn(3, P, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    new, moved = one_round(spec, [-2.0, 0.5, -1e300], delta)
    assert moved != spec.startswith("aaggff")
    assert torch.isfinite(new).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("zero", [[0], [0, 1, 2]])
def test_updates_of_zero_break_nothing(spec: str, zero: list[int]) -> None:
    delta = torch.randn(3, P, generator=torch.Generator().manual_seed(3), dtype=torch.float64).abs()
    delta[zero] = 0
    new, moved = one_round(spec, [1.0, 0.5, 2.0], delta)
    assert moved
    assert torch.equal(new, torch.ones_like(new)) if len(zero) == 3 else (new < 1).all()


@pytest.mark.parametrize("spec", SEEING)
@pytest.mark.parametrize("length", [1e-100, 1e100])
def test_updates_of_any_length_give_a_finite_step(spec: str, length: float) -> None:
    delta = length * torch.randn(3, P, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    new, moved = one_round(spec, [1.0, 0.5, 2.0], delta)
    assert moved
    assert torch.isfinite(new).all()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("term", {"t": -1.0}),
        ("term", {"lr": math.inf}),
        ("fedeba", {"tau": 0.0}),
        ("afl", {"lr_lambda": -0.1}),
        ("fedmgda", {"eps": -0.1}),
        ("fedmgda", {"decay": math.nan}),
        ("fedfv", {"alpha": 1.5}),
        ("propfair", {"m": 0.0}),
        ("propfair", {"near": -1.0}),
        ("gifair", {"lam": 1.0}),
        ("aaggff", {"form": "cross"}),
        ("aaggff", {"cdf": "cauchy"}),
        ("ditto", {"lam": -1.0}),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        algorithms.REGISTRY[name](**bad)


# In the engine


@pytest.mark.parametrize("options", [{}, {"participation": 0.5}, {"participation": 0.2, "seeds": [3]}])
def test_both_executors_agree(ragged: Federation, options: dict[str, Any]) -> None:
    seeds = options.get("seeds", [0, 1])
    given = {name: value for name, value in options.items() if name != "seeds"}
    one, other = (
        simulation(ragged, SPECS, seeds, solver=SOLVERS["momentum"], engine=engine, **given)
        for engine in ("stacked", "loop")
    )
    assert_together(one, other, rounds=4, tolerance=1e-8)
    assert one.stalled.sum() == 0


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_resumed_is_as_uninterrupted(ragged: Federation, participation: float) -> None:
    def made() -> Simulation:
        return simulation(ragged, SPECS, [0], solver=SOLVERS["sgd"], participation=participation)

    one = made()
    for _ in range(2):
        one.step()
    kept = one.checkpoint()
    other = made()
    other.restore(kept)
    for _ in range(3):
        one.step()
        other.step()
    assert torch.equal(one.x, other.x)
    for a, b in zip(one.states, other.states, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_losses_that_would_overflow_leave_a_model_finite(ragged: Federation) -> None:
    """Losses in the thousands, in float32: e^{tF} is far beyond what that holds."""
    inputs = as_tensor(ragged.inputs).float() * 3000
    federation = dataclasses.replace(ragged, inputs=inputs)
    model = torch.nn.Linear(inputs.shape[1], 3)
    specs = [spec for spec in SPECS if not spec.startswith("ditto")]
    solver = Solver(lr=1e-9, batch_size=10)
    made = simulation(federation, specs, [0], model=model, solver=solver, eval_every=1)
    made.step()
    assert (made.loss0 > 700).any()
    assert made.stalled.sum() == 0
    assert torch.isfinite(made.x).all()


def test_they_work_on_tensors_of_the_engines_device() -> None:
    for spec in SPECS:
        algorithm = algorithms.build(spec)
        x = torch.ones(P, dtype=torch.float32, device=DEVICE)
        state = first_state(algorithm, x, K)
        told = rounds()[4]
        made = Report(*(field.to(DEVICE) for field in report(told)))
        new, state, moved = rehearse(algorithm, x, state, made, torch.from_numpy(told["delta"]).to(DEVICE))
        assert moved
        assert new.device == x.device
        assert all(value.device == x.device for value in state)
