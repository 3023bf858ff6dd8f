"""The report of a run directory: one self-contained page, and its figures as PDF and PNG files."""

from collections.abc import Iterable
from pathlib import Path

import altair as alt

from fairwind.data.federation import Federation
from fairwind.errors import InputError
from fairwind.report import charts, groups, spread
from fairwind.report import joining as joins
from fairwind.report.clients import client_chart, clients_data, clients_section
from fairwind.report.finding import best_shown, finding, how_sure
from fairwind.report.html import (
    Spec,
    escaped,
    frame,
    measures_table,
    plain_spec,
    section,
    write_figures,
)
from fairwind.report.legend import legend_html, shared
from fairwind.report.newcomers import new_clients_section
from fairwind.report.paired import Paired, paired
from fairwind.report.provenance import how_section
from fairwind.report.record import Record, read_record
from fairwind.report.sizes import shown_by_size, sizes, trend_words
from fairwind.report.table import (
    FIRST,
    by_other_scores,
    count,
    display_name,
    judged,
    measures,
    notes,
    reading,
    sample_counts,
    seed_count,
)
from fairwind.report.targets import targets_data, targets_section
from fairwind.report.theme import theme
from fairwind.runs.files import write_atomic
from fairwind.runs.folder import explained
from fairwind.runs.schema import Findings, FindingsSoFar, Results
from fairwind.runs.seals import check_whole

INTERIM = "interim.html"  # the page of a run that is not finished


def write_report(directory: Path) -> list[Path]:
    """Writes report.html and figures/ into the directory of a finished run; returns the paths."""
    check_whole(directory)
    record = read_record(directory)
    try:
        return write_page(directory, record, paired(record))
    except OSError as error:
        raise InputError(
            f"the report of {directory} cannot be written: {explained(error)}; the results are safe"
        ) from error


def write_page(directory: Path, record: Record, runs: Paired) -> list[Path]:
    """The same of a record that was read, of which it is known what is more than noise."""
    specs = figures(record)
    (directory / "figures").mkdir(exist_ok=True)
    written = [write_atomic(directory / "report.html", page(record, specs, runs).encode())]
    (directory / INTERIM).unlink(missing_ok=True)
    return written + write_figures(directory / "figures", specs, theme(record.labels, "light"))


def figures(record: Record) -> dict[str, Spec]:
    """The Vega-Lite specs of the report by name, without colours (see `theme`)."""
    drawn: dict[str, alt.Chart | alt.LayerChart | None] = {
        "average": charts.curves(
            record, "avg", f"Average over clients{record.of_curves}: {record.judged.axis}"
        ),
        "worst30": charts.curves(
            record, "worst30", f"The worst-off 30 % of clients{record.of_curves}: {record.judged.axis}"
        ),
    }
    if record.names:
        drawn |= {
            "distribution": spread.distribution(record),
            "sizes": sizes(record),
        }
    drawn |= {"groups": groups.averages(record), "certainty": charts.certainty(record)}
    if record.names:
        drawn["clients"] = spread.clients(record)
        if gains := joins.gains(record):
            drawn["joining"] = joins.chart(record, gains)
    return {name: plain_spec(chart) for name, chart in drawn.items() if chart is not None}


def page(record: Record, specs: dict[str, Spec], runs: Paired | None = None, live: str = "") -> str:
    """The whole page as HTML; `live` names what it shows of a run that goes on (see `frame`)."""
    runs = runs or paired(record)
    results = record.results
    names = [display_name(label) for label in record.labels]
    baselines = {row["algorithm"] for row in results["runs"] if "baseline" in row}
    federated = [display_name(label) for label in record.owners if label not in baselines] or names
    subject = federated[0] if len(federated) == 1 else f"{len(federated)} algorithms"
    summary = f"<section><h2>Summary</h2>{_summary(record, runs)}</section>"
    body = [summary, *_sections(record, specs, runs), how_section(record)]
    data: dict[str, object] = {"names": names, "percent": record.judged.kind == "accuracy"}
    if (targets := targets_data(record)) is not None:
        data["targets"] = targets
    if record.names:
        data |= {"clients": clients_data(record), "client": shared(plain_spec(client_chart(record)))}
    return frame(
        kind="Fairwind report, interim" if record.state else "Fairwind report",
        title=f"{subject} on {_task_name(results)}",
        banner=record.state,
        finding=finding(record, runs),
        facts=_facts(record),
        notes=notes(results),
        legend=legend_html(record.labels),
        body="\n".join(body),
        specs={name: shared(spec) for name, spec in specs.items()},
        themes={mode: theme(record.labels, mode) for mode in ("light", "dark")},
        data=data,
        live=live,
    )


def _task_name(results: Results | FindingsSoFar) -> str:
    """The task's name; of one without a name, how many clients it has."""
    name, federation = results["task"], results["federation"]
    if name == Federation.name and "clients" in federation:
        return count(federation["clients"], "client")
    return name


def _facts(record: Record) -> dict[str, str]:
    results, algorithms = record.results, len(record.owners)
    federation, seeds = results["federation"], seed_count(results)
    told = {} if federation["name"] == Federation.name else {"federation": federation["name"]}
    if "clients" in federation:  # older runs say so only when they are finished
        told |= {
            "clients": f"{federation['clients']:,}",
            **({"new clients": f"{federation['new_clients']:,}"} if "new_clients" in federation else {}),
            "samples": sample_counts(federation),
            "training samples of a client": (
                f"{federation['smallest']:,} to {federation['largest']:,}, median {federation['median']:,g}"
            ),
        }
        if "groups" in federation:
            told["groups"] = f"{len(federation['groups']):,}"
    return told | {
        "runs": f"{count(algorithms, 'algorithm')} × {count(seeds, 'seed')}",
        "rounds": f"{max(run['rounds'] for run in results['runs']):,}",
    }


def _summary(record: Record, runs: Paired) -> str:
    """The table of scores, and the other measures folded away below it."""
    results = record.results
    shown, ahead = measures(results), best_shown(record, runs)
    meanings = "".join(f"<dt>{escaped(m.name)}</dt><dd>{escaped(m.meaning)}</dd>" for m in shown)
    score = judged(results)
    unit = ", in percent" if score.kind == "accuracy" else ", lower is better" if score.sign < 0 else ""
    return (
        f"<p>{escaped(score.title)} on the clients’ own {record.part} data after the last "
        f"round{unit}. {reading(results)} {escaped(how_sure(record))}</p>"
        f"{measures_table(results, shown[: len(FIRST)], ahead=ahead)}{_further(results)}"
        "<details><summary>Other measures of fairness, and the losses</summary>"
        f"{measures_table(results, shown[7:], 'Other measures', ahead=ahead)}</details>"
        f'<details><summary>What the columns mean</summary><dl class="pairs">{meanings}</dl></details>'
    )


def _further(results: Findings) -> str:
    """A table for each score beside the main one."""
    tables = ""
    for other in by_other_scores(results):
        lower = ", lower is better" if judged(other).kind == "lower" else ""
        table = measures_table(other, measures(other)[:5], judged(other).title)
        tables += f"<h3>{escaped(judged(other).title)}{lower}</h3>{table}"
    return tables


def _sections(record: Record, specs: dict[str, Spec], runs: Paired) -> Iterable[str]:
    several = len(record.labels) > 1
    band = (
        f"Lines are means over {record.seeds} seeds; bands reach from the lowest seed to the highest."
        if record.seeds > 1
        else "One seed, so there is no band."
    )
    evaluated = len({row["round"] for row in record.history})
    if evaluated > charts.MAX_POINTS:
        band += f" Of {evaluated:,} evaluated rounds {charts.MAX_POINTS} are drawn, evenly spaced."
    hint = " Point at a round for its values." if several else ""
    yield section("Over the rounds", band + hint, ["average", "worst30"])
    yield targets_section(record)

    if "joining" in specs:
        gains = joins.table(record, joins.gains(record))
        yield section("Who gains from joining?", joins.words(record), ["joining"], gains)
    yield new_clients_section(record)
    tested = len(spread.tested_clients(record))
    untested = record.score.shape[1] - tested
    if "distribution" in specs:
        better = "The higher a line" if record.judged.sign > 0 else "The lower a line"
        yield section(
            "How clients are spread",
            "Each line is the clients of an algorithm, from the worst-off on the left to the best-off"
            + (", place by place a mean over seeds" if record.seeds > 1 else "")
            + f". {better}, the better; the flatter, the fairer. The worst-off 30 % are shaded."
            + (f" {count(untested, 'client')} without {record.part} samples left out." if untested else ""),
            ["distribution"],
        )
    if "sizes" in specs:
        some = len(shown_by_size(record))
        yield section(
            "Against client size",
            "Each dot is a client under an algorithm, as large as the test set behind it: small dots are "
            f"rough numbers. {trend_words(record)}Click a dot to open its client."
            + (f" Of {tested:,} clients {some:,} have dots." if some < tested else ""),
            ["sizes"],
        )
    if "groups" in specs:
        yield section("Groups", groups.words(record), ["groups"], groups.tables(record))
    if "certainty" in specs:
        yield section(
            "Certainty",
            "AdaFedAdam’s C is 1 plus the logarithm of how far local training went, in gradient steps. "
            f"The server’s step and memory scale with it; at C = 1 a round is one step of Adam. {band}",
            ["certainty"],
        )
    if "clients" in specs:
        yield clients_section(record)
