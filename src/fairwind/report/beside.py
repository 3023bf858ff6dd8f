"""Our numbers beside the paper's, and algorithms beside each other."""

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np

from fairwind.metrics import Interval, paired_differences
from fairwind.report.record import Record
from fairwind.report.table import MEASURES, algorithm_of

Summary = list[dict[str, Any]]

BESIDE = {m.key: m for m in MEASURES if m.key in ("avg", "std", "worst30")}  # what the paper prints
# The paper does not say whether clients are weighted by their size. Its authors' public code weights the
# average of accuracies, and not their standard deviation.
WEIGHTED = "all weighted"
STATISTICS = {
    "plain": {"avg": "avg", "std": "std", "worst30": "worst30"},
    "weighted average": {"avg": "avg_weighted", "std": "std", "worst30": "worst30"},
    "weighted average and STD": {"avg": "avg_weighted", "std": "std_weighted", "worst30": "worst30"},
    WEIGHTED: {"avg": "avg_weighted", "std": "std_weighted", "worst30": "worst30_weighted"},
}


class Cell(NamedTuple):
    """One measure of one algorithm, ours and the paper's: mean and standard deviation over seeds."""

    ours: float | None
    ours_std: float | None
    paper: float
    paper_std: float
    in_order: bool  # whether the algorithm has the same place among all as in the paper

    @property
    def difference(self) -> float | None:
        return None if self.ours is None else self.ours - self.paper

    @property
    def pooled(self) -> float | None:
        """The difference in units of the pooled standard deviation over seeds."""
        spread = math.sqrt(((self.ours_std or 0) ** 2 + self.paper_std**2) / 2)
        return None if self.difference is None or not spread else self.difference / spread


@cache
def published() -> dict[str, Any]:
    """The paper's tables: src/fairwind/paper/published.json."""
    text = (files("fairwind.paper") / "published.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def least_std(average: float, worst: float, share: float) -> float:
    """The smallest STD of clients of which this share has the mean `worst`, where each counts once.

    It is that of clients with two values, `worst` and one for all others. Means over seeds obey it as single
    seeds do, because it is linear.
    """
    return (average - worst) * math.sqrt(share / (1 - share))


class Row(NamedTuple):
    """A published row, and the smallest STD that it could have if each client counted once.

    The paper does not say how it rounds 30 % of the clients, so there is one for each way.
    """

    tables: tuple[str, ...]  # that print it
    algorithm: str
    average: float
    std: float
    worst30: float
    least_down: float  # with 30 % of the clients rounded down: the smaller one
    least_up: float

    def possible(self, rounded: Literal["down", "up"] = "down") -> bool:
        """Whether each client may have counted once; the printed numbers are rounded to two decimals."""
        return self.std + 0.01 >= (self.least_down if rounded == "down" else self.least_up)


@cache
def published_rows() -> tuple[Row, ...]:
    """The paper's distinct rows."""
    found: dict[tuple[Any, ...], Row] = {}
    for name, table in published()["tables"].items():
        clients, main_text = table["clients"], table.get("main_text", {})
        counts = math.floor(0.3 * clients + 1e-9), math.ceil(0.3 * clients - 1e-9)
        for algorithm, row in (*table["rows"].items(), *main_text.items()):
            average, std, worst = (row[key][0] for key in BESIDE)
            where = f"{name}, main text" if row in main_text.values() else name
            key = algorithm, average, std, worst
            tables = (*found[key].tables, where) if key in found else (where,)
            found[key] = Row(tables, *key, *(least_std(average, worst, n / clients) for n in counts))
    return tuple(found.values())


def statistics_of(table: str) -> str:
    """How a published table is compared: each client counted once, unless some row cannot be of that kind."""
    rows = [row for row in published_rows() if table in row.tables]
    return "plain" if all(row.possible() for row in rows) else WEIGHTED


def beside_paper(summary: Summary, table: str, statistics: str = "") -> dict[str, dict[str, Cell]]:
    """For each algorithm that both have, and each measure, our value and the paper's.

    The measures are those of `statistics_of` the table, or of the given statistics.
    """
    chosen = STATISTICS[statistics or statistics_of(table)]
    theirs = published()["tables"][table]["rows"]
    ours = {row["algorithm"]: row for row in summary if row["algorithm"] in theirs}
    cells: dict[str, dict[str, Cell]] = {label: {} for label in ours}
    for key, measure in BESIDE.items():
        own = chosen[key]
        sign = -1 if measure.best == "highest" else 1
        values = {label: row.get(own) or {"mean": None, "std": None} for label, row in ours.items()}
        known = [label for label in ours if values[label]["mean"] is not None]
        our_order = sorted(known, key=lambda label: sign * values[label]["mean"])
        their_order = sorted(known, key=lambda label: sign * theirs[label][key][0])
        for label in ours:
            same = label in known and our_order.index(label) == their_order.index(label)
            mean, std = theirs[label][key]
            cells[label][key] = Cell(values[label]["mean"], values[label]["std"], mean, std, same)
    return cells


def distance(cells: dict[str, dict[str, Cell]]) -> float | None:
    """The root of the mean squared difference from the paper over all cells, in points."""
    differences = [cell.difference for row in cells.values() for cell in row.values()]
    known = [d for d in differences if d is not None]
    return float(np.sqrt(np.mean(np.square(known)))) if known and len(known) == len(differences) else None


def against_others(record: Record) -> tuple[str, dict[str, dict[str, Interval]]]:
    """AdaFedAdam (else the first algorithm) against each other one, paired over clients and common seeds."""
    ours = [label for label in record.labels if algorithm_of(label) == "adafedadam"]
    default = ("adafedadam", "adafedadam:alpha=1", "adafedadam:lr=0.001", "adafedadam:warmup=6")
    one = next((label for label in ours if label in default), (ours or record.labels)[0])
    found = {}
    for other in record.labels:
        mine, theirs = _accuracies(record, one), _accuracies(record, other)
        seeds = [seed for seed in mine if seed in theirs]
        a, b = [mine[seed] for seed in seeds], [theirs[seed] for seed in seeds]
        if other != one and seeds and np.isfinite([*a, *b]).all(axis=0).any():
            found[other] = paired_differences(a, b)
    return one, found


def rounds_to(record: Record, targets: tuple[int, ...] = (30, 40, 50, 60, 70, 80, 90)) -> dict[str, Any]:
    """For each algorithm the first evaluated round whose average, meaned over seeds, reaches each target."""
    found: dict[str, dict[int, int | None]] = {}
    for label in record.labels:
        by_round: dict[int, list[float | None]] = {}
        for line in record.history:
            if line["algorithm"] == label:
                by_round.setdefault(line["round"], []).append(line["avg"])
        most = max(map(len, by_round.values()), default=0)
        whole = {t: v for t, v in sorted(by_round.items()) if len(v) == most and None not in v}
        means = {t: float(np.mean([x for x in v if x is not None])) for t, v in whole.items()}
        found[label] = {x: next((t for t, m in means.items() if m >= x), None) for x in targets}
    reached = [x for x in targets if any(row[x] for row in found.values())]
    return {label: {x: row[x] for x in reached} for label, row in found.items()}


def by_algorithm(summary: Summary) -> dict[str, Summary]:
    """The rows of each algorithm, whatever its parameters, the highest average first."""
    found: dict[str, Summary] = {}
    for row in sorted((r for r in summary if r["avg"]["mean"] is not None), key=lambda r: -r["avg"]["mean"]):
        found.setdefault(algorithm_of(row["algorithm"]), []).append(row)
    order = [algorithm_of(row["algorithm"]) for row in summary]
    return {name: found[name] for name in dict.fromkeys(order) if name in found}


def _accuracies(record: Record, label: str) -> dict[int, Any]:
    """The clients' accuracies of each seed of which they were kept."""
    rows = zip(record.results["runs"], record.score, strict=True)
    return {r["seed"]: row for r, row in rows if r["algorithm"] == label and np.isfinite(row).any()}
