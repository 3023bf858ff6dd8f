"""What the commands say, and training with a progress bar that can be stopped."""

import os
import signal
import sys
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fairwind.comparison import RunDirectory
from fairwind.engine.simulation import Simulation

out = Console(highlight=False)


class Messages(Console):
    """Standard error: shows what users wrote as they did, and falls silent where nobody reads it."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # training goes on


err = Messages(stderr=True, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    err.print(text, soft_wrap=True)


def advance(
    directory: RunDirectory,
    simulation: Simulation,
    checkpoint_every: float,
    again: str,
    *,
    save_last: bool = True,
) -> None:
    """The rounds that are left, with a progress bar. Ctrl-C saves first, and says to go on by `again`."""
    stop = Interrupt()
    written = len(simulation.history)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=err,
    )
    settings, runs = simulation.settings, simulation.runs
    clients = len(simulation.federation)
    taking = simulation.planner.participants
    some = f"{taking} of {clients}" if taking < clients else str(clients)
    compiling = " (compiling first)" if settings.compile == "on" and not simulation.done else ""
    err.print(
        f"{len(runs)} run{'s' * (len(runs) > 1)} × {some} clients on {settings.device}, into "
        f"{directory.path}{compiling}",
        soft_wrap=True,
    )
    err.print(str(simulation.choice), soft_wrap=True, markup=False)

    def save() -> None:
        if save_last or not simulation.done:
            directory.save(simulation)
        if not err.is_terminal:
            err.print(f"round {simulation.round} of {settings.rounds}")

    with bar, stop:
        task = bar.add_task("rounds", total=settings.rounds, completed=simulation.round, rate="")

        def after_round() -> None:
            nonlocal written
            if len(simulation.history) > written:
                directory.write_history(simulation, since=written)
                written = len(simulation.history)
            rate = simulation.round / max(simulation.seconds, 1e-9)
            shown = f"{rate:.1f}/s" if rate >= 0.5 else f"{1 / rate:.0f} s each"
            bar.update(task, completed=simulation.round, rate=shown)
            if simulation.ranks.any(stop.asked) and not simulation.done:
                save()
                stop.saved = True
                raise KeyboardInterrupt

        try:
            simulation.run(save, every=checkpoint_every, after_round=after_round)
        except KeyboardInterrupt:
            bar.stop()
            where = f"stopped after round {simulation.round}" if stop.saved else "stopped"
            err.print(f"{where}; go on with: {again}", soft_wrap=True)
            raise


def help_along(simulation: Simulation) -> None:
    """The rounds that are left, on a rank that only trains: rank 0 speaks, writes and stops for all."""
    stop = Interrupt()

    def after_round() -> None:
        if simulation.ranks.any(stop.asked) and not simulation.done:
            stop.saved = True
            raise KeyboardInterrupt

    with stop:
        try:
            simulation.run(after_round=after_round)
        except KeyboardInterrupt:
            if not stop.saved:
                raise


class Interrupt:
    """Turns Ctrl-C, or a request to terminate, into a wish to stop after this round; a second stops now."""

    def __init__(self) -> None:
        self.asked = self.saved = False

    def __enter__(self) -> "Interrupt":
        self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        err.print("stopping after this round (again to stop now)")
