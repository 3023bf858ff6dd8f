"""What may become of a file."""

import gzip
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from fairwind.runs import cache


def damages(data: bytes) -> Iterator[tuple[str, bytes | None]]:
    """What may become of a file; None where it is deleted."""
    yield "deleted", None
    yield "emptied", b""
    yield "halved", data[: len(data) // 2]
    yield "cut by a byte", data[:-1]
    yield "garbage", random.Random(0).randbytes(len(data))
    yield "nested deep", b"[" * 100_000
    yield "nested deep, and closed", b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    for text in (b"[]", b"{}", b"3", b'"text"', b"null", b'{"runs": 3, "files": []}'):
        yield f"the JSON {text.decode()}", text
    if (changed := _another_number(data)) is not None:
        yield "another number", changed
    for i in range(8 if data else 0):
        place = i * (len(data) - 1) // 7
        yield f"bit {i} of byte {place} flipped", _flipped(data, place, i)


def _flipped(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def _another_number(data: bytes) -> bytes | None:
    """The same JSON, plain or compressed, with its last average changed; None where there is none."""
    packed = data.startswith(b"\x1f\x8b")
    text = gzip.decompress(data) if packed else data
    found = list(re.finditer(rb'"avg": (?:\{\s*"mean": )?([0-9.]+)', text))
    if not found:
        return None
    start = found[-1].start(1)
    text = text[:start] + b"1" + text[start:]
    assert all(isinstance(json.loads(line), dict) for line in (text.splitlines() if packed else ()))
    return gzip.compress(text, mtime=0) if packed else text


def each_damage(pristine: Path, path: Path, below: str = "") -> Iterator[tuple[str, str]]:
    """Puts a copy of a directory to a path, with one file damaged: its name, and what became of it.

    Only files in the folder `below` are damaged, if one is given.
    """
    for file in sorted(p for p in (pristine / below).rglob("*") if p.is_file()):
        name = file.relative_to(pristine).as_posix()
        if name.startswith("figures/") and name != "figures/average.pdf":
            continue  # all alike
        for what, data in damages(file.read_bytes()):
            shutil.copytree(pristine, path)
            if data is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(data)
            yield name, what
            shutil.rmtree(path)


def flipped(place: float, bit: int) -> Callable[[Path], object]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(place * (len(data) - 1))] ^= 1 << bit
        path.write_bytes(data)

    return flip


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


LIBRARY_DAMAGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "without its digest": lambda path: os.truncate(path, path.stat().st_size - cache.SEAL),
    "with another digest": flipped(1, 0),
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)),
    "zeros, and many": lambda path: os.truncate(path, 1 << 40),
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: replaced(path, lambda p: (p / "sub").mkdir(parents=True)),
    "a pipe": lambda path: replaced(path, os.mkfifo),
    "a link to itself": lambda path: replaced(path, lambda p: p.symlink_to(p)),
    "a link to zeros": lambda path: replaced(path, lambda p: p.symlink_to("/dev/zero")),
    **{f"bit {i % 8} flipped, {i}/32 of the way": flipped(i / 32, i % 8) for i in range(33)},
}
