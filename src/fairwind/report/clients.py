"""Every client's numbers for the page's table, and its curves for when it is opened there."""

import base64
from typing import TypedDict

import altair as alt
import numpy as np
from numpy.typing import NDArray

from fairwind.errors import printable
from fairwind.report.html import escaped, scroll, section
from fairwind.report.record import Record, thin
from fairwind.report.spread import client_means, shown_clients, tested_clients
from fairwind.report.table import count, display_name
from fairwind.report.theme import DASHES, colour, styles
from fairwind.runs.schema import Part

MAX_VALUES = 400_000  # of all curves together, two bytes each: about 1 MB of the page
FEWEST_ROUNDS = 15
STEPS = 65_534  # between the lowest and the highest score of curves; 65,535 is none


class Curves(TypedDict):
    """Mean curves of clients, (algorithms, rounds, clients) in steps from `low` to `high`."""

    rounds: list[int]
    clients: list[int]
    low: float
    high: float
    steps: int
    data: str  # base64 of two bytes each


class ClientsData(TypedDict):
    """What the table of clients shows and its rows open."""

    names: list[str]
    groups: list[str]
    train: list[int]
    test: list[int]
    part: Part  # which samples these and the scores are of
    score: list[list[float | None]]  # (algorithms, K)
    curves: Curves | None


def clients_data(record: Record) -> ClientsData:
    """What the table of clients shows and its rows open."""
    means = client_means(record)
    return {
        "names": [printable(name) for name in record.names],
        "groups": [printable(group) for group in record.groups],
        "train": record.train_size.tolist(),
        "test": record.test_size.tolist(),
        "part": record.part,
        "score": [[_number(value) for value in row] for row in means],
        "curves": _curves(record),
    }


def _curves(record: Record) -> Curves | None:
    """The mean curve over seeds of each kept client under each algorithm, quantised to two bytes a value."""
    if record.curves is None or len(record.rounds) < 2 or not record.names:
        return None
    rounds, kept = kept_curves(record)
    values = np.stack(
        [_mean(record.curves[np.ix_(rounds, _runs(record, label), kept)]) for label in record.labels]
    )  # (algorithms, rounds, clients)
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    scaled = (values - low) / (high - low or 1) * STEPS
    steps = np.where(np.isfinite(values), scaled, STEPS + 1).round().astype("<u2")
    return {
        "rounds": [record.rounds[t] for t in rounds],
        "clients": kept.tolist(),
        "low": low,
        "high": high,
        "steps": STEPS,
        "data": base64.b64encode(steps.tobytes()).decode(),
    }


def kept_curves(record: Record) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of the record's rounds, and which clients have their curves on the page: as many as have room."""
    clients, algorithms = tested_clients(record), len(record.labels)
    room = MAX_VALUES // (algorithms * max(1, len(clients)))
    rounds = thin(np.arange(len(record.rounds)), min(len(record.rounds), max(FEWEST_ROUNDS, room)))
    return rounds, np.sort(thin(clients, max(1, MAX_VALUES // (algorithms * len(rounds)))))


def clients_section(record: Record) -> str:
    """The chart with a column for each client, the table that sorts and searches, and the dialog of one."""
    shown, tested = len(shown_clients(record)), len(tested_clients(record))
    words = (
        f"Each column is a client, in the order of its {record.judged.name}"
        + (" averaged over the algorithms" if len(record.labels) > 1 else "")
        + ("; colours and numbers are means over seeds." if record.seeds > 1 else ".")
        + " Click a column, or a name in the table, for the client’s curves under every algorithm."
    )
    if shown < tested:
        words += (
            f" Of {tested:,} clients {shown} have a column, evenly spaced from the worst-off to the best-off."
        )
    columns = [("n", "client"), *([("g", "group")] if record.groups else [])]
    columns += [("r", "training samples"), ("t", f"{record.part} samples")]
    columns += [(f"a{i}", display_name(label)) for i, label in enumerate(record.labels)]
    head = "".join(
        f'<th scope="col" data-column="{key}"><button type="button">{escaped(name)}</button></th>'
        for key, name in columns
    )
    last = f'<th scope="col">{escaped(record.judged.axis)}, at the end</th>'
    return (
        section("Client by client", words + left_out(record), ["clients"]).removesuffix("</section>")
        + '<div class="controls"><label>Search <input id="clients-search" type="search"></label>'
        '<span role="status" id="clients-status"></span></div>'
        + scroll(f"<thead><tr>{head}</tr></thead><tbody></tbody>", "Clients", 'id="clients-table"')
        + '<button type="button" id="clients-more" hidden>Show more</button>'
        '<dialog id="client" aria-labelledby="client-name"><h2 id="client-name"></h2>'
        '<button type="button" class="close">Close</button><p class="about"></p>'
        '<p class="left-out">The curves of this client are not on the page.</p>'
        '<div class="chart" id="client-chart"></div>'
        f"<table><thead><tr><td></td>{last}</tr></thead><tbody></tbody></table></dialog></section>"
    )


def left_out(record: Record) -> str:
    """What is said of curves that the page has no room for."""
    if record.curves is None or len(record.rounds) < 2:
        return " Curves of single clients were not kept."
    rounds, kept = kept_curves(record)
    tested, said = len(tested_clients(record)), ""
    if len(kept) < tested:
        said += (
            f" The page has room for the curves of {len(kept):,} of {count(tested, 'client')}, evenly spaced "
            "from the worst-off to the best-off; fairwind.load reads all of them."
        )
    if len(rounds) < len({line["round"] for line in record.history}):
        said += f" A client’s curve is drawn at {len(rounds)} of the evaluated rounds."
    return said


def client_chart(record: Record) -> alt.Chart:
    """The chart of one client's curves, into which the page puts the client's rows."""
    names = [display_name(label) for label in record.domain]
    chart: alt.Chart = (
        alt.Chart(
            alt.InlineData([]), description=f"{record.judged.name} of the client by round, by algorithm"
        )
        .properties(width="container", height=260)
        .mark_line(strokeWidth=2.25, strokeJoin="round", point=False)
        .encode(
            x=alt.X(
                "round:Q", title="round", axis=alt.Axis(grid=False, tickCount=6), scale=alt.Scale(nice=False)
            ),
            y=alt.Y(
                "score:Q",
                title=f"{record.judged.axis}{record.of_curves}",
                scale=alt.Scale(zero=False),
                axis=alt.Axis(tickCount=5),
            ),
            color=colour(record, None),
            strokeDash=alt.StrokeDash(
                "algorithm:N",
                scale=alt.Scale(domain=names, range=[DASHES[dash] for _, dash in styles(record.domain)]),
                legend=None,
            ),
            tooltip=[
                "algorithm:N",
                alt.Tooltip("round:Q", format=",d"),
                alt.Tooltip("score:Q", title=record.judged.axis, format=".4~g"),
            ],
        )
    )
    return chart


def _runs(record: Record, label: str) -> NDArray[np.int64]:
    return np.flatnonzero([run["algorithm"] == label for run in record.results["runs"]])


def _mean(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Over the runs, (rounds, runs, clients); NaN where no run has a score."""
    known = np.isfinite(values)
    total = np.where(known, values, 0).sum(axis=1, dtype=np.float64)
    times = known.sum(axis=1)
    mean: NDArray[np.float64] = np.where(times > 0, total / np.maximum(times, 1), np.nan)
    return mean


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
