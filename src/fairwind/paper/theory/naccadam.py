"""N-AccAdam, which is Adam fed with accumulated updates of SGD, and runs of it on two convex problems.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam.
IEEE Transactions on Machine Learning in Communications and Networking, 2024.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairwind.metrics import Floats
from fairwind.paper.theory.problems import Federation, Logistic, Objective, Quadratics, Scale, descend

DIMENSIONS = 10
LOCAL_RATE = 0.1  # η_s, in units of 1/L
ROUNDING = 1e-12  # a gap below this share of the first one is rounding
TINY = 1e-100  # keeps ratios of what has converged finite
SETTINGS = ("conditions", "defaults")


class Extent(NamedTuple):
    """How much is run at one scale."""

    updates: tuple[int, ...]  # N
    budgets: tuple[int, ...]  # gradients
    seeds: int


EXTENTS: dict[Scale, Extent] = {
    "smoke": Extent((1, 4, 16), (64, 256), 2),
    "reduced": Extent((1, 2, 4, 8, 16, 32, 64), (128, 1024), 4),
    "full": Extent((1, 2, 4, 8, 16, 32, 64), (128, 1024, 8192), 8),
}


class Adam(NamedTuple):
    """Adam's hyper-parameters; a column (R, 1) gives each of R runs its own."""

    lr: float | Floats = 1e-3
    beta1: float | Floats = 0.9
    beta2: float | Floats = 0.999
    eps: float | Floats = 1e-8


class Step(NamedTuple):
    """One round of N-AccAdam, for R runs."""

    x: Floats  # (R, d), before the round
    update: Floats  # Δ (R, d), what Adam is fed with
    next: Floats  # (R, d), after the round


def naccadam(
    objective: Objective,
    x: Floats,
    adam: Adam,
    *,
    updates: int,
    rate: float,
    rounds: int,
    rng: np.random.Generator | None = None,
) -> Iterator[Step]:
    """N-AccAdam (Algorithm 3): Adam fed with (x − SGD(x, η_s, N))/η_s. With `updates` N = 1 it is Adam.

    `rate` is η_s. Gradients are noisy where `rng` is given.
    """
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, rounds + 1):
        update = (x - descend(objective, x, rate, updates, rng)) / rate  # Δ
        m = adam.beta1 * m + (1 - adam.beta1) * update
        v = adam.beta2 * v + (1 - adam.beta2) * update**2
        m_hat, v_hat = m / (1 - adam.beta1**t), v / (1 - adam.beta2**t)
        stepped = x - adam.lr * m_hat / (np.sqrt(v_hat) + adam.eps)
        yield Step(x, update, stepped)
        x = stepped


class Problem(NamedTuple):
    """A smooth convex loss with its constants, and a starting point for each seed."""

    name: str
    objective: Objective
    starts: Floats  # (seeds, d)
    optimum: Floats
    least: float  # f(x*)
    smooth: float  # L
    convex: float  # μ
    steepest: float  # G, which bounds |∇f| in every coordinate where the runs can be

    def conditions(self) -> Adam:
        """Hyper-parameters with equality in Theorem 1's conditions: η = ε/2L and 1 − β₂ = ε²/16G²; β₁ = 0."""
        eps = 4 * self.steepest * math.sqrt(1 - 0.999)
        return Adam(eps / (2 * self.smooth), 0.0, 0.999, eps)


def problems(seeds: int, seed: int) -> list[Problem]:
    """A strongly convex quadratic of known eigenvalues, and a regularised logistic regression."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((DIMENSIONS, DIMENSIONS)))
    eigenvalues = np.geomspace(0.1, 1, DIMENSIONS)
    matrix = basis @ np.diag(eigenvalues) @ basis.T
    quadratic = Quadratics(matrix[None], np.zeros((1, DIMENSIONS)), noise=0.5)
    starts = 0.5 * rng.standard_normal((seeds, DIMENSIONS))
    far = np.linalg.norm(starts, axis=1).max()
    found = [Problem("quadratic", quadratic, starts, np.zeros(DIMENSIONS), 0.0, 1.0, 0.1, float(far))]

    inputs = rng.standard_normal((200, DIMENSIONS)) * np.geomspace(1, 0.3, DIMENSIONS)
    truth = 2 * rng.standard_normal(DIMENSIONS)
    labels = np.where(rng.random(200) < 1 / (1 + np.exp(-inputs @ truth)), 1.0, -1.0)
    logistic = Logistic((labels[:, None] * inputs)[None], ridge=0.01, batch_size=10)
    alone = Federation(logistic, np.ones(1), 1.0, np.ones(1))
    optimum = alone.optimum(np.zeros(DIMENSIONS))
    far = np.linalg.norm(starts, axis=1).max() + np.linalg.norm(optimum)
    steepest = np.abs(inputs).mean(0).max() + logistic.ridge * far
    constants = alone.loss(optimum), logistic.smoothness(np.ones(1)), logistic.ridge, float(steepest)
    return [*found, Problem("logistic regression", logistic, optimum + starts, optimum, *constants)]


class Path(NamedTuple):
    """What was measured along runs of one N, for each round and seed, in one setting."""

    problem: Problem
    noise: str
    setting: str
    adam: Adam
    updates: int  # N
    gaps: Floats  # f(x) − f* (T + 1, seeds)
    squares: Floats  # ‖∇f‖² (T, seeds)
    least_ratio: Floats  # R_t (T, seeds)
    length_ratio: Floats  # P_N^t (T, seeds)
    steepest: Floats  # max |∇f| over coordinates (T, seeds)

    @property
    def live(self) -> NDArray[np.bool_]:
        """The rounds that start farther from the minimum than rounding (T, seeds)."""
        live: NDArray[np.bool_] = self.gaps[:-1] > ROUNDING * self.gaps[0]
        return live

    def share(self, happens: NDArray[np.bool_]) -> float:
        """The share of live rounds in which it happens."""
        return float(happens[self.live].mean())


@cache
def measure(scale: Scale, seed: int) -> tuple[Path, ...]:
    """Runs of N-AccAdam on every problem, without and with noise, in both settings, for every N."""
    extent = EXTENTS[scale]
    paths = []
    for problem in problems(extent.seeds, seed):
        both = problem.conditions(), Adam()
        stacked = Adam(*np.repeat(np.array(both), extent.seeds, axis=0).T[:, :, None])
        for noise in ("none", "gradient noise"):
            for updates in extent.updates:
                rng = None if noise == "none" else np.random.default_rng([seed, updates])
                measured = _along(problem, stacked, updates, extent.budgets[-1] // updates, rng)
                for s, (setting, adam) in enumerate(zip(SETTINGS, both, strict=True)):
                    mine = slice(s * extent.seeds, (s + 1) * extent.seeds)
                    columns = (each[:, mine] for each in measured)
                    paths.append(Path(problem, noise, setting, adam, updates, *columns))
    return tuple(paths)


def _along(
    problem: Problem, adam: Adam, updates: int, rounds: int, rng: np.random.Generator | None
) -> tuple[Floats, ...]:
    objective, x = problem.objective, np.tile(problem.starts, (len(SETTINGS), 1))
    gaps = [objective.losses(x) - problem.least]
    squares, least, lengths, steepest = [], [], [], []
    rate = LOCAL_RATE / problem.smooth
    for step in naccadam(objective, x, adam, updates=updates, rate=rate, rounds=rounds, rng=rng):
        slope = np.maximum(np.abs(objective.gradients(step.x)), TINY)
        size = np.maximum(np.abs(step.update), TINY)
        gaps.append(objective.losses(step.next) - problem.least)
        squares.append((slope**2).sum(1))
        least.append((size / slope).min(1))
        lengths.append(np.linalg.norm(size, axis=1) / np.linalg.norm(slope, axis=1))
        steepest.append(slope.max(1))
    return tuple(map(np.array, (gaps, squares, least, lengths, steepest)))


def linear_rate(distances: Floats) -> tuple[float, float]:
    """(A, c) of approximately linear convergence, ‖xⁿ − x*‖ ≤ A(1−c)ⁿ‖x⁰ − x*‖.

    c is fitted to the logarithms by least squares; A is the least that makes the inequality true.
    """
    n = np.arange(len(distances))
    c = min(max(-math.expm1(np.polyfit(n, np.log(distances / distances[0]), 1)[0]), 0.0), 1 - 1e-12)
    return float((distances / distances[0] / (1 - c) ** n).max()), c


@cache
def fitted(scale: Scale, seed: int) -> dict[tuple[str, str], tuple[float, float]]:
    """(A, c) of SGD by problem and noise, from the mean distance to the optimum over seeds."""
    extent = EXTENTS[scale]
    constants = {}
    for problem in problems(extent.seeds, seed):
        for noise in ("none", "gradient noise"):
            rng = None if noise == "none" else np.random.default_rng(seed)
            x, distances = problem.starts, []
            for _ in range(extent.updates[-1] + 1):
                distances.append(np.linalg.norm(x - problem.optimum, axis=1).mean())
                x = descend(problem.objective, x, LOCAL_RATE / problem.smooth, 1, rng)
            constants[problem.name, noise] = linear_rate(np.array(distances))
    return constants
