"""How trained models do on clients that took no part in training, as a table."""

import numpy as np

from fairwind.errors import printable
from fairwind.intervals import Interval, jackknife
from fairwind.report.html import section, table_html
from fairwind.report.record import Record
from fairwind.report.table import (
    Measure,
    count,
    display_name,
    mean_and_spread,
    measures,
    of_new_clients,
    reading,
    seed_count,
)
from fairwind.runs.schema import OverSeeds

MOST_NAMES = 12
SHOWN = ("avg", "std", "worst30", "worst")


def new_clients_section(record: Record) -> str:
    """A row for each model that fits them, beside the clients that trained; nothing without new clients."""
    new = of_new_clients(record.results)
    if new is None or record.new_score is None:
        return ""
    seeds = seed_count(record.results)
    shown = [measure for measure in measures(record.results) if measure.key in SHOWN]
    trained = {row["algorithm"]: row["avg"] for row in record.results["summary"]}
    rows = []
    for row in new["summary"]:
        within, number = _interval(record, row["algorithm"]), record.judged.number
        between = "–" if within is None else f"{number(within.low)} to {number(within.high)}"
        average, *cells = (_text(row.get(measure.key), measure, seeds) for measure in shown)
        others = _text(trained[row["algorithm"]], shown[0], seeds)
        rows.append([display_name(row["algorithm"]), others, average, between, *cells])
    heads = ["", "average of trained clients", "average of new clients", "95 % interval"]
    heads += [measure.name for measure in shown[1:]]
    names = [printable(name) for name in record.new_names[:MOST_NAMES]]
    more = len(record.new_names) - len(names)
    words = (
        f"{count(len(record.new_names), 'client')} took no part in training: {', '.join(names)}"
        f"{f' and {more} more' if more else ''}. Models are tested on their test samples; only fine-tuning "
        f"has used their training samples. {reading(new).partition(';')[0].rstrip('.')}; intervals are over "
        "clients and seeds. Models that belong to single clients cannot be given to new ones."
    )
    return section("New clients", words, [], table_html(heads, rows))


def _interval(record: Record, label: str) -> Interval | None:
    """Of an algorithm's average over the new clients."""
    assert record.new_score is not None
    rows = [run for run in record.results["runs"] if "new_clients" in run]
    mine = [r for r, run in enumerate(rows) if run["algorithm"] == label]
    score = record.new_score[mine].astype(np.float64)
    score = score[:, np.isfinite(score).all(axis=0)]
    if not score.size:
        return None
    found = jackknife(score, None, np.ones(score.shape[1]), record.judged.sign)
    return found.interval("avg", range(len(mine)))


def _text(value: OverSeeds | None, measure: Measure, seeds: int) -> str:
    """A mean, with its standard deviation over seeds."""
    mean, spread = mean_and_spread(value, measure, seeds)
    return f"{mean} ±{spread}" if spread else mean
