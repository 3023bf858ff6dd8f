"""Kills at every operation of a sweep on the file system, and damage to every file of its runs."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from damages import damages, each_damage
from fairwind.runs.files import RESULTS
from fairwind.study import read_runs
from forked import Drawings, Ended, Moment, command, fork, killed, operations, strays
from sweeps import FILES, STUDY, numbers, words

pytestmark = pytest.mark.crash
MOMENTS: tuple[Moment, ...] = ("before", "half", "after")


class Undisturbed:
    """A sweep that nothing happens to."""

    def __init__(self, folder: Path):
        os.environ["FAIRWIND_COMMIT"] = "campaign"  # whatever is committed meanwhile
        self.folder, self.path, log = folder, begun(folder / "undisturbed"), folder / "operations.json"
        self.drawings = Drawings(folder / "drawings")
        ended = self.drawings.learn(operations(self.sweep(self.path), self.path, log), folder)
        assert ended.code == 0, ended.stderr
        self.operations: list[str] = json.loads(log.read_bytes())
        self.numbers = numbers(self.path)

    def sweep(self, path: Path, *more: object) -> Callable[[], object]:
        return command(*words(path), "--checkpoint-every", 0, *more)

    def run(self, act: Callable[[], object]) -> Ended:
        return fork(self.drawings.used(act), self.folder)

    def ends_alike(self, path: Path, what: str) -> Ended:
        """What the next sweep says, which makes all whole again."""
        ended = self.run(self.sweep(path))
        assert ended.code == 0, f"{what}: {ended}"
        assert "Traceback" not in ended.stderr, what
        assert numbers(path) == self.numbers, what
        assert strays(path) == [], what
        return ended


def begun(path: Path) -> Path:
    """A folder with nothing but the study's file."""
    path.mkdir()
    (path / "fair.toml").write_text(STUDY.replace("rounds = 2", "rounds = 3"))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("study"))


@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_a_sweep_killed_at_any_operation_ends_with_the_same_bits(
    undisturbed: Undisturbed, moment: Moment, tmp_path: Path
) -> None:
    kills = 0
    for at, name in enumerate(undisturbed.operations):
        if moment == "half" and name != "write":
            continue
        path, what = begun(tmp_path / "study"), f"killed {moment} operation {at} ({name})"
        ended = undisturbed.run(killed(undisturbed.sweep(path), path, at, moment))
        assert ended.code == -9, f"{what}: {ended}"
        undisturbed.ends_alike(path, what)
        shutil.rmtree(path)
        kills += 1
    print(f"{kills} kills")


def test_a_sweep_killed_again_and_again_ends_with_the_same_bits(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn by seed {seed}")
    draw, kills = random.Random(seed), 0
    for _ in range(25):
        path, what = begun(tmp_path / "study"), []
        for _ in range(4):
            at, moment = draw.randrange(60), draw.choice(MOMENTS)
            what.append(f"{moment} {at}")
            ended = undisturbed.run(killed(undisturbed.sweep(path), path, at, moment))
            assert ended.code in (0, -9), f"killed {what}: {ended}"
            kills += ended.code == -9
        undisturbed.ends_alike(path, f"killed {what}")
        shutil.rmtree(path)
    print(f"{kills} kills")


def test_a_damaged_run_is_never_shown_and_trained_again(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Reports, of the run or of the study alone, show what they showed before, or name the file."""
    path = tmp_path / "study"
    shutil.copytree(undisturbed.path, path)
    (run,) = (path / "runs").iterdir()
    shown = undisturbed.drawings.learn(command("report", run), undisturbed.folder)
    assert shown.code == 0
    shutil.rmtree(path)
    failures, count = [], 0
    for name, what in each_damage(undisturbed.path, path, below="runs"):
        count += 1
        try:
            file = path / name
            before = file.read_bytes() if file.exists() else None
            passed = read_runs(path)[1]
            pages = undisturbed.run(undisturbed.sweep(path, "--report-only"))
            if passed:
                assert pages.code == 2, pages
                assert f"{file} is " in pages.stderr, pages
            else:
                assert pages.code == 0, pages
                assert numbers(path) == undisturbed.numbers
            reported = shutil.copytree(path, tmp_path / "reported") / Path(name).parent
            ended = undisturbed.run(command("report", reported))
            if passed:
                assert ended.code == 2, ended
                assert ended.stderr.count("\n") == 1, ended
                assert str(reported / file.name) in ended.stderr, ended
            else:
                assert (ended.code, ended.stderr) == (0, ""), ended
            shutil.rmtree(tmp_path / "reported")
            again = undisturbed.ends_alike(path, "swept again")
            if passed or (before is not None and file.read_bytes() != before):
                assert str(file) in again.stderr, again
        except AssertionError as error:
            failures.append(f"{name}, {what}: {str(error)[:600]}")
            shutil.rmtree(tmp_path / "reported", ignore_errors=True)
    print(f"{count} damaged")
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures)
    assert count > 20 * len(FILES)


@pytest.fixture(scope="module")
def unfinished(undisturbed: Undisturbed) -> Path:
    """A sweep that was stopped with two checkpoints of its run."""
    path = undisturbed.folder / "unfinished"
    for at in range(20, len(undisturbed.operations)):
        undisturbed.run(killed(undisturbed.sweep(begun(path)), path, at, "before"))
        if len(list(path.glob("runs/*/checkpoints/*.json"))) == 2:
            assert not list(path.rglob(RESULTS))
            return path
        shutil.rmtree(path)
    raise AssertionError("no such moment")


def test_a_damaged_unfinished_run_ends_with_the_same_bits(
    undisturbed: Undisturbed, unfinished: Path, tmp_path: Path
) -> None:
    failures, count = [], 0
    for name, what in each_damage(unfinished, tmp_path / "study", below="runs"):
        count += 1
        try:
            undisturbed.ends_alike(tmp_path / "study", what)
        except AssertionError as error:
            failures.append(f"{name}, {what}: {str(error)[:600]}")
    print(f"{count} damaged")
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures)


def test_without_a_good_checkpoint_the_sweep_says_what_to_do(
    undisturbed: Undisturbed, unfinished: Path, tmp_path: Path
) -> None:
    path = tmp_path / "study"
    for what, data in damages(b"{}" * 50):
        shutil.copytree(unfinished, path)
        for file in path.glob("runs/*/checkpoints/*.safetensors"):
            if data is None:
                file.unlink()
            else:
                file.write_bytes(data)
        (checkpoints,) = path.glob("runs/*/checkpoints")
        ended = undisturbed.run(undisturbed.sweep(path))
        assert ended.code == 2, ended
        assert "Traceback" not in ended.stderr, ended
        last = ended.stderr.splitlines()[-1]
        assert "no usable checkpoint" in last
        assert str(checkpoints) in last
        shutil.rmtree(checkpoints)
        undisturbed.ends_alike(path, what)
        shutil.rmtree(path)
