"""Kills at every operation on the file system, and damage to every file: no run directory is spoilt."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fairwind
from damages import damages, each_damage
from fairwind.errors import InputError
from fairwind.report.interim import read_interim
from fairwind.runs.files import CLIENTS, HISTORY, MODELS, RECIPE, RESULTS
from forked import Drawings, Ended, Moment, bits, command, fork, killed, operations, strays

pytestmark = pytest.mark.crash

TASK = "synthetic:clients=8,features=5,classes=3"
ALGORITHMS = "fedavg", "adafedadam"
ROUNDS, EVAL_EVERY = 4, 2
DOORS = "command", "python"
MOMENTS: tuple[Moment, ...] = ("before", "half", "after")


class Undisturbed:
    """A comparison that nothing happens to, by the command or from Python, and the same again elsewhere."""

    def __init__(self, folder: Path, door: str):
        os.environ["FAIRWIND_COMMIT"] = "campaign"  # whatever is committed meanwhile
        self.folder, self.door = folder, door
        self.path, log = folder / "undisturbed", folder / "operations.json"
        self.drawings = Drawings(folder / "drawings")
        ended = self.drawings.learn(operations(self.begin(self.path), self.path, log), folder)
        assert ended.code == 0, ended.stderr
        self.operations: list[str] = json.loads(log.read_bytes())
        self.bits = bits(self.path)

    def begin(self, path: Path) -> Callable[[], object]:
        if self.door == "python":
            return lambda: fairwind.compare(
                fairwind.setup(TASK),
                ALGORITHMS,
                rounds=ROUNDS,
                eval_every=EVAL_EVERY,
                compile="off",
                checkpoint_every=0,
                out=path,
            )
        words = "compare", TASK, "--rounds", ROUNDS, "--seeds", 0, "--algorithms", *ALGORITHMS
        options = "--eval-every", EVAL_EVERY, "--compile", "off", "--checkpoint-every", 0
        return command(*words, *options, "--out", path)

    def go_on(self, path: Path) -> Callable[[], object]:
        """What a user does after a kill."""
        if self.door == "command" and (path / RECIPE).exists():
            return command("resume", path, "--checkpoint-every", 0)
        return self.begin(path)

    def run(self, act: Callable[[], object]) -> Ended:
        return fork(self.drawings.used(act), self.folder)


@pytest.fixture(scope="module", params=DOORS)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_killed_at_any_operation_it_ends_with_the_same_bits(
    undisturbed: Undisturbed, moment: Moment, tmp_path: Path
) -> None:
    path, kills = tmp_path / "run", 0
    for at, name in enumerate(undisturbed.operations):
        if moment == "half" and name != "write":
            continue
        what = f"killed {moment} operation {at} ({name})"
        ended = undisturbed.run(killed(undisturbed.begin(path), path, at, moment))
        assert ended.code == -9, f"{what}: {ended}"
        _goes_on(undisturbed, path, what)
        kills += 1
    print(f"{kills} kills")


def test_killed_again_and_again_it_ends_with_the_same_bits(undisturbed: Undisturbed, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn by seed {seed}")
    draw, path, kills = random.Random(seed), tmp_path / "run", 0
    for _ in range(25):
        what = []
        for _ in range(4):
            at, moment = draw.randrange(60), draw.choice(MOMENTS)
            what.append(f"{moment} {at}")
            ended = undisturbed.run(killed(undisturbed.go_on(path), path, at, moment))
            assert ended.code in (0, -9), f"killed {what}: {ended}"
            kills += ended.code == -9
        _goes_on(undisturbed, path, f"killed {what}")
    print(f"{kills} kills")


def _goes_on(undisturbed: Undisturbed, path: Path, what: str) -> None:
    ended = undisturbed.run(undisturbed.go_on(path))
    assert ended.code == 0, f"{what}: {ended}"
    assert "Traceback" not in ended.stderr, what
    assert bits(path) == undisturbed.bits, what
    assert strays(path) == [], what
    if undisturbed.door == "command":
        assert (path / "report.html").exists(), what
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def unfinished(undisturbed: Undisturbed) -> Path:
    """A directory with two checkpoints, in which round 3 was the last."""
    path = undisturbed.folder / "unfinished"
    last = len(undisturbed.operations)
    for at in range(30, last):
        undisturbed.run(killed(undisturbed.begin(path), path, at, "before"))
        if len(list(path.glob("checkpoints/*.json"))) == 2 and (path / "checkpoints/0000003.json").exists():
            assert not (path / RESULTS).exists()
            return path
        shutil.rmtree(path)
    raise AssertionError("no such moment")


def assert_one_line(ended: Ended, *words: str) -> None:
    """One line of error, exit code 2."""
    assert ended.code == 2, ended
    assert ended.stderr.count("\n") == 1, ended
    assert ended.stderr.startswith("fairwind: error: "), ended
    for word in words:
        assert word in ended.stderr


RESULT_FILES = HISTORY, CLIENTS, MODELS, RESULTS


def found_by_load(path: Path) -> Callable[[], object]:
    """Prints a digest of what `fairwind.load` finds, or its one line of refusal."""

    def act() -> None:
        try:
            found = fairwind.load(path)
        except InputError as error:
            print(error)
            raise SystemExit(2) from None
        seen = hashlib.sha256(json.dumps([found.results, found.clients]).encode())
        for run in found:
            seen.update(json.dumps([run.metrics, run.rounds, run.history, run.left_out]).encode())
            for tensor in (run.score, run.loss, run.curve, *run.state_dict.values()):
                seen.update(tensor.numpy().tobytes())
        print(seen.hexdigest())

    return act


def test_load_and_report_find_the_same_in_a_damaged_directory_or_name_the_file(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(undisturbed.path, path)
    loaded = undisturbed.run(found_by_load(path))
    reported = undisturbed.drawings.learn(command("report", path), undisturbed.folder)
    shutil.rmtree(path)
    assert (loaded.code, reported.code) == (0, 0)
    failures, count = [], 0
    for name, what in each_damage(undisturbed.path, path):
        count += 1
        try:
            ended = undisturbed.run(found_by_load(path))
            if ended != loaded:
                assert ended.code == 2, ended
                assert ended.stdout.count("\n") == 1, ended
                assert name in ended.stdout, ended
                assert "fairwind resume" in ended.stdout, ended
                assert name in RESULT_FILES, ended
            ended = undisturbed.run(command("report", path))
            if (name, what) == (RESULTS, "deleted"):  # as if the run had been killed before its end
                assert ended.code == 0, ended
                assert "interim report" in ended.stdout, ended
                assert strays(path) == []
            elif ended.code:
                assert_one_line(ended, f"fairwind resume {path}")
                assert name in RESULT_FILES, ended
                assert name in ended.stderr or what == "deleted", ended
            else:
                assert ended == reported
                assert strays(path) == []
        except AssertionError as error:
            failures.append(f"{name}, {what}: {str(error)[:600]}")
    print(f"{count} damaged")
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures)


def test_going_on_mends_a_damaged_finished_directory(undisturbed: Undisturbed, tmp_path: Path) -> None:
    _mends(undisturbed, undisturbed.path, tmp_path / "run")


def test_going_on_mends_a_damaged_unfinished_directory(
    undisturbed: Undisturbed, unfinished: Path, tmp_path: Path
) -> None:
    _mends(undisturbed, unfinished, tmp_path / "run")


def _mends(undisturbed: Undisturbed, pristine: Path, path: Path) -> None:
    failures, count = [], 0
    for name, what in each_damage(pristine, path):
        count += 1
        before = (path / name).read_bytes() if what != "deleted" else None
        ended = undisturbed.run(command_or_call(undisturbed, path))
        try:
            assert ended.code == 0, ended
            assert "Traceback" not in ended.stderr, ended
            assert bits(path) == undisturbed.bits
            assert strays(path) == []
            mended = name == RECIPE and (path / name).read_bytes() != before
            mended |= name in RESULT_FILES and (path / name).read_bytes() != before and what != "deleted"
            refused = pristine is not undisturbed.path and name.startswith("checkpoints/0000003")
            if mended or (refused and what != "deleted"):
                assert Path(name).stem in ended.stderr, ended
        except (AssertionError, OSError, ValueError) as error:
            failures.append(f"{name}, {what}: {str(error)[:600]}")
    print(f"{count} damaged")
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures)


def command_or_call(undisturbed: Undisturbed, path: Path) -> Callable[[], object]:
    """Going on by resume, or by the same call."""
    return command("resume", path) if undisturbed.door == "command" else undisturbed.begin(path)


def seen_in_between(path: Path) -> Callable[[], object]:
    """Prints the history that an interim page shows, and a digest of the clients' numbers."""

    def act() -> None:
        record = read_interim(path)
        clients = hashlib.sha256(record.score.tobytes()).hexdigest() if record.names else ""
        print(json.dumps([record.history, clients]))

    return act


def test_an_interim_page_of_a_damaged_directory_is_true_or_names_the_file(
    undisturbed: Undisturbed, unfinished: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(unfinished, path)
    assert undisturbed.drawings.learn(command("report", path), undisturbed.folder).code == 0
    whole, clients = json.loads(undisturbed.run(seen_in_between(path)).stdout)
    shutil.rmtree(path)
    assert clients
    failures, count = [], 0
    for name, what in each_damage(unfinished, path):
        count += 1
        try:
            ended = undisturbed.run(command("report", path))
            if ended.code:
                assert_one_line(ended, str(path))
                assert name in ended.stderr or name == RECIPE, ended
            else:
                assert "Traceback" not in ended.stderr, ended
                history, seen = json.loads(undisturbed.run(seen_in_between(path)).stdout)
                assert history
                assert history == whole[: len(history)]
                assert seen in (clients, "")
        except AssertionError as error:
            failures.append(f"{name}, {what}: {str(error)[:600]}")
    print(f"{count} damaged")
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures)


def test_without_a_good_checkpoint_one_line_says_what_to_do(
    undisturbed: Undisturbed, unfinished: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    for what, data in damages(b"{}" * 50):
        shutil.copytree(unfinished, path)
        for file in path.glob("checkpoints/*.safetensors"):
            if data is None:
                file.unlink()
            else:
                file.write_bytes(data)
        ended = undisturbed.run(command("resume", path))
        if undisturbed.door == "command":
            assert_one_line(ended, "no usable checkpoint", str(path / "checkpoints"), "delete that folder")
            shutil.rmtree(path / "checkpoints")
            _goes_on(undisturbed, path, what)
        else:
            shutil.rmtree(path)


def test_a_recipe_that_nothing_can_bring_back_is_one_line(undisturbed: Undisturbed, tmp_path: Path) -> None:
    path = tmp_path / "run"
    at = undisturbed.operations.index("replace") + 1
    undisturbed.run(killed(undisturbed.begin(path), path, at, "after"))
    pristine = (path / RECIPE).read_bytes()
    for what, data in damages(pristine):
        if data is None or what == "cut by a byte":  # as before the first write; the last line's end
            continue
        (path / RECIPE).write_bytes(data)
        for ended in (undisturbed.run(command("resume", path)), undisturbed.run(command("report", path))):
            assert_one_line(ended, str(path / RECIPE), "begin anew")


# ---- a finished comparison that grows ----


class Growing(Undisturbed):
    """A finished comparison that gets rounds, a seed and an algorithm; and one that had them all at once."""

    def __init__(self, folder: Path, door: str):
        os.environ["FAIRWIND_COMMIT"] = "campaign"
        self.folder, self.door = folder, door
        self.drawings = Drawings(folder / "drawings")
        self.path, log = folder / "grown", folder / "operations.json"
        small, whole = folder / "small", folder / "whole"
        for act in (self.begin(small), lambda: self.compare(whole, ALGORITHMS, (0, 1), ROUNDS)):
            ended = self.drawings.learn(act, folder)
            assert ended.code == 0, ended.stderr
        self.small = small
        shutil.copytree(small, self.path)
        ended = self.drawings.learn(operations(self.go_on(self.path), self.path, log), folder)
        assert ended.code == 0, ended.stderr
        self.operations = json.loads(log.read_bytes())
        self.bits = bits(self.path)
        once = bits(whole)
        assert {name: once[name] for name in RESULT_FILES[:3]} == {n: self.bits[n] for n in RESULT_FILES[:3]}

    def compare(self, path: Path, algorithms: tuple[str, ...], seeds: tuple[int, ...], rounds: int) -> None:
        fairwind.compare(
            fairwind.setup(TASK),
            algorithms,
            seeds=seeds,
            rounds=rounds,
            eval_every=EVAL_EVERY,
            engine="loop",
            compile="off",
            checkpoint_every=0,
            out=path,
        )

    def begin(self, path: Path) -> Callable[[], object]:
        return lambda: self.compare(path, ALGORITHMS[:1], (0,), 3)

    def go_on(self, path: Path) -> Callable[[], object]:
        if self.door == "command":
            more = "--rounds", ROUNDS, "--seeds", 1, "--algorithms", ALGORITHMS[1]
            return command("resume", path, *more, "--checkpoint-every", 0)
        return lambda: self.compare(path, ALGORITHMS, (0, 1), ROUNDS)


@pytest.fixture(scope="module", params=DOORS)
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Growing:
    return Growing(tmp_path_factory.mktemp(f"{request.param}-grown"), request.param)


@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_killed_while_it_grows_it_has_what_it_had_or_all(
    grown: Growing, moment: Moment, tmp_path: Path
) -> None:
    path, kills = tmp_path / "run", 0
    loaded = grown.run(found_by_load(grown.small))
    seen = set()
    for at, name in enumerate(grown.operations):
        if moment == "half" and name != "write":
            continue
        what = f"killed {moment} operation {at} ({name})"
        shutil.copytree(grown.small, path)
        ended = grown.run(killed(grown.go_on(path), path, at, moment))
        assert ended.code == -9, f"{what}: {ended}"
        ended = grown.run(found_by_load(path))
        assert ended.code == 0, f"{what}: {ended}"
        seen.add("small" if ended == loaded else "grown")
        _goes_on(grown, path, what)
        kills += 1
    print(f"{kills} kills")
    assert seen == {"small", "grown"}
