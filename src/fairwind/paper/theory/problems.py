"""Small convex problems with known constants, and rounds of the package's own algorithms on them.

Everything is NumPy in float64; a round goes through `contract.contribute` and `contract.advance`, as in the
engine. K clients have K losses F_k, and a method that takes K points evaluates F_k at the k-th of them. A
problem of one loss (K = 1) takes any number of points.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fairwind.aggregation import advance, contribute
from fairwind.contract import Algorithm, Report
from fairwind.metrics import Floats
from fairwind.runs.schema import TheoryCheck, TheoryRow, TheoryScale, Verdict

Check = TheoryCheck
Row = TheoryRow
Scale = TheoryScale


def judge(held: int, of: int) -> Verdict:
    """The verdict on a claim that held in so many cases of so many."""
    return "holds" if held == of else "holds in part" if held else "does not hold"


class Objective(Protocol):
    """K convex losses in d dimensions."""

    def losses(self, points: Floats) -> Floats: ...  # (K, d) -> (K,)

    def gradients(self, points: Floats, rng: np.random.Generator | None = None) -> Floats:
        """(K, d) -> (K, d); noisy where `rng` is given."""

    def hessians(self, points: Floats) -> Floats: ...  # (K, d) -> (K, d, d)


class Quadratics(NamedTuple):
    """F_k(x) = ½ (x − c_k)ᵀ H_k (x − c_k); noisy gradients carry Gaussian noise."""

    matrices: Floats  # H_k (K, d, d)
    centres: Floats  # c_k (K, d)
    noise: float = 0.0  # standard deviation in each coordinate

    def losses(self, points: Floats) -> Floats:
        losses: Floats = ((points - self.centres) * self.gradients(points)).sum(1) / 2
        return losses

    def gradients(self, points: Floats, rng: np.random.Generator | None = None) -> Floats:
        away = points - self.centres
        slope: Floats
        if len(self.matrices) == 1:
            slope = away @ self.matrices[0]
        else:
            slope = np.einsum("kde,ke->kd", self.matrices, away)
        return slope if rng is None else slope + self.noise * rng.standard_normal(slope.shape)

    def hessians(self, points: Floats) -> Floats:
        return np.broadcast_to(self.matrices, (len(points), *self.matrices.shape[1:]))


class Logistic(NamedTuple):
    """Logistic regression, F_k(x) = mean log(1 + exp(−y·aᵀx)) + ridge/2·‖x‖²; batches give noise."""

    signed: Floats  # y·a (K, n, d), the label ±1 times the input
    ridge: float = 0.0
    batch_size: int = 0

    def losses(self, points: Floats) -> Floats:
        norms = np.square(points).sum(1)
        losses: Floats = np.logaddexp(0, -self._margins(points)).mean(1) + self.ridge / 2 * norms
        return losses

    def gradients(self, points: Floats, rng: np.random.Generator | None = None) -> Floats:
        slope: Floats
        if rng is not None:  # K = 1: a batch for each point, drawn with replacement
            samples = self.signed[0][rng.integers(self.signed.shape[1], size=(len(points), self.batch_size))]
            wrong = (1 - np.tanh(np.einsum("knd,kd->kn", samples, points) / 2)) / 2
            slope = self.ridge * points - np.einsum("kn,knd->kd", wrong, samples) / self.batch_size
            return slope
        wrong = (1 - np.tanh(self._margins(points) / 2)) / 2
        each = (
            wrong @ self.signed[0] if len(self.signed) == 1 else np.einsum("kn,knd->kd", wrong, self.signed)
        )
        slope = self.ridge * points - each / self.signed.shape[1]
        return slope

    def hessians(self, points: Floats) -> Floats:
        wrong = (1 - np.tanh(self._margins(points) / 2)) / 2
        spread = (wrong * (1 - wrong))[:, :, None] * self.signed
        curves: Floats = np.swapaxes(spread, 1, 2) @ self.signed / self.signed.shape[1]
        return curves + self.ridge * np.eye(points.shape[1])

    def smoothness(self, weights: Floats) -> float:
        """L of Σ weights·F_k: the largest eigenvalue that its Hessian can have anywhere."""
        second = np.einsum("k,knd,kne->de", weights, self.signed, self.signed) / self.signed.shape[1]
        return float(np.linalg.eigvalsh(second)[-1]) / 4 + self.ridge

    def _margins(self, points: Floats) -> Floats:
        margins: Floats
        if len(self.signed) == 1:
            margins = points @ self.signed[0].T
        else:
            margins = np.einsum("knd,kd->kn", self.signed, points)
        return margins


class LogCosh(NamedTuple):
    """F_k(x) = L_k·log cosh(x − c_k) in one dimension: convex, L_k-smooth, not a quadratic."""

    scales: Floats  # L_k (K, 1)
    centres: Floats  # c_k (K, 1)

    def losses(self, points: Floats) -> Floats:
        away = np.abs(points - self.centres)
        losses: Floats = self.scales * (away + np.log1p(np.exp(-2 * away)) - np.log(2))
        return losses[:, 0]

    def gradients(self, points: Floats, rng: np.random.Generator | None = None) -> Floats:
        return self.scales * np.tanh(points - self.centres)

    def hessians(self, points: Floats) -> Floats:
        curves: Floats = self.scales / np.cosh(points - self.centres) ** 2
        return curves[:, :, None]


def descend(
    objective: Objective,
    points: Floats,
    rate: float,
    steps: int | Floats,
    rng: np.random.Generator | None = None,
) -> Floats:
    """Where SGD ends after so many steps from each point; `steps` may differ from point to point."""
    for step in range(int(np.max(steps))):
        slope = objective.gradients(points, rng)
        if not isinstance(steps, int):
            slope = np.where((step < steps)[:, None], slope, 0)
        points = points - rate * slope
    return points


class Federation(NamedTuple):
    """Clients that train by gradient descent, each with its own number of steps."""

    objective: Objective
    sizes: Floats  # (K,)
    rate: float  # η of the local solver
    steps: Floats  # τ_k (K,)

    @property
    def shares(self) -> Floats:
        shares: Floats = self.sizes / self.sizes.sum()  # p_k
        return shares

    def spread(self, x: Floats) -> Floats:
        return np.broadcast_to(x, (len(self.sizes), len(x)))

    def loss(self, x: Floats) -> float:
        """f = Σ p_k F_k."""
        return float(self.shares @ self.objective.losses(self.spread(x)))

    def gradient(self, x: Floats) -> Floats:
        slope: Floats = self.shares @ self.objective.gradients(self.spread(x))
        return slope

    def updates(self, x: Floats) -> Floats:
        """δ_k = x − x_k after local training (K, d)."""
        return x - descend(self.objective, self.spread(x), self.rate, self.steps)

    def optimum(self, x: Floats) -> Floats:
        """The minimiser of f, from a starting point."""

        def parts(at: Floats) -> tuple[float, Floats, Floats]:
            curve = np.einsum("k,kde->de", self.shares, self.objective.hessians(self.spread(at)))
            return self.loss(at), self.gradient(at), curve

        return newton(parts, x)


class Round(NamedTuple):
    """A round's outcome, and what it was made of."""

    x: Floats
    state: Any
    total: Floats  # Σ coef·δ
    sums: Any
    report: Report


def play(
    federation: Federation,
    algorithm: Algorithm[Any, Any],
    x: Floats,
    state: Any = None,
    loss0: Floats | None = None,
) -> Round:
    """One round of an algorithm; the first has no state, and its losses are the first losses."""
    at = federation.spread(x)
    losses, slopes = federation.objective.losses(at), federation.objective.gradients(at)
    updates = federation.updates(x)
    norms = (np.linalg.norm(updates, axis=1), losses, losses if loss0 is None else loss0)
    rates = np.full_like(federation.sizes, federation.rate)
    report = Report(
        *map(_tensor, (federation.sizes, federation.steps, rates, *norms, np.linalg.norm(slopes, axis=1)))
    )
    part, usable = contribute(algorithm, report)
    total = part.coef @ _tensor(updates)
    sums = type(part.sums)(*(s.sum() for s in part.sums))
    model = _tensor(x)
    state = algorithm.init(model) if state is None else state
    model, state, _ = advance(algorithm, model, state, total, sums, usable.sum())
    return Round(model.numpy(), state, total.numpy(), sums, report)


def settle(
    federation: Federation, algorithm: Algorithm[Any, Any], x: Floats, rounds: int, tolerance: float = 1e-13
) -> Floats:
    """Where an algorithm comes to rest: rounds until it moves less than `tolerance`, or so many rounds."""
    state, loss0 = None, federation.objective.losses(federation.spread(x))
    for _ in range(rounds):
        played = play(federation, algorithm, x, state, loss0)
        moved = np.linalg.norm(played.x - x)
        x, state = played.x, played.state
        if moved <= tolerance:
            break
    return x


def newton(parts: Callable[[Floats], tuple[float, Floats, Floats]], x: Floats, steps: int = 200) -> Floats:
    """The minimiser of a smooth convex function that gives its value, gradient and Hessian."""
    value, slope, curve = parts(x)
    for _ in range(steps):
        step = np.linalg.solve(curve + 1e-14 * np.trace(curve) * np.eye(len(x)), slope)
        share, decrease = 1.0, float(slope @ step)
        while share > 1e-10:
            there = parts(x - share * step)
            lower = there[0] < value and there[0] <= value - 1e-4 * share * decrease
            # Near the minimum the value no longer falls beyond rounding, but the gradient does.
            flatter = decrease < 1e-10 * abs(value) and np.linalg.norm(there[1]) < np.linalg.norm(slope)
            if lower or flatter:
                break
            share /= 2
        else:
            return x
        x, (value, slope, curve) = x - share * step, there
    return x


def _tensor(values: Floats) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))
