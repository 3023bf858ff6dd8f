"""The cache of prepared federations, which are read and partitioned once."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairwind.data.federation import Federation
from fairwind.data.source import Source, named_vectors, sha256
from fairwind.errors import InputError, first_line
from fairwind.runs.files import PARTIAL, default_cache, lock, partial_folder, read_json, write_json
from fairwind.runs.schema import Origin, SourceFile

FORMAT = 1
MANIFEST = "manifest.json"
# A dataset of up to a GiB is one shard, memory-mapped and never copied. A larger one is joined from shards of
# a quarter of that size, so that peak memory is not much larger than the dataset.
WHOLE, SHARD = 1 << 30, 1 << 28

Say = Callable[[str], None]


class Preparation(TypedDict, total=False):
    """What an entry is prepared from, and how."""

    format: int
    setup: str
    parameters: Mapping[str, object]
    rule: str
    source: list[SourceFile]
    notes: list[str]


class Manifest(Preparation):
    """manifest.json of an entry."""

    name: str
    made: str
    digest: str
    classes: int | None
    class_names: list[str]
    words: list[str]
    clients: list[tuple[str, int, int]]  # name, training and test samples
    groups: NotRequired[list[str]]
    shards: list[str]


class Entry(NamedTuple):
    """A prepared federation in the cache."""

    path: Path
    manifest: Manifest

    def load(self) -> Federation:
        """The federation with memory-mapped samples, checked against the manifest's digest."""
        try:
            federation = _load(self.path, self.manifest)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError, RuntimeError) as error:
            raise self._damaged(first_line(error)) from None
        if federation.digest() != self.manifest["digest"]:
            raise self._damaged("its digest is not the manifest's")
        return federation

    def _damaged(self, why: str) -> InputError:
        return InputError(
            f"prepared data in {self.path} is damaged ({why}); delete that folder and prepare it again"
        )


def prepare(
    name: str,
    source: Source,
    parameters: Mapping[str, object],
    *,
    data_dir: Path | None = None,
    glove: Path | None = None,
    cache: Path | None = None,
    say: Say = lambda text: None,
) -> Entry:
    """The prepared data of a setup, from the cache or prepared now.

    Without `data_dir`, the newest entry with these parameters is used, whatever its source; if there is none,
    the hub's files are downloaded. With it, only an entry made from these files is used.
    """
    source.check(**parameters)
    cache = cache or default_cache()
    rule: Preparation = {"format": FORMAT, "setup": name, "parameters": parameters, "rule": source.rule}
    if data_dir is None:
        ready = [e for e in entries(cache) if all(e.manifest.get(k) == v for k, v in rule.items())]
        if glove is not None:
            table = named_vectors(glove)
            ready = [e for e in ready if sha256(table) in {f["sha256"] for f in e.manifest["source"]}]
        if len(ready) > 1:
            say(f"{len(ready)} prepared sets of these parameters: the newest is taken (others by --data-dir)")
        if ready:
            return ready[-1]
        if any(e.manifest.get("setup") == name for e in entries(cache)):
            say(f"{name} is prepared in {cache} with other parameters; for these, give its --data-dir again")
        say(f"{name} is not prepared in {cache}: downloading {source.repository} from the Hugging Face hub")
        _check(cache)
    located = source.locate(data_dir or source.download(), glove)
    files = located.fingerprint()
    key = hashlib.sha256(json.dumps([rule, files], sort_keys=True).encode()).hexdigest()[:12]
    path = cache / f"{name}-{key}"
    if (path / MANIFEST).exists():
        return _read_manifest(path)
    _check(cache)
    several = "s" * (len(located.files) > 1)
    beside = f", with the vectors of {located.vectors.name}" if located.vectors else ""
    place = f"{located.folder} ({located.layout.name}){beside}"
    say(f"preparing {name} from {len(located.files)} file{several} of {place}")
    samples = located.read()
    vectors = [located.vectors] if source.vectors else []
    federation, notes = source.federate(samples, *vectors, **parameters)
    if len(samples.labels) < source.published:
        notes.insert(0, f"a subset: {len(samples.labels):,} of the {source.published:,} published samples")
    return save(path, federation, {**rule, "source": files, "notes": notes})


def keep(
    name: str, federation: Federation, parameters: Mapping[str, object], *, cache: Path | None = None
) -> Entry:
    """A generated federation as an entry, for other programs to read."""
    digest = federation.digest()
    made: Preparation = {"format": FORMAT, "setup": name, "parameters": parameters}
    made |= {"source": [], "notes": ["generated"]}
    path = (cache or default_cache()) / f"{name}-{digest[:12]}"
    return _read_manifest(path) if (path / MANIFEST).exists() else save(path, federation, made)


def save(path: Path, federation: Federation, made: Preparation) -> Entry:
    """Writes an entry, whole or not at all."""
    assert not federation.validation.any()  # these are drawn when the data is loaded
    cache = path.parent
    manifest: dict[str, object] = {
        **made,
        "name": federation.name,
        "made": datetime.now(UTC).isoformat(),
        "digest": federation.digest(),
        "classes": federation.classes,
        "class_names": list(federation.class_names),
        "words": list(federation.words),
        "clients": [
            [name, train, test]
            for name, train, test in zip(
                federation.names, federation.train.tolist(), federation.test.tolist(), strict=True
            )
        ],
    }
    if federation.groups:
        manifest["groups"] = list(federation.groups)
    with _writing(cache), partial_folder(cache) as partial:
        partial.chmod(0o755)
        manifest["shards"] = _write_shards(partial, federation)
        write_json(partial / MANIFEST, manifest, indent=None)
        with lock(cache, wait=True):
            if not (path / MANIFEST).exists():  # else another process was faster
                shutil.rmtree(path, ignore_errors=True)
                os.rename(partial, path)
    return _read_manifest(path)


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    """Creates the cache folder, and turns errors of writing into one line."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"cannot write to the cache {cache}: {why}; name another with --cache") from None


def _check(cache: Path) -> None:
    """Refuses a cache that cannot be written, before data is downloaded or read."""
    with _writing(cache), tempfile.TemporaryFile(dir=cache):
        pass


def entries(cache: Path) -> list[Entry]:
    """The entries of the cache, oldest first, without unreadable ones."""
    readable = []
    for path in cache.glob(f"*/{MANIFEST}"):
        if not path.parent.name.startswith(PARTIAL):
            try:
                readable.append(_read_manifest(path.parent))
            except InputError:
                continue
    return sorted(readable, key=lambda entry: str(entry.manifest["made"]))


def find(digest: str, cache: Path | None = None) -> Entry | None:
    """The entry whose data has this digest."""
    return next((e for e in entries(cache or default_cache()) if e.manifest["digest"] == digest), None)


def _read_manifest(path: Path) -> Entry:
    try:
        manifest = read_json(path / MANIFEST)
        if not {"made", "digest", "clients", "shards", "source"} <= set(manifest):
            raise ValueError
    except (OSError, ValueError):
        raise InputError(f"{path / MANIFEST} is no manifest; delete {path} and prepare it again") from None
    return Entry(path, cast(Manifest, manifest))


def _write_shards(path: Path, federation: Federation) -> list[str]:
    """The samples in shards of consecutive rows; the first also holds everything else."""
    assert isinstance(federation.inputs, Tensor)
    assert isinstance(federation.targets, Tensor)
    rows = len(federation.inputs)
    size = federation.inputs.nbytes
    count = 1 if size <= WHOLE else -(-size // SHARD)
    names = [f"samples-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        part = slice(i * rows // count, (i + 1) * rows // count)
        tensors = {
            "inputs": federation.inputs[part].contiguous(),
            "targets": federation.targets[part].contiguous(),
        }
        if i == 0 and federation.embedding is not None:
            tensors["embedding"] = federation.embedding.contiguous()
        save_file(tensors, path / name)
    return names


def _load(path: Path, m: Manifest) -> Federation:
    train = torch.tensor([samples for _, samples, _ in m["clients"]])
    test = torch.tensor([samples for _, _, samples in m["clients"]])
    tensors = load_file(path / m["shards"][0])  # mapped, not read
    if len(m["shards"]) > 1:
        for name in ("inputs", "targets"):
            part = tensors[name]
            tensors[name] = torch.empty((int((train + test).sum()), *part.shape[1:]), dtype=part.dtype)
        at = 0
        for shard in m["shards"]:
            rows = load_file(path / shard)
            end = at + len(rows["targets"])
            for name in ("inputs", "targets"):
                tensors[name][at:end] = rows[name]
            at = end
    federation = Federation(
        tensors["inputs"],
        tensors["targets"],
        (train + test).cumsum(0) - train - test,
        train,
        test,
        tuple(name for name, _, _ in m["clients"]),
        m["name"],
        m["classes"],
        tuple(m["words"]),
        tensors.get("embedding"),
        tuple(m["class_names"]),
        groups=tuple(m.get("groups", ())),
    )
    known = {"digest": m["digest"], "rule": m.get("rule"), "source": m.get("source"), "notes": m.get("notes")}
    return replace(federation, origin=cast(Origin, {k: v for k, v in known.items() if v}))
