"""A folder of per-client files."""

import csv
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairwind.errors import InputError, first_line

Arrays = Tensor | NDArray[np.generic]


def read_clients(folder: Path) -> tuple[list[str], list[tuple[Arrays, Arrays]]]:
    """Names and samples of the clients of a folder, in the order of their names."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    files = sorted(f for f in folder.iterdir() if f.suffix in READERS)
    if not files:
        raise InputError(f"{folder} holds no {', '.join(READERS)} files, one for each client")
    names = [f.stem for f in files]
    for name, file in zip(names, files, strict=True):
        if names.count(name) > 1:
            raise InputError(f"{file}: client {name!r} has several files; keep one")
    return names, [_read(file) for file in files]


def _read(file: Path) -> tuple[Arrays, Arrays]:
    try:
        arrays = READERS[file.suffix](file)
    except (OSError, ValueError, zipfile.BadZipFile, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} cannot be read: {first_line(error)}") from None
    for name in ("inputs", "targets"):
        if name not in arrays:
            raise InputError(f"{file} has no array {name!r}; it has {', '.join(arrays) or 'none'}")
    return arrays["inputs"], arrays["targets"]


def _npz(file: Path) -> dict[str, Arrays]:
    with np.load(file, allow_pickle=False) as content:
        return dict(content)


def _safetensors(file: Path) -> dict[str, Arrays]:
    return dict(load_file(file))


def _csv(file: Path) -> dict[str, Arrays]:
    with open(file, newline="", encoding="utf-8") as text:
        rows = csv.reader(text)
        header = next(rows, [])
        if "target" not in header:
            raise InputError(f"{file} has no column 'target'; it has {', '.join(header) or 'none'}")
        numbers = []
        for row in rows:
            try:
                numbers.append([float(value) for value in row])
                if len(row) != len(header):
                    raise ValueError(f"{len(row)} values under {len(header)} columns")
            except ValueError as error:
                raise InputError(f"{file}, line {rows.line_num}: {error}") from None
    table = np.array(numbers, dtype=np.float32).reshape(len(numbers), len(header))
    at = header.index("target")
    targets = table[:, at]
    whole = np.array_equal(targets, np.rint(targets))
    return {"inputs": np.delete(table, at, axis=1), "targets": targets.astype(np.int64) if whole else targets}


READERS = {".npz": _npz, ".safetensors": _safetensors, ".csv": _csv}
