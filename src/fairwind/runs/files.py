"""The files of a run directory, written atomically."""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

RECIPE = "recipe.json"
HISTORY = "history.jsonl"
PACKED = f"{HISTORY}.gz"  # of a study's finished run
RESULTS = "results.json"
CLIENTS = "clients.safetensors"
MODELS = "models.safetensors"
PARTIAL = ".partial-"
GROWING = (
    "growing"  # in the folder of a comparison that gets more rounds, seeds or algorithms, the larger one
)
ADDED = "added"  # in that, the runs that are added
TRACKING = "tracking.json"  # the trackers of a run, and the id by which they know it


def default_cache() -> Path:
    """The default cache folder of prepared data and compiled steps."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairwind"


def write_atomic(path: Path, data: bytes) -> Path:
    """Writes a file atomically: readers, or a crash, see the old file or the complete new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path


def append(path: Path, text: str) -> None:
    """Appends text to a file, and flushes it to disk."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, content: object, *, indent: int | None = 2) -> Path:
    return write_atomic(path, (json.dumps(content, indent=indent, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if it is not one."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path.name} is damaged (not JSON)") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is damaged (not a JSON object)")
    return content


def read_sealed(path: Path) -> dict[str, Any]:
    """The object in a JSON file that was written `sealed`; ValueError if it was changed since."""
    content = read_json(path)
    if not is_sealed(content):
        raise ValueError(f"{path.name} is damaged (its SHA-256 differs)")
    return content


def sealed(content: Mapping[str, object]) -> dict[str, object]:
    """The content with its own digest, which `is_sealed` verifies."""
    return {**content, "sha256": _seal(content)}


def is_sealed(content: Mapping[str, object]) -> bool:
    """Whether content matches its digest."""
    try:
        return content.get("sha256") == _seal(content)
    except RecursionError:  # nested too deep to be ours
        return False


def _seal(content: Mapping[str, object]) -> str:
    text = json.dumps({key: value for key, value in content.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sweep(folder: Path) -> None:
    """Removes temporary files of a killed process from a folder that this process has locked."""
    runs = folder, folder / GROWING, folder / GROWING / ADDED
    for place in (*runs, *(run / "checkpoints" for run in runs), folder / "figures"):
        for partial in place.glob(".*.partial"):
            if re.fullmatch(r"\..+\.\d+\.partial", partial.name):  # none but those of `write_atomic`
                if partial.is_dir():  # of a comparison that has grown
                    shutil.rmtree(partial, ignore_errors=True)
                else:
                    partial.unlink(missing_ok=True)


@contextmanager
def writing_pages(folder: Path) -> Iterator[None]:
    """Locks a folder of pages while they are written, and removes temporary files of a killed process."""
    with lock(folder, wait=True):
        sweep(folder)
        yield


def is_held(path: Path) -> bool | None:
    """Whether some process holds a file or folder; None where that cannot be known."""
    if fcntl is None:
        return None
    with lock(path, shared=True) as free:
        return not free


@contextmanager
def lock(path: Path, *, wait: bool = False, patience: float = 0, shared: bool = False) -> Iterator[bool]:
    """Locks a file or folder, and yields whether that worked; a kill releases the lock.

    It may take some seconds of `patience`. A `shared` lock excludes only those that are not.
    """
    if fcntl is None:
        yield True
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            _flock(descriptor, kind if wait else kind | fcntl.LOCK_NB, time.monotonic() + patience)
            mine, there = os.fstat(descriptor), os.stat(path)
            held = os.path.samestat(mine, there)  # else its last holder removed it
        except OSError as error:
            held = error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # no locks there
        yield held
    finally:
        os.close(descriptor)


def _flock(descriptor: int, how: int, until: float) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, how)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.01)


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder in a folder, removed at the end unless renamed; also removes what kills left."""
    with ExitStack() as stack:
        with lock(folder, wait=True):  # excludes other processes that create, remove or rename
            for left in folder.glob(f"{PARTIAL}*/"):
                with suppress(FileNotFoundError), lock(left) as mine:  # else its process has just ended
                    if mine:
                        shutil.rmtree(left, ignore_errors=True)
            path = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            stack.enter_context(lock(path))
        yield path
