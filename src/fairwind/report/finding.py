"""The sentences at the top of a page: who serves the worst-off best, and how sure that is."""

from typing import NamedTuple

from fairwind.intervals import Interval
from fairwind.report.paired import Paired, best_labels
from fairwind.report.record import Record
from fairwind.report.table import Judged, Measure, display_name, measures
from fairwind.runs.schema import Metric


class Floor(NamedTuple):
    """What a model reaches that has learned nothing."""

    value: float
    words: str


def finding(record: Record, paired: Paired) -> str:
    """Who serves the worst-off 30 % best, and who has the best average, each with its interval."""
    score = record.judged
    if (chance := at_chance(record, paired)) is not None:
        return chance
    by_key = {measure.key: measure for measure in measures(record.results)}
    worst, average = by_key["worst30"], by_key["avg"]
    first, top = (next(iter(best_labels(record, measure)), None) for measure in (worst, average))
    if first is None or top is None:
        return f"No run ended with a defined {score.name}."
    if len(record.owners) == 1:
        return _alone(record, paired, first)
    shown = not _rivals(record, paired, worst, first)
    said = _worst_off(record, paired, worst, first), _average(record, paired, average, top, first * shown)
    return " ".join(said)


def _alone(record: Record, paired: Paired, label: str) -> str:
    score = record.judged
    average, worst = _mean(record, label, "avg"), _mean(record, label, "worst30")
    within = paired.level("avg", label)
    return (
        f"Under {display_name(label)} clients reach {score.name} of {score.text(average)} on average"
        f"{_range(score, within)}, the worst-off 30 % of them {score.text(worst)}."
    )


def _worst_off(record: Record, paired: Paired, measure: Measure, first: str) -> str:
    score, reached = record.judged, _mean(record, first, "worst30")
    level, name = f"{score.name} of {score.text(reached)}", display_name(first)
    next_best = _next(record, measure, first)
    if next_best is None:
        return (
            f"{name} alone ended with a defined {score.name}: {score.text(reached)} for the worst-off 30 %."
        )
    rivals = _rivals(record, paired, measure, first)
    tied = [x for x in (first, *rivals) if score.text(_mean(record, x, "worst30")) == score.text(reached)]
    if len(tied) > 1:
        return (
            f"No difference shown for the worst-off 30 % of clients: {_listed(tied)} serve them equally, "
            f"with {level}."
        )
    between = paired.difference("worst30", first, next_best)
    gap = score.gap(abs(reached - _mean(record, next_best, "worst30")))
    if between is not None and rivals:
        more = f"; nor is it shown to differ from {_listed(rivals[1:])}" if rivals[1:] else ""
        return (
            f"No difference shown for the worst-off 30 % of clients: {name} reaches {level}, "
            f"{gap} ahead of {display_name(next_best)}{_apart(score, between)}{more}."
        )
    doubt = _apart(score, between) or " (no interval: scores of clients were not kept)"
    return (
        f"{name} serves the worst-off 30 % of clients best: {level}, "
        f"{gap} ahead of {display_name(next_best)}, the next best{doubt}."
    )


def _average(record: Record, paired: Paired, measure: Measure, top: str, said: str) -> str:
    """`said` is the algorithm that was just said to serve the worst-off best, if one was."""
    score, reached = record.judged, _mean(record, top, "avg")
    next_best = _next(record, measure, top)
    if next_best is None:
        return f"The average over all clients is {score.text(reached)}."
    rivals = _rivals(record, paired, measure, top)
    tied = [label for label in best_labels(record, measure) if label in (top, *rivals)]
    if len(tied) > 1:
        return (
            f"No difference shown in the average over all clients: {_listed(tied)} share the best, "
            f"{score.text(reached)}."
        )
    gap = abs(reached - _mean(record, next_best, "avg"))
    between = paired.difference("avg", top, next_best)
    ahead = f"{score.gap(gap)} ahead of {display_name(next_best)}{_apart(score, between)}"
    if between is not None and rivals:
        return (
            f"No difference shown in the average over all clients: the best, {score.text(reached)}, is "
            f"{display_name(top)}’s, {ahead}."
        )
    if said == top:
        return f"Its average over all clients, {score.text(reached)}, is the best too, {ahead}."
    return f"The best average over all clients, {score.text(reached)}, is {display_name(top)}’s, {ahead}."


def at_chance(record: Record, paired: Paired) -> str | None:
    """What to say where no algorithm is shown to have learned anything."""
    score, by_key = record.judged, {measure.key: measure for measure in measures(record.results)}
    top, floor = next(iter(best_labels(record, by_key["avg"])), None), floor_of(record)
    within = None if top is None else paired.level("avg", top)
    if top is None or floor is None or within is None:
        return None
    if min(score.sign * (within.low - floor.value), score.sign * (within.high - floor.value)) > 0:
        return None
    several = len(record.owners) > 1
    best = f"best average over all clients, {display_name(top)}’s," if several else "average over all clients"
    return (
        f"Not shown to be better than {floor.words}: the {best} is {score.text(within.difference)}"
        f"{_range(score, within)}, against {score.text(floor.value)}."
        f"{' So no algorithm is called best here.' if several else ''}"
    )


def best_shown(record: Record, paired: Paired) -> dict[str, str]:
    """By measure, the algorithm that is shown to be the best; none where nothing was learned."""
    return {} if at_chance(record, paired) else paired.ahead


def floor_of(record: Record) -> Floor | None:
    """Of accuracy the commonest answer's, or that of guessing; half for AUC; else the untrained model's."""
    score, about = record.judged, record.results["federation"]
    if score.kind == "accuracy" and "clients" in about:
        if "commonest" in about:
            return Floor(about["commonest"], "always giving the commonest answer")
        if about["classes"]:
            return Floor(100 / about["classes"], f"guessing among {about['classes']} classes")
    if score.name == "AUC":
        return Floor(0.5, "ordering at random")
    untrained = [line["avg"] for line in record.history if line["round"] == 0]
    defined = [value for value in untrained if value is not None]
    if defined and len(defined) == len(untrained):
        return Floor(sum(defined) / len(defined), f"before training{record.of_curves}")
    return None


def how_sure(record: Record) -> str:
    """What the intervals are."""
    if record.seeds == 1:
        return (
            "95 % intervals are over clients, and of these models alone. One seed says nothing of others. No "
            "algorithm is called best."
        )
    together = ", and hold together for all others that an algorithm is compared with"
    return f"95 % intervals are over clients and seeds{together * (len(record.labels) > 2)}."


def _mean(record: Record, label: str, key: Metric) -> float:
    """Of an algorithm that has one."""
    mean = next(row[key]["mean"] for row in record.results["summary"] if row["algorithm"] == label)
    assert mean is not None
    return mean


def _others(record: Record, first: str) -> list[str]:
    """The models of other algorithms than that of a model, which may have several."""
    return [label for label in record.labels if record.owner(label) != record.owner(first)]


def _rivals(record: Record, paired: Paired, measure: Measure, first: str) -> list[str]:
    """The models of other algorithms that the best one is not shown to be ahead of."""
    return paired.rivals(measure, first, among=_others(record, first))


def _next(record: Record, measure: Measure, first: str) -> str | None:
    """The best model of another algorithm by a measure."""
    sign = 1 if measure.best == "highest" else -1
    means = {row["algorithm"]: row[measure.key]["mean"] for row in record.results["summary"]}
    others = {label: sign * mean for label, mean in means.items() if mean is not None}
    known = [label for label in _others(record, first) if label in others]
    return max(known, key=lambda label: others[label], default=None)


def _apart(score: Judged, interval: Interval | None) -> str:
    """The interval of a difference in favour of the better one."""
    if interval is None:
        return ""
    low, high = sorted(score.sign * end for end in (interval.low, interval.high))
    return f" (95 % interval {score.number(low)} to {score.number(high)})"


def _range(score: Judged, interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f" (95 % interval {score.number(interval.low)} to {score.number(interval.high)})"


def _listed(labels: list[str]) -> str:
    names = [display_name(label) for label in labels]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
