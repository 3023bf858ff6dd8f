"""The folder of a comparison: created, locked by one process, and its errors explained."""

import errno
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from fairwind.errors import InputError
from fairwind.runs.files import RECIPE, TRACKING, lock, read_json, sweep

CHECKPOINTS = "checkpoints"
FEDERATED = "federated"  # what the recipe of a real federation's training holds, and a comparison's does not
PATIENCE = 0.2  # seconds; who only looks at a directory, or mends it, locks it for less
RUNS = Path("runs")  # where folders are made, if no other place is named


class BusyError(InputError):
    """Another process holds the directory."""


@contextmanager
def held(path: Path, *, wait: bool = False, reading: bool = False) -> Iterator[None]:
    """Locks a directory against other processes, and creates it if necessary.

    If it may be that there is nothing to write, `reading`, also one that cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}; give another --out") from None
    with lock(path, wait=wait, patience=PATIENCE) as mine:
        if not mine:
            raise BusyError(f"another process is training in {path}; wait for it or stop it")
        own = identity(path)
        if not reading:
            check_writable(path)
        try:
            if writable(path):
                sweep(path)
            yield
        finally:
            if identity(path) == own:  # else it was made by someone else, meanwhile
                with suppress(OSError):  # only if it is empty
                    path.rmdir()
                    if path.parent == RUNS:
                        path.parent.rmdir()


def writable(path: Path) -> bool:
    return os.access(path, os.W_OK)


def check_writable(path: Path) -> None:
    """Refuses a directory in which this process may not write, or nobody may."""
    if not writable(path):
        raise InputError(f"cannot write to {path}: no permission, or read-only; give another --out")


def holds_run(path: Path) -> bool:
    """Whether a comparison was started in a directory."""
    return (path / RECIPE).exists() or any((path / CHECKPOINTS).glob("[0-9]*.json"))


def is_federated(path: Path) -> bool:
    """Whether a directory is that of a real federation's training, which no command of ours resumes."""
    try:
        return FEDERATED in read_json(path / RECIPE)
    except (OSError, ValueError):
        return False


def resuming(path: Path) -> str:
    """What finishes a directory's training, or makes damaged files again."""
    if is_federated(path):
        return "the same 'flwr run' again, or the same NVFLARE job"
    return f"'{shlex.join(['fairwind', 'resume', str(path)])}'"


def check_free(path: Path) -> None:
    """Refuses a directory that is not empty; this process has locked it."""
    if any(file.name != TRACKING for file in path.iterdir()):  # which a kill before the recipe leaves
        raise InputError(f"{path} is not empty: give another --out, so that nothing is overwritten")


def run_name(name: str) -> str:
    """A name that a folder can have, with the time."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.") or "run"
    return f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"


def new_directory(name: str) -> Path:
    """A new directory under runs/ for a comparison of that name."""
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
    """A file system error in one line, with its file."""
    where = f": {error.filename}" if error.filename else ""
    text = f"{error.strerror or error}{where}"
    return f"{text}; make room, then give the same command again" if _full(error) else text


@contextmanager
def explaining(path: Path, again: str = "") -> Iterator[None]:
    """Turns a file system error during training into one line that says how to resume.

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
    """The message if a folder was moved or deleted."""
    return InputError(
        f"{path} was moved or deleted while it was trained in; what was saved is where it was moved to: "
        "go on there with 'fairwind resume NEW-PLACE'"
    )


def identity(path: Path) -> tuple[int, int] | None:
    """The identity of a folder, to detect that it was replaced; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
