"""Which differences between algorithms are more than noise: seeds and clients redrawn, the same for all."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairwind.metrics import Interval
from fairwind.report.record import Record
from fairwind.report.table import Measure, measures

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

DRAWS = 1000
AT_ONCE = 2**18  # counts held at a time, which stay in the cache
KEYS = (
    *("avg", "std", "worst30", "best30", "avg_weighted", "std_weighted", "std_beyond_noise"),
    *("rsd_error", "jain", "gini", "loss_avg", "loss_worst30"),
)
# Not "worst": one client is no sample, and redrawing says nothing of extremes.


@dataclass(frozen=True)
class Paired:
    """Every measure of every run, once as it is and then with the clients redrawn."""

    record: Record
    rows: dict[str, dict[int, int]]  # by label and seed, the run
    values: dict[str, Floats]  # by measure, (1 + DRAWS, R); the first row is as measured
    places: Floats  # (DRAWS, most seeds) in [0, 1): which seeds are redrawn

    def difference(self, key: str, one: str, other: str) -> Interval | None:
        """How far `one` lies above `other`, paired over clients and common seeds; None where unknown."""
        if key not in self.values:
            return None
        seeds = [seed for seed in self.rows.get(one, {}) if seed in self.rows.get(other, {})]
        if not seeds:
            return None
        mine, theirs = (self.values[key][:, [self.rows[x][s] for s in seeds]] for x in (one, other))
        return self._interval(mine - theirs)

    def level(self, key: str, label: str) -> Interval | None:
        """A measure of one algorithm, and its interval."""
        rows = list(self.rows.get(label, {}).values())
        return self._interval(self.values[key][:, rows]) if rows and key in self.values else None

    def _interval(self, values: Floats) -> Interval | None:
        """Of the mean over seeds, (1 + DRAWS, seeds)."""
        seeds = values.shape[1]
        drawn = (self.places[:, :seeds] * seeds).astype(np.int64)
        redrawn = np.take_along_axis(values[1:], drawn, axis=1).mean(axis=1)
        if not np.isfinite(redrawn).all():
            return None
        low, high = np.percentile(redrawn, (2.5, 97.5))
        return Interval(float(values[0].mean()), float(low), float(high))

    def rivals(self, measure: Measure, first: str) -> list[str]:
        """The algorithms that `first`, the best, is not shown to be ahead of, the nearest first."""
        given = {row["algorithm"]: (row.get(measure.key) or {}).get("mean") for row in self._summary}
        means = {label: float(mean) for label, mean in given.items() if mean is not None}
        sign = 1 if measure.best == "highest" else -1
        found = []
        for label, mean in means.items():
            if label == first:
                continue
            tied = measure.text(mean) == measure.text(means[first])
            between = self.difference(measure.key, first, label)
            apart = 0.0 if between is None else min(sign * between.low, sign * between.high)
            if tied or float(measure.text(apart)) <= 0:
                found.append(label)
        return sorted(found, key=lambda label: -sign * means[label])

    @cached_property
    def ahead(self) -> dict[str, str]:
        """By measure, the algorithm that is ahead of every other one beyond its interval, where one is."""
        found: dict[str, str] = {}
        if len(self._summary) < 2:
            return found
        for measure in measures(self.record.results):
            best = best_label(self.record, measure)
            if best is not None and measure.key in self.values and not self.rivals(measure, best):
                found[measure.key] = best
        return found

    @property
    def _summary(self) -> list[dict[str, Any]]:
        summary: list[dict[str, Any]] = self.record.results["summary"]
        return summary


def best_label(record: Record, measure: Measure) -> str | None:
    """The algorithm with the best mean over seeds."""
    means = {row["algorithm"]: (row.get(measure.key) or {}).get("mean") for row in record.results["summary"]}
    known = {label: mean for label, mean in means.items() if mean is not None}
    sign = 1 if measure.best == "highest" else -1
    return max(known, key=lambda label: sign * known[label]) if known else None


def paired(record: Record) -> Paired:
    """Redraws the clients of a record; algorithms without a score for each tested client are left out."""
    finite = np.isfinite(record.score)
    tested = finite.any(axis=0)
    there = [r for r in range(len(record.score)) if tested.any() and finite[r, tested].all()]
    rows: dict[str, dict[int, int]] = {}
    for place, r in enumerate(there):
        run = record.results["runs"][r]
        rows.setdefault(run["algorithm"], {})[run["seed"]] = place
    draw = np.random.default_rng(0)
    places = draw.random((DRAWS, max((len(seeds) for seeds in rows.values()), default=1)))
    if not there:
        return Paired(record, {}, {}, places)
    score = record.score[there][:, tested].astype(np.float64)
    loss = None if record.loss is None else record.loss[there][:, tested].astype(np.float64)
    given = score, loss, record.test_size[tested].astype(np.float64), record.judged.sign
    clients = score.shape[1]
    parts = [_measured(np.ones((clients, 1), np.float32), *given)]
    step = max(1, AT_ONCE // clients)
    for begin in range(0, DRAWS, step):
        parts.append(_measured(_redrawn(draw, clients, min(step, DRAWS - begin)), *given))
    values = {key: np.concatenate([part[key] for part in parts], axis=1).T for key in parts[0]}
    return Paired(record, rows, values, places)


def _redrawn(draw: np.random.Generator, clients: int, draws: int) -> Singles:
    """How often each client is drawn, (K, draws)."""
    drawn = draw.integers(clients, size=(draws, clients)) * draws + np.arange(draws)[:, None]
    return np.bincount(drawn.ravel(), minlength=clients * draws).astype(np.float32).reshape(clients, draws)


def _measured(
    counts: Singles, score: Floats, loss: Floats | None, size: Floats, sign: int
) -> dict[str, Floats]:
    """The measures (R, draws) over clients that count so often (K, draws): those of `metrics.fairness`."""
    clients = score.shape[1]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        avg, square = score @ counts / clients, score**2 @ counts / clients
        weights = size[:, None] * counts
        weight = weights.sum(axis=0)
        weighted = score @ weights / weight
        std = np.sqrt(np.maximum(0, square - avg**2))
        found = {
            "avg": avg,
            "std": std,
            "avg_weighted": weighted,
            "std_weighted": np.sqrt(np.maximum(0, score**2 @ weights / weight - weighted**2)),
            "rsd_error": np.where(avg < 100, std / (100 - avg), 0),
            "jain": np.where(square > 0, avg**2 / square, 1),
            "std_beyond_noise": _beyond_noise(counts, score, size),
        }
        of_ranks = np.stack([_by_rank(counts, row) for row in score])  # (R, 3, draws)
        found["worst30"], found["best30"] = (of_ranks[:, 0 if s > 0 else 1] for s in (sign, -sign))
        found["gini"] = of_ranks[:, 2]
        if loss is not None:
            found["loss_avg"] = loss @ counts / clients
            found["loss_worst30"] = np.stack([_by_rank(counts, row)[1] for row in loss])
    return {key: found[key] for key in KEYS if key in found}


def _by_rank(counts: Singles, values: Floats) -> Floats:
    """Means of the lowest and of the highest 30 % of the clients, and Gini: (3, draws).

    Σ x_k·(u_k − u_{k−1}) over the clients in order is summed by parts, as −Σ u_k·(x_{k+1} − x_k) and what
    stands at the ends: so the one cumulative sum of the counts gives all three.
    """
    order = np.argsort(values, kind="stable")
    x, clients = values[order], len(values)
    wanted = math.ceil(0.3 * clients - 1e-9)
    upto = np.cumsum(counts[order[:-1]], axis=0, dtype=np.float32)  # (K − 1, draws)
    steps = np.diff(x).astype(np.float32)
    low = x[-1] - steps @ np.minimum(upto, wanted) / wanted
    high = x[0] + steps @ np.minimum(clients - upto, wanted) / wanted
    total = values @ counts
    pairs = steps @ (upto * (clients - upto))
    gini = np.where(total > 0, pairs / (clients * np.where(total > 0, total, 1)), 0)
    return np.stack([low, high, gini]).astype(np.float64)


def _beyond_noise(counts: Singles, score: Floats, size: Floats) -> Floats:
    """As in `metrics`: the spread without what binomial sampling explains, clients of one sample left out."""
    several = size > 1
    if not several.any():
        return np.full((len(score), counts.shape[1]), np.nan)
    a, n, times = score[:, several] / 100, size[several], counts[several]
    total = np.maximum(1, times.sum(axis=0))
    mean = a @ times / total
    variance = a**2 @ times / total - mean**2
    noise = (a * (1 - a) / (n - 1)) @ times / total
    spread: Floats = 100 * np.sqrt(np.maximum(0, variance - noise))
    return spread
