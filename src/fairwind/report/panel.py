"""A panel on the page of a study: its finding, its tables beside the paper, its charts."""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import altair as alt
import numpy as np

from fairwind.data.federation import Federation
from fairwind.report import charts, pareto
from fairwind.report.finding import best_shown, finding, how_sure
from fairwind.report.html import chart_html, escaped, measures_table, table_html
from fairwind.report.labels import shown_largest, spread
from fairwind.report.paired import Paired, paired
from fairwind.report.paper_comparison import (
    BESIDE,
    WEIGHTED,
    Cell,
    against_others,
    beside_paper,
    published,
    statistics_of,
)
from fairwind.report.record import Record
from fairwind.report.spread import distribution
from fairwind.report.table import FIRST, MEASURES, algorithm_of, count, display_name, seed_count
from fairwind.report.targets import TARGETS_READ, target_tables
from fairwind.runs.results import summary_of
from fairwind.runs.schema import ResultsFile, RunRow
from fairwind.study import Clients, Finished, Panel, Study, choose

NOBODY = Clients(np.zeros(0, np.int64), np.zeros(0, np.int64), [])
Chart = alt.Chart | alt.LayerChart
FindData = Callable[[Panel], Federation | None]


class Shown(NamedTuple):
    """A panel, with what is known of it."""

    panel: Panel
    chosen: dict[str, list[Finished]]
    record: Record | None  # None where none of its runs is finished

    @property
    def missing(self) -> dict[str, list[int]]:
        """The seeds that each algorithm still lacks."""
        there = {spec: [run.key.seed for run in runs] for spec, runs in self.chosen.items()}
        left = {spec: [s for s in self.panel.seeds if s not in seeds] for spec, seeds in there.items()}
        return {spec: seeds for spec, seeds in left.items() if seeds}


def show(
    panel: Panel, runs: list[Finished], labels: tuple[str, ...] = (), digest: str | None = None
) -> Shown:
    """The panel's runs as a record like that of a comparison."""
    chosen = choose(panel, runs, digest)
    # A spec may be written in several ways: here it is called as the panel calls it.
    named = [(spec, run) for spec, runs in chosen.items() for run in runs]
    if not named:
        return Shown(panel, chosen, None)
    clients = next((run.clients for _, run in named if run.clients is not None), NOBODY)
    unknown = np.full(len(clients.names), np.nan, dtype=np.float32)
    rows: list[RunRow] = [{**run.row, "algorithm": spec} for spec, run in named]
    results: ResultsFile = {
        **named[0][1].results,
        "setup": panel.title,
        "runs": rows,
        "summary": summary_of(rows),
    }
    record = Record(
        results=results,
        history=[{**line, "algorithm": spec} for spec, run in named for line in run.history],
        score=np.stack([unknown if run.accuracy is None else run.accuracy for _, run in named]),
        train_size=clients.train_size,
        test_size=clients.test_size,
        names=clients.names,
        beside=labels,
    )
    return Shown(panel, chosen, record)


def panel_charts(study: Study, shown: list[Shown], find_data: FindData) -> Iterable[tuple[str, Chart]]:
    for i, part in enumerate(shown):
        record = part.record
        if record is None:
            continue
        has_curves = any(line["round"] for line in record.history)
        alphas = any(algorithm_of(label) == "adafedadam" for label in record.labels)
        if "pareto" in study.charts:
            if pareto.front(pareto.points(record)):
                yield f"pareto-{i}", pareto.pareto(record)
            if has_curves and alphas:
                yield (
                    f"alpha-average-{i}",
                    pareto.alpha_curves(record, "avg", f"Average accuracy by α{record.of_curves}, %"),
                )
        elif "curves" in study.charts and has_curves:
            yield (
                f"average-{i}",
                charts.curves(record, "avg", f"Average accuracy of clients{record.of_curves}, %"),
            )
            yield (
                f"worst30-{i}",
                charts.curves(record, "worst30", f"Accuracy of the worst-off 30 %{record.of_curves}, %"),
            )
        if "rsd" in study.charts and has_curves and alphas:
            title = f"Relative standard deviation of error by α{record.of_curves}"
            yield f"alpha-rsd-{i}", pareto.alpha_curves(record, "rsd_error", title)
        if "distribution" in study.charts and np.isfinite(record.score).any():
            yield f"distribution-{i}", distribution(record)
        if "labels" in study.charts and (data := find_data(part.panel)) is not None:
            counts = data.label_counts().numpy()
            yield f"labels-{i}", spread(data, counts, shown_largest(counts))


def panel_section(study: Study, i: int, shown: Shown, drawn: Collection[str]) -> str:
    """A panel: its finding, its table, differences with their intervals, its charts, if they are drawn."""
    record, panel = shown.record, shown.panel
    title = f"<h2>{escaped(panel.title)}</h2>"
    if record is None:
        return f"<section>{title}<p>Not run yet.</p></section>"
    runs = paired(record)
    ahead = best_shown(record, runs)
    body = f"<p>{escaped(f'{finding(record, runs)} {how_sure(record)}')}</p>"
    if panel.published:
        body += _beside(record, panel.published)
        body += (
            "<details><summary>All measures</summary>"
            f"{measures_table(record.results, MEASURES, panel.title, ahead=ahead)}</details>"
        )
    else:
        body += measures_table(record.results, FIRST, panel.title, ahead=ahead)
    if len(record.labels) > 1 and np.isfinite(record.score).any():
        body += _paired(runs)
    if "targets" in study.charts:
        body += _targets(record)
    if "pareto" in study.charts:
        body += _trade(record)
    kinds = ("pareto", "alpha-average", "alpha-rsd", "average", "worst30", "distribution", "labels")
    plots = "".join(chart_html(f"{kind}-{i}") for kind in kinds if f"{kind}-{i}" in drawn)
    return f'<section>{title}{body}<div class="charts">{plots}</div></section>'


def _beside(record: Record, table: str) -> str:
    """Ours, the paper's, and the difference, measure by measure."""
    cells = beside_paper(record.results["summary"], table)
    several = seed_count(record.results) > 1
    head = ["", *("ours", "paper", "diff.") * len(BESIDE)]
    by_size = "weighted " if statistics_of(table) == WEIGHTED else ""
    above = [("", 1), *((f"{by_size}{measure.name}", 3) for measure in BESIDE.values())]
    rows = [
        [display_name(label), *(text for key in BESIDE for text in _cell(row[key], several))]
        for label, row in cells.items()
    ]
    printed = published()["tables"][table]
    note = f" ({printed['note']})" if "note" in printed else ""
    words = (
        f"Beside the paper ({printed['where']}{note}): means ± standard deviations over seeds, in percent; "
        "differences in units of the pooled standard deviation σ, or in points where we have one seed. "
        "† marks an algorithm without its published place among the others in that measure."
    )
    if by_size:
        words += (
            " Clients are weighted by size here: some published rows of this table cannot count each once."
        )
    return f"<p>{escaped(words)}</p>{table_html(head, rows, above)}"


def _cell(cell: Cell, several: bool) -> tuple[str, str, str]:
    """Ours, the paper's and their difference; one seed has no spread."""
    theirs = f"{cell.paper:.2f} ±{cell.paper_std:.2f}"
    if cell.ours is None:
        return "–", theirs, "–"
    ours = (
        f"{cell.ours:.2f}" + (f" ±{cell.ours_std:.2f}" if several else "") + ("" if cell.in_order else " †")
    )
    apart = f"{cell.difference:+.1f}" if cell.pooled is None or not several else f"{cell.pooled:+.1f} σ"
    return ours, theirs, apart


def _paired(runs: Paired) -> str:
    one, differences = against_others(runs)
    if not differences:
        return ""
    head = [f"{display_name(one)} minus", *(m.name for m in BESIDE.values())]
    rows = [
        [display_name(other), *(f"{i.difference:+.2f} [{i.low:+.2f}, {i.high:+.2f}]" for i in row.values())]
        for other, row in differences.items()
    ]
    words = "Differences with 95 % confidence intervals, paired over clients and seeds, that hold together"
    return f"<details open><summary>{escaped(words)}</summary>{table_html(head, rows)}</details>"


def _targets(record: Record) -> str:
    tables_of_costs = target_tables(record)
    if not tables_of_costs:
        return ""
    words = "Rounds, sample gradients and bytes until the average reaches a target"
    tables = "".join(table_html(*table) for table in tables_of_costs)
    return f"<details open><summary>{words}</summary><p>{escaped(TARGETS_READ)}</p>{tables}</details>"


def _trade(record: Record) -> str:
    """What the front says, in words."""
    found = pareto.points(record)
    if not pareto.front(found):
        return ""
    best, beaten = pareto.knee(found), pareto.dominated(found)
    baselines = [p for p in found if p["kind"] == "baseline"]
    words = f"Some α beats {len(beaten)} of {count(len(baselines), 'baseline')} in both error and its spread"
    if beaten:
        words += f": {', '.join(p['name'] for p in beaten)}"
    words += ". The shaded area is what the front dominates."
    if best is not None:
        words += (
            f" The knee, the point of the front farthest from the line between its ends, is {best['name']}."
        )
    return f"<p>{escaped(words)}</p>"
