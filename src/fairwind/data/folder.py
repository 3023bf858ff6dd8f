"""A folder of per-client files."""

import csv
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from fairwind.data.samples import refuse_rounded
from fairwind.data.values import Table
from fairwind.errors import InputError, damaged, shown

DEFLATE = 1032  # largest possible compression ratio
Arrays = Mapping[str, NDArray[Any] | Tensor | Table | None]  # by name; None is an array that is not needed


def read_clients(folder: Path) -> tuple[list[str], list[tuple[Tensor | Table, Tensor]]]:
    """Names and samples of the clients of a folder, in the order of their names."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    files = sorted(f for f in folder.iterdir() if f.suffix in READERS)
    if not files:
        raise InputError(f"{folder} holds no {', '.join(READERS)} files, one for each client")
    # A file name that is not UTF-8 is decoded with surrogates, which cannot be written.
    names = [f.stem.encode(errors="backslashreplace").decode() for f in files]
    for name, file in zip(names, files, strict=True):
        if names.count(name) > 1:
            raise InputError(f"{file}: client {name!r} has several files; keep one")
    clients = _narrow(files, [_read(file) for file in files])
    # CSV has no types: targets are class labels if all clients' are whole numbers.
    if all(_whole(y) for _, y in clients):
        clients = [
            (x, y.long() if f.suffix == ".csv" else y) for f, (x, y) in zip(files, clients, strict=True)
        ]
    return names, clients


def _whole(values: Tensor) -> bool:
    """Whether all are integers that float32 represents exactly."""
    return not values.is_floating_point() or bool(((values == values.round()) & (values.abs() < 2**24)).all())


def _read(file: Path) -> tuple[Tensor | Table, Tensor]:
    if not file.is_file():
        raise InputError(f"{file} is not a file; keep one file for each client")
    with damaged(lambda: f"{file} cannot be read", "save it again"):
        arrays = READERS[file.suffix](file)
        for name in ("inputs", "targets"):
            if name not in arrays:
                raise InputError(f"{file} has no array {name!r}; it has {', '.join(arrays) or 'none'}")
        inputs, targets = arrays["inputs"], torch.as_tensor(arrays["targets"])
        if isinstance(inputs, Table):
            return inputs, targets
        inputs = torch.as_tensor(inputs)
        for name, value in (("inputs", inputs), ("targets", targets)):
            if value.is_complex() or (value.is_floating_point() and value.itemsize < 2):
                raise InputError(f"{file}: {name} are {value.dtype}; save them as float32")
        return inputs, targets


def _npz(file: Path) -> Arrays:
    """The two arrays that are needed, and the names of others."""
    with zipfile.ZipFile(file) as content:
        members = {member.filename.removesuffix(".npy"): member for member in content.infolist()}
        return {
            name: _array(file, content, member) if name in ("inputs", "targets") else None
            for name, member in members.items()
        }


def _array(file: Path, content: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """An array of an archive; refuses sizes that the file cannot hold before memory is allocated."""
    with content.open(member) as stream:
        old = np.lib.format.read_magic(stream) == (1, 0)
        header = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(stream)
        if dtype.kind not in "biuf":
            raise InputError(f"{file} cannot be read: {member.filename} holds {dtype}; save numbers")
        if math.prod(shape) * dtype.itemsize > min(member.file_size, DEFLATE * file.stat().st_size):
            raise InputError(
                f"{file} cannot be read: {member.filename} claims the shape {shape}, for which the file is "
                "too small; save it again"
            )
        stream.seek(0)
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        return array


def _safetensors(file: Path) -> Arrays:
    return dict(load_file(file))


def _csv(file: Path) -> Arrays:
    with open(file, newline="", encoding="utf-8-sig") as text:
        rows = csv.reader(text)
        header = next(rows, [])
        if header.count("target") != 1:
            several = "several columns" if "target" in header else "no column"
            raise InputError(f"{file} has {several} 'target'; it has {', '.join(header) or 'none'}")
        numbers = []
        for row in filter(None, rows):
            where = f"{file}, line {rows.line_num}"
            if len(row) != len(header):
                raise InputError(f"{where}: {len(row)} values under {len(header)} columns")
            numbers.append([_number(where, *cell) for cell in zip(header, row, strict=True)])
    exact = np.array(numbers, dtype=np.float64).reshape(len(numbers), len(header))
    at = header.index("target")
    names = tuple(name for name in header if name != "target")
    return {"inputs": Table(np.delete(exact, at, axis=1), names), "targets": exact[:, at]}


def _narrow(
    files: list[Path], clients: list[tuple[Tensor | Table, Tensor]]
) -> list[tuple[Tensor | Table, Tensor]]:
    """Clients with the numbers of CSV files in float32, unless it rounds a column of all files too much."""
    found: dict[str, list[tuple[Path, NDArray[Any]]]] = {}
    for file, (x, y) in zip(files, clients, strict=True):
        if isinstance(x, Table):
            for name, column in zip((*x.columns, "target"), (*x.numbers.T, y.numpy()), strict=True):
                found.setdefault(name, []).append((file, column))
    for name, columns in found.items():
        owners = [file for file, column in columns for _ in column]
        exact = torch.as_tensor(np.concatenate([column for _, column in columns]))
        where = f"the numbers of column {name!r}"
        refuse_rounded(exact, torch.float32, where, [f"{owner}: " for owner in owners].__getitem__)
    with np.errstate(over="ignore"):  # infinite numbers are refused later, with their sample
        return [
            (Table(x.numbers.astype(np.float32), x.columns), y.float()) if isinstance(x, Table) else (x, y)
            for x, y in clients
        ]


def _number(where: str, column: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{where}: {column} is {shown(text)}, not a number; write numbers only") from None


READERS: dict[str, Callable[[Path], Arrays]] = {
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".csv": _csv,
}
