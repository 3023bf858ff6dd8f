"""Commands in forked children, which can be killed at any operation on the file system."""

import builtins
import io
import json
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch._dynamo  # noqa: F401, children need not load it again

import fairwind.report  # noqa: F401
from fairwind import cli
from fairwind.report import vega
from fairwind.runs.files import CLIENTS, HISTORY, MODELS, RESULTS

Moment = Literal["before", "half", "after"]  # half: half of the bytes of a write reach the disk


class Ended(NamedTuple):
    """How a child ended; code is negative after a signal."""

    code: int
    stdout: str
    stderr: str


def fork(act: Callable[[], object], folder: Path) -> Ended:
    """Runs a function in a child of this process; what it says goes through files in a folder."""
    said = [folder / name for name in ("stdout", "stderr")]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number, path in enumerate(said, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
            warnings.simplefilter("default")
            warnings.showwarning = _say  # type: ignore[assignment]  # pytest has put its own in place
            act()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), *(path.read_text() for path in said))


def _say(message: Warning | str, *_: object) -> None:
    print(message, file=sys.stderr)


def command(*words: object) -> Callable[[], object]:
    """A command line."""

    def act() -> None:
        sys.argv = ["fairwind", *map(str, words)]
        cli.main()

    return act


class Drawings:
    """What the drawing library made, by what it was given: it is slow, and must not run after a fork."""

    def __init__(self, file: Path):
        self.file = file
        self.known: dict[Any, Any] = {}

    def learn(self, act: Callable[[], object], folder: Path) -> Ended:
        """Runs a function in a child, and keeps what is drawn there."""

        def drawing() -> None:
            vega.call = self._kept(vega.call)
            try:
                act()
            finally:
                self.file.write_bytes(pickle.dumps(self.known))

        ended = fork(drawing, folder)
        self.known = pickle.loads(self.file.read_bytes())
        return ended

    def _kept(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*given: Any, **options: Any) -> Any:
            key = json.dumps([given, options], sort_keys=True)
            if key not in self.known:
                self.known[key] = draw(*given, **options)
            return self.known[key]

        return drawn

    def used(self, act: Callable[[], object]) -> Callable[[], object]:
        """The function, which may draw what is known, and nothing else."""

        def unknown(*_: Any, **__: Any) -> None:
            raise AssertionError("another chart than the undisturbed comparison's")

        def using() -> object:
            vega.call = self._kept(unknown)
            return act()

        return using


def killed(act: Callable[[], object], folder: Path, at: int, moment: Moment) -> Callable[[], object]:
    """The function, killed at its operation number `at` on the file system in or on a folder."""

    def acting() -> object:
        _Operations(folder, at, moment).watch()
        return act()

    return acting


def operations(act: Callable[[], object], folder: Path, log: Path) -> Callable[[], object]:
    """The function, whose operations on the file system in or on a folder are written to a log."""

    def acting() -> None:
        watched = _Operations(folder, -1, "before")
        watched.watch()
        try:
            act()
        finally:
            with io.FileIO(log, "w") as file:
                file.write(json.dumps(watched.seen).encode())

    return acting


class _Operations:
    def __init__(self, folder: Path, at: int, moment: Moment):
        self.folder, self.at, self.moment = str(folder.absolute()), at, moment
        self.seen: list[str] = []

    def watch(self) -> None:
        for name in ("replace", "rename", "mkdir", "unlink", "remove", "rmdir"):
            setattr(os, name, self._watched(name, getattr(os, name)))
        sync = os.fsync
        os.fsync = lambda descriptor: self.happens("fsync", lambda: sync(descriptor))  # type: ignore[assignment]
        opened = builtins.open
        io.open = builtins.open = self._opening(opened)

    def happens(self, name: str, act: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        due = len(self.seen) == self.at
        self.seen.append(name)
        if due and self.moment != "after":
            if self.moment == "half" and half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return act()
        finally:  # also where the operation is refused, as making a folder that is there
            if due:
                os.kill(os.getpid(), signal.SIGKILL)

    def mine(self, path: Any) -> bool:
        if not isinstance(path, str | os.PathLike):
            return False
        text = os.path.abspath(path)
        return text == self.folder or text.startswith(self.folder + os.sep)

    def _watched(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any, *given: Any, **options: Any) -> Any:
            folder = options.get("dir_fd")  # as in removing a tree
            place = path if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}"), path)
            if not self.mine(place):
                return act(path, *given, **options)
            return self.happens(name, lambda: act(path, *given, **options))

        return watched

    def _opening(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any, mode: str = "r", *given: Any, **options: Any) -> Any:
            if not self.mine(path) or not set(mode) & set("wax+"):
                return opened(path, mode, *given, **options)
            return _File(self, self.happens("open", lambda: opened(path, mode, *given, **options)))

        return watched


class _File:
    """An open file whose writes are operations."""

    def __init__(self, operations: _Operations, file: Any):
        self.operations, self.file = operations, file

    def write(self, data: Any) -> Any:
        def write(part: Any) -> Any:
            written = self.file.write(part)
            self.file.flush()
            return written

        return self.operations.happens("write", lambda: write(data), lambda: write(data[: len(data) // 2]))

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def bits(directory: Path) -> dict[str, Any]:
    """All that a comparison found, to the bit, without when and how fast."""
    results = json.loads((directory / RESULTS).read_bytes())
    del results["timing"], results["sha256"], results["environment"]["date"]
    files = {name: (directory / name).read_bytes() for name in (HISTORY, CLIENTS, MODELS)}
    return {"results": results, **files}


def strays(directory: Path) -> list[str]:
    """Files that were half written."""
    return [str(path) for path in directory.rglob("*.partial")]
