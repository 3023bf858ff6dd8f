"""Checkpoints: a safetensors file and a JSON file with its digest; safe against kills at any moment."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fairwind.runs.files import read_json, write_atomic

KEPT = 2


class Checkpoint(NamedTuple):
    """The state of a simulation."""

    round: int
    tensors: dict[str, Tensor]
    record: dict[str, Any]  # what is not a tensor, as JSON


def save_checkpoint(folder: Path, checkpoint: Checkpoint, owner: str) -> None:
    """Writes a checkpoint of the simulation identified by `owner`, and deletes all but the newest two."""
    folder.mkdir(exist_ok=True)  # but not its parents: a run directory that was moved is not created again
    path = folder / f"{checkpoint.round:07d}.safetensors"
    # Copies, because a state may hold one tensor under several names.
    copies = {
        name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in checkpoint.tensors.items()
    }
    data = save(copies)
    write_atomic(path, data)
    record = {"round": checkpoint.round, "owner": owner, "record": checkpoint.record}
    vouched = {"sha256": _digest(data, record), **record}
    text = json.dumps(vouched, allow_nan=False)
    write_atomic(path.with_suffix(".json"), text.encode())  # last: this makes the checkpoint valid
    kept = sorted(p.stem for p in folder.glob("[0-9]*.json") if p.stem <= path.stem)[-KEPT:]
    for old in (*folder.glob("[0-9]*"), *folder.glob(".[0-9]*.partial")):
        if old.stem not in kept:
            old.unlink(missing_ok=True)


def _digest(data: bytes, record: Mapping[str, object]) -> str:
    return hashlib.sha256(data + _text(record)).hexdigest()


def _text(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def load_checkpoint(folder: Path, owner: str | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, of `owner` if given, and why newer ones were refused."""
    refused: list[str] = []
    for path in sorted(folder.glob("[0-9]*.json"), reverse=True):
        try:
            return _read(path, owner), refused
        except (OSError, ValueError, SafetensorError) as error:
            refused.append(f"checkpoint {path.stem} is refused: {error}")
    return None, refused


def read_record(path: Path) -> dict[str, Any]:
    """The JSON file of a checkpoint, if both of its files are intact; no tensor is loaded."""
    vouched = read_json(path)
    with open(path.with_suffix(".safetensors"), "rb") as file:
        seen = hashlib.file_digest(file, "sha256")
    seen.update(_text({k: vouched[k] for k in ("round", "owner", "record")}))
    if seen.hexdigest() != vouched["sha256"]:
        raise ValueError("it is damaged (its SHA-256 differs)")
    return vouched


def _read(path: Path, owner: str | None) -> Checkpoint:
    vouched = read_json(path)
    if owner is not None and vouched.get("owner", owner) != owner:
        raise ValueError("it belongs to a run with other settings")
    try:
        data = path.with_suffix(".safetensors").read_bytes()
        intact = _digest(data, {k: vouched[k] for k in ("round", "owner", "record")}) == vouched["sha256"]
    except (KeyError, RecursionError):
        intact = False
    if not intact:
        raise ValueError("it is damaged (its SHA-256 differs)")
    return Checkpoint(vouched["round"], load(data), vouched["record"])
