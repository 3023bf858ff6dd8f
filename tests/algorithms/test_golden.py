"""The arithmetic of every algorithm, done again in NumPy float64 from the authors' definitions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fairwind import algorithms
from fairwind.aggregation import contribute
from fairwind.contract import Algorithm, Report
from fairwind.paper import variants

K, P, ROUNDS, LR = 6, 4, 12, 0.05


def rounds(seed: int = 0) -> list[dict[str, np.ndarray]]:
    """What the clients report in each round: fixed numbers, with losses that fall."""
    rng = np.random.default_rng(seed)
    told = []
    for t in range(ROUNDS):
        told.append(
            {
                "delta": rng.normal(size=(K, P)) * 0.3,
                "size": rng.integers(5, 80, K).astype(float),
                "steps": rng.integers(1, 9, K).astype(float),
                "loss": rng.uniform(0.5, 2, K) / (1 + t),
                "grad": rng.uniform(0.1, 3, K),
            }
        )
    return told


Told = dict[str, np.ndarray]
LOSS0 = np.random.default_rng(9).uniform(1, 3, K)


def ours(algorithm: Algorithm[Any, Any], loss0: np.ndarray = LOSS0) -> list[np.ndarray]:
    x = torch.linspace(-1, 1, P, dtype=torch.float64)
    state = algorithm.init(x)
    path = []
    for told in rounds():
        t = {name: torch.from_numpy(value) for name, value in told.items()}
        lr = torch.full((K,), LR, dtype=torch.float64)
        norms = t["delta"].norm(dim=1)
        report = Report(t["size"], t["steps"], lr, norms, t["loss"], torch.from_numpy(loss0), t["grad"])
        part, _ = contribute(algorithm, report)
        sums = type(part.sums)(*(s.sum() for s in part.sums))
        x, state = algorithm.server(x, state, part.coef @ t["delta"], sums)
        path.append(x.numpy().copy())
    return path


def theirs(step: Callable[[int, np.ndarray, Told], np.ndarray]) -> list[np.ndarray]:
    x = np.linspace(-1, 1, P)
    path = []
    for t, told in enumerate(rounds()):
        x = step(t, x, told)
        path.append(x)
    return path


def assert_same_path(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_fedavg() -> None:
    def step(t: int, x: np.ndarray, told: Told) -> Any:
        p = told["size"] / told["size"].sum()
        models = x - told["delta"]  # x_k
        return (p[:, None] * models).sum(0)

    assert_same_path(ours(algorithms.fedavg()), theirs(step))


def test_fedavg_with_a_server_rate() -> None:
    def step(t: int, x: np.ndarray, told: Told) -> Any:
        return x - 0.1 * np.average(told["delta"], axis=0, weights=told["size"])

    assert_same_path(ours(algorithms.fedavg(lr=0.1)), theirs(step))


def test_fednova() -> None:
    def step(t: int, x: np.ndarray, told: Told) -> Any:
        p = told["size"] / told["size"].sum()
        effective = (p * told["steps"]).sum()
        return x - effective * (p[:, None] * told["delta"] / told["steps"][:, None]).sum(0)

    assert_same_path(ours(algorithms.fednova()), theirs(step))


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 3.0])
def test_qfedavg(q: float) -> None:
    def step(t: int, x: np.ndarray, told: Told) -> Any:
        big_l, f = 1 / LR, told["loss"] + 1e-10
        scaled = big_l * told["delta"]  # L(x − x_k)
        numerator = (f[:, None] ** q * scaled).sum(0)
        h = q * f ** (q - 1) * (scaled**2).sum(1) + big_l * f**q
        return x - numerator / h.sum()

    assert_same_path(ours(algorithms.qfedavg(q=q)), theirs(step))


@pytest.mark.parametrize("kind", ["adam", "adam uncorrected", "yogi", "adagrad"])
def test_the_fedadam_family(kind: str) -> None:
    lr, b1, b2, eps = 0.02, 0.8, 0.95, 1e-3
    memory: dict[str, Any] = {"m": np.zeros(P), "v": np.zeros(P) if kind == "adam" else np.full(P, eps**2)}

    def step(t: int, x: np.ndarray, told: Told) -> Any:
        g = np.average(told["delta"], axis=0, weights=told["size"])
        m = memory["m"] = b1 * memory["m"] + (1 - b1) * g
        v = memory["v"]
        if kind.startswith("adam "):
            v = b2 * v + (1 - b2) * g * g
        elif kind == "adam":
            v = b2 * v + (1 - b2) * g * g
            m = m / (1 - b1 ** (t + 1))
        elif kind == "yogi":
            v = v - (1 - b2) * g * g * np.sign(v - g * g)
        else:
            v = v + g * g
        memory["v"] = v
        corrected = v / (1 - b2 ** (t + 1)) if kind == "adam" else v
        return x - lr * m / (np.sqrt(corrected) + eps)

    built = {
        "adam": algorithms.fedadam(lr=lr, beta1=b1, beta2=b2, eps=eps),
        "adam uncorrected": algorithms.fedadam(lr=lr, beta1=b1, beta2=b2, eps=eps, corrected=False),
        "yogi": algorithms.fedyogi(lr=lr, beta1=b1, beta2=b2, eps=eps),
        "adagrad": algorithms.fedadagrad(lr=lr, beta1=b1, eps=eps),
    }
    assert_same_path(ours(built[kind]), theirs(step))


def adaptive(
    alpha: float,
    loss0: np.ndarray,
    rate: Callable[[int, float], float],
    power: Callable[[float], float] = lambda c: c,
    normalised: bool = True,
) -> list[np.ndarray]:
    """Algorithms 1 and 2 of the paper as printed, with `rate` for the step: (round, C) -> factor of η.

    `power` is that of the decay rates, β^power(C); without normalisation an update is as long as it was made.
    """
    lr, b1, b2, eps = 1e-3, 0.9, 0.999, 1e-8
    memory: dict[str, Any] = {"m": np.zeros(P), "v": np.zeros(P), "c1": 1.0, "c2": 1.0}

    def step(t: int, x: np.ndarray, told: Told) -> Any:
        weights, updates, certainties = [], [], []
        for k in range(K):
            change = -told["delta"][k]  # Δ_k = x_k − x
            eta = np.linalg.norm(change) / told["grad"][k]
            updates.append(-change / eta if normalised else -change)
            certainties.append(np.log(eta / LR) + 1)
            weights.append(told["size"][k] * (told["loss"][k] / loss0[k]) ** alpha)
        g = np.average(updates, axis=0, weights=weights)
        c = np.average(certainties, weights=weights)
        b1t, b2t = b1 ** power(c), b2 ** power(c)
        memory["c1"] *= b1t
        memory["c2"] *= b2t
        memory["m"] = (1 - b1t) * g + b1t * memory["m"]
        memory["v"] = (1 - b2t) * g * g + b2t * memory["v"]
        m, v = memory["m"] / (1 - memory["c1"]), memory["v"] / (1 - memory["c2"])
        return x - rate(t, c) * lr * m / (np.sqrt(v) + eps)

    return theirs(step)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
def test_adafedadam_as_in_the_text(alpha: float) -> None:
    built = algorithms.adafedadam(alpha=alpha, warmup=0)
    assert_same_path(ours(built), adaptive(alpha, LOSS0, lambda t, c: c))


def test_adafedadam_as_printed() -> None:
    assert_same_path(ours(algorithms.adafedadam(warmup=None)), adaptive(1.0, LOSS0, lambda t, c: 1.0))


def test_adafedadam_as_its_authors_compute_it() -> None:
    """Their code weighs by S·F, which is ours with F⁰ = 1, and steps by η in six rounds, then by C·η."""
    ones = np.ones(K)
    golden = adaptive(1.0, ones, lambda t, c: c if t >= 6 else 1.0)
    assert_same_path(ours(algorithms.adafedadam(), loss0=ones), golden)
    assert len(golden) > 8
    assert not np.allclose(golden[-1], adaptive(1.0, ones, lambda t, c: c)[-1])


def warmed(t: int, c: float) -> float:
    return c if t >= 6 else 1.0


def test_a_variant_without_normalised_updates() -> None:
    golden = adaptive(1.0, LOSS0, warmed, normalised=False)
    assert_same_path(ours(variants.adafedadam_unnormalised()), golden)


def test_a_variant_without_certainty() -> None:
    golden = adaptive(1.0, LOSS0, lambda t, c: 1.0, power=lambda c: 1.0)
    assert_same_path(ours(variants.adafedadam_without_certainty()), golden)


def test_a_variant_whose_step_adapts_but_not_its_decay_rates() -> None:
    golden = adaptive(1.0, LOSS0, warmed, power=lambda c: 1.0)
    assert_same_path(ours(variants.adafedadam_with_fixed_betas()), golden)


@pytest.mark.parametrize(
    ("variant", "lr"),
    [(variants.fedadam_normalised, 0.001), (variants.fedadam_normalised_larger_step, 0.0035)],
)
def test_a_variant_of_fedadam_on_updates_by_local_step(
    variant: Callable[[], Algorithm[Any, Any]], lr: float
) -> None:
    moments = np.zeros((2, P))

    def step(t: int, x: np.ndarray, told: Told) -> Any:
        p = told["size"] / told["size"].sum()
        g = (p / told["steps"]) @ told["delta"]
        moments[:] = 0.9 * moments[0] + 0.1 * g, 0.999 * moments[1] + 0.001 * g**2
        m, v = moments[0] / (1 - 0.9 ** (t + 1)), moments[1] / (1 - 0.999 ** (t + 1))
        return x - lr * m / (np.sqrt(v) + 1e-8)

    assert_same_path(ours(variant()), theirs(step))


def test_adafedadam_by_hand() -> None:
    """One client, one number: δ = 0.4 over ‖∇F‖ = 2 is η′ = 0.2, four times η = 0.05, so C = 1 + log 4."""
    algorithm = algorithms.adafedadam(warmup=0)
    values = [3.0, 8.0, 0.05, 0.4, 1.0, 2.0, 2.0]
    report = Report(*(torch.tensor(v, dtype=torch.float64) for v in values))
    part = algorithm.client(report)
    c = 1 + np.log(4)
    assert part.sums.weight.item() == pytest.approx(1.5)  # 3 · (1/2)¹
    assert part.sums.certainty.item() == pytest.approx(1.5 * c)
    assert part.coef.item() == pytest.approx(1.5 / 0.2)
    x = torch.zeros(1, dtype=torch.float64)
    new, state = algorithm.server(x, algorithm.init(x), part.coef * torch.tensor([0.4]), part.sums)
    assert new.item() == pytest.approx(-1e-3 * c)  # Adam's first step is sign(g)·ηₜ
    assert state.m.item() == pytest.approx((1 - 0.9**c) * 2)  # g is δ stretched to the gradient's length
    assert state.product2.item() == pytest.approx(0.999**c)
