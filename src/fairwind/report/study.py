"""The page of a study: its panels beside the paper, their curves, the trade-off of α; figures; LaTeX."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

from fairwind.report import latex
from fairwind.report.finding import best_shown
from fairwind.report.html import escaped, frame, plain_spec, table_html, write_figures
from fairwind.report.legend import legend_html, shared
from fairwind.report.paired import paired
from fairwind.report.panel import FindData, Shown, panel_charts, panel_section, show
from fairwind.report.paper_comparison import (
    BESIDE,
    STATISTICS,
    UNKNOWN,
    Printed,
    against_others,
    beside_paper,
    by_algorithm,
    distance,
    published,
    statistics_of,
)
from fairwind.report.plane import plane, plane_section, planes
from fairwind.report.record import TESTED
from fairwind.report.table import MEASURES, display_name, notes, seed_count
from fairwind.report.targets import RoundCost, cost_of, rounds_to
from fairwind.report.theme import theme
from fairwind.runs.files import write_atomic, write_json, writing_pages
from fairwind.runs.schema import Environment, FederationFacts, FederationName, SummaryRow
from fairwind.study import Finished, Study

FEW = 6  # missing runs that a note names
FindDigest = Callable[[str], str | None]


class Source(TypedDict):
    """A comparison that runs of a panel come from."""

    folder: str
    environment: Environment
    seconds: float
    precision: str
    runs: int


class PanelContent(TypedDict):
    """A panel in study.json; only one with finished runs has all of it."""

    title: str
    setup: str
    changes: Mapping[str, object]
    seeds: tuple[int, ...]
    missing: dict[str, list[int]]
    federation: NotRequired[FederationFacts | FederationName]
    summary: NotRequired[list[SummaryRow]]
    against_others: NotRequired[dict[str, dict[Printed, dict[str, float]]]]
    rounds_to_average: NotRequired[dict[str, dict[int, tuple[int | None, ...]]]]
    cost_of_a_round: NotRequired[dict[str, RoundCost | None]]
    comparisons: NotRequired[list[Source]]
    statistics: NotRequired[str]
    paper: NotRequired[dict[str, dict[Printed, dict[str, float | None]]]]


class StudyContent(TypedDict):
    """study.json."""

    study: str
    title: str
    question: str
    panels: list[PanelContent]


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
    specs = {name: plain_spec(chart) for name, chart in panel_charts(study, shown, find_data)}
    wide = planes(shown) if "plane" in study.charts else {}
    specs |= {f"plane-{i}": plain_spec(plane(panels)) for i, panels in enumerate(wide.values())}
    light = theme(list(labels), "light")
    out.mkdir(parents=True, exist_ok=True)
    (out / "figures").mkdir(exist_ok=True)
    known = [panel for panel in shown if panel.record is not None]
    html = frame(
        kind="Fairwind study",
        title=study.title,
        finding=study.question,
        facts=_facts(shown),
        notes=_notes(shown),
        body="\n".join(
            [
                *_overview(study, known),
                *(plane_section(setup, f"plane-{i}", each) for i, (setup, each) in enumerate(wide.items())),
                *(panel_section(study, i, p, specs) for i, p in enumerate(shown)),
            ]
        ),
        legend=legend_html(list(labels)) if specs else "",
        specs={name: shared(spec) for name, spec in specs.items()},
        data={"names": [display_name(label) for label in labels]},
        themes={"light": light, "dark": theme(list(labels), "dark")},
    )
    tables = latex.tables(study.title, known_tables(known))
    with writing_pages(out):
        written = [
            write_json(out / "study.json", content(study, shown), indent=1),
            write_atomic(out / "index.html", html.encode()),
            write_atomic(out / "tables.tex", tables.encode()),
        ]
        return written + write_figures(out / "figures", specs, light)


def content(study: Study, shown: list[Shown]) -> StudyContent:
    """The study's numbers as data: what is on the page, and where each run comes from."""
    panels = []
    for part in shown:
        panel, record = part.panel, part.record
        entry: PanelContent = {
            "title": panel.title,
            "setup": panel.setup,
            "changes": dict(panel.changes),
            "seeds": panel.seeds,
            "missing": part.missing,
        }
        if record is not None:
            _, differences = against_others(paired(record))
            entry |= {
                "federation": record.results["federation"],
                "summary": record.results["summary"],
                "against_others": {k: {m: i._asdict() for m, i in v.items()} for k, v in differences.items()},
                "rounds_to_average": {
                    label: {target: reached.rounds for target, reached in row.items()}
                    for label, row in rounds_to(record).items()
                },
                "cost_of_a_round": {label: cost_of(record, label) for label in record.labels},
                "comparisons": _comparisons(part),
            }
        if record is not None and panel.published:
            cells = beside_paper(record.results["summary"], panel.published)
            entry["statistics"] = statistics_of(panel.published)
            entry["paper"] = {
                label: {key: cell._asdict() | {"pooled": cell.pooled} for key, cell in row.items()}
                for label, row in cells.items()
            }
        panels.append(entry)
    return {"study": study.name, "title": study.title, "question": study.question, "panels": panels}


def _comparisons(shown: Shown) -> list[Source]:
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
    for part in shown:
        assert part.record is not None
        summary, table = part.record.results["summary"], part.panel.published
        ahead = best_shown(part.record, paired(part.record))
        several = seed_count(part.record.results) > 1
        theirs = published()["tables"][table]["rows"] if table else {}
        chosen = STATISTICS[statistics_of(table) if table else "plain"]
        shown_measures = [m for m in MEASURES if m.key in chosen.values()]
        rows = []
        for row in summary:
            own = [row.get(m.key) or UNKNOWN for m in shown_measures]
            ours = [(value["mean"], value["std"] if several else None) for value in own]
            paper = [theirs[row["algorithm"]][key] for key in BESIDE] if row["algorithm"] in theirs else []
            best = [ahead.get(m.key) == row["algorithm"] for m in shown_measures]
            rows.append(latex.Row(display_name(row["algorithm"]), ours, paper, best))
        tables.append(latex.Table(part.panel.title, [m.name for m in shown_measures], rows))
    return tables


def _facts(shown: list[Shown]) -> dict[str, str]:
    runs = [run for part in shown for chosen in part.chosen.values() for run in chosen]
    wanted = sum(len(part.panel.algorithms) * len(part.panel.seeds) for part in shown)
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
    lines = []
    for part in shown:
        left, title = part.missing, part.panel.title
        count_left = sum(map(len, left.values()))
        if part.record is None:
            lines.append(f"{title}: not run yet.")
        elif count_left > FEW:
            wanted = len(part.panel.algorithms) * len(part.panel.seeds)
            lines.append(f"{title}: {count_left} of {wanted} runs not run yet.")
        elif left:
            names = ", ".join(f"{display_name(k)} (seed {', '.join(map(str, v))})" for k, v in left.items())
            lines.append(f"{title}: not run yet: {names}.")
        if part.record is not None:
            lines += [f"{title}: {note}" for note in notes(part.record.results)]
            federation = part.record.results["federation"]
            told: list[str] = federation.get("notes", []) if "clients" in federation else []
            lines += [f"{title}: {note}." for note in told]
    return lines + _chosen_on_test(shown)


def _chosen_on_test(shown: list[Shown]) -> list[str]:
    """Setups with several settings or parameters of an algorithm, and no validation samples to choose on."""
    tried: dict[str, int] = {}
    for part in shown:
        if part.record is not None and part.record.results.get("parts", TESTED)["history"] == "test":
            names = Counter(spec.partition(":")[0] for spec in part.panel.algorithms)
            tried[part.panel.setup] = tried.get(part.panel.setup, 0) + max(names.values())
    return [
        f"{setup}: {count} settings are compared on the test samples, so the best of them is known with "
        "hindsight: to choose one, keep validation samples (validation=0.1), or use fairwind tune."
        for setup, count in tried.items()
        if count > 1
    ]


def _overview(study: Study, shown: list[Shown]) -> Iterable[str]:
    """What is said of all panels together."""
    if "readings" in study.charts and shown:
        yield _readings(shown)
    if "tuned" in study.charts:
        yield from filter(None, map(_tuned, shown))


def _readings(shown: list[Shown]) -> str:
    """How far each reading of the data and of the statistics lies from the published table."""
    readings = []
    for part in shown:
        assert part.record is not None
        for statistics in STATISTICS:
            cells = beside_paper(part.record.results["summary"], part.panel.published, statistics)
            away = distance(cells)
            if away is not None:
                order = sum(cell.in_order for row in cells.values() for cell in row.values())
                total = sum(len(row) for row in cells.values())
                readings.append((away, part.panel.title, statistics, f"{order} of {total}"))
    rows = [[t, s, f"{away:.1f}", o] for away, t, s, o in sorted(readings)]
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
