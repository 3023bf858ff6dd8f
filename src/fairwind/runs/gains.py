"""Who gains from joining the federation: each client's score less that of the model it trains alone."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairwind.intervals import Interval, paired_differences, share
from fairwind.runs.schema import IntervalJson, JoiningRow, JoiningSummary, RunRow
from fairwind.scores import Kind

MOST_LOSERS = 20  # that results name
ROUNDING = 4 * np.finfo(np.float32).eps  # of scores as files keep them: a smaller gain is none


class Joining(NamedTuple):
    """What an algorithm's model gives the clients, compared with training alone; larger is better."""

    algorithm: str
    gains: NDArray[np.float64]  #: (K,) Of each client, a mean over seeds; NaN where a score is not defined.
    average: Interval | None  #: Over clients, with its 95 % interval; None if a tested client has no gain.

    @property
    def better(self) -> int:
        """Clients that gain."""
        return int((self.gains > 0).sum())

    @property
    def worse(self) -> int:
        """Clients that lose."""
        return int((self.gains < 0).sum())

    @property
    def equal(self) -> int:
        """Clients to which it makes no difference."""
        return int((self.gains == 0).sum())

    @property
    def better_share(self) -> Interval | None:
        """Share of the clients that gain, in percent, with its 95 % interval over clients."""
        known = self.better + self.worse + self.equal
        return share(self.better, known) if known else None

    def losers(self, names: Sequence[str]) -> list[tuple[str, float]]:
        """The clients that lose, the one that loses most first."""
        order = np.argsort(self.gains, kind="stable")
        return [(names[k], float(self.gains[k])) for k in order if self.gains[k] < 0]


def joining(runs: Sequence[RunRow], score: ArrayLike, kind: Kind) -> list[Joining]:
    """Of each other algorithm, if training alone is among the runs, which have scores (R, K)."""
    alone, values = alone_label(runs), np.asarray(score, dtype=np.float64)
    tested = np.isfinite(values).any(axis=0)
    places: dict[str, dict[int, int]] = {}
    for r, run in enumerate(runs[: len(values)]):
        places.setdefault(run["algorithm"], {})[run["seed"]] = r
    joined = []
    for label, mine in places.items():
        seeds = [seed for seed in mine if alone is not None and seed in places[alone]]
        if alone is None or label == alone or not seeds:
            continue
        own, theirs = values[[mine[s] for s in seeds]], values[[places[alone][s] for s in seeds]]
        pair = (theirs, own) if kind == "lower" else (own, theirs)
        gains = np.full(values.shape[1], np.nan)
        defined = np.isfinite(np.concatenate(pair)).all(axis=0)
        known = np.stack(pair)[:, :, defined]
        mean = (known[0] - known[1]).mean(axis=0)
        gains[defined] = np.where(np.abs(mean) > ROUNDING * np.abs(known).max(axis=(0, 1)), mean, 0)
        apart = {}
        if (defined | ~tested).all():  # else the average would be of those that did not diverge
            apart = paired_differences(*pair, kind=kind, comparisons=len(places) - 1)
        joined.append(Joining(label, gains, apart.get("avg")))
    return joined


def alone_label(runs: Sequence[RunRow]) -> str | None:
    """What training alone is called here, if it is compared."""
    return next((run["algorithm"] for run in runs if run.get("baseline") == "local"), None)


def joining_summary(
    runs: Sequence[RunRow], score: ArrayLike, kind: Kind, names: Sequence[str]
) -> JoiningSummary | None:
    """The same as results hold it."""
    alone = alone_label(runs)
    if alone is None:
        return None
    rows = []
    for each in joining(runs, score, kind):
        row: JoiningRow = {
            "algorithm": each.algorithm,
            "better": each.better,
            "worse": each.worse,
            "equal": each.equal,
            "losers": dict(each.losers(names)[:MOST_LOSERS]),
        }
        if each.better_share is not None:
            row["better_share"] = _json(each.better_share)
        if each.average is not None:
            row["average"] = _json(each.average)
        rows.append(row)
    return {"alone": alone, "algorithms": rows}


def _json(interval: Interval) -> IntervalJson:
    return {"value": interval.difference, "low": interval.low, "high": interval.high}
