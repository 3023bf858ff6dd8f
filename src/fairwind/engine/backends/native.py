"""C++ that is built when it is first needed, and loaded."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fairwind.runs import cache
from fairwind.runs.files import default_cache

HERE = Path(__file__).parent
_LOADED: dict[Path, ctypes.CDLL] = {}  # so that none is loaded twice: the loader cannot know them as equal


def compiler() -> str | None:
    """The C++ compiler that is used, if there is one."""
    names = os.environ.get("CXX", "g++"), "g++", "clang++"
    return next((name for name in names if shutil.which(name)), None)


def source(*names: str) -> str:
    """Files of C++ in this folder, as one text by which to know them."""
    return "\n".join((HERE / name).read_text() for name in names)


def named(described: object, ending: str) -> str:
    """The name in the cache of what is built on this machine from what is described."""
    digest = hashlib.sha256(repr((described, _processor())).encode()).hexdigest()
    return f"{digest[:24]}.{ending}"


def library(described: object, needed: str, make: Callable[[Path], None]) -> ctypes.CDLL:
    """The library with a function `needed` that `make` builds from what is described, now or earlier."""
    name = named(described, "so")
    path = default_cache() / name
    if path not in _LOADED:
        _LOADED[path] = _kept(name, needed) or _built(name, needed, make)
    return _LOADED[path]


def _kept(name: str, needed: str) -> ctypes.CDLL | None:
    data = cache.read(name)
    if data is not None:
        with suppress(OSError, AttributeError):  # if the system has changed
            return _loaded(data, needed)
    return None


def _built(name: str, needed: str, make: Callable[[Path], None]) -> ctypes.CDLL:
    with cache.build_folder() as folder:
        make(folder / name)
        data = (folder / name).read_bytes()
    loaded = _loaded(data, needed)
    cache.write(name, data)
    return loaded


def _loaded(data: bytes, needed: str) -> ctypes.CDLL:
    """A library, loaded from memory: what was verified is what runs, whatever becomes of its file."""
    with tempfile.TemporaryDirectory(prefix="fairwind-") as private:
        path = (
            Path(private) / "library.so"
        )  # a new path: for a known one, the loader returns the known library
        try:
            with os.fdopen(os.memfd_create("fairwind"), "wb") as memory:
                memory.write(data)
                memory.flush()
                path.symlink_to(f"/proc/self/fd/{memory.fileno()}")
                found = ctypes.CDLL(str(path))
        except (AttributeError, OSError):  # a system without files in memory, or that runs none
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            found = ctypes.CDLL(str(path))
    getattr(found, needed)
    return found


def build(name: str, library: Path, *options: str) -> None:
    """Compiles a file in this folder for this machine's processor."""
    found = compiler()
    assert found is not None
    native = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []
    always = ["-O3", *native, "-std=c++17", "-shared", "-fPIC"]
    command = [found, *always, "-o", str(library), "-x", "c++", str(HERE / name), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode:
        why = next((line for line in done.stderr.splitlines() if "error" in line), "it does not say why")
        raise RuntimeError(f"the compiler {found} failed: {why}")
    if not library.is_file() or not library.stat().st_size:
        raise RuntimeError(f"the compiler {found} wrote no library, and no error; set CXX to another")


def _processor() -> str:
    """What compiled code depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
