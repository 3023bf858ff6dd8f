"""What a client keeps between rounds: its first loss, and its memory or personal model."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fairwind.exchange.message import Arrays, Request
from fairwind.runs.files import is_sealed, sealed, write_atomic

CODED = "coded-"  # before the number of a round, in a file: what a codec left out


class Kept(NamedTuple):
    """What a client keeps of one training.

    The server says in each request which of the client's rounds counted last. So a round whose reply was
    late, refused, or lost with the server is undone: that is why the last two vectors are kept.
    """

    training: str = ""
    first_loss: float | None = None
    vectors: Mapping[int, Arrays] = {}  # by the round that they were made in
    left_out: Mapping[int, Arrays] = {}  # likewise: what a codec left out of the updates

    def of(self, training: str) -> "Kept":
        """The same, or nothing where it was kept of another training."""
        return self if self.training == training else Kept(training)

    def after(
        self,
        request: Request,
        first_loss: float | None,
        vector: Arrays | None,
        left_out: Arrays | None = None,
    ) -> "Kept":
        """What is kept after a round: also the vectors that it began from."""

        def newest(old: Mapping[int, Arrays], new: Arrays | None) -> Mapping[int, Arrays]:
            before = {number: each for number, each in old.items() if number == request.kept}
            return {} if new is None else before | {request.round: new}

        vectors, rest = newest(self.vectors, vector), newest(self.left_out, left_out)
        return Kept(request.training, first_loss, vectors, rest)


def kept_file(folder: str | Path, number: int) -> Path:
    """The file of a client, by its number among all."""
    return Path(folder) / f"client-{number}.safetensors"


def save_kept(file: Path, kept: Kept) -> None:
    """Writes a file that replaces the one before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kinds = {"": kept.vectors, CODED: kept.left_out}
    tensors = {
        f"{kind}{number}/{name}": array
        for kind, vectors in kinds.items()
        for number, arrays in vectors.items()
        for name, array in arrays.items()
    }
    said = {"training": kept.training, "first_loss": kept.first_loss, "digest": _digest(tensors)}
    write_atomic(file, save(tensors, {"kept": json.dumps(sealed(said))}))


def load_kept(file: Path) -> Kept:
    """What a file holds; nothing if there is none, or it is damaged: then the server is told what is lost."""
    vectors: dict[int, Arrays] = {}
    left_out: dict[int, Arrays] = {}
    try:
        with safe_open(file, "np") as opened:
            said = json.loads(opened.metadata()["kept"])
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if not is_sealed(said) or said["digest"] != _digest(tensors):
            return Kept()
        for key, array in tensors.items():
            number, _, name = key.partition("/")
            kind = left_out if number.startswith(CODED) else vectors
            kind.setdefault(int(number.removeprefix(CODED)), {})[name] = array
        first = said["first_loss"]
        return Kept(str(said["training"]), None if first is None else float(first), vectors, left_out)
    except (OSError, SafetensorError, ValueError, LookupError, TypeError):
        return Kept()


def _digest(tensors: Arrays) -> str:
    found = hashlib.sha256()
    for key in sorted(tensors):
        found.update(key.encode())
        found.update(np.ascontiguousarray(tensors[key]).data)
    return found.hexdigest()
