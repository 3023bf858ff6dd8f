"""Trains a comparison with progress, checkpoints and results, from Python or the command line."""

import signal
import sys
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import Any, Protocol

from fairwind.engine.simulation import Simulation
from fairwind.errors import python_numbers
from fairwind.runs.directory import RunDirectory
from fairwind.runs.results import Evaluated, warnings_of
from fairwind.runs.schema import HistoryLine, Stopped


class Bar(Protocol):
    """How far training is."""

    def show(self, done: int, rate: str, standing: str) -> None: ...

    def stop(self) -> None: ...


class Console(Protocol):
    """Where training says how it goes."""

    @property
    def draws(self) -> bool: ...  # whether a bar is seen: on a terminal, in a notebook

    @property
    def width(self) -> int: ...

    def print(self, text: str, /, *, soft_wrap: bool = ...) -> None: ...

    def bar(self, total: int, done: int) -> AbstractContextManager[Bar]: ...


class Plain:
    """Lines on standard error, or none; where nothing draws them."""

    draws, width = False, 80

    def __init__(self, *, quiet: bool = False):
        self.quiet = quiet

    def print(self, text: str, /, *, soft_wrap: bool = True) -> None:
        if not self.quiet:
            with suppress(OSError):  # nobody reads it, or its disk is full
                print(text, file=sys.stderr, flush=True)

    def bar(self, total: int, done: int) -> AbstractContextManager[Bar]:
        return nullcontext(self)

    def show(self, done: int, rate: str, standing: str) -> None: ...

    def stop(self) -> None: ...


def messages() -> Console:
    """Standard error, with a bar where rich is installed."""
    try:
        from fairwind.runs.progress import Messages  # which takes time to load
    except ModuleNotFoundError:
        return Plain()
    return Messages()


def asks_to_stop(after_evaluation: Evaluated, lines: list[HistoryLine]) -> bool:
    """Calls a user's function with the newest lines; whether it returns True."""
    return python_numbers(after_evaluation([line.copy() for line in lines])) is True


class News:
    """Evaluations that were not yet told: to the history's file, and to a user's function."""

    def __init__(
        self, simulation: Simulation, directory: RunDirectory | None, after_evaluation: Evaluated | None
    ):
        self.simulation, self.directory, self.after_evaluation = simulation, directory, after_evaluation
        self.told = len(simulation.history)

    def tell(self) -> bool:
        """Tells them; whether the function asks to stop."""
        lines, runs, asked = self.simulation.history, len(self.simulation.views), False
        if len(lines) > self.told and self.directory is not None:
            self.directory.write_history(self.simulation, since=self.told)
        for begin in range(self.told, len(lines), runs):
            if self.after_evaluation is not None:
                asked |= asks_to_stop(self.after_evaluation, lines[begin : begin + runs])
        self.told = len(lines)
        return asked


BY_CALLBACK: Stopped = {"by": "after_evaluation", "why": "after_evaluation returned True"}
BY_TIME: Stopped = {"by": "time_budget", "why": "the time budget was used up"}


def train(
    simulation: Simulation,
    directory: RunDirectory | None = None,
    *,
    console: Console | None = None,
    every: float = 30,
    again: str = "",
    after_evaluation: Evaluated | None = None,
    time_budget: float | None = None,
    save_last: bool = True,
) -> None:
    """Trains the remaining rounds, or until so many seconds of training are used up.

    With a directory, writes a checkpoint every so many seconds, and the history line by line. Ctrl-C or
    SIGTERM saves first and prints how to resume: by `again`. Without a console nothing is printed. Other
    ranks than 0 have neither, and stop when it does.
    """
    console = console or Plain(quiet=True)
    stop, news = Interrupt(console), News(simulation, directory, after_evaluation)
    _announce(simulation, directory, console)

    def save() -> None:
        if directory is not None and (save_last or not simulation.done):
            directory.save(simulation)
        if not console.draws:
            console.print(f"round {simulation.round} of {simulation.settings.rounds}{_standing(simulation)}")

    with console.bar(simulation.settings.rounds, simulation.round) as bar, stop:

        def after_round() -> None:
            asked = news.tell()
            late = time_budget is not None and simulation.seconds >= time_budget
            if simulation.ranks.any(asked or late):
                simulation.stop(BY_CALLBACK if asked else BY_TIME)
                news.tell()
            rate = simulation.round / max(simulation.seconds, 1e-9)
            shown = f"{rate:.1f}/s" if rate >= 0.5 else f"{1 / rate:.0f} s each"
            standing = _standing(simulation, short=console.width < 110)
            bar.show(simulation.round, shown, standing)
            if simulation.ranks.any(stop.asked) and not simulation.done:
                save()
                stop.saved = True
                raise KeyboardInterrupt

        try:
            if simulation.round:
                after_round()  # the time may be used up
            simulation.run(save, every=every, after_round=after_round)
        except KeyboardInterrupt:
            if stop.saved and not simulation.ranks.first:
                return
            bar.stop()
            where = f"stopped after round {simulation.round}" if stop.saved else "stopped"
            console.print(f"{where}; go on with: {again}" if again else where, soft_wrap=True)
            raise
    if (stopped := simulation.stopping.stopped) is not None:
        console.print(f"stopped after round {simulation.round}: {stopped['why']}", soft_wrap=True)
    for line in warnings_of(simulation):
        console.print(f"fairwind: {line}", soft_wrap=True)


def _announce(simulation: Simulation, directory: RunDirectory | None, console: Console) -> None:
    settings, runs = simulation.settings, simulation.runs
    clients, taking = len(simulation.federation), simulation.planner.participants
    some = f"{taking} of {clients}" if taking < clients else str(clients)
    place = f", into {directory.path}" if directory is not None else ""
    compiling = " (compiling first)" if settings.compile == "on" and not simulation.done else ""
    console.print(
        f"{len(runs)} run{'s' * (len(runs) > 1)} × {some} clients on {settings.device}{place}{compiling}",
        soft_wrap=True,
    )
    console.print(simulation.plan.order, soft_wrap=True)


def _standing(simulation: Simulation, *, short: bool = False) -> str:
    """The newest average and worst 30 % of the run whose average is best."""
    newest = simulation.history[-len(simulation.views) :]
    if not newest or newest[0]["round"] == 0:
        return ""
    known = [
        (line["avg"], line["worst30"], line["algorithm"])
        for line in newest
        if line["avg"] is not None and line["worst30"] is not None
    ]
    if not known:
        return " average not finite"
    average, worst, label = max(known, key=lambda numbers: simulation.scores[0].sign * numbers[0])
    part = "" if simulation.watched == "test" else f" {simulation.watched}"
    if short:
        return f"{part} {average:.4g}, worst 30 % {worst:.4g}"
    whose = f" ({label} leads)" if len(simulation.views) > 1 else ""
    return f"{part} average {average:.4g}, worst 30 % {worst:.4g}{whose}"


class Interrupt:
    """Turns Ctrl-C or SIGTERM into a request to stop after this round; a second one stops at once."""

    def __init__(self, console: Console) -> None:
        self.console, self.asked, self.saved = console, False, False
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.console.print("stopping after this round (again to stop now)")
