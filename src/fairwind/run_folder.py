"""A folder for a comparison: made, held by one process, and what went wrong with it."""

import errno
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from fairwind.errors import InputError
from fairwind.files import RECIPE, lock, sweep

CHECKPOINTS = "checkpoints"
RUNS = Path("runs")  # where folders are made, if no other place is named


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keeps other processes from training in a directory, which is made if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}; give another --out") from None
    with lock(path) as mine:
        if not mine:
            raise InputError(f"another process is training in {path}; wait for it or stop it")
        if not os.access(path, os.W_OK):
            raise InputError(f"cannot write to {path}: permission denied; give another --out")
        try:
            sweep(path)
            yield
        finally:
            with suppress(OSError):  # whatever is in it stays
                path.rmdir()
                if path.parent == RUNS:
                    path.parent.rmdir()


def holds_run(path: Path) -> bool:
    """Whether a comparison was begun in a directory."""
    return (path / RECIPE).exists() or any((path / CHECKPOINTS).glob("[0-9]*.json"))


def check_free(path: Path) -> None:
    """Refuses a directory that holds anything; it is held by this process."""
    if holds_run(path):
        raise InputError(
            f"{path} already holds a run: go on with 'fairwind resume {path}', or give another --out"
        )
    if any(path.iterdir()):
        raise InputError(f"{path} is not empty: give another --out, so that nothing is overwritten")


def run_name(name: str) -> str:
    """A name that a folder can have, with the time."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.") or "run"
    return f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"


def new_directory(name: str) -> Path:
    """A directory under runs/ that nobody else has, made for a comparison of that name."""
    begun = run_name(name)
    for number in range(1, 1000):
        path = RUNS / (begun if number == 1 else f"{begun}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"cannot write to {path.parent}: {error.strerror}; give --out") from None
    raise InputError("there are a thousand runs of this second: give --out")


def explained(error: OSError) -> str:
    """An error of the file system in a line, with the file that it is about."""
    where = f": {error.filename}" if error.filename else ""
    text = f"{error.strerror or error}{where}"
    return f"{text}; make room, then give the same command again" if _full(error) else text


@contextmanager
def explaining(path: Path, again: str = "") -> Iterator[None]:
    """Turns an error of the file system while training in a directory into a line on how to go on.

    `again` is how, if not with 'fairwind resume'.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None and not Path(str(error.filename)).is_relative_to(path):
            raise  # something of the user's
        if identity(path) is None:
            raise moved(path) from error
        then = "make room" if _full(error) else "mend that"
        saved = max((file.stem for file in (path / CHECKPOINTS).glob("[0-9]*.json")), default="")
        if not holds_run(path):
            advice = f"nothing was saved yet: {then}, then begin again"
        else:
            safe = f"the checkpoint of round {int(saved)}" if saved.isdigit() else "the recipe"
            go_on = again or shlex.join(["fairwind", "resume", str(path)])
            advice = f"{safe} is safe: {then}, then go on with: {go_on}"
        where = f": {error.filename}" if error.filename is not None else ""
        raise InputError(f"{error.strerror or error}{where}; {advice}") from error


def _full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def moved(path: Path) -> InputError:
    """What to say where a folder is no longer in its place."""
    return InputError(
        f"{path} was moved or deleted while it was trained in; what was saved is where it was moved to: "
        "go on there with 'fairwind resume NEW-PLACE'"
    )


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a folder from another one in its place; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
