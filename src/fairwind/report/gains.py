"""Who gains from joining the federation: each client's score less that of the model it trains alone."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairwind.intervals import Interval
from fairwind.report.paired import Paired
from fairwind.report.record import Record

ALONE = "local"  # the algorithm that trains each client by itself


class Joining(NamedTuple):
    """What an algorithm's model gives the clients, compared with training alone; larger is better."""

    algorithm: str
    gains: NDArray[np.float64]  #: (K,) Of each client, a mean over seeds; NaN without test samples.
    average: Interval | None  #: Over clients, with its 95 % interval.

    @property
    def better(self) -> int:
        """Clients that gain."""
        return int((self.gains > 0).sum())

    @property
    def worse(self) -> int:
        """Clients that lose."""
        return int((self.gains < 0).sum())

    def losers(self, names: Sequence[str]) -> list[tuple[str, float]]:
        """The clients that lose, the one that loses most first."""
        order = np.argsort(self.gains, kind="stable")
        return [(names[k], float(self.gains[k])) for k in order if self.gains[k] < 0]


def joining(record: Record, runs: Paired) -> list[Joining]:
    """Of each algorithm, if training alone is among them."""
    if ALONE not in runs.rows:
        return []
    found, sign = [], record.judged.sign
    for label in runs.rows:
        seeds = runs.common(label, ALONE)
        if label == ALONE or not seeds:
            continue
        mine, alone = (_scores(record, of, seeds) for of in (label, ALONE))
        gains = sign * (mine - alone).mean(axis=0)
        average = runs.difference("avg", label, ALONE)
        if average is not None and sign < 0:
            average = Interval(-average.difference, -average.high, -average.low)
        found.append(Joining(label, gains, average))
    return found


def _scores(record: Record, label: str, seeds: list[int]) -> NDArray[np.float64]:
    """(seeds, K)."""
    rows = {run["seed"]: r for r, run in enumerate(record.results["runs"]) if run["algorithm"] == label}
    return record.score[[rows[seed] for seed in seeds]].astype(np.float64)
