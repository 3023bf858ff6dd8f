"""When training stops before its last round: by the averages so far, or because someone asked for it."""

import math
from collections.abc import Sequence

from fairwind.engine.settings import Settings
from fairwind.runs.schema import HistoryLine, Stopped


class Stopping:
    """Follows from the history, so that a resumed run stops at the same round; unless it was asked for."""

    def __init__(self, settings: Settings, sign: int, history: Sequence[HistoryLine], runs: int):
        """`sign` is −1 where lower averages are better; each evaluation has a line of every run."""
        self.target, self.patience, self.sign = settings.target, settings.patience, sign
        self.best = [-math.inf] * runs
        self.waited = 0  # evaluations since a run's average was better than ever
        self.reached = False  # whether every run is at the target
        self.request: Stopped | None = None  # of a time budget or a callback
        for first in range(0, len(history), runs):
            self.add(history[first : first + runs])

    def add(self, lines: Sequence[HistoryLine]) -> None:
        """An evaluation of all runs."""
        averages = [-math.inf if line["avg"] is None else self.sign * line["avg"] for line in lines]
        improved = any(new > best for new, best in zip(averages, self.best, strict=True))
        self.waited = 0 if improved else self.waited + 1
        self.best = list(map(max, self.best, averages))
        self.reached = self.target is not None and min(averages) >= self.sign * self.target

    @property
    def stopped(self) -> Stopped | None:
        """Why training stops now; None if it goes on."""
        if self.reached:
            return {"by": "target", "why": f"every average has reached {self.target:g}"}
        if self.patience is not None and self.waited >= self.patience:
            waited = f"{self.waited} evaluation{'s' * (self.waited > 1)}"
            return {"by": "patience", "why": f"no average has improved for {waited}"}
        return self.request
