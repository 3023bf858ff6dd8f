"""When training stops before its last round, by the averages of all evaluations so far."""

import math
from collections.abc import Sequence

from fairwind.engine.settings import Settings
from fairwind.runs.schema import HistoryLine


class Stopping:
    """Follows from the history alone, so that a resumed run stops at the same round."""

    def __init__(self, settings: Settings, sign: int, history: Sequence[HistoryLine], runs: int):
        """`sign` is −1 where lower averages are better; each evaluation has a line of every run."""
        self.target, self.patience, self.sign = settings.target, settings.patience, sign
        self.best = [-math.inf] * runs
        self.waited = 0  # evaluations since a run's average was better than ever
        self.reached = False  # whether every run is at the target
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
    def why(self) -> str:
        """Why training stops now; empty if it goes on."""
        if self.reached:
            return f"every average has reached {self.target:g}"
        if self.patience is not None and self.waited >= self.patience:
            return f"no average has improved for {self.waited} evaluation{'s' * (self.waited > 1)}"
        return ""
