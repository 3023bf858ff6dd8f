"""The files of a finished run, sealed: results.json holds the digests of the others, and its own."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from safetensors.torch import save
from torch import Tensor

from fairwind.errors import InputError
from fairwind.runs.files import (
    CLIENTS,
    HISTORY,
    MODELS,
    PACKED,
    RESULTS,
    is_sealed,
    read_json,
    sealed,
    write_atomic,
    write_json,
)
from fairwind.runs.folder import holds_run, resuming
from fairwind.runs.schema import HistoryLine, Results, ResultsFile, RunRow


def finish(
    path: Path,
    results: Results,
    history: list[HistoryLine],
    clients: dict[str, Tensor],
    metadata: dict[str, str],
    trained: dict[str, Tensor] | None,
) -> ResultsFile:
    """Writes the final files of a comparison, the results last; returns them as written.

    Without trained models the history is compressed: a study keeps many small runs.
    """
    text = history_lines(history).encode()
    if trained is None:
        made = {PACKED: gzip.compress(text, mtime=0)}
    else:  # whatever happened to its file meanwhile, the history is written as it was
        made = {HISTORY: text} | ({MODELS: save(trained)} if trained else {})
    made[CLIENTS] = _ordered(save(clients, metadata=metadata))
    for name, data in made.items():
        write_atomic(path / name, data)
    written = sealed({**results, "files": {name: _digest(data) for name, data in made.items()}})
    write_json(path / RESULTS, written)
    return cast(ResultsFile, written)


def read_results(path: Path) -> ResultsFile:
    """The results of a finished comparison; ValueError if its file is not JSON."""
    return cast(ResultsFile, read_json(path / RESULTS))


def damaged(path: Path, among: Iterable[str] | None = None) -> list[str]:
    """Files of a finished comparison that were changed since they were written; of `among`, if given."""
    try:
        results = read_json(path / RESULTS)
    except (OSError, ValueError):
        return [RESULTS]
    if not is_sealed(results) or not isinstance(results.get("files"), dict):
        return [RESULTS]
    named = {name: digest for name, digest in results["files"].items() if among is None or name in among}
    return [name for name, digest in named.items() if _digest_of(path / name) != digest]


def check_whole(path: Path) -> None:
    """Refuses a finished comparison of which a file is damaged."""
    if spoilt := damaged(path):
        again = f"{resuming(path)} makes it again" if holds_run(path) else TRAINED_AGAIN
        raise InputError(f"{path / spoilt[0]} is damaged: {again}")


TRAINED_AGAIN = "the command of its study, given again, trains it anew"


def lost_results(path: Path) -> bool:
    """Whether a study's finished run has lost its results."""
    return (path / PACKED).exists() and not (path / RESULTS).exists() and not holds_run(path)


def read_history(path: Path, results: ResultsFile) -> list[HistoryLine]:
    """The history of a finished comparison, one line for each run and evaluated round."""
    if PACKED in results["files"]:
        try:
            data = gzip.decompress((path / PACKED).read_bytes())
        except (EOFError, zlib.error) as error:  # an OSError would be gzip's own
            raise ValueError(f"{PACKED} is damaged ({error})") from None
    else:
        data = (path / HISTORY).read_bytes()
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def with_history(runs: Sequence[RunRow]) -> list[RunRow]:
    """The runs of which each evaluation has a line; they come first, and others are evaluated at the end."""
    return [run for run in runs if run.get("baseline") != "finetuned"]


def history_lines(history: Iterable[HistoryLine]) -> str:
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in history)


def _ordered(data: bytes) -> bytes:
    """A safetensors file with sorted metadata, which the library writes in arbitrary order."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[end:]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_of(path: Path) -> str:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return "missing"
