"""Our numbers beside the paper's, and algorithms beside each other."""

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from fairwind.intervals import Interval
from fairwind.report.paired import Paired
from fairwind.report.table import MEASURES, Measure, algorithm_of
from fairwind.runs.schema import Metric, OverSeeds, SummaryRow

Printed = Literal["avg", "std", "worst30"]  # what the paper prints
BESIDE: dict[Printed, Measure] = {m.key: m for m in MEASURES if m.key in ("avg", "std", "worst30")}
UNKNOWN: OverSeeds = {"mean": None, "std": None}
# The paper does not say whether clients are weighted by their size. Its authors' public code weights the
# average of accuracies, and not their standard deviation.
WEIGHTED = "all weighted"
STATISTICS: dict[str, dict[Printed, Metric]] = {
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


class PublishedTable(TypedDict):
    """A table of the paper: by algorithm and measure, mean and standard deviation."""

    where: str
    clients: int
    note: NotRequired[str]
    main_text: NotRequired[dict[str, dict[Printed, tuple[float, float]]]]  # rows that differ there
    rows: dict[str, dict[Printed, tuple[float, float]]]


class Published(TypedDict):
    """src/fairwind/paper/published.json."""

    source: str
    unit: str
    tables: dict[str, PublishedTable]


@cache
def published() -> Published:
    """The paper's tables."""
    content: Published = json.loads((files("fairwind.paper") / "published.json").read_text(encoding="utf-8"))
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
    rows: dict[tuple[str, float, float, float], Row] = {}
    for name, table in published()["tables"].items():
        clients, main_text = table["clients"], table.get("main_text", {})
        counts = math.floor(0.3 * clients + 1e-9), math.ceil(0.3 * clients - 1e-9)
        for algorithm, row in (*table["rows"].items(), *main_text.items()):
            average, std, worst = (row[key][0] for key in BESIDE)
            where = f"{name}, main text" if row in main_text.values() else name
            key = algorithm, average, std, worst
            tables = (*rows[key].tables, where) if key in rows else (where,)
            rows[key] = Row(tables, *key, *(least_std(average, worst, n / clients) for n in counts))
    return tuple(rows.values())


def statistics_of(table: str) -> str:
    """How a published table is compared: each client counted once, unless some row cannot be of that kind."""
    rows = [row for row in published_rows() if table in row.tables]
    return "plain" if all(row.possible() for row in rows) else WEIGHTED


def beside_paper(
    summary: Sequence[SummaryRow], table: str, statistics: str = ""
) -> dict[str, dict[Printed, Cell]]:
    """For each algorithm that both have, and each measure, our value and the paper's.

    The measures are those of `statistics_of` the table, or of the given statistics.
    """
    chosen = STATISTICS[statistics or statistics_of(table)]
    theirs = published()["tables"][table]["rows"]
    ours = {row["algorithm"]: row for row in summary if row["algorithm"] in theirs}
    cells: dict[str, dict[Printed, Cell]] = {label: {} for label in ours}
    for key, measure in BESIDE.items():
        own = chosen[key]
        sign = -1 if measure.best == "highest" else 1
        values = {label: row.get(own) or UNKNOWN for label, row in ours.items()}
        means = {label: value["mean"] for label, value in values.items()}
        our_places = _places({label: sign * round(m, 2) for label, m in means.items() if m is not None})
        their_places = _places({label: sign * theirs[label][key][0] for label in our_places})
        for label, value in values.items():
            same = label in our_places and bool(our_places[label] & their_places[label])
            mean, std = theirs[label][key]
            cells[label][key] = Cell(value["mean"], value["std"], mean, std, same)
    return cells


def _places(values: dict[str, float]) -> dict[str, set[int]]:
    """The places that each may have, the smallest value first: several where values are equal."""
    others = list(values.values())
    return {
        label: set(range(sum(v < mine for v in others), sum(v <= mine for v in others)))
        for label, mine in values.items()
    }


def distance(cells: dict[str, dict[Printed, Cell]]) -> float | None:
    """The root of the mean squared difference from the paper over all cells, in points."""
    differences = [cell.difference for row in cells.values() for cell in row.values()]
    defined = [d for d in differences if d is not None]
    return (
        float(np.sqrt(np.mean(np.square(defined)))) if defined and len(defined) == len(differences) else None
    )


def against_others(
    runs: Paired, others: Sequence[str] = ()
) -> tuple[str, dict[str, dict[Printed, Interval]]]:
    """AdaFedAdam (else the first algorithm) against each other one, or those named.

    The intervals of all these comparisons hold together.
    """
    record = runs.record
    ours = [label for label in record.labels if algorithm_of(label) == "adafedadam"]
    default = ("adafedadam", "adafedadam:alpha=1", "adafedadam:lr=0.001", "adafedadam:warmup=6")
    one = next((label for label in ours if label in default), (ours or record.labels)[0])
    rows = {}
    for other in others or [label for label in record.labels if label != one]:
        row = {key: runs.difference(key, one, other, len(others)) for key in BESIDE}
        intervals = {key: interval for key, interval in row.items() if interval is not None}
        if len(intervals) == len(row):
            rows[other] = intervals
    return one, rows


def by_algorithm(summary: Sequence[SummaryRow]) -> dict[str, list[SummaryRow]]:
    """The rows of each algorithm, whatever its parameters, the highest average first."""
    averages = [(row["avg"]["mean"], row) for row in summary]
    known = [(mean, row) for mean, row in averages if mean is not None]
    rows: dict[str, list[SummaryRow]] = {}
    for _, row in sorted(known, key=lambda pair: -pair[0]):
        rows.setdefault(algorithm_of(row["algorithm"]), []).append(row)
    order = [algorithm_of(row["algorithm"]) for row in summary]
    return {name: rows[name] for name in dict.fromkeys(order) if name in rows}
