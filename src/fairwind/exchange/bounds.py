"""Bounds on the numbers of a client's report, relative to those of other clients."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields

from fairwind.contract import Report
from fairwind.errors import InputError, positive, store_python_numbers
from fairwind.robust.limits import Limits

FEWEST = 3  # minimum number of other clients for a median


@dataclass(frozen=True)
class Bounds:
    """Limits on a single client. Factors are relative to the median of the other clients' last reports.

    Numbers outside are clamped, and the client is logged; infinity switches a bound off. Medians hold as long
    as fewer than half of the clients lie.
    """

    share: float = Limits().share
    """Of a round's weight: what one client may have, at most. Among few clients it is at least twice an equal
    share. 1 switches off the next bound, too."""
    together: float = Limits().together
    """What clients have of a round's weight beyond the median weight, all together: to what all weights are
    up to the median. Among fewer than eight clients it is at least twice an equal share."""
    norm: float = Limits().norm
    """Of an update, for each unit of weight, relative to the median of the round's clients; infinity switches
    it off."""
    further: float = Limits().further
    """The same of any further sum, such as that of certainties."""
    size: float = 100.0
    steps: float = 100.0
    lr: float = 10.0
    loss: float = 100.0
    loss0: float = 10.0
    """Of the first loss, which the paper takes to be equal for all."""
    rate: float = 100.0
    """Of η′/η, the step that training was worth in gradient steps: its logarithm is the certainty less 1."""

    def __post_init__(self) -> None:
        store_python_numbers(self)
        if not 0 < self.share <= 1:
            raise InputError(f"share={self.share} is out of range: it is a share of the weight, in (0, 1]")
        if not self.together >= 0:
            raise InputError(f"together={self.together} is out of range: it must not be negative")
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != math.inf:
                positive(**{field.name: value})
            if not value >= 1:
                raise InputError(f"{field.name}={value} is out of range: a factor is 1 or more")

    @property
    def limits(self) -> Limits:
        """Those on what a client has of a round."""
        return Limits(self.share, self.together, self.norm, self.further)


UNBOUNDED = Bounds(1.0, *[math.inf] * 9)

ONLY_ABOVE = ("size", "loss")  # small ones do no harm


class Seen:
    """The numbers that clients reported last, by client."""

    def __init__(self, numbers: Mapping[str, Mapping[str, float]] | None = None):
        self.numbers = {client: dict(each) for client, each in (numbers or {}).items()}

    def note(self, client: str, report: Report) -> None:
        """Stores a client's report."""
        self.numbers[client] = {name: v for name, v in _believed(report).items() if math.isfinite(v)}

    def bounded(self, client: str, report: Report, bounds: Bounds) -> tuple[Report, list[str]]:
        """The report within the bounds, and what was changed, in words."""
        said, found, notes = _believed(report), report, []
        for name, value in said.items():
            low, high = self._limits(client, name, getattr(bounds, name))
            if name == "rate":
                high = min(high, bounds.rate * float(report.steps)) if report.steps > 0 else high
            within = min(max(value, low), high)
            if math.isnan(value) or within == value:
                continue
            notes.append(f"{_WORDS[name]} of {value:.3g} taken as {within:.3g}")
            if name == "rate":
                norm = found.update_norm / (found.lr * within)
                found = found._replace(grad_norm=norm)
            else:
                found = found._replace(**{name: getattr(report, name).new_tensor(within)})
        return found, notes

    def _limits(self, client: str, name: str, factor: float) -> tuple[float, float]:
        others = [each[name] for who, each in self.numbers.items() if who != client and name in each]
        if len(others) < FEWEST or math.isinf(factor):
            return -math.inf, math.inf
        median = statistics.median(others)
        if median <= 0:  # losses may be negative, where a factor means nothing
            return -math.inf, math.inf
        return (-math.inf if name in ONLY_ABOVE else median / factor), median * factor


def within(values: list[float], factor: float) -> list[float]:
    """Values, clamped to within a factor of the median."""
    median = statistics.median(values) if len(values) > FEWEST else 0.0
    if median <= 0 or math.isinf(factor):
        return values
    return [min(max(value, median / factor), median * factor) for value in values]


_WORDS = {
    "lr": "a learning rate",
    "size": "a size",
    "steps": "a number of steps",
    "loss": "a loss",
    "loss0": "a first loss",
    "rate": "a step worth",
}


def _believed(report: Report) -> dict[str, float]:
    """What is bounded, in the order in which it is; η′/η is NaN where a client has no gradient or update."""
    speaks = bool(report.grad_norm > 0) and bool(report.update_norm > 0)
    rate = float(report.update_norm / (report.grad_norm * report.lr)) if speaks else math.nan
    numbers = {name: float(getattr(report, name)) for name in _WORDS if name != "rate"}
    return {**numbers, "rate": rate}
