"""Rounds and seconds to a target: a table for one, and what the page needs for others."""

import math
from typing import Any

from fairwind.report.charts import curve_of
from fairwind.report.html import escaped, scroll
from fairwind.report.record import Record
from fairwind.report.table import display_name

MEASURES = {"avg": "average", "worst30": "worst 30 %"}


def targets_data(record: Record) -> dict[str, Any] | None:
    """The mean curves over seeds; None where nothing was evaluated after training began."""
    found = {
        key: [
            [[row["round"], row["mean"]] for row in curve_of(record, label, key)] for label in record.labels
        ]
        for key in MEASURES
    }
    if not any(curve and curve[-1][0] for curve in found["avg"]):
        return None
    return {"curves": found, "seconds": seconds_per_round(record), "sign": record.judged.sign}


def seconds_per_round(record: Record) -> float | None:
    rate = record.results["timing"].get("rounds_per_second")
    return 1 / rate if rate else None


def default_target(record: Record) -> float:
    """The one that training was to stop at; else a round number that about half of the algorithms reach."""
    given = record.results["config"].get("target")
    if given is not None:
        return float(given)
    sign = record.judged.sign
    averages = [[row["mean"] for row in curve_of(record, label, "avg")] for label in record.labels]
    reached = sorted(sign * max(sign * value for value in curve) for curve in averages if curve)
    middle = reached[(len(reached) - (sign > 0)) // 2] if reached else 0.0
    if record.judged.kind == "accuracy":
        return float(5 * math.floor(middle / 5))
    if not middle:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(middle))) - 1)  # two digits that count
    rounded = math.floor(middle / unit) if sign > 0 else math.ceil(middle / unit)
    return float(f"{rounded * unit:.6g}")


def targets_section(record: Record) -> str:
    """A form for the target, and a table with a row for each algorithm."""
    data, target = targets_data(record), default_target(record)
    if data is None:
        return ""
    seconds, sign = data["seconds"], record.judged.sign
    rows = ""
    for label, curve in zip(record.labels, data["curves"]["avg"], strict=True):
        at = next((t for t, value in curve if sign * value >= sign * target), None)
        cells = ["–" if at is None else f"{at:,}"]
        if seconds:
            cells.append("–" if at is None else f"{at * seconds:.3g}")
        rows += f'<tr><th scope="row">{escaped(display_name(label))}</th>'
        rows += "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    head = '<th scope="col">rounds</th>' + ('<th scope="col">seconds</th>' if seconds else "")
    runs = len(record.results["runs"])
    timed = (
        f" All {runs} runs trained at once: seconds are rounds times the {seconds:.3g} s that a round of all "
        "runs took."
        if seconds and runs > 1
        else f" A round took {seconds:.3g} s."
        if seconds
        else ""
    )
    words = (
        "The first evaluated round at which the mean over seeds is at the target"
        if record.seeds > 1
        else "The first evaluated round at which the run is at the target"
    )
    options = "".join(f'<option value="{key}">{escaped(name)}</option>' for key, name in MEASURES.items())
    table = scroll(
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody>",
        "Rounds and seconds to the target",
        'id="targets-table" class="narrow"',
    )
    return (
        f"<section><h2>Rounds and seconds to a target</h2><p>{escaped(words + '.' + timed)}</p>"
        '<div class="controls">'
        f'<label>Measure <select id="target-measure">{options}</select></label>'
        f'<label>Target <input id="target-value" type="number" step="any" value="{target:g}"> '
        f"{'%' if record.judged.kind == 'accuracy' else ''}</label>"
        f'<span role="status" id="target-status"></span></div>{table}</section>'
    )
