"""C++ that is built when it is first needed, and kept in the cache."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from fairwind.files import default_cache

HERE = Path(__file__).parent


def compiler() -> str | None:
    """The C++ compiler that is used, if there is one."""
    names = os.environ.get("CXX", "g++"), "g++", "clang++"
    return next((name for name in names if shutil.which(name)), None)


def source(*names: str) -> str:
    """Files of C++ in this folder, as one text by which to know them."""
    return "\n".join((HERE / name).read_text() for name in names)


def cached(described: object, make: Callable[[Path], None]) -> Path:
    """A folder of the cache that `make` filled, now or earlier, from what is described."""
    name = hashlib.sha256(repr((described, _processor())).encode()).hexdigest()[:24]
    folder = default_cache() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="fairwind-"))
    path = folder / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            make(Path(made))
            try:
                os.rename(made, path)
            except OSError:  # another process was faster
                shutil.rmtree(made, ignore_errors=True)
            Path(made).mkdir(exist_ok=True)  # for its end
    return path


def build(name: str, library: Path, *options: str) -> None:
    """Compiles a file in this folder for this machine's processor."""
    found = compiler()
    assert found is not None
    native = ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else []
    always = ["-O3", *native, "-std=c++17", "-shared", "-fPIC"]
    command = [found, *always, "-o", str(library), str(HERE / name), *options]
    subprocess.run(command, check=True, capture_output=True)


def _processor() -> str:
    """What compiled code depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
