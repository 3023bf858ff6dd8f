"""Kills during builds, and damage to every file of the cache of compiled code: no process is harmed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from answers import answering, run, training
from conftest import compiler_found
from damages import LIBRARY_DAMAGES
from forked import Ended, Moment, killed, operations

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(not compiler_found(torch.device("cpu")), reason="needs a C++ compiler"),
]
SCRIPT = Path(__file__).parents[1] / "trained.py"


def files(xdg: Path) -> list[Path]:
    return sorted(path for path in xdg.rglob("*") if not path.is_dir())


def left_over(xdg: Path) -> list[Path]:
    """What a build left, other than what it was for."""
    return [path for path in (xdg / "fairwind" / "compiled").iterdir() if path.suffix not in (".so", ".zip")]


@pytest.mark.parametrize("moment", ["before", "half", "after"])
@pytest.mark.parametrize("what", ["answer", "training"])
def test_killed_at_any_operation_of_a_build_the_next_process_finds_a_sound_cache(
    tmp_path: Path, what: str, moment: Moment
) -> None:
    xdg, log, later = tmp_path / "cache", tmp_path / "operations.json", tmp_path / "later"
    later.mkdir()
    act = training if what == "training" else answering(tmp_path)
    fresh = run(operations(act, xdg, log), tmp_path, xdg)
    assert fresh.code == 0, fresh
    kills = 0
    for at, name in enumerate(json.loads(log.read_bytes())):
        if moment == "half" and name != "write":
            continue
        shutil.rmtree(xdg)
        assert run(killed(act, xdg, at, moment), tmp_path, xdg).code == -9, (at, name)
        ended = run(act, tmp_path, xdg)
        assert (ended.code, ended.stderr) == (0, ""), (at, name)
        assert ended.stdout.splitlines()[-1] == fresh.stdout.splitlines()[-1], (at, name)
        assert run(answering(later), tmp_path, xdg).stdout == "built\n42\n"  # a build removes what is left
        assert left_over(xdg) == [], (at, name)
        kills += 1
    assert kills


def test_training_gives_the_same_bits_whatever_became_of_its_code(tmp_path: Path) -> None:
    xdg, failures = tmp_path / "cache", []
    fresh = run(training, tmp_path, xdg)
    (entry,) = files(xdg)
    for what, damage in {**LIBRARY_DAMAGES, **flips(40)}.items():
        damage(entry)
        if run(training, tmp_path, xdg) != fresh or files(xdg) != [entry]:
            failures.append(what)
    assert not failures


def flips(count: int) -> dict[str, Callable[[Path], object]]:
    """Damages of one to a hundred bits at random places."""
    draw = random.Random(0)

    def flipping(seed: int, many: int) -> Callable[[Path], object]:
        def flip(path: Path) -> None:
            data, places = bytearray(path.read_bytes()), random.Random(seed)
            for _ in range(many):
                data[places.randrange(len(data))] ^= 1 << places.randrange(8)
            path.write_bytes(data)

        return flip

    each = [(seed, draw.choice([1, 1, 1, 5, 100])) for seed in range(count)]
    return {f"{many} bits flipped by seed {seed}": flipping(seed, many) for seed, many in each}


class Processes:
    """Trainings by PyTorch's compiler, each in a process of its own."""

    def __init__(self, folder: Path):
        self.xdg, self.temporary = folder / "cache", folder / "temporary"
        self.temporary.mkdir()
        self.fresh = self.run()
        self.pristine = folder / "pristine"
        shutil.copytree(self.xdg, self.pristine)

    def start(self) -> subprocess.Popen[str]:
        env = {**os.environ, "XDG_CACHE_HOME": str(self.xdg), "TMPDIR": str(self.temporary)}
        env.pop("TORCHINDUCTOR_CACHE_DIR", None)
        said: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        out: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, str(SCRIPT)], env=env, start_new_session=True, **said
        )
        return out

    def run(self) -> Ended:
        process = self.start()
        out, err = process.communicate(timeout=600)
        return Ended(process.returncode, out, err)

    def kill(self, after: float) -> bool:
        """Kills a training and its compilers; whether it was still at work."""
        process = self.start()
        time.sleep(after)
        working = process.poll() is None
        if working:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return working

    def restore(self) -> None:
        shutil.rmtree(self.xdg)
        shutil.copytree(self.pristine, self.xdg)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    return Processes(tmp_path_factory.mktemp("processes"))


def test_steps_of_pytorchs_compiler_are_kept_and_found_again(processes: Processes) -> None:
    assert processes.fresh.code == 0, processes.fresh
    assert processes.fresh.stdout.endswith(" []\n"), "compiled, without a warning"
    processes.restore()
    before = {path: path.stat().st_mtime_ns for path in files(processes.xdg)}
    assert processes.run() == processes.fresh
    assert {path: path.stat().st_mtime_ns for path in files(processes.xdg)} == before, "nothing was built"
    assert len(before) == 4  # two kinds of steps, what drives them, and what the compiler uses again
    assert left_over(processes.xdg) == []
    assert [path for path in processes.temporary.rglob("*") if not path.is_dir()] == []


ENOUGH = "truncated", "garbage", "with another digest", "a folder"  # a build takes many seconds


def cases() -> Iterator[tuple[int, str, Callable[[Path], object]]]:
    for i in range(4):
        for what in ENOUGH:
            yield i, what, LIBRARY_DAMAGES[what]


def test_steps_of_pytorchs_compiler_are_mended(processes: Processes) -> None:
    failures = []
    for i, what, damage in cases():
        processes.restore()
        entry = files(processes.xdg)[i]
        damage(entry)
        if entry.suffix == ".zip":  # is read only for a build
            step = next(p for p in files(processes.xdg) if p != entry and p.stat().st_size > 1 << 20)
            step.unlink()
        if processes.run() != processes.fresh or left_over(processes.xdg):
            failures.append((entry.name, what))
    assert not failures


def test_killed_while_pytorchs_compiler_works_it_ends_with_the_same_bits(processes: Processes) -> None:
    kills, pause = 0, 3.0
    shutil.rmtree(processes.xdg)
    while processes.kill(pause):
        kills += 1
        pause *= 2
    assert kills >= 3
    assert processes.run() == processes.fresh
    shutil.rmtree(processes.xdg)
    assert processes.kill(15)
    assert processes.run() == processes.fresh
    assert left_over(processes.xdg) == []
