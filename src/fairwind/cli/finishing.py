"""The end of a comparison: the rounds that are left, its results, page and table."""

import shlex
from pathlib import Path

from safetensors import SafetensorError

from fairwind.cli.terminal import err, out
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError, first_line
from fairwind.runs.directory import RunDirectory
from fairwind.runs.folder import explaining
from fairwind.runs.training import train
from fairwind.tracking import Tracking


def finish(
    directory: RunDirectory, simulation: Simulation, checkpoint_every: float, tracking: Tracking
) -> None:
    """The rounds that are left, then the results and the page."""
    again = shlex.join(["fairwind", "resume", str(directory.path)])
    with tracking:
        with explaining(directory.path):
            tracking.begin(simulation, directory.recipe, directory.path)
            train(
                simulation,
                directory,
                console=err,
                every=checkpoint_every,
                again=again,
                after_evaluation=tracking.and_then(None),
            )
            directory.write_results(simulation)
        tracking.finish(show(directory.path))


def show(path: Path) -> Path:
    """The page, and the table on the terminal."""
    from fairwind.report.finding import best_shown  # charts need a second to load
    from fairwind.report.page import write_page
    from fairwind.report.paired import paired
    from fairwind.report.record import read_record
    from fairwind.report.table import summary_table

    try:
        record = read_record(path)
        found = paired(record)
        page = write_page(path, record, found)[0]
        out.print(summary_table(record.results, best_shown(record, found), out.width))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        about = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else ""
        why = about or first_line(error)
        again = shlex.join(["fairwind", "report", str(path)])
        raise InputError(
            f"the report of {path} cannot be written: {why}; the results are safe, and '{again}' tries again"
        ) from error
    out.print(f"report: {path / 'report.html'}", soft_wrap=True, markup=False)
    return page
