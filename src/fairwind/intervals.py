"""How sure a difference between algorithms is: 95 % intervals over clients and seeds. See docs/metrics.md.

The variance over clients is a jackknife's (Busing, Meijer, van der Leeden: Delete-m jackknife for unequal m,
Statistics and Computing 9, 1999), that over seeds the sample variance. Both have few degrees of freedom, and
each is multiplied by its own quantile of Student's t, so that the interval does not fall below its level
(Banerjee: Approximate confidence interval for linear functions of means of k populations, Sankhyā 22, 1960).
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairwind.runs.schema import ClientMetric
from fairwind.scores import Kind

Floats = NDArray[np.float64]

LEVEL = 0.95
GROUPS = 500  # of clients that are left out in turn: one client each, where there are no more
AT_ONCE = 2**18  # weights held at a time, which stay in the cache
KEYS = tuple(name for name in get_args(ClientMetric) if name != "worst")
# One client is no sample, and leaving clients out says nothing of extremes.


class Interval(NamedTuple):
    """A difference, and the 95 % confidence interval around it."""

    difference: float  #: The first less the second.
    low: float  #: Lower end of the interval.
    high: float  #: Upper end.


class Jackknife(NamedTuple):
    """Every measure of R runs, once as it is and then without each of G groups of clients."""

    values: dict[str, Floats]  # by measure, (1 + G, R); the first row is as measured
    shares: Floats  # (G,) of the clients that are in the group

    def interval(
        self, key: str, mine: Sequence[int], theirs: Sequence[int] = (), comparisons: int = 1
    ) -> Interval | None:
        """The mean over runs, less that over `theirs` under the same seeds in the same order.

        It is widened for so many comparisons, so that all of them hold at once (Bonferroni). With one seed it
        is of these models, over clients alone. None where there is no interval.
        """
        values = self.values[key][:, list(mine)]
        if theirs:
            values = values - self.values[key][:, list(theirs)]
        seeds, miss = values.shape[1], (1 - LEVEL) / comparisons
        if len(self.shares) < 2 or not np.isfinite(values).all():
            return None
        over_clients = self._variance(values.mean(axis=1))
        square = student(miss, len(self.shares) - 1) ** 2 * over_clients
        if seeds > 1:
            square += student(miss, seeds - 1) ** 2 * float(values[0].var(ddof=1)) / seeds
        centre, half = float(values[0].mean()), math.sqrt(square)
        return Interval(centre, centre - half, centre + half)

    def _variance(self, values: Floats) -> float:
        """Over clients, of a number (1 + G,) as it is and without each group."""
        parts = 1 / self.shares
        pseudo = parts * values[0] - (parts - 1) * values[1:]
        centre = float((pseudo * self.shares).sum())
        return float(((pseudo - centre) ** 2 / (parts - 1)).mean())


def jackknife(score: Floats, loss: Floats | None, size: Floats, sign: int) -> Jackknife:
    """Measures runs (R, K) whose scores are all defined; sign is −1 where lower scores are better."""
    clients = score.shape[1]
    groups = min(clients, GROUPS)
    group = np.random.default_rng(0).permutation(np.arange(clients) % groups)  # clients may lie in some order
    members = np.bincount(group, minlength=groups)
    orders = np.argsort(score, axis=1, kind="stable")
    of_loss = None if loss is None else np.argsort(loss, axis=1, kind="stable")
    given = score, orders, loss, of_loss, size, sign
    parts = [_measured(np.ones((clients, 1)), *given)]
    step = max(1, AT_ONCE // clients)
    for begin in range(0, groups if groups > 1 else 0, step):
        out = np.arange(begin, min(groups, begin + step))
        # The others stand for those left out, so that 30 % of the clients remain as many.
        weights = np.where(group[:, None] == out, 0, clients / (clients - members[out]))
        parts.append(_measured(weights, *given))
    values = {key: np.concatenate([part[key] for part in parts], axis=1).T for key in parts[0]}
    return Jackknife(values, members[: groups if groups > 1 else 0] / clients)


def paired_differences(
    a: ArrayLike, b: ArrayLike, *, kind: Kind = "accuracy", comparisons: int = 1
) -> dict[str, Interval]:
    """How far average, STD and worst 30 % of scores `a` (seeds, K) lie above those of `b`.

    Clients and seeds are the same in both, so that what makes a client hard for both cancels out. Clients
    without a score are left out. A measure without an interval is left out, too.
    """
    x, y = (np.asarray(v, dtype=np.float64) for v in (a, b))
    tested = np.isfinite(x).all(axis=0) & np.isfinite(y).all(axis=0)
    both = np.concatenate([x, y])[:, tested]
    if not both.shape[1]:
        return {}
    found = jackknife(both, None, np.ones(both.shape[1]), -1 if kind == "lower" else 1)
    mine, theirs = range(len(x)), range(len(x), len(both))
    intervals = {k: found.interval(k, mine, theirs, comparisons) for k in ("avg", "std", "worst30")}
    return {key: interval for key, interval in intervals.items() if interval is not None}


def share(count: int, of: int) -> Interval:
    """A share in percent, and its 95 % interval by Wilson's score, which stays within 0 and 100."""
    p, square = count / of, student(1 - LEVEL, max(1, of - 1)) ** 2
    centre, half = p + square / (2 * of), math.sqrt(square * (p * (1 - p) + square / (4 * of)) / of)
    ends = ((centre - half) / (1 + square / of), (centre + half) / (1 + square / of))
    return Interval(100 * p, 100 * max(0.0, ends[0]), 100 * min(1.0, ends[1]))


def over_draws(differences: Sequence[float], comparisons: int = 1) -> Interval:
    """The mean of differences on independent draws of the data, at least two, one number of each draw.

    A draw has clients of its own, so that its number varies with them, too.
    """
    values = np.asarray(differences, dtype=np.float64)
    spread = float(values.std(ddof=1)) / math.sqrt(len(values))
    half = student((1 - LEVEL) / comparisons, len(values) - 1) * spread
    return Interval(float(values.mean()), float(values.mean()) - half, float(values.mean()) + half)


@cache
def student(miss: float, freedom: int) -> float:
    """What |t| exceeds with probability `miss`, by bisection (Abramowitz, Stegun: 26.7.3, 26.7.4)."""
    odd = freedom % 2
    powers = np.arange(1 if odd else 0, freedom - 1, 2)
    ratios = np.where(powers > odd, (powers - 1) / np.maximum(1, powers), 1.0)
    factors = np.cumprod(ratios)

    def within(angle: float) -> float:
        series = math.sin(angle) * float((factors * math.cos(angle) ** powers).sum())
        return 2 / math.pi * (angle + series) if odd else series

    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < 1 - miss else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _measured(
    weights: Floats,
    score: Floats,
    orders: NDArray[np.int64],
    loss: Floats | None,
    of_loss: NDArray[np.int64] | None,
    size: Floats,
    sign: int,
) -> dict[str, Floats]:
    """The measures (R, G) of `metrics.fairness` over clients of these weights (K, G), which sum to K."""
    clients = score.shape[1]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        avg, square = score @ weights / clients, score**2 @ weights / clients
        by_size = size[:, None] * weights
        total = by_size.sum(axis=0)
        weighted = score @ by_size / total
        std = np.sqrt(np.maximum(0, square - avg**2))
        found = {
            "avg": avg,
            "std": std,
            "avg_weighted": weighted,
            "std_weighted": np.sqrt(np.maximum(0, score**2 @ by_size / total - weighted**2)),
            "rsd_error": np.where(avg < 100, std / (100 - avg), 0),
            "jain": np.where(square > 0, avg**2 / square, 1),
            "std_beyond_noise": _beyond_noise(weights, score, size),
        }
        of_ranks = np.stack([_by_rank(weights, *row) for row in zip(score, orders, strict=True)])  # (R, 3, G)
        found["worst30"], found["best30"] = (of_ranks[:, 0 if s > 0 else 1] for s in (sign, -sign))
        found["gini"] = of_ranks[:, 2]
        found["worst30_weighted"] = np.stack(
            [_worst_by_size(weights, by_size, x, o[::sign]) for x, o in zip(score, orders, strict=True)]
        )
        if loss is not None and of_loss is not None:
            found["loss_avg"] = loss @ weights / clients
            found["loss_worst30"] = np.stack(
                [_by_rank(weights, *row)[1] for row in zip(loss, of_loss, strict=True)]
            )
    return {key: found[key] for key in KEYS if loss is not None or not key.startswith("loss")}


def _by_rank(weights: Floats, values: Floats, order: NDArray[np.int64]) -> Floats:
    """Means of the lowest and of the highest 30 % of the clients, and Gini: (3, G).

    Σ x_k·(u_k − u_{k−1}) over the clients in order is summed by parts, as −Σ u_k·(x_{k+1} − x_k) and what
    stands at the ends: so the one cumulative sum of the weights gives all three.
    """
    x, clients = values[order], len(values)
    wanted = math.ceil(0.3 * clients - 1e-9)
    upto = np.cumsum(weights[order[:-1]], axis=0)  # (K − 1, G)
    steps = np.diff(x)
    low = x[-1] - steps @ np.minimum(upto, wanted) / wanted
    high = x[0] + steps @ np.minimum(clients - upto, wanted) / wanted
    total = values @ weights
    pairs = steps @ (upto * (clients - upto))
    gini = np.where(total > 0, pairs / (clients * np.where(total > 0, total, 1)), 0)
    return np.stack([low, high, gini])


def _worst_by_size(weights: Floats, by_size: Floats, values: Floats, order: NDArray[np.int64]) -> Floats:
    """The mean of the worst 30 % by size (G,), equal values counting alike; `order` has the worst first."""
    wanted = math.ceil(0.3 * len(values) - 1e-9)
    starts = np.flatnonzero(np.diff(values[order], prepend=np.inf))
    counts = np.add.reduceat(weights[order], starts, axis=0)  # (distinct values, G)
    sizes = np.add.reduceat(by_size[order], starts, axis=0)
    left = wanted - (np.cumsum(counts, axis=0) - counts)
    taken = sizes * np.clip(left / np.where(counts > 0, counts, 1), 0, 1)
    mean: Floats = values[order][starts] @ taken / taken.sum(axis=0)
    return mean


def _beyond_noise(weights: Floats, score: Floats, size: Floats) -> Floats:
    """As in `metrics`: the spread without what binomial sampling explains, clients of one sample left out."""
    several = size > 1
    if not several.any():
        return np.full((len(score), weights.shape[1]), np.nan)
    a, n, times = score[:, several] / 100, size[several], weights[several]
    total = times.sum(axis=0)
    mean = a @ times / total
    variance = a**2 @ times / total - mean**2
    noise = (a * (1 - a) / (n - 1)) @ times / total
    spread: Floats = 100 * np.sqrt(np.maximum(0, variance - noise))
    return spread
