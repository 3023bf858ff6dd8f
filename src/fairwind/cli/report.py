"""report: the page of a comparison, finished or still going, and its table."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from fairwind.cli.options import Directory, described
from fairwind.cli.terminal import out, say
from fairwind.errors import InputError, first_line
from fairwind.runs.directory import check_begun
from fairwind.runs.files import RESULTS, is_held, lock, sweep
from fairwind.runs.growth import settle
from fairwind.runs.seals import check_whole, lost_results, read_results


@described
@dataclass(frozen=True)
class Report:
    """Write a comparison's report page and figures anew, and show its table.

    Of a comparison that is still going, or was stopped, an interim page is written: interim.html.
    """

    directory: Directory
    """The comparison's directory."""
    live: bool = False
    """Serve the page of a comparison that is still going on 127.0.0.1, where it refreshes by itself. Stops
    when the comparison ends, or at Ctrl-C, which leaves the comparison alone."""

    def run(self) -> None:
        if (self.directory / RESULTS).exists() or lost_results(self.directory):
            return self._finished()
        from fairwind.report.interim import write_interim  # charts need a second to load
        from fairwind.report.live import follow

        check_begun(self.directory)
        if self.live and is_held(self.directory):
            try:
                follow(self.directory, say)
            except KeyboardInterrupt:
                return say("no longer followed; the run goes on")
            if (self.directory / RESULTS).exists():
                return self._finished()
        record, path = write_interim(self.directory)
        say(record.state)
        return out.print(f"interim report: {path}", soft_wrap=True, markup=False)

    def _finished(self) -> None:
        with lock(self.directory) as mine:
            if mine:
                sweep(self.directory)
                settle(self.directory)
            check_whole(self.directory)
            show(self.directory)


def nothing_left(path: Path) -> str:
    """What is said where nothing was trained."""
    stopped = read_results(path).get("stopped")
    return (
        "finished: nothing is left to train" if stopped is None else f"nothing was trained: {stopped['why']}"
    )


def show(path: Path) -> Path:
    """The page, and the table on the terminal."""
    from fairwind.report.finding import best_shown  # charts need a second to load
    from fairwind.report.joining import lines
    from fairwind.report.page import write_page
    from fairwind.report.paired import paired
    from fairwind.report.record import read_record
    from fairwind.report.table import new_clients_table, summary_table

    try:
        record = read_record(path)
        found = paired(record)
        page = write_page(path, record, found)[0]
        out.print(summary_table(record.results, best_shown(record, found), out.width))
        if (new := new_clients_table(record.results, out.width)) is not None:
            out.print(new)
        for line in lines(record):
            out.print(line, soft_wrap=True, markup=False)
    except (OSError, ValueError, KeyError, MemoryError, SafetensorError) as error:
        about = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else ""
        why = about or first_line(error)
        again = shlex.join(["fairwind", "report", str(path)])
        raise InputError(
            f"the report of {path} cannot be written: {why}; the results are safe, and '{again}' tries again"
        ) from error
    out.print(f"report: {path / 'report.html'}", soft_wrap=True, markup=False)
    return page
