"""Fairness metrics, all from one vector of clients' scores. Definitions: docs/metrics.md."""

import math
from collections.abc import Mapping, Sequence
from typing import cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairwind.runs.schema import (
    ClientMetric,
    GroupMetric,
    GroupMetrics,
    HistoryLine,
    Metric,
    ModelMetrics,
    OverSeeds,
)
from fairwind.scores import Kind

Floats = NDArray[np.float64]

METRICS: tuple[Metric, ...] = get_args(ClientMetric)
OF_GROUPS: tuple[Metric, ...] = get_args(GroupMetric)  # where clients are in groups
OF_ACCURACIES = ("std_beyond_noise", "rsd_error", "jain", "gini")  # meaningless for other scores


def fairness(score: ArrayLike, loss: ArrayLike, size: ArrayLike, kind: Kind = "accuracy") -> dict[str, float]:
    """The metrics of one model over its clients.

    `score` is one number per client, accuracies in percent; `size` are their numbers of test samples. Clients
    without test samples or with an undefined score are left out; if all scores are undefined, none are.
    """
    a, f, n = (np.asarray(v, dtype=np.float64) for v in (score, loss, size))
    if not (n > 0).any():
        raise ValueError("no client has test samples")
    there = _counted(a, n, kind)
    a, n, f = a[there], n[there], f[n > 0]
    with np.errstate(invalid="ignore", over="ignore"):  # of a run that diverged
        return _fairness(a, n, f, kind)


def _fairness(a: Floats, n: Floats, f: Floats, kind: Kind) -> dict[str, float]:
    sign = -1 if kind == "lower" else 1
    weighted = float(np.average(a, weights=n))
    values = {
        "avg": float(a.mean()),
        "std": float(a.std()),
        "worst30": _signed(sign, worst_mean(sign * a)),
        "best30": _signed(-sign, worst_mean(-sign * a)),
        "worst": _signed(sign, float((sign * a).min())),
        "avg_weighted": weighted,
        "std_weighted": math.sqrt(float(np.average((a - weighted) ** 2, weights=n))),
        "worst30_weighted": _signed(sign, worst_mean(sign * a, n)),
        "loss_avg": float(f.mean()),
        "loss_worst30": 0.0 - worst_mean(-f),
    }
    if kind == "accuracy":
        error = 100 - a
        values |= {
            "std_beyond_noise": _beyond_noise(a, n),
            "rsd_error": float(error.std() / error.mean()) if error.mean() > 0 else 0.0,
            "jain": _jain(a),
            "gini": _gini(a),
        }
    assert set(values) <= set(METRICS)  # else a new one would be lost without a word
    return {name: values[name] for name in METRICS if name in values}


def by_group(score: ArrayLike, size: ArrayLike, groups: Sequence[str], kind: Kind) -> GroupMetrics:
    """Each group's average, the worst group, and its gap to the best; empty without groups.

    A group's average counts each client once. Clients are left out as in `fairness`; a group without any
    remaining client has no average, and is neither worst nor best. Values that are not finite become null.
    """
    if not groups:
        return {}
    a, n = np.asarray(score, dtype=np.float64), np.asarray(size, dtype=np.float64)
    labels = sorted(set(groups))
    place = {label: g for g, label in enumerate(labels)}
    there = _counted(a, n, kind)
    of = np.fromiter((place[label] for label in groups), np.int64, len(groups))[there]
    clients = np.bincount(of, minlength=len(labels))
    with np.errstate(invalid="ignore", over="ignore"):
        avg = finite(
            dict(zip(labels, (np.bincount(of, a[there], len(labels)) / clients).tolist(), strict=True))
        )
    result: GroupMetrics = {
        "groups": {
            label: {"clients": int(k), "avg": avg[label]} for label, k in zip(labels, clients, strict=True)
        },
        "worst_group": None,
        "worst_group_avg": None,
        "group_gap": None,
    }
    tested = {label: avg[label] for label, k in zip(labels, clients, strict=True) if k}
    averages = [v for v in tested.values() if v is not None]
    if averages and len(averages) == len(tested):
        worst, best = (max, min) if kind == "lower" else (min, max)
        result["worst_group_avg"] = worst(averages)
        result["worst_group"] = next(label for label in tested if tested[label] == worst(averages))
        result["group_gap"] = abs(best(averages) - worst(averages))
    return result


def model_metrics(
    score: ArrayLike, loss: ArrayLike, size: ArrayLike, kind: Kind, groups: Sequence[str] = ()
) -> ModelMetrics:
    """The metrics of one model over its clients and their groups, as files hold them."""
    values = finite(fairness(score, loss, size, kind)) | {**by_group(score, size, groups, kind)}
    return cast(ModelMetrics, values)


def no_metrics(kind: Kind) -> ModelMetrics:
    """The same where no client was tested."""
    names = [name for name in METRICS if kind == "accuracy" or name not in OF_ACCURACIES]
    return cast(ModelMetrics, dict.fromkeys(names))


def history_line(
    algorithm: str, seed: int, round: int, scores: Mapping[str, ModelMetrics], scalars: Mapping[str, float]
) -> HistoryLine:
    """A model after a round: its metrics by each score, the main one first, and scalars of the run."""
    first, *others = scores
    line: dict[str, object] = {"algorithm": algorithm, "seed": seed, "round": round, **scores[first]}
    line |= {name: value for name, value in finite(scalars).items() if name not in line}
    if others:
        line["scores"] = {name: scores[name] for name in others}
    return cast(HistoryLine, line)


def _counted(a: Floats, n: Floats, kind: Kind) -> NDArray[np.bool_]:
    """The clients that metrics include: those with test samples and a defined score, if any has one."""
    there: NDArray[np.bool_] = n > 0
    if kind != "accuracy" and np.isfinite(a[there]).any():
        there = there & ~np.isnan(a)
    return there


def _signed(sign: int, value: float) -> float:
    return 0.0 + sign * value  # without a negative zero


def over_seeds(values: Sequence[float | None]) -> OverSeeds:
    """Mean and (population) standard deviation over seeds; null if any value is."""
    present = [v for v in values if v is not None]
    if len(present) < len(values):
        return {"mean": None, "std": None}
    return {"mean": float(np.mean(present)), "std": float(np.std(present))}


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """The same, with null for values that are not finite, because JSON has no NaN."""
    return {k: v if math.isfinite(v) else None for k, v in values.items()}


def worst_mean(values: Floats, weights: Floats | None = None) -> float:
    """Mean of the lowest 30 %, at least one value; NaN if any value is.

    With weights it is the weighted mean of the same values. Of equal values at the edge each counts in part,
    so that their order does not matter.
    """
    if np.isnan(values).any():
        return math.nan
    k = math.ceil(0.3 * len(values) - 1e-9)
    if weights is None:
        return float(np.sort(values)[:k].mean())
    edge = np.partition(values, k - 1)[k - 1]
    below, at = values < edge, values == edge
    share = np.where(below, 1.0, np.where(at, (k - below.sum()) / at.sum(), 0.0))
    kept = share > 0
    return float(np.average(values[kept], weights=(share * weights)[kept]))


def _jain(a: Floats) -> float:
    """Jain's index (Σa)²/(K·Σa²): 1 if all are equal, 1/K if one client has everything."""
    if not a.any():
        return 1.0
    a = a / a.max()  # so that no square underflows
    return float(a.sum() ** 2 / (len(a) * (a**2).sum()))


def _gini(a: Floats) -> float:
    """Gini coefficient: mean absolute difference of all pairs over twice the mean, computed by ranks."""
    if not a.any():
        return 0.0
    rank = np.arange(1, len(a) + 1)
    return max(0.0, float((2 * rank - len(a) - 1) @ np.sort(a) / (len(a) * a.sum())))


def _beyond_noise(a: Floats, n: Floats) -> float:
    """The STD without binomial sampling noise, over clients with at least two test samples."""
    a, n = a[n > 1] / 100, n[n > 1]
    if not len(a):
        return math.nan
    noise = (a * (1 - a) / (n - 1)).mean()  # the unbiased estimate of p(1−p)/n
    return 100 * math.sqrt(max(0.0, float(a.var() - noise)))
