"""A study's stored runs: verified before they are used, trained again where they are damaged."""

import gzip
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fairwind
from command import ENV, called
from fairwind.runs.files import RESULTS
from fairwind.study import read_runs
from forked import strays
from sweeps import FILES, PACKED, STUDY, numbers, words


def sweep(folder: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return called(*words(folder), *more)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "study"
    folder.mkdir()
    (folder / "fair.toml").write_text(STUDY)
    assert sweep(folder).returncode == 0
    return folder


@pytest.fixture
def copy(swept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(swept, tmp_path / "study")


def changed_number(file: Path) -> None:
    """A number that a page shows, changed in a file that still can be read."""
    if file.name == RESULTS:
        content = json.loads(file.read_bytes())
        content["runs"][0]["final"]["avg"] = 99.0
        file.write_text(json.dumps(content, indent=2))
    elif file.name == PACKED:
        lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
        lines[-1]["avg"] = 99.0
        file.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [changed_number, flipped, cut, emptied, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_run_is_named_and_trained_again(
    name: str, damage: Callable[[Path], object], copy: Path, swept: Path
) -> None:
    (run,) = (copy / "runs").iterdir()
    damage(run / name)
    _, (passed,) = read_runs(copy)
    assert str(run / name) in str(passed)

    shown = called("report", run)
    assert shown.returncode == 2
    assert str(run / name) in shown.stderr
    assert shown.stderr.count("\n") == 1

    pages = sweep(copy, "--report-only")
    assert pages.returncode == 2
    assert f"{run / name} is " in pages.stderr
    assert "without --report-only" in pages.stderr

    again = sweep(copy)
    assert again.returncode == 0, again.stderr
    assert str(run / name) in again.stderr
    assert numbers(copy) == numbers(swept)
    assert not read_runs(copy)[1]


def test_a_stored_run_has_a_report_and_can_be_loaded(copy: Path) -> None:
    (run,) = (copy / "runs").iterdir()
    shown = called("report", run)
    assert shown.returncode == 0, shown.stderr
    assert (run / "report.html").exists()
    loaded = fairwind.load(run)
    assert [len(each.history) for each in loaded] == [3, 3]
    assert loaded["fedavg"].metrics == read_runs(copy)[0][0].row["final"]


def test_results_without_a_seal_are_not_believed(copy: Path) -> None:
    (run,) = (copy / "runs").iterdir()
    content = json.loads((run / RESULTS).read_bytes())
    del content["sha256"], content["files"]
    (run / RESULTS).write_text(json.dumps(content))
    found, (passed,) = read_runs(copy)
    assert not found
    assert passed.damaged


def test_what_a_kill_left_of_a_finished_run_is_removed(copy: Path, swept: Path) -> None:
    (run,) = (copy / "runs").iterdir()
    (run / "checkpoints").mkdir()
    for name in ("recipe.json", "history.jsonl", "checkpoints/0000002.json"):
        (run / name).write_text("{}")
    assert sweep(copy).returncode == 0
    assert numbers(copy) == numbers(swept)


def test_half_written_pages_are_swept(copy: Path) -> None:
    for name in (".index.html.7.partial", "figures/.average-0.pdf.7.partial"):
        (copy / "fair" / name).write_text("half of it")
    assert sweep(copy).returncode == 0
    assert strays(copy) == []


def test_two_sweeps_at_once_both_succeed(tmp_path: Path) -> None:
    text = STUDY.replace("rounds = 2", "rounds = [20, 21]")
    (tmp_path / "fair.toml").write_text(text)
    command = [sys.executable, "-m", "fairwind", *map(str, words(tmp_path))]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENV}
    both = [subprocess.Popen(command, **pipe) for _ in range(2)]
    ended = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    runs, passed = read_runs(tmp_path)
    assert (len(runs), passed) == (4, [])
    assert strays(tmp_path) == []


def test_a_run_that_another_process_trains_is_waited_for(tmp_path: Path) -> None:
    """The other one holds the only run, has not finished it, and is killed."""
    (tmp_path / "fair.toml").write_text(STUDY)
    pipe: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": ENV}
    assert sweep(tmp_path).returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    (run / RESULTS).unlink()
    holding = (
        "import sys, time; from pathlib import Path; from fairwind.runs.files import lock\n"
        "with lock(Path(sys.argv[1])) as mine: print(mine, flush=True); time.sleep(300)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", holding, run], stdout=subprocess.PIPE, text=True, env=ENV
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    waiting = subprocess.Popen([sys.executable, "-m", "fairwind", *map(str, words(tmp_path))], **pipe)
    assert waiting.stderr is not None
    said = ""
    while "is waited for" not in said:
        line = waiting.stderr.readline()
        assert line, said
        said += line
    time.sleep(0.2)
    assert waiting.poll() is None
    holder.kill()
    holder.communicate()
    said += waiting.communicate(timeout=100)[1]
    assert waiting.returncode == 0, said
    assert len(read_runs(tmp_path)[0]) == 2


def test_the_results_of_this_repository_are_sealed_and_whole() -> None:
    runs, passed = read_runs(Path(__file__).parents[2] / "results")
    assert passed == []
    assert len(runs) > 300


def test_a_setup_changed_in_place_is_no_run_of_the_setup(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rounds": 1, "progress": False, "compile": "off"}
    task = fairwind.setup("synthetic:clients=3")
    fairwind.compare(task, "fedavg", out=tmp_path / "as made", **given)
    assert isinstance(task.federation.targets, torch.Tensor)
    task.federation.targets.numpy()[:] = 0
    fairwind.compare(task, "fedavg", out=tmp_path / "changed", **given)
    runs, refused = read_runs(tmp_path)
    assert [run.folder.name for run in runs] == ["as made"]
    assert [each.why for each in refused] == ["cannot be used (its task was made in Python)"]
