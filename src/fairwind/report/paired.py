"""Which differences between algorithms are more than noise; the intervals are those of fairwind.intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fairwind.intervals import Interval, Jackknife, jackknife
from fairwind.report.record import Record
from fairwind.report.table import Measure, measures


@dataclass(frozen=True)
class Paired:
    """What is known of the runs of a record: every measure, and how far it depends on the clients."""

    record: Record
    rows: dict[str, dict[int, int]]  # by label and seed, the run
    jackknife: Jackknife

    def difference(self, key: str, one: str, other: str, comparisons: int = 0) -> Interval | None:
        """How far `one` lies above `other`, paired over clients and common seeds; None where unknown.

        The interval holds together with those of so many other comparisons; if not given, with those of one
        algorithm with each other one.
        """
        seeds = self.common(one, other)
        if key not in self.jackknife.values or not seeds:
            return None
        mine, theirs = ([self.rows[x][s] for s in seeds] for x in (one, other))
        return self.jackknife.interval(key, mine, theirs, comparisons or max(1, len(self.record.labels) - 1))

    def common(self, one: str, other: str) -> list[int]:
        """The seeds that both were trained with."""
        return [seed for seed in self.rows.get(one, {}) if seed in self.rows.get(other, {})]

    def level(self, key: str, label: str) -> Interval | None:
        """A measure of one algorithm, and its interval."""
        rows = list(self.rows.get(label, {}).values())
        return self.jackknife.interval(key, rows) if rows and key in self.jackknife.values else None

    def rivals(self, measure: Measure, first: str, among: Sequence[str] | None = None) -> list[str]:
        """The models, of all or some, that `first`, the best, is not shown to be ahead of, the nearest first.

        With one seed these are all: it says nothing of other seeds.
        """
        means = _means(self.record, measure)
        sign = 1 if measure.best == "highest" else -1
        rivals = []
        for label, mean in means.items():
            if label == first or (among is not None and label not in among):
                continue
            tied = measure.text(mean) == measure.text(means[first])
            between = self.difference(measure.key, first, label)
            apart = 0.0 if between is None else min(sign * between.low, sign * between.high)
            if tied or len(self.common(first, label)) < 2 or float(measure.text(apart)) <= 0:
                rivals.append(label)
        return sorted(rivals, key=lambda label: -sign * means[label])

    @cached_property
    def ahead(self) -> dict[str, str]:
        """By measure, the algorithm that is ahead of every other one beyond its interval, where one is."""
        best_by_measure: dict[str, str] = {}
        if len(self.record.labels) < 2:
            return best_by_measure
        for measure in measures(self.record.results):
            best = best_labels(self.record, measure)
            if len(best) == 1 and measure.key in self.jackknife.values and not self.rivals(measure, best[0]):
                best_by_measure[measure.key] = best[0]
        return best_by_measure


def best_labels(record: Record, measure: Measure) -> list[str]:
    """The algorithms with the best mean over seeds: several where they are equal as shown."""
    means = _means(record, measure)
    best = (max if measure.best == "highest" else min)(means.values(), default=0.0)
    return [label for label, mean in means.items() if measure.text(mean) == measure.text(best)]


def _means(record: Record, measure: Measure) -> dict[str, float]:
    """By algorithm, where there is one."""
    values = {row["algorithm"]: row.get(measure.key) for row in record.results["summary"]}
    means = {label: value["mean"] for label, value in values.items() if value is not None}
    return {label: mean for label, mean in means.items() if mean is not None}


def paired(record: Record) -> Paired:
    """Measures a record's runs; algorithms without a score for each tested client are left out."""
    finite = np.isfinite(record.score)
    tested = finite.any(axis=0)
    there = [r for r in range(len(record.score)) if tested.any() and finite[r, tested].all()]
    rows: dict[str, dict[int, int]] = {}
    for place, r in enumerate(there):
        run = record.results["runs"][r]
        rows.setdefault(run["algorithm"], {})[run["seed"]] = place
    if not there:
        return Paired(record, {}, Jackknife({}, np.zeros(0)))
    score = record.score[there][:, tested].astype(np.float64)
    loss = None if record.loss is None else record.loss[there][:, tested].astype(np.float64)
    size = record.test_size[tested].astype(np.float64)
    return Paired(record, rows, jackknife(score, loss, size, record.judged.sign))
