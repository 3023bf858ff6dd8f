"""The files of a run directory, and how they are written: whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

RECIPE = "recipe.json"
HISTORY = "history.jsonl"
RESULTS = "results.json"
CLIENTS = "clients.safetensors"
MODELS = "models.safetensors"


def default_cache() -> Path:
    """Where prepared data and compiled steps are kept, unless another place is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairwind"


def write_atomic(path: Path, data: bytes) -> Path:
    """Writes a file so that a reader, or a crash, sees the old one or the whole new one."""
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
    """Adds text to a file, and sees to it that it is on the disk."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, content: Any, *, indent: int | None = 2) -> Path:
    return write_atomic(path, (json.dumps(content, indent=indent, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path.name} is damaged (not JSON)") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is damaged (not a JSON object)")
    return content


def sweep(folder: Path) -> None:
    """Removes what a kill left half written in a folder that this process holds."""
    for partial in folder.glob(".*.partial"):
        partial.unlink(missing_ok=True)


@contextmanager
def lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process alone holds a file or folder meanwhile; the system lets go of it at a kill."""
    if fcntl is None:
        yield True
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)
