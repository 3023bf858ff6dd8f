"""The page of a study: its panels beside the paper, their curves, the trade-off of α; figures; LaTeX."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import numpy as np

from fairwind.data.federation import Federation
from fairwind.files import write_atomic, write_json
from fairwind.report import charts, latex, pareto
from fairwind.report.beside import (
    BESIDE,
    STATISTICS,
    Cell,
    against_others,
    beside_paper,
    by_algorithm,
    distance,
    published,
    rounds_to,
)
from fairwind.report.labels import shown_largest, spread
from fairwind.report.page import (
    escaped,
    finding,
    frame,
    measures_table,
    plain_spec,
    table_html,
    write_figure,
)
from fairwind.report.record import Record
from fairwind.report.table import MEASURES, algorithm_of, best_rows, count, display_name, notes, seed_count
from fairwind.results import summary_of
from fairwind.study import Finished, Panel, Study, choose

Chart = alt.Chart | alt.LayerChart
FEW = 6  # missing runs that a note names
FindData = Callable[[Panel], Federation | None]
FindDigest = Callable[[str], str | None]


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


def write_study(
    study: Study,
    runs: list[Finished],
    out: Path,
    find_data: FindData = lambda panel: None,
    digest: FindDigest = lambda setup: None,
) -> list[Path]:
    """Writes study.json, index.html, tables.tex and the figures into `out`; returns the paths.

    `find_data` gives a panel's data where it is at hand, for the figures that need it; `digest` names the
    data of a setup that counts, where runs on several are known.
    """
    labels = tuple(dict.fromkeys(spec for panel in study.panels for spec in panel.algorithms))
    shown = [show(panel, runs, labels, digest(panel.setup)) for panel in study.panels]
    specs = {name: plain_spec(chart) for name, chart in _charts(study, shown, find_data)}
    light = charts.theme(list(labels), "light")
    out.mkdir(parents=True, exist_ok=True)
    (out / "figures").mkdir(exist_ok=True)
    known = [panel for panel in shown if panel.record is not None]
    html = frame(
        kind="Fairwind study",
        title=study.title,
        finding=study.question,
        facts=_facts(shown),
        notes=_notes(shown),
        body="\n".join([*_overview(study, known), *(_section(study, i, p) for i, p in enumerate(shown))]),
        specs=specs,
        themes={"light": light, "dark": charts.theme(list(labels), "dark")},
    )
    written = [
        write_json(out / "study.json", content(study, shown), indent=1),
        write_atomic(out / "index.html", html.encode()),
        write_atomic(out / "tables.tex", latex.tables(study.title, known_tables(known)).encode()),
    ]
    for name, spec in specs.items():
        written += write_figure(out / "figures" / name, spec, light)
    return written


def show(
    panel: Panel, runs: list[Finished], labels: tuple[str, ...] = (), digest: str | None = None
) -> Shown:
    """The panel's runs as a record like that of a comparison."""
    chosen = choose(panel, runs, digest)
    found = [run for each in chosen.values() for run in each]
    if not found:
        return Shown(panel, chosen, None)
    vectors = next((run for run in found if run.accuracy is not None), None)
    width = 0 if vectors is None or vectors.accuracy is None else len(vectors.accuracy)
    unknown = np.full(width, np.nan, dtype=np.float32)
    # A spec may be written in several ways: here it is called as the panel calls it.
    named = [(spec, run) for spec, each in chosen.items() for run in each]
    rows = [run.row | {"algorithm": spec} for spec, run in named]
    results = {
        "setup": panel.title,
        "federation": found[0].results["federation"],
        "runs": rows,
        "summary": summary_of(rows),
    }
    record = Record(
        results=results,
        history=[line | {"algorithm": spec} for spec, run in named for line in run.history],
        score=np.stack([unknown if run.accuracy is None else run.accuracy for run in found]),
        train_size=np.zeros(0, np.int64) if vectors is None else vectors.clients["train_size"],
        test_size=np.zeros(0, np.int64) if vectors is None else vectors.clients["test_size"],
        names=[] if vectors is None else vectors.clients["names"],
        beside=labels,
    )
    return Shown(panel, chosen, record)


def content(study: Study, shown: list[Shown]) -> dict[str, Any]:
    """The study's numbers as data: what is on the page, and where each run comes from."""
    panels = []
    for each in shown:
        panel, record = each.panel, each.record
        entry: dict[str, Any] = {
            "title": panel.title,
            "setup": panel.setup,
            "changes": dict(panel.changes),
            "seeds": panel.seeds,
            "missing": each.missing,
        }
        if record is not None:
            _, paired = against_others(record) if record.score.shape[1] else ("", {})
            entry |= {
                "federation": record.results["federation"],
                "summary": record.results["summary"],
                "against_others": {k: {m: i._asdict() for m, i in v.items()} for k, v in paired.items()},
                "rounds_to_average": rounds_to(record),
                "comparisons": _comparisons(each),
            }
        if record is not None and panel.published:
            cells = beside_paper(record.results["summary"], panel.published)
            entry["paper"] = {
                label: {key: cell._asdict() | {"pooled": cell.pooled} for key, cell in row.items()}
                for label, row in cells.items()
            }
        panels.append(entry)
    return {"study": study.name, "title": study.title, "question": study.question, "panels": panels}


def _comparisons(shown: Shown) -> list[dict[str, Any]]:
    """The comparisons that the panel's runs were part of."""
    folders = {run.folder: run for runs in shown.chosen.values() for run in runs}
    return [
        {
            "folder": folder.name,
            "environment": run.results["environment"],
            "seconds": run.results["timing"]["seconds"],
            "precision": run.precision,
            "runs": len(run.results["runs"]),
        }
        for folder, run in folders.items()
    ]


def known_tables(shown: list[Shown]) -> list[latex.Table]:
    """Each panel as a table of means ± standard deviations, with the paper's rows where it has them."""
    tables = []
    for each in shown:
        assert each.record is not None
        summary, table = each.record.results["summary"], each.panel.published
        several = seed_count(each.record.results) > 1
        theirs = published()["tables"][table]["rows"] if table else {}
        rows = []
        for row in summary:
            ours = [(row[key]["mean"], row[key]["std"] if several else None) for key in BESIDE]
            paper = (
                [tuple(theirs[row["algorithm"]][key]) for key in BESIDE] if row["algorithm"] in theirs else []
            )
            best = [row["algorithm"] in best_rows(each.record.results, m) for m in BESIDE.values()]
            rows.append(latex.Row(display_name(row["algorithm"]), ours, paper, best))
        tables.append(latex.Table(each.panel.title, [m.name for m in BESIDE.values()], rows))
    return tables


def _facts(shown: list[Shown]) -> dict[str, str]:
    runs = [run for each in shown for found in each.chosen.values() for run in found]
    wanted = sum(len(each.panel.algorithms) * len(each.panel.seeds) for each in shown)
    made = [run.results["environment"] for run in runs]
    devices = dict.fromkeys(str(e["processor"] if e["device"] == "cpu" else e["device"]) for e in made)
    commits = dict.fromkeys(str(e["commit"]) for e in made)
    facts = {
        "panels": f"{len(shown)}",
        "runs": f"{len(runs):,} of {wanted:,}",
        "devices": ", ".join(devices),
        "precision": ", ".join(dict.fromkeys(run.precision for run in runs)),
        "commits": ", ".join(commits),
    }
    return {key: value for key, value in facts.items() if value}


def _notes(shown: list[Shown]) -> list[str]:
    found = []
    for each in shown:
        left = each.missing
        count_left = sum(map(len, left.values()))
        if each.record is None:
            found.append(f"{each.panel.title}: not run yet.")
        elif count_left > FEW:
            wanted = len(each.panel.algorithms) * len(each.panel.seeds)
            found.append(f"{each.panel.title}: {count_left} of {wanted} runs not run yet.")
        elif left:
            names = ", ".join(f"{display_name(k)} (seed {', '.join(map(str, v))})" for k, v in left.items())
            found.append(f"{each.panel.title}: not run yet: {names}.")
        if each.record is not None:
            found += [f"{each.panel.title}: {note}" for note in notes(each.record.results)]
            found += [
                f"{each.panel.title}: {note}." for note in each.record.results["federation"].get("notes", [])
            ]
    return found


def _charts(study: Study, shown: list[Shown], find_data: FindData) -> Iterable[tuple[str, Chart]]:
    for i, each in enumerate(shown):
        record = each.record
        if record is None:
            continue
        has_curves = any(line["round"] for line in record.history)
        alphas = any(algorithm_of(label) == "adafedadam" for label in record.labels)
        if "pareto" in study.charts:
            if pareto.front(pareto.points(record)):
                yield f"pareto-{i}", pareto.pareto(record)
            if has_curves and alphas:
                yield f"alpha-average-{i}", pareto.alpha_curves(record, "avg", "Average accuracy by α, %")
        elif "curves" in study.charts and has_curves:
            yield f"average-{i}", charts.curves(record, "avg", "Average accuracy of clients, %")
            yield f"worst30-{i}", charts.curves(record, "worst30", "Accuracy of the worst-off 30 %, %")
        if "rsd" in study.charts and has_curves and alphas:
            title = "Relative standard deviation of error by α"
            yield f"alpha-rsd-{i}", pareto.alpha_curves(record, "rsd_error", title)
        if "distribution" in study.charts and np.isfinite(record.score).any():
            yield f"distribution-{i}", charts.distribution(record)
        if "labels" in study.charts and (data := find_data(each.panel)) is not None:
            counts = data.label_counts().numpy()
            yield f"labels-{i}", spread(data, counts, shown_largest(counts))


def _overview(study: Study, shown: list[Shown]) -> Iterable[str]:
    """What is said of all panels together."""
    if "readings" in study.charts and shown:
        yield _readings(shown)
    if "tuned" in study.charts:
        yield from filter(None, map(_tuned, shown))


def _readings(shown: list[Shown]) -> str:
    """How far each reading of the data and of the statistics lies from the published table."""
    found = []
    for each in shown:
        assert each.record is not None
        for statistics in STATISTICS:
            cells = beside_paper(each.record.results["summary"], each.panel.published, statistics)
            away = distance(cells)
            if away is not None:
                order = sum(cell.in_order for row in cells.values() for cell in row.values())
                total = sum(len(row) for row in cells.values())
                found.append((away, each.panel.title, statistics, f"{order} of {total}"))
    rows = [[t, s, f"{away:.1f}", o] for away, t, s, o in sorted(found)]
    head = ["data", "statistics", "distance, points", "places as published"]
    words = (
        "Distance is the root of the mean squared difference from the paper over five algorithms and three "
        "measures; places count the algorithms that rank as published."
    )
    return f"<section><h2>Readings, nearest first</h2><p>{words}</p>{table_html(head, rows)}</section>"


def _tuned(shown: Shown) -> str:
    """Every algorithm with the best rate of its grid; nothing where some have been run with one rate only."""
    record = shown.record
    assert record is not None
    by = by_algorithm(record.results["summary"])
    if any(len(rates) < 2 for rates in by.values()):
        return ""
    rows = []
    for best, *others in by.values():
        values = [f"{best[key]['mean']:.2f}" for key in BESIDE]
        rows.append([display_name(best["algorithm"]), *values, f"{1 + len(others)}"])
    words = (
        "The rate with the highest average test accuracy at the end, so chosen with hindsight, in the "
        "baselines’ favour."
    )
    head = ["best rate", *(m.name for m in BESIDE.values()), "rates tried"]
    title = escaped(f"{shown.panel.title}: each with its best rate")
    return f"<section><h2>{title}</h2><p>{words}</p>{table_html(head, rows)}</section>"


def _section(study: Study, i: int, shown: Shown) -> str:
    """A panel: its finding, its table, differences with their intervals, its charts."""
    record, panel = shown.record, shown.panel
    title = f"<h2>{escaped(panel.title)}</h2>"
    if record is None:
        return f"<section>{title}<p>Not run yet.</p></section>"
    body = f"<p>{escaped(finding(record.results))}</p>"
    if panel.published:
        body += _beside(record, panel.published)
        body += (
            f"<details><summary>All measures</summary>{measures_table(record.results, MEASURES)}</details>"
        )
    else:
        body += measures_table(record.results, MEASURES[:7])
    if len(record.labels) > 1 and np.isfinite(record.score).any():
        body += _paired(record)
    if "targets" in study.charts:
        body += _targets(record)
    if "pareto" in study.charts:
        body += _trade(record)
    kinds = ("pareto", "alpha-average", "alpha-rsd", "average", "worst30", "distribution", "labels")
    plots = "".join(f'<div class="chart" id="{kind}-{i}"></div>' for kind in kinds if _drawn(study, kind))
    return f'<section>{title}{body}<div class="charts">{plots}</div></section>'


def _drawn(study: Study, kind: str) -> bool:
    if kind in ("average", "worst30"):
        return "curves" in study.charts and "pareto" not in study.charts
    return {"alpha-average": "pareto", "alpha-rsd": "rsd"}.get(kind, kind) in study.charts


def _beside(record: Record, table: str) -> str:
    """Ours, the paper's, and the difference, measure by measure."""
    cells = beside_paper(record.results["summary"], table)
    several = seed_count(record.results) > 1
    head = ["", *("ours", "paper", "diff.") * len(BESIDE)]
    above = [("", 1), *((measure.name, 3) for measure in BESIDE.values())]
    rows = [
        [display_name(label), *(text for key in BESIDE for text in _cell(row[key], several))]
        for label, row in cells.items()
    ]
    found = published()["tables"][table]
    note = f" ({found['note']})" if "note" in found else ""
    words = (
        f"Beside the paper ({found['where']}{note}): means ± standard deviations over seeds, in percent; "
        "differences in units of the pooled standard deviation σ, or in points where we have one seed. "
        "† marks an algorithm without its published place among the others in that measure."
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


def _paired(record: Record) -> str:
    one, found = against_others(record)
    if not found:
        return ""
    head = [f"{display_name(one)} minus", *(m.name for m in BESIDE.values())]
    rows = [
        [display_name(other), *(f"{i.difference:+.2f} [{i.low:+.2f}, {i.high:+.2f}]" for i in row.values())]
        for other, row in found.items()
    ]
    words = "Differences with 95 % confidence intervals, paired over clients and seeds"
    return f"<details open><summary>{escaped(words)}</summary>{table_html(head, rows)}</details>"


def _targets(record: Record) -> str:
    found = rounds_to(record)
    targets = list(next(iter(found.values()), {}))
    if not targets:
        return ""
    head = ["rounds until the average reaches", *(f"{x} %" for x in targets)]
    rows = [
        [display_name(label), *("–" if row[x] is None else str(row[x]) for x in targets)]
        for label, row in found.items()
    ]
    return f"<details open><summary>Rounds to target</summary>{table_html(head, rows)}</details>"


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
