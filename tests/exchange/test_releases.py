"""Releases are counted before they are made: whatever is killed or damaged, none is forgotten."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from damages import damages, each_damage
from fairwind import InputError, algorithms, scores
from fairwind.engine.layout import Layout
from fairwind.exchange import Aggregator, Evaluations, FederatedRun, Privacy, Reply
from fairwind.exchange.releases import FILES, UNKNOWN, Release, Releases
from fairwind.exchange.results import owner_of
from forked import Moment, fork, killed, operations

LAYOUT = Layout((("w",),), (torch.Size([8]),), ((1,),), torch.float32)
ROUNDS, DRAWS = 3, 2  # of random bytes for each noisy sum
MADE = [Release("noisy sum", 0), Release("noisy sum", 1, (3, 10)), Release("noisy sum", 2)]


def counted(folder: Path) -> list[Release]:
    found = Releases()
    found.keep_in(folder)
    return found.made


def written(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    releases = Releases()
    releases.keep_in(folder)
    for each in MADE:
        releases.note(each)


# ---- the files ----


def test_what_is_noted_is_there_again(tmp_path: Path) -> None:
    written(tmp_path)
    assert counted(tmp_path) == MADE
    assert [(tmp_path / name).read_bytes().count(b"\n") for name in FILES] == [3, 3]


def test_nothing_is_written_before_the_first_release(tmp_path: Path) -> None:
    assert Releases().keep_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_a_torn_last_line_is_counted(tmp_path: Path, name: str) -> None:
    written(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content + content.splitlines(keepends=True)[0][:20])
    assert counted(tmp_path) == [*MADE, UNKNOWN]
    releases = Releases()
    releases.keep_in(tmp_path)
    releases.note(MADE[0])
    assert counted(tmp_path) == [*MADE, UNKNOWN, MADE[0]]


@pytest.mark.parametrize("name", FILES)
def test_one_damaged_file_is_made_again_from_the_other(tmp_path: Path, name: str) -> None:
    written(tmp_path / "good")
    for number, (what, data) in enumerate(damages((tmp_path / "good" / name).read_bytes())):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        if data is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(data)
        assert counted(folder) == MADE, what
        assert (folder / name).read_bytes() == (tmp_path / "good" / name).read_bytes(), what


def test_where_both_are_damaged_nothing_goes_on(tmp_path: Path) -> None:
    written(tmp_path)
    for name in FILES:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content.replace(b'"round": 1', b'"round": 7'))
    with pytest.raises(InputError, match="what was released is not known"):
        counted(tmp_path)


# ---- a training that is killed and damaged ----


def private(log: Path) -> Privacy:
    """One that writes down outside of the training's folder that noise was drawn: the sum is there then."""

    def draw(count: int) -> bytes:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, b".")
        os.close(descriptor)
        return os.urandom(count)

    return Privacy(clip=1.0, weight=50.0, noise=4.0, delta=1e-3, draw=draw)


def released(log: Path) -> int:
    """How many noisy sums there were."""
    return -(-log.stat().st_size // DRAWS) if log.exists() else 0


def opened(path: Path, log: Path) -> tuple[FederatedRun, Aggregator]:
    aggregator = Aggregator(algorithms.fedavg(), LAYOUT, torch.zeros(8), privacy=private(log))
    evaluations = Evaluations([scores.accuracy], "fedavg", 0)
    owner = owner_of(aggregator, evaluations, task="releases", clients_per_round=None)
    run = FederatedRun(path, owner, aggregator, evaluations)
    try:
        run.restore()
    except InputError:
        run.close()
        raise
    return run, aggregator


def trains(path: Path, log: Path) -> Callable[[], object]:
    def act() -> None:
        run, aggregator = opened(path, log)
        while aggregator.round < ROUNDS:
            for k in range(3):
                w = np.random.default_rng(k).normal(size=8).astype(np.float32)
                assert not aggregator.accept(str(k), Reply({"w": w}, {"size": 40.0, "lr": 0.1, "steps": 5.0}))
            aggregator.finish()
            run.save()
        run.close()

    return act


def counts(path: Path, log: Path) -> int:
    """How many releases a training counts that goes on there."""
    run, aggregator = opened(path, log)
    run.close()
    assert aggregator.accountant is not None
    return sum(aggregator.accountant.releases.values())


def all_operations(folder: Path) -> list[str]:
    where = folder / "undisturbed"
    where.mkdir()
    act = trains(where / "run", where / "log")
    ended = fork(operations(act, where / "run", where / "operations.json"), where)
    assert ended.code == 0, ended.stderr
    assert released(where / "log") == ROUNDS
    assert counts(where / "run", where / "log") == ROUNDS
    found: list[str] = json.loads((where / "operations.json").read_bytes())
    return found


def each_kill(folder: Path, moments: tuple[Moment, ...]) -> Any:
    """A training killed at each operation on the file system: its folder, and how many sums there were."""
    for at, name in enumerate(all_operations(folder)):
        for moment in moments:
            if moment == "half" and name != "write":
                continue
            where = folder / f"{at}-{moment}"
            where.mkdir()
            path, log = where / "run", where / "log"
            ended = fork(killed(trains(path, log), path, at, moment), where)
            assert ended.code == -9, f"{moment} operation {at} ({name}): {ended}"
            yield f"killed {moment} operation {at} ({name})", path, log
            shutil.rmtree(where)


@pytest.mark.parametrize(
    "moments", [("half",), pytest.param(("before", "after"), marks=pytest.mark.crash)], ids=str
)
def test_killed_at_any_operation_no_release_is_uncounted(tmp_path: Path, moments: tuple[Moment, ...]) -> None:
    kills = behind = 0
    for what, path, log in each_kill(tmp_path, moments):
        made = released(log)
        if path.exists():
            assert made <= counts(path, log) <= made + 1, what
        trains(path, log)()
        assert released(log) <= counts(path, log) <= released(log) + 1, what
        behind += released(log) > ROUNDS
        kills += 1
    print(f"{kills} kills, of which {behind} cost a release more")
    assert behind


@pytest.mark.crash
def test_killed_and_damaged_no_release_is_uncounted_or_training_stops(tmp_path: Path) -> None:
    """Any one file of the directory, at any moment."""
    count = stopped = 0
    for what, path, log in each_kill(tmp_path, ("before", "half")):
        if not path.exists():
            continue
        made = released(log)
        for name, damage in each_damage(path, path.with_name("damaged")):
            count += 1
            try:
                assert counts(path.with_name("damaged"), log) >= made, f"{what}, {name}: {damage}"
            except (InputError, ValueError):  # of a recipe that is no JSON, too
                stopped += 1
    print(f"{count} damaged directories, of which {stopped} do not go on")
    assert 0 < stopped < count


def test_a_training_whose_checkpoints_are_lost_goes_on_counting(tmp_path: Path) -> None:
    path, log = tmp_path / "run", tmp_path / "log"
    trains(path, log)()
    for file in (path / "checkpoints").iterdir():
        file.write_bytes(b"damaged")
    trains(path, log)()  # from the first round
    assert counts(path, log) == released(log) == 2 * ROUNDS


def test_a_directory_of_an_earlier_version_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path, log = tmp_path / "run", tmp_path / "log"
    trains(path, log)()
    for name in FILES:
        (path / name).unlink()
    assert counts(path, log) == ROUNDS
    assert all((path / name).exists() for name in FILES)


def test_without_anything_that_counts_it_does_not_go_on(tmp_path: Path) -> None:
    path, log = tmp_path / "run", tmp_path / "log"
    trains(path, log)()
    for file in (path / "checkpoints").iterdir():
        file.unlink()
    for name in FILES:
        (path / name).unlink()
    with pytest.raises(InputError, match="the privacy that was spent is not known"):
        counts(path, log)


def test_files_that_count_less_than_a_checkpoint_are_refused(tmp_path: Path) -> None:
    path, log = tmp_path / "run", tmp_path / "log"
    trains(path, log)()
    for name in FILES:
        (path / name).write_bytes((path / name).read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(InputError, match="a checkpoint counts 3 releases, and the files of releases only 1"):
        counts(path, log)


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}"])
def test_a_damaged_recipe_is_named(text: str, tmp_path: Path) -> None:
    run, _ = opened(tmp_path / "run", tmp_path / "log")
    run.close()
    (tmp_path / "run" / "recipe.json").write_text(text)
    with pytest.raises(InputError, match=r"recipe\.json cannot be read .*; put a copy of it there"):
        opened(tmp_path / "run", tmp_path / "log")
