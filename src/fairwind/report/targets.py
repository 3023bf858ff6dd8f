"""Rounds to a target, over seeds, and what they cost: tables, and what the page needs for other targets."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from fairwind.report.charts import curve_of, number
from fairwind.report.html import escaped, scroll
from fairwind.report.record import Record
from fairwind.report.table import display_name
from fairwind.runs.cost import per_round
from fairwind.runs.schema import Metric

MEASURES: dict[Metric, str] = {"avg": "average", "worst30": "worst 30 %"}
TARGETS_READ = (
    "The first evaluated round at which a seed is at the target: the median over seeds and, in brackets, the "
    "first and the last; – where it is not reached. Gradients and bytes are those of all clients."
)


class Reached(NamedTuple):
    """The first evaluated round of each seed that is at a target; None where none is."""

    rounds: tuple[int | None, ...]

    @property
    def median(self) -> int | None:
        """By which half of the seeds are there, of two the later one."""
        return sorted(self.rounds, key=_late)[len(self.rounds) // 2]

    def text(self, of: Callable[[int], str] = "{:,}".format) -> str:
        """The median, with first and last seed where they differ; `of` a round is what is told of it."""
        low, high = min(self.rounds, key=_late), max(self.rounds, key=_late)
        said = ["–" if each is None else of(each) for each in (self.median, low, high)]
        return said[0] if low == high else f"{said[0]} ({said[1]} to {said[2]})"


def _late(round: int | None) -> float:
    return math.inf if round is None else round


COSTS = {"sample_gradients": "sample gradients", "bytes": "bytes"}


class RoundCost(TypedDict):
    """What a round of an algorithm costs, both ways together."""

    sample_gradients: NotRequired[float]
    bytes: float


class TargetsData(TypedDict):
    """What the page needs to say when a target is reached, and at what cost."""

    curves: dict[Metric, list[list[list[tuple[int, float]]]]]  # by algorithm and seed: round, value
    seconds: float | None  # of a round
    costs: list[tuple[float, ...]] | None  # of a round, by algorithm: those of COSTS that all have
    sign: int


def reached(record: Record, label: str, key: str, target: float) -> Reached:
    """When each seed of an algorithm is at the target."""
    sign = record.judged.sign
    curves = seed_curves(record, label, key)
    return Reached(tuple(next((t for t, v in curve if sign * v >= sign * target), None) for curve in curves))


def seed_curves(record: Record, label: str, key: str) -> list[list[tuple[int, float]]]:
    """A measure by evaluated round, for each seed, where it is defined."""
    curves: dict[int, list[tuple[int, float]]] = {}
    for line in record.history:
        if line["algorithm"] == label:
            curve = curves.setdefault(line["seed"], [])
            if (value := number(line, key)) is not None:
                curve.append((line["round"], value))
    return list(curves.values())


def cost_of(record: Record, label: str) -> RoundCost | None:
    """A round's sample gradients and bytes, both ways together; None where unknown."""
    runs = [run for run in record.results["runs"] if run["algorithm"] == label]
    cost = per_round(runs[0]) if runs else None
    if cost is None:
        return None
    sent = cost.bytes_up + cost.bytes_down
    if math.isnan(cost.sample_gradients):
        return {"bytes": sent}
    return {"sample_gradients": cost.sample_gradients, "bytes": sent}


def known_costs(record: Record) -> dict[str, list[float]]:
    """The costs that are known of all algorithms: of a round of each, by name."""
    costs: list[Any] = [cost_of(record, label) or {} for label in record.watched]
    return {name: [cost[name] for cost in costs] for name in COSTS if all(name in cost for cost in costs)}


def rounds_to(
    record: Record, targets: Sequence[int] = (30, 40, 50, 60, 70, 80, 90)
) -> dict[str, dict[int, Reached]]:
    """By algorithm and target of the average, as far as any algorithm reaches it."""
    rounds = {label: {x: reached(record, label, "avg", x) for x in targets} for label in record.watched}
    shown = [x for x in targets if any(row[x].median is not None for row in rounds.values())]
    return {label: {x: row[x] for x in shown} for label, row in rounds.items()}


def target_tables(record: Record) -> list[tuple[list[str], list[list[str]]]]:
    """Head and rows of a table of rounds, and where costs are known of gradients and of bytes."""
    rounds = rounds_to(record)
    targets = list(next(iter(rounds.values()), {}))
    if not targets:
        return []
    tables = [_table("rounds", rounds, targets, [1.0] * len(rounds))]
    for name, costs in known_costs(record).items():
        tables.append(_table(COSTS[name], rounds, targets, costs))
    return tables


def _table(
    name: str, found: dict[str, dict[int, Reached]], targets: list[int], each: list[float]
) -> tuple[list[str], list[list[str]]]:
    """Of something of which a round has so much, in a unit that leaves few digits."""
    last = [
        (row[x].median or 0) * value for row, value in zip(found.values(), each, strict=True) for x in row
    ]
    power = 0 if name == "rounds" else min(12, 3 * int(math.log10(max(1.0, *last)) // 3))
    unit = {0: "", 3: "thousand ", 6: "million ", 9: "billion ", 12: "trillion "}[power]

    def told(value: float) -> Callable[[int], str]:
        return lambda t: _digits(t * value / 10**power)

    rows = [
        [display_name(label), *(row[x].text(told(value)) for x in targets)]
        for (label, row), value in zip(found.items(), each, strict=True)
    ]
    return [f"{unit}{name} to an average of", *(f"{x} %" for x in targets)], rows


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def targets_data(record: Record) -> TargetsData | None:
    """The curves of every seed, and costs of a round; None where nothing was evaluated after training."""
    curves = {key: [seed_curves(record, label, key) for label in record.watched] for key in MEASURES}
    if not any(curve and curve[-1][0] for seeds in curves["avg"] for curve in seeds):
        return None
    costs = known_costs(record)
    return {
        "curves": curves,
        "seconds": seconds_per_round(record),
        "costs": list(zip(*costs.values(), strict=True)) if costs else None,
        "sign": record.judged.sign,
    }


def seconds_per_round(record: Record) -> float | None:
    rate = record.results["timing"]["rounds_per_second"]
    return 1 / rate if rate else None


def default_target(record: Record) -> float:
    """The one that training was to stop at; else a round number that about half of the algorithms reach."""
    config = record.results["config"]
    if "target" in config and config["target"] is not None:
        return float(config["target"])
    sign = record.judged.sign
    averages = [[row["mean"] for row in curve_of(record, label, "avg")] for label in record.watched]
    best = sorted(sign * max(sign * value for value in curve) for curve in averages if curve)
    middle = best[(len(best) - (sign > 0)) // 2] if best else 0.0
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
    seconds, costs = data["seconds"], data["costs"]
    rows = ""
    for i, label in enumerate(record.watched):
        rounds_reached = reached(record, label, "avg", target)
        at = rounds_reached.median
        cells = [rounds_reached.text()]
        cells += ["–" if at is None else f"{at * cost:.3g}" for cost in (costs[i] if costs else ())]
        if seconds:
            cells.append("–" if at is None else f"{at * seconds:.3g}")
        rows += f'<tr><th scope="row">{escaped(display_name(label))}</th>'
        rows += "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    known = [COSTS[name] for name in known_costs(record)]
    names = ["rounds", *known, *(["seconds"] if seconds else [])]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    runs = sum(record.owner(row["algorithm"]) == row["algorithm"] for row in record.results["runs"])
    timed = (
        f" All {runs} runs trained at once: seconds are rounds times the {seconds:.3g} s that a round of all "
        "runs took."
        if seconds and runs > 1
        else f" A round took {seconds:.3g} s."
        if seconds
        else ""
    )
    words = (
        "The first evaluated round at which a seed is at the target: the median over seeds and, in brackets, "
        "the first and the last."
        if record.seeds > 1
        else "The first evaluated round at which the run is at the target."
    )
    words += " Averages are of validation samples." * bool(record.of_curves)
    what = " and ".join(name.removeprefix("sample ") for name in known).capitalize()
    words += f" {what} are those of all clients." * bool(known) + timed
    options = "".join(f'<option value="{key}">{escaped(name)}</option>' for key, name in MEASURES.items())
    table = scroll(
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody>",
        "Rounds and costs to the target",
        'id="targets-table" class="narrow"',
    )
    return (
        f"<section><h2>Rounds and costs to a target</h2><p>{escaped(words)}</p>"
        '<div class="controls">'
        f'<label>Measure <select id="target-measure">{options}</select></label>'
        f'<label>Target <input id="target-value" type="number" step="any" value="{target:g}"> '
        f"{'%' if record.judged.kind == 'accuracy' else ''}</label>"
        f'<span role="status" id="target-status"></span></div>{table}</section>'
    )
