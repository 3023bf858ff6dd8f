"""Our numbers beside the paper's, and algorithms beside each other."""

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np

from fairwind.intervals import Interval
from fairwind.report.paired import Paired
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
        our_places = _places({label: sign * round(values[label]["mean"], 2) for label in known})
        their_places = _places({label: sign * theirs[label][key][0] for label in known})
        for label in ours:
            same = label in known and bool(our_places[label] & their_places[label])
            mean, std = theirs[label][key]
            cells[label][key] = Cell(values[label]["mean"], values[label]["std"], mean, std, same)
    return cells


def _places(values: dict[str, float]) -> dict[str, set[int]]:
    """The places that each may have, the smallest value first: several where values are equal."""
    given = list(values.values())
    return {
        label: set(range(sum(v < mine for v in given), sum(v <= mine for v in given)))
        for label, mine in values.items()
    }


def distance(cells: dict[str, dict[str, Cell]]) -> float | None:
    """The root of the mean squared difference from the paper over all cells, in points."""
    differences = [cell.difference for row in cells.values() for cell in row.values()]
    known = [d for d in differences if d is not None]
    return float(np.sqrt(np.mean(np.square(known)))) if known and len(known) == len(differences) else None


def against_others(found: Paired, others: Sequence[str] = ()) -> tuple[str, dict[str, dict[str, Interval]]]:
    """AdaFedAdam (else the first algorithm) against each other one, or those named.

    The intervals of all these comparisons hold together.
    """
    record = found.record
    ours = [label for label in record.labels if algorithm_of(label) == "adafedadam"]
    default = ("adafedadam", "adafedadam:alpha=1", "adafedadam:lr=0.001", "adafedadam:warmup=6")
    one = next((label for label in ours if label in default), (ours or record.labels)[0])
    rows = {}
    for other in others or [label for label in record.labels if label != one]:
        row = {key: found.difference(key, one, other, len(others)) for key in BESIDE}
        known = {key: interval for key, interval in row.items() if interval is not None}
        if len(known) == len(row):
            rows[other] = known
    return one, rows


def by_algorithm(summary: Summary) -> dict[str, Summary]:
    """The rows of each algorithm, whatever its parameters, the highest average first."""
    found: dict[str, Summary] = {}
    for row in sorted((r for r in summary if r["avg"]["mean"] is not None), key=lambda r: -r["avg"]["mean"]):
        found.setdefault(algorithm_of(row["algorithm"]), []).append(row)
    order = [algorithm_of(row["algorithm"]) for row in summary]
    return {name: found[name] for name in dict.fromkeys(order) if name in found}
