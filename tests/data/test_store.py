"""Prepared data: kept whole or not at all, found again, and never mistaken."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import layouts
from fairwind import Federation, InputError, setups
from fairwind.data import store
from fairwind.runs.files import default_cache
from fairwind.setups import Where
from samples import as_tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return layouts.femnist_parquet(tmp_path / "in")


def entry(where: Where, spec: str = "femnist") -> store.Entry:
    return setups.entry(spec, where, lambda text: None)


def same(a: Federation, b: Federation) -> None:
    for name in ("inputs", "targets", "start", "train", "test"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.names, a.name, a.classes, a.words) == (b.names, b.name, b.classes, b.words)


def test_what_was_kept_is_what_was_made(tmp_path: Path) -> None:
    table = torch.randn(4, 3)
    made = Federation(
        torch.arange(60, dtype=torch.uint8).view(10, 6),
        torch.arange(10),
        torch.tensor([0, 4]),
        torch.tensor([3, 4]),
        torch.tensor([1, 2]),
        ("ann", "bob é"),
        "two",
        10,
        ("<padding>", "<unknown>", "a", "b"),
        table,
    )
    loaded = store.save(tmp_path / "x", made, {"source": []}).load()
    same(loaded, made)
    assert loaded.embedding is not None
    assert torch.equal(loaded.embedding, table)
    assert loaded.digest() == made.digest()


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_large_sets_lie_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    made = Federation.from_clients([(torch.randn(n, 7), torch.arange(n)) for n in (50, 1, 20)])
    monkeypatch.setattr(store, "WHOLE", 100)
    monkeypatch.setattr(store, "SHARD", rows * 28)
    kept = store.save(tmp_path / "x", made, {"source": []})
    assert len(list(kept.path.glob("*.safetensors"))) == -(-71 // rows)
    same(kept.load(), made)


def test_samples_are_mapped_not_copied(tmp_path: Path) -> None:
    """A process that loads 64 MiB and reads them grows by no more than 1.3 times as much."""
    made = Federation.from_clients([(torch.zeros(1 << 16, 1 << 10, dtype=torch.uint8), torch.zeros(1 << 16))])
    store.save(tmp_path / "big", made, {"source": []})
    program = f"""
from pathlib import Path
from fairwind.data import store

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

entry = store.entries(Path({str(tmp_path)!r}))[0]
before = resident()
federation = entry.load()
federation.inputs.sum()
print(resident() - before)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is read from /proc")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.3 * as_tensor(made.inputs).nbytes


def test_it_is_made_once(tmp_path: Path, folder: Path) -> None:
    said: list[str] = []
    where = Where(folder, None, tmp_path / "cache")
    for _ in range(2):
        setups.entry("femnist", where, said.append)
    assert len(said) == 1
    assert len(store.entries(tmp_path / "cache")) == 1


def test_prepared_data_is_found_without_its_folder(tmp_path: Path, folder: Path) -> None:
    made = entry(Where(folder, None, tmp_path / "cache"))
    assert entry(Where(cache=tmp_path / "cache")).path == made.path


def test_a_changed_source_or_rule_makes_a_new_entry(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = Where(folder, None, tmp_path / "cache")
    paths = [entry(where).path, entry(where, "femnist:seed=1").path, entry(where, "femnist:clients=2").path]
    rows = layouts.characters(layouts.WRITERS)[:-3]
    layouts.femnist_parquet(folder, rows)
    paths.append(entry(where).path)
    femnist: Any = setups.SETUPS["femnist"]
    changed = femnist._replace(data=type(femnist.data)(**(vars(femnist.data) | {"rule": "another"})))
    monkeypatch.setitem(setups.SETUPS, "femnist", changed)
    paths.append(entry(where).path)
    assert len(set(paths)) == 5
    assert all((path / store.MANIFEST).exists() for path in paths)  # and what was there stays


def test_the_manifest_says_where_it_came_from(tmp_path: Path, folder: Path) -> None:
    made = entry(Where(folder, None, tmp_path / "cache"))
    m = json.loads((made.path / store.MANIFEST).read_text())
    assert [f["file"] for f in m["source"]] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert all(len(f["sha256"]) == 64 for f in m["source"])
    assert m["clients"] == [["f0001_41", 5, 2], ["f0002_07", 4, 1], ["f0003_10", 9, 3]]
    assert "a client for each writer" in m["rule"]
    assert m["parameters"] == {"clients": None, "seed": 0}
    assert m["notes"][0].startswith("a subset: 27 of the 814,277")
    assert str(tmp_path) not in json.dumps(m)  # an entry may be given to others


@pytest.mark.parametrize("spoil", ["cut", "bytes", "gone", "counts", "nonsense", "shards", "manifest"])
def test_a_damaged_entry_is_refused_with_the_remedy(tmp_path: Path, folder: Path, spoil: str) -> None:
    made = entry(Where(folder, None, tmp_path / "cache"))
    shard = next(made.path.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    if spoil == "cut":
        shard.write_bytes(content[:-10])
    elif spoil == "bytes":
        content[-3] ^= 1
        shard.write_bytes(content)
    elif spoil == "gone":
        shard.unlink()
    else:
        changes: dict[str, dict[str, Any]] = {
            "counts": {"clients": [["f", 1, 0]]},
            "nonsense": {"clients": [["f", "x", 0]], "words": None},
            "shards": {"shards": []},
        }
        m = json.dumps(made.manifest | changes[spoil]) if spoil in changes else "{"
        (made.path / store.MANIFEST).write_text(m)
    with pytest.raises(InputError, match="delete"):
        entry(Where(folder, None, tmp_path / "cache")).load()


def test_a_failure_while_writing_leaves_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        entry(Where(folder, None, tmp_path / "cache"))
    assert not list((tmp_path / "cache").iterdir())


def test_a_kill_leaves_nothing_that_counts_and_is_cleaned_up(tmp_path: Path, folder: Path) -> None:
    """Killed after the shards and before the manifest, preparation leaves no entry; the next sweeps."""
    cache = tmp_path / "cache"
    program = f"""
import sys, time
from pathlib import Path
from fairwind import setups
from fairwind.data import store
def wait(*_, **__):
    print("written", flush=True)
    time.sleep(60)
store.write_json = wait
setups.entry("femnist", setups.Where(Path({str(folder)!r}), None, Path({str(cache)!r})), print)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while (line := child.stdout.readline()) != "written\n":
        assert line, "the child ended before it wrote"
    assert store.entries(cache) == []
    left = list(cache.iterdir())
    assert len(left) == 1
    made = entry(Where(folder, None, cache))  # one at work is left alone
    assert left[0].exists()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    other = entry(Where(folder, None, cache), "femnist:seed=3")
    assert sorted(cache.iterdir()) == sorted([made.path, other.path])


def test_a_cache_that_cannot_be_written_is_found_before_reading(tmp_path: Path, folder: Path) -> None:
    for file in folder.rglob("*.parquet"):
        file.write_bytes(b"reading this would fail")
    (tmp_path / "file").touch()
    said: list[str] = []
    with pytest.raises(InputError, match="cannot write to the cache"):
        setups.entry("femnist", Where(folder, None, tmp_path / "file"), said.append)
    assert said == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write to the cache .*file.*--cache"):
        entry(Where(folder, None, tmp_path / "file" / "cache"))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    program = f"""
import resource, signal
from pathlib import Path
from fairwind import setups
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
setups.entry("femnist", setups.Where(Path({str(folder)!r}), None, Path({str(tmp_path / "cache")!r})), print)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "InputError: cannot write to the cache" in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_several_may_prepare_at_once(tmp_path: Path, folder: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "fairwind",
        "data",
        "femnist",
        "--data-dir",
        folder,
        "--cache",
        tmp_path / "cache",
    ]
    children = [subprocess.Popen([*map(str, words)], stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_generated_data_is_kept_too(tmp_path: Path) -> None:
    made = entry(Where(cache=tmp_path), "synthetic:clients=5")
    same(made.load(), setups.federation("synthetic:clients=5", Where()))


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "fairwind"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "fairwind"
