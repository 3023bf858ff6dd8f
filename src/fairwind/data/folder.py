"""A folder of per-client files."""

import csv
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairwind.errors import InputError, first_line


def read_clients(folder: Path) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
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
    clients = [_read(file) for file in files]
    # A CSV file does not say whether its targets are labels: they are if all clients' are whole numbers.
    if all(_whole(y) for _, y in clients):
        clients = [
            (x, y.long() if f.suffix == ".csv" else y) for f, (x, y) in zip(files, clients, strict=True)
        ]
    return names, clients


def _whole(values: Tensor) -> bool:
    return bool((torch.isfinite(values) & (values == values.round())).all())


def _read(file: Path) -> tuple[Tensor, Tensor]:
    try:
        arrays = READERS[file.suffix](file)
        for name in ("inputs", "targets"):
            if name not in arrays:
                raise InputError(f"{file} has no array {name!r}; it has {', '.join(arrays) or 'none'}")
        return torch.as_tensor(arrays["inputs"]), torch.as_tensor(arrays["targets"])
    except InputError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        SafetensorError,
    ) as error:
        raise InputError(f"{file} cannot be read: {first_line(error)}") from None


def _npz(file: Path) -> dict[str, Any]:
    with np.load(file, allow_pickle=False) as content:
        return dict(content)


def _safetensors(file: Path) -> dict[str, Any]:
    return dict(load_file(file))


def _csv(file: Path) -> dict[str, Any]:
    with open(file, newline="", encoding="utf-8-sig") as text:
        rows = csv.reader(text)
        header = next(rows, [])
        if "target" not in header:
            raise InputError(f"{file} has no column 'target'; it has {', '.join(header) or 'none'}")
        numbers = []
        for row in filter(None, rows):
            where = f"{file}, line {rows.line_num}"
            if len(row) != len(header):
                raise InputError(f"{where}: {len(row)} values under {len(header)} columns")
            numbers.append([_number(where, *cell) for cell in zip(header, row, strict=True)])
    table = np.array(numbers, dtype=np.float32).reshape(len(numbers), len(header))
    at = header.index("target")
    return {"inputs": np.delete(table, at, axis=1), "targets": table[:, at]}


def _number(where: str, column: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{where}: {column} is {text!r}, not a number; write numbers only") from None


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".csv": _csv,
}
