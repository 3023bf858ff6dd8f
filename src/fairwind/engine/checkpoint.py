"""Checkpoints: a safetensors file and a JSON file that vouches for it; a kill at any moment loses neither."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

KEPT = 2


class Checkpoint(NamedTuple):
    """Where a simulation stands."""

    round: int
    tensors: dict[str, Tensor]
    record: dict[str, Any]  # what is not a tensor, as JSON


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file so that a reader, or a crash, sees the old one or the whole new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, content: Any) -> None:
    write_atomic(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def save_checkpoint(folder: Path, checkpoint: Checkpoint, owner: str) -> None:
    """Adds a checkpoint of the simulation named by `owner`, and drops all but the newest few."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{checkpoint.round:07d}.safetensors"
    data = save({name: t.cpu().contiguous() for name, t in checkpoint.tensors.items()})
    write_atomic(path, data)
    digest = hashlib.sha256(data).hexdigest()
    vouched = {"round": checkpoint.round, "owner": owner, "sha256": digest, "record": checkpoint.record}
    write_json(path.with_suffix(".json"), vouched)  # last: a checkpoint without it does not count
    for old in sorted(folder.glob("*.json"))[:-KEPT]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def load_checkpoint(folder: Path, owner: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint of `owner`, and why newer ones were refused."""
    refused: list[str] = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        try:
            return _read(path, owner), refused
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            refused.append(f"checkpoint {path.stem} is refused: {error}")
    return None, refused


def _read(path: Path, owner: str) -> Checkpoint:
    try:
        vouched = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path.name} is damaged (not JSON)") from None
    if not isinstance(vouched, dict) or vouched.get("owner") != owner:
        raise ValueError("it belongs to a run with other settings")
    data = path.with_suffix(".safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != vouched["sha256"]:
        raise ValueError(f"{path.stem}.safetensors is damaged (its SHA-256 differs)")
    return Checkpoint(vouched["round"], load(data), vouched["record"])
