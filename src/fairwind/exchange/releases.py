"""What a training has released, counted on disk before it is released.

A release cannot be taken back: a noisy sum costs ε, and two secure sums of one round differ by what a node
sent. So each is written down first, in two files, line by line. A kill may leave a release counted that was
not made, and never one made that is not counted. Either file alone is enough to go on from.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from fairwind.errors import InputError
from fairwind.runs.files import append, is_sealed, sealed, write_atomic

FILES = "releases.jsonl", "releases.copy.jsonl"
What = Literal["noisy sum", "magnitudes", "secure sum", "unknown"]


class Release(NamedTuple):
    """Something computed from clients' data that leaves the place where it was protected."""

    what: What
    round: int | None  # from 0; none where it is not known
    drawn: tuple[int, int] | None = None  # clients of a noisy sum, of how many, if they were drawn in secret
    nodes: tuple[str, ...] = ()  # whose sum a secure one is


UNKNOWN = Release(
    "unknown", None
)  # a line that a kill has torn, or what a checkpoint of an old version counts


class Releases:
    """The releases of a training, in the order in which they were made."""

    def __init__(self, made: Iterable[Release] = ()):
        self.made = list(made)
        self.folder: Path | None = None

    def keep_in(self, folder: Path) -> list[str]:
        """Counts in files of a folder from now on, with what is there; returns what there is to say."""
        copies = [_read(folder / name) for name in FILES]
        intact = [copy for copy in copies if copy is not None]
        self.made, self.folder = max(intact, key=_how_complete, default=[]), folder
        if not any((folder / name).exists() for name in FILES):
            return []
        if not intact:
            raise InputError(
                f"{folder / FILES[0]} and its copy are damaged, so what was released is not known: put "
                "back a copy of one of them, or begin anew in another directory"
            )
        self._write()
        pairs = zip(FILES, copies, strict=True)
        return [f"{folder / name} was damaged, and is made again" for name, copy in pairs if copy is None]

    def note(self, release: Release) -> None:
        """Counts a release that is about to be made; it is on disk when this returns."""
        if self.folder is not None:
            new = not self.made
            for name in FILES:
                append(self.folder / name, _line(release))
            if new:
                _sync(self.folder)
        self.made.append(release)

    def begin_with(self, made: Iterable[Release]) -> None:
        """Takes over what a checkpoint counts, where no file does."""
        self.made = list(made)
        if self.folder is not None:
            self._write()

    def forbids(self, release: Release) -> str:
        """Why a secure sum must not be released: another set of nodes' sum of this round already was."""
        for made in self.made:
            if made[:2] == release[:2] and set(made.nodes) != set(release.nodes):
                return (
                    f"the {release.what} of {len(made.nodes)} nodes was released in this round before, and "
                    "the difference would be what single nodes sent: exactly the same nodes must reply"
                )
        return ""

    def _write(self) -> None:
        assert self.folder is not None
        for name in FILES:
            write_atomic(self.folder / name, "".join(map(_line, self.made)).encode())
        _sync(self.folder)


def _line(release: Release) -> str:
    return json.dumps(sealed(release._asdict()), sort_keys=True) + "\n"


def _read(file: Path) -> list[Release] | None:
    """The releases in a file, a torn last line as an unknown one; none if the file is damaged or missing."""
    try:
        *lines, rest = file.read_bytes().split(b"\n")
    except OSError:
        return None
    found = []
    for line in lines:
        release = _parsed(line)
        if release is None:
            return None
        found.append(release)
    return [*found, _parsed(rest) or UNKNOWN] if rest else found


def _how_complete(made: list[Release]) -> tuple[int, bool]:
    return len(made), UNKNOWN not in made


def _parsed(line: bytes) -> Release | None:
    """The release in a line; none where the line was changed."""
    with suppress(ValueError, RecursionError, AttributeError, LookupError, TypeError):
        said = json.loads(line)
        if is_sealed(said):
            drawn = None if said["drawn"] is None else (int(said["drawn"][0]), int(said["drawn"][1]))
            return Release(said["what"], said["round"], drawn, tuple(said["nodes"]))
    return None


def _sync(folder: Path) -> None:
    """Brings the names of a folder's files to disk."""
    with suppress(OSError):  # where folders cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
