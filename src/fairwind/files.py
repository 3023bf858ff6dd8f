"""The files of a run directory, and how they are written: whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def write_json(path: Path, content: Any, *, indent: int | None = 2) -> Path:
    return write_atomic(path, (json.dumps(content, indent=indent, allow_nan=False) + "\n").encode())


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
