"""The cache of code, compiled or bundled: what is read from it is what this user, or root, wrote to it."""

import atexit
import hashlib
import io
import os
import shutil
import stat
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from fairwind.runs.files import default_cache, partial_folder

LARGEST = 1 << 28  # bytes: no library or archive of ours is nearly as large
SEAL = hashlib.sha256().digest_size
ELSEWHERE = "set XDG_CACHE_HOME to a folder of yours"


def read(name: str) -> bytes | None:
    """What was written under a name; None if it is damaged, or another user can have written it."""
    folder = _folder()
    if folder is None:
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # no links, and no waiting for a pipe's writer
    try:
        with open(folder / name, "rb", opener=lambda path, _: os.open(path, flags)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST or _distrusted(found):
                return None
            content = file.read()
    except OSError:
        return None
    data, seal = content[:-SEAL], content[-SEAL:]
    return data if seal == _seal(name, data) else None


def write(name: str, data: bytes) -> None:
    """Writes data and its digest under a name, whole or not at all; without a cache, nothing."""
    folder = _folder()
    if folder is None:
        return
    with suppress(OSError), partial_folder(folder) as partial:
        made = partial / name
        made.touch(mode=0o600)  # whatever the umask: `read` refuses what others can write
        with open(made, "wb") as file:
            file.write(data + _seal(name, data))
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            shutil.rmtree(folder / name)
        os.replace(made, folder / name)


@contextmanager
def build_folder() -> Iterator[Path]:
    """A private folder to build in; what killed processes left of theirs is removed."""
    with ExitStack() as stack:
        yield _build_folder(stack)


@contextmanager
def tools(name: str, *patterns: str) -> Iterator[Path]:
    """This process's private folder of a name; files of these patterns pass from process to process."""
    folder = _own(name)
    before = _matching(folder, patterns)
    if not before and (packed := read(name)) is not None:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(folder)
        before = _matching(folder, patterns)
    yield folder
    after = _matching(folder, patterns)
    if after != before:
        packing = io.BytesIO()
        with zipfile.ZipFile(packing, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for file in after:
                archive.write(folder / file, file)
        write(name, packing.getvalue())


def private_folder(name: str) -> Path:
    """A folder of the cache, into which no other user can write; without a cache, of this process."""
    folder = _folder()
    if folder is not None:
        with suppress(OSError):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
            if not _distrusted((folder / name).lstat()):
                return folder / name
    return _own(name)


def _folder() -> Path | None:
    """The cache's folder, if it can be trusted."""
    path, why = _judged()
    return None if why else path


def _judged() -> tuple[Path, str]:
    """The cache's folder, and why it is not used, if so."""
    folder = default_cache() / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder, _distrusted(folder.stat())
    except OSError as error:
        return folder, f"cannot be made ({error.strerror}); {ELSEWHERE}"


def _distrusted(found: os.stat_result) -> str:
    """Why the content of a file or folder may be another user's; empty if it cannot."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user; {ELSEWHERE}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by other users; chmod go-w it, or {ELSEWHERE}"
    return ""


def _seal(name: str, data: bytes) -> bytes:
    return hashlib.sha256(name.encode() + data).digest()


def _build_folder(stack: ExitStack) -> Path:
    folder, why = _judged()
    if not why and not os.access(folder, os.W_OK):
        why = f"cannot be written; {ELSEWHERE}"
    if not why:
        return stack.enter_context(partial_folder(folder))
    warnings.warn(f"compiled code is not kept: {folder} {why}", stacklevel=2)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairwind-")))


@cache
def _own(name: str) -> Path:
    """A private folder that is removed when this process ends."""
    stack, process = ExitStack(), os.getpid()
    folder = _build_folder(stack)
    atexit.register(lambda: stack.close() if os.getpid() == process else None)  # not by a forked child
    return folder


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted(str(file.relative_to(folder)) for pattern in patterns for file in folder.glob(pattern))
