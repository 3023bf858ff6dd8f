"""Progress on a terminal or in a notebook, drawn by rich."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Messages(Console):
    """Standard error: shows what users wrote as they did, and falls silent where it cannot be written."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False, markup=False, emoji=False)

    def _check_buffer(self) -> None:  # rich's, which lets any error pass but a broken pipe
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Nobody reads it, or its disk is full: training goes on."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    @property
    def draws(self) -> bool:
        return self.is_terminal or self.is_jupyter

    @contextmanager
    def bar(self, total: int, done: int) -> Iterator["Rounds"]:
        with Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[standing]}", style="dim"),
            console=self,
        ) as drawn:
            yield Rounds(drawn, total, done)


class Rounds:
    """The bar of a comparison's rounds."""

    def __init__(self, drawn: Progress, total: int, done: int):
        self.drawn = drawn
        self.task = drawn.add_task("rounds", total=total, completed=done, rate="", standing="")

    def show(self, done: int, rate: str, standing: str) -> None:
        self.drawn.update(self.task, completed=done, rate=rate, standing=standing)

    def stop(self) -> None:
        self.drawn.stop()
