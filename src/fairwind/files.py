"""The files of a run directory, and how they are written: whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

RECIPE = "recipe.json"
HISTORY = "history.jsonl"
RESULTS = "results.json"
CLIENTS = "clients.safetensors"
MODELS = "models.safetensors"


def write_atomic(path: Path, data: bytes) -> Path:
    """Writes a file so that a reader, or a crash, sees the old one or the whole new one."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def write_json(path: Path, content: Any) -> Path:
    return write_atomic(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
