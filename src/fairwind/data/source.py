"""Sources of datasets: the Hugging Face hub, or a folder with its files in one of several layouts."""

import hashlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairwind.data.federation import Federation
from fairwind.errors import InputError, damaged, first_line, needs_extra, shown
from fairwind.runs.schema import SourceFile

Pixels = NDArray[np.uint8]
Notes = list[str]  # messages for the user

AGAIN = "download it again"
HALF = re.compile("[\ud800-\udfff]")  # surrogates, which cannot be written to files
PARQUET = ("**/train*.parquet", "**/train/*.parquet")
# LEAF's output before its own split; or its two parts, which are joined; or any JSON.
LEAF = (("**/all_data*.json",), ("**/train/*.json", "**/test/*.json"), ("*.json",))


class Samples(NamedTuple):
    """All samples of a data set, before they are partitioned."""

    inputs: Pixels | list[str]
    labels: NDArray[np.int64]
    owners: list[str]  # writer or user of each sample, if known


class Layout(NamedTuple):
    """A layout of a dataset's files in a folder."""

    name: str
    patterns: tuple[str, ...]  # of its files in the folder
    read: Callable[[list[Path]], Samples]
    without: tuple[str, ...] = ()  # names of files to ignore


@dataclass(frozen=True)
class Source:
    """A dataset on the hub, the layouts it is read from, and how it becomes a federation."""

    folder: str  # of its files, among those of several datasets
    repository: str
    revision: str
    files: str  # pattern of the hub's files
    layouts: tuple[Layout, ...]
    rule: str  # in words; if it changes, data is prepared again
    federate: Callable[..., tuple[Federation, Notes]]  # its keyword parameters are those of the setup's spec
    published: int  # samples of the whole data set
    check: Callable[..., None] = lambda **_: None  # refuses parameters before anything is read
    vectors: bool = False  # whether words have pretrained vectors

    def locate(self, folder: Path, vectors: Path | None = None) -> "Found":
        """The first layout that the folder holds, and a file of word vectors; a single file may be named."""
        single, folder = (folder, folder.parent) if folder.is_file() else (None, folder)
        if not folder.is_dir():
            raise InputError(f"data folder {folder} does not exist")
        if vectors is not None and not self.vectors:
            raise InputError("word vectors (--glove) are for text; this setup has none")
        table = None
        if self.vectors:
            table = named_vectors(vectors) if vectors is not None else find_vectors(folder)
        for layout in self.layouts:
            if single is not None:
                kinds = {Path(pattern).suffix for pattern in layout.patterns} - {""}
                found = {single} if single.suffix in kinds else set()
            else:
                found = {f for p in layout.patterns for f in folder.glob(p) if f.is_file()} - {table}
            files = sorted(f for f in found if not any(f.match(name) for name in layout.without))
            if files:
                return Found(folder, layout, tuple(files), table)
        layouts: dict[str, list[str]] = {}
        for layout in self.layouts:
            layouts.setdefault(layout.name, []).extend(layout.patterns)
        known = "; ".join(f"{name} ({', '.join(patterns)})" for name, patterns in layouts.items())
        if single is not None:
            raise InputError(f"{single} is a file of another kind; give a folder that holds one of: {known}")
        raise InputError(f"data folder {folder} holds none of: {known}")

    def download(self) -> Path:
        """The folder that the hub's files were downloaded to."""
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise needs_extra("reading this data set", error, "data") from None
        try:
            folder = snapshot_download(
                self.repository, repo_type="dataset", revision=self.revision, allow_patterns=[self.files]
            )
        except Exception as error:  # network errors have many types
            raise InputError(
                f"{self.repository} cannot be downloaded from the Hugging Face hub ({first_line(error)}); "
                "try again, or give a folder that holds the files with --data-dir"
            ) from None
        return Path(folder)


class Found(NamedTuple):
    """A data set's files in a folder."""

    folder: Path
    layout: Layout
    files: tuple[Path, ...]
    vectors: Path | None

    def read(self) -> Samples:
        samples = self.layout.read(list(self.files))
        if not len(samples.labels):
            raise InputError(f"the files of {self.folder} ({self.layout.name}) hold no samples")
        return samples

    def fingerprint(self) -> list[SourceFile]:
        """Name, size and digest of every file."""
        layouts = [(file, self.layout.name) for file in self.files]
        layouts += [(self.vectors, "word vectors")] if self.vectors else []
        return [
            {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256(file), "layout": layout}
            for file, layout in layouts
        ]


def find_vectors(path: Path) -> Path | None:
    """The file of word vectors, if there is one: the path itself, or the one in a folder."""
    if path.is_file():
        return path
    found = sorted(path.rglob("glove*.txt"))
    if len(found) > 1:
        raise InputError(f"{path} holds several files of word vectors; name one with --glove: {found[0]}, …")
    return found[0] if found else None


def named_vectors(path: Path) -> Path:
    """The file of word vectors that a user named, by itself or its folder."""
    found = find_vectors(path)
    if found is None:
        raise InputError(f"{path} is no file, and no folder that holds a glove*.txt")
    return found


def sha256(file: Path) -> str:
    """The digest of a file."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def distinct(samples: Samples) -> NDArray[np.int64]:
    """Samples without duplicates: same owner, same input, same label."""
    seen: set[bytes] = set()
    keep = []
    owners = samples.owners or [""] * len(samples.labels)
    for i, (owner, label) in enumerate(zip(owners, samples.labels.tolist(), strict=True)):
        key = hashlib.blake2b(f"{owner!r}{label}\0".encode(), digest_size=16)
        content = samples.inputs[i]
        key.update(content.encode(errors="surrogatepass") if isinstance(content, str) else content.tobytes())
        if key.digest() not in seen:
            seen.add(key.digest())
            keep.append(i)
    return np.array(keep, dtype=np.int64)


# ---- parquet, as the hub stores it ----


def parquet(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """The rows of a parquet file in batches of thousands, with the index of the first."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise needs_extra("reading this data set", error, "data") from None
    row = 0
    bad = damaged(lambda: f"{file}, after row {row}, is damaged or no parquet", AGAIN)
    with bad, pq.ParquetFile(file) as content:
        present = content.schema_arrow.names
        for column in columns:
            if column not in present:
                needed = ", ".join(columns)
                raise InputError(
                    f"{file} has no column {column!r}; it has {', '.join(present)}, needed are {needed}"
                )
        for batch in content.iter_batches(4096, columns=list(columns)):
            yield row, batch.to_pydict()
            row += batch.num_rows


def images(files: list[Path], image: str, label: str, owner: str | None, like: "Like") -> Samples:
    """Images, labels and owners from the hub's parquet files, in which images are encoded files."""
    pixels: list[Pixels] = []
    labels: list[int] = []
    owners: list[str] = []
    for file in files:
        for first, rows in parquet(file, (image, label, *([owner] if owner else []))):
            for i, (cell, value) in enumerate(zip(rows[image], rows[label], strict=True)):
                where = f"{file}, row {first + i}"
                pixels.append(like.check(where, _decoded(where, cell, like), value))
            labels += rows[label]
            if owner:
                owners += [check_owner(f"{file}, row {first + i}", o) for i, o in enumerate(rows[owner])]
    return Samples(like.stack(pixels), np.array(labels, dtype=np.int64), owners)


def _decoded(where: str, cell: Any, like: "Like") -> Pixels:
    """The pixels of an encoded image; images of the wrong size are refused before decoding."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise needs_extra("reading this data set", error, "data") from None
    # Pillow reads many formats, some with external programs, and warns about large images before decoding.
    with damaged(lambda: f"{where}: no readable image", AGAIN), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            opened = Image.open(io.BytesIO(cell["bytes"]), formats=("PNG", "JPEG"))
        except UnidentifiedImageError:
            raise ValueError("it is neither PNG nor JPEG") from None
        with opened:
            like.check_size(where, (opened.height, opened.width))
            return np.asarray(opened.convert(like.mode))


class Like(NamedTuple):
    """Size and channels of a dataset's images."""

    mode: str  # Pillow's
    shape: tuple[int, ...]
    classes: int

    def stack(self, pictures: list[Pixels]) -> Pixels:
        return np.stack(pictures) if pictures else np.empty((0, *self.shape), np.uint8)

    def check(self, where: str, picture: Pixels, label: Any) -> Pixels:
        self.check_size(where, picture.shape)
        check_label(where, label, self.classes)
        return picture

    def check_size(self, where: str, size: tuple[int, ...]) -> None:
        """Refuses an image of the wrong size."""
        if size[:2] != self.shape[:2]:
            given, wanted = ("×".join(map(str, s[:2])) for s in (size, self.shape))
            raise InputError(f"{where}: the image is {given}, not {wanted}")


def check_label(where: str, label: Any, classes: int) -> None:
    if not isinstance(label, int | np.integer) or not 0 <= label < classes:
        raise InputError(f"{where}: label {shown(label)} is not one of 0 to {classes - 1}")


def check_owner(where: str, owner: Any) -> str:
    """The name of a writer or user: any text that is not empty and has no surrogates."""
    if not isinstance(owner, str) or not owner or (not owner.isascii() and HALF.search(owner)):
        raise InputError(f"{where}: {shown(owner)} names no owner")
    return owner


# ---- LEAF's JSON ----


def leaf(file: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Users with their x and y from one of LEAF's JSON files."""
    with damaged(lambda: f"{file} is no JSON", AGAIN):
        content = json.loads(file.read_bytes())
    for key in ("users", "num_samples", "user_data"):
        if not isinstance(content, dict) or key not in content:
            raise InputError(f"{file} has no {key!r}: it is not LEAF's layout")
    users, counts, data = content["users"], content["num_samples"], content["user_data"]
    if not isinstance(users, list) or not isinstance(counts, list) or not isinstance(data, dict):
        raise InputError(f"{file}: users and num_samples are not lists, or user_data is no object")
    if len(users) != len(counts):
        raise InputError(f"{file} lists {len(users)} users, but {len(counts)} num_samples")
    for row, user in enumerate(users):
        check_owner(f"{file}, user {row}", user)
    if len(set(users)) != len(users) or set(users) != set(data):
        raise InputError(f"{file}: users, {len(users)} of them, are not those of user_data, {len(data)}")
    for row, (user, count) in enumerate(zip(users, counts, strict=True)):
        where = f"{file}, user {row} ({user!r})"
        try:
            x, y = data[user]["x"], data[user]["y"]
        except (KeyError, TypeError):
            raise InputError(f"{where}: user_data has no x and y of this user") from None
        if not isinstance(x, list) or not isinstance(y, list):
            raise InputError(f"{where}: x and y are not lists")
        if not len(x) == len(y) == count:
            raise InputError(
                f"{where}: num_samples says {shown(count)}, but there are {len(x)} x and {len(y)} y"
            )
        yield user, x, y
