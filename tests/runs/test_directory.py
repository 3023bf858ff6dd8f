"""A run directory that two processes, a full disk, a move or a kill at a bad moment do not spoil."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fairwind
from command import ENV
from conftest import CLASSES, FEATURES
from fairwind import cli
from fairwind.engine.backends.native import compiler
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.errors import InputError
from fairwind.report import drawing
from fairwind.runs.directory import RunDirectory
from fairwind.runs.files import CLIENTS, HISTORY, MODELS, RESULTS, is_held, read_json, sealed, write_json
from fairwind.runs.folder import explaining, held, new_directory
from forked import bits, strays

SMALL = "synthetic:clients=6,features=5,classes=3"
ALGORITHMS = ["fedavg", "adafedadam"]

Refused = Callable[..., str]  # runs a command that must fail; what it says


def compare(out: Path, **options: Any) -> fairwind.Comparison:
    given: dict[str, Any] = {
        "rounds": 4,
        "eval_every": 2,
        "compile": "off",
        "checkpoint_every": 0,
        "progress": False,
    }
    return fairwind.compare(fairwind.setup(SMALL), ALGORITHMS, out=out, **given | options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("directory") / "run"
    compare(path)
    return path


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What a command says that must fail: one line of error, exit code 2."""

    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["fairwind", *map(str, words)])
        monkeypatch.setattr("warnings.showwarning", None)  # set by the command, and put back afterwards
        with pytest.raises(SystemExit) as stop:
            cli.main()
        said = capsys.readouterr().err
        assert stop.value.code == 2
        assert said.startswith("fairwind: error: ")
        assert said.count("\n") == 1
        return said

    return run


@pytest.fixture
def read_only(copy: Path, tmp_path: Path) -> Iterator[Path]:
    """A finished directory on a file system that is mounted read-only."""
    place = tmp_path / "mounted"
    place.mkdir()
    for options in (["--bind", str(copy), str(place)], ["-o", "remount,bind,ro", str(place)]):
        if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_what_is_finished_is_read_where_nothing_can_be_written(
    read_only: Path, refused: Refused, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are shown; of pages, and of more training, it is said why not."""
    found = compare(read_only)
    assert found.results == fairwind.load(read_only).results
    with pytest.raises(InputError, match=r"the report of .* cannot be written: Read-only file system"):
        found.report()
    with pytest.raises(InputError, match=r"cannot write to .* read-only; give another"):
        compare(read_only, rounds=5)
    monkeypatch.setattr(sys, "argv", ["fairwind", "resume", str(read_only)])
    monkeypatch.setattr("warnings.showwarning", None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert stop.value.code == 0
    assert "AdaFedAdam" in said.out
    assert "cannot be written: Read-only file system" in said.err
    assert "finished: nothing is left to train" in said.err


def test_who_looks_whether_a_directory_is_trained_in_is_not_taken_for_a_trainer(tmp_path: Path) -> None:
    end, seen = threading.Event(), list[bool | None]()
    (tmp_path / "file").touch()  # an empty folder would be removed

    def look() -> None:
        while not end.is_set():
            seen.append(is_held(tmp_path))

    with ThreadPoolExecutor(3) as pool:
        looking = [pool.submit(look) for _ in range(3)]
        try:
            time.sleep(0.2)
            assert True not in seen
            for _ in range(100):
                with held(tmp_path):
                    assert is_held(tmp_path)
        finally:
            end.set()
        for each in looking:
            each.result()
    assert is_held(tmp_path) is False


def test_a_report_is_drawn_without_the_lock(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, free = drawing.drawn, list[bool]()

    def looked(asked: Sequence[drawing.Drawing]) -> list[bytes]:
        with held(copy):
            free.append(True)
        return drawn(asked)

    monkeypatch.setattr(drawing, "drawn", looked)
    monkeypatch.setattr(sys, "argv", ["fairwind", "report", str(copy)])
    monkeypatch.setattr("warnings.showwarning", None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert (stop.value.code, bool(free)) == (0, True)


def newer(recipe: dict[str, Any]) -> dict[str, Any]:
    """As a later version may write it, with a setting that this one does not have."""
    plain = {name: value for name, value in recipe.items() if name != "sha256"}
    made = {**plain["environment"], "fairwind": "9.9"}
    return sealed({**plain, "settings": {**plain["settings"], "frobnicate": 3}, "environment": made})


@pytest.mark.parametrize("lost", [False, True])
def test_a_recipe_of_a_later_version_is_called_so(lost: bool, copy: Path, refused: Refused) -> None:
    """Also that in a checkpoint, where its file is lost."""
    (copy / RESULTS).unlink()
    recipe = newer(read_json(copy / "recipe.json"))
    write_json(copy / "recipe.json", recipe)
    if lost:
        checkpoint, _ = load_checkpoint(copy / "checkpoints")
        assert checkpoint is not None
        changed = checkpoint._replace(record={**checkpoint.record, "recipe": recipe})
        save_checkpoint(copy / "checkpoints", changed, "of a later version")
        (copy / "recipe.json").unlink()
    for command in ("resume", "report"):
        said = refused(command, copy)
        assert f"the recipe of {copy} is not understood" in said
        assert f"'frobnicate'): it was written by fairwind 9.9, and this is {fairwind.__version__}" in said


def test_code_that_a_directory_names_is_named_before_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever goes on with somebody else's run should know whose code that is."""
    for name, makes in {
        "mine": f"task = fairwind.setup({SMALL!r})",
        "ours": "own = fairwind.algorithms.fedavg()",
    }.items():
        text = f"import fairwind, sys\nprint('running {name}', file=sys.stderr)\n{makes}\n"
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("warnings.showwarning", None)

    def run(*words: str) -> str:
        for name in ("mine", "ours"):
            sys.modules.pop(f"fairwind_user_{name}", None)
        monkeypatch.setattr(sys, "argv", ["fairwind", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0
        return capsys.readouterr().err

    begin = ["compare", "mine.py:task", "--algorithms", "ours.py:own", "--rounds", "2", "--compile", "off"]
    assert "names code" not in run(*begin, "--seeds", "0", "--out", "run")
    said = run("resume", "run", "--rounds", "3")
    for name, reference in {"mine": "mine.py:task", "ours": "ours.py:own"}.items():
        named = f"fairwind: run names code, which is run now: {tmp_path / reference}\n"
        assert said.index(named) < said.index(f"running {name}")
    sys.modules.pop("fairwind_user_mine")
    with pytest.warns(UserWarning, match=rf"run names the code of its task, .*: {tmp_path}/mine.py:task"):
        fairwind.load("run")[0].predict(0)
    assert "running mine" in capsys.readouterr().err
    recipe = Path("run", "recipe.json")
    write_json(recipe, sealed({**read_json(recipe), "setup": "mine\x1b[2K\n.py:task"}))
    assert r"mine\x1b[2K\n.py:task" in RunDirectory.open(Path("run")).code[0]


def test_comparisons_begun_at_the_same_moment_never_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    together = threading.Barrier(16)

    def begin(_: int) -> Path:
        together.wait()
        return new_directory("synthetic")

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(begin, range(16)))) == 16


def test_of_two_with_the_same_out_one_wins_and_the_other_says_why(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = "compare", SMALL, "--rounds", "100000", "--algorithms", "fedavg", "--compile", "off", "--out", out
    command = [sys.executable, "-m", "fairwind", *map(str, words)]
    pipe: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": ENV}
    both = [subprocess.Popen(command, **pipe) for _ in range(2)]
    until = time.monotonic() + 60
    while all(process.poll() is None for process in both) and time.monotonic() < until:
        time.sleep(0.02)
    winner, loser = sorted(both, key=lambda process: process.poll() is not None)
    _, said = loser.communicate(timeout=10)
    going = winner.poll() is None
    winner.send_signal(signal.SIGKILL)
    winner.communicate()
    assert going
    assert loser.returncode == 2
    assert said.count("\n") == 1
    assert f"another process is training in {out}" in said
    assert out.exists()


def test_who_is_refused_leaves_the_directory_to_its_holder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with held(out):
        with pytest.raises(InputError, match="another process is training"), held(out):
            pass
        assert out.exists()  # though still empty
        (out / "file").touch()
    assert out.exists()


def test_a_directory_moved_while_training_is_not_made_anew(tmp_path: Path, finished: Path) -> None:
    out, moved = tmp_path / "run", tmp_path / "moved"

    def move(lines: list[dict[str, Any]]) -> None:
        if lines[0]["round"] == 2:
            out.rename(moved)

    with pytest.raises(InputError, match=r"was moved or deleted .* 'fairwind resume NEW-PLACE'"):
        compare(out, after_evaluation=move)
    assert not out.exists()
    compare(moved)
    assert bits(moved) == bits(finished)


def test_a_kill_during_the_first_write_leaves_a_folder_that_compare_takes(
    tmp_path: Path, finished: Path
) -> None:
    out = tmp_path / "run"
    script = (
        "import os, sys, fairwind; os.fsync = lambda _: os._exit(9);"
        f"fairwind.compare(fairwind.setup({SMALL!r}), {ALGORITHMS}, rounds=4, out=sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", script, out], env=ENV, capture_output=True, check=False)
    assert done.returncode == 9
    assert [path.suffix for path in out.iterdir()] == [".partial"]
    compare(out)
    assert bits(out) == bits(finished)
    assert strays(out) == []


def test_half_written_files_are_swept_and_nothing_else(copy: Path) -> None:
    (copy / "figures").mkdir()
    for name in (
        ".results.json.7.partial",
        "checkpoints/.0000004.json.7.partial",
        "figures/.a.pdf.7.partial",
    ):
        (copy / name).write_text("half of it")
    for name in (".mine.partial", "notes.7.partial"):
        (copy / name).write_text("a user's")
    with held(copy):
        pass
    assert sorted(Path(name).name for name in strays(copy)) == [".mine.partial", "notes.7.partial"]


@pytest.mark.parametrize(
    ("file", "safe"),
    [
        ("recipe.json", "nothing was saved yet: make room, then begin again"),
        ("0000001.safetensors", "the recipe is safe: make room, then go on with: "),
        ("0000003.json", "the checkpoint of round 2 is safe: make room, then go on with: "),
        ("results.json", "the checkpoint of round 4 is safe: make room, then go on with: "),
    ],
)
def test_a_full_disk_is_named_and_what_is_safe(
    file: str, safe: str, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    out, write = tmp_path / "run", os.fsync

    def full(descriptor: int) -> None:
        if f".{file}." in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=f"No space left on device: .*{file}; {safe}") as said:
            compare(out)
    assert (f"the same call, with out='{out}'" in str(said.value)) == ("go on" in safe)
    assert strays(tmp_path) == []
    compare(out)
    assert bits(out) == bits(finished)


def test_a_full_disk_is_one_line_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def full(descriptor: int) -> None:
        if "0000002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = [
        "compare",
        SMALL,
        "--rounds",
        "4",
        "--compile",
        "off",
        "--checkpoint-every",
        "0",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(sys, "argv", ["fairwind", *words])
    monkeypatch.setattr("warnings.showwarning", None)
    with pytest.raises(SystemExit):
        cli.main()
    *_, last = capsys.readouterr().err.splitlines()
    assert last == (
        f"fairwind: error: No space left on device: {out / 'checkpoints' / '0000002.safetensors'}; "
        f"the checkpoint of round 1 is safe: make room, then go on with: fairwind resume {out}"
    )


def test_control_characters_in_a_clients_name_still_give_a_report(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(20, FEATURES, generator=draw), torch.randint(0, CLASSES, (20,), generator=draw))
        for _ in range(3)
    ]
    names = ["a\x00b", "c\x1b[31m", "two\nlines"]
    federation = fairwind.Federation.from_clients(clients, names=names, classes=CLASSES)
    task = fairwind.Task(torch.nn.Linear(FEATURES, CLASSES), federation)
    found = fairwind.compare(task, "fedavg", rounds=1, out=tmp_path / "run", progress=False)
    assert found.report().stat().st_size > 100_000
    assert fairwind.load(tmp_path / "run").clients == names


def test_a_report_that_nobody_reads_is_written(copy: Path) -> None:
    command = f"{sys.executable} -m fairwind report '{copy}' | true"
    done = subprocess.run(command, shell=True, env=ENV, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (copy / "report.html").stat().st_size > 100_000
    assert len(list((copy / "figures").iterdir())) == 12


def test_seconds_that_are_no_number_are_one_line(refused: Refused, tmp_path: Path) -> None:
    words = "--checkpoint-every", "nan"
    assert "checkpoint_every=nan is out of range" in refused(
        "compare", SMALL, *words, "--out", tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_a_list_is_one_line(copy: Path, refused: Refused) -> None:
    (copy / "recipe.json").write_text("[]")
    shutil.rmtree(copy / "checkpoints")
    assert "recipe.json is damaged (not a JSON object)" in refused("resume", copy)


@pytest.mark.parametrize("text", [None, "[]", "{}", "[" * 100_000])
def test_a_lost_recipe_is_made_again_from_a_checkpoint(text: str | None, copy: Path, finished: Path) -> None:
    recipe, results = copy / "recipe.json", copy / "results.json"
    before = recipe.read_bytes()
    results.unlink()
    recipe.unlink() if text is None else recipe.write_text(text)
    with pytest.warns(UserWarning, match=r"recipe\.json .*; it is made again from a checkpoint"):
        compare(copy)
    assert recipe.read_bytes() == before
    assert bits(copy) == bits(finished)


def test_a_changed_number_in_a_recipe_is_noticed(copy: Path, refused: Refused) -> None:
    recipe = copy / "recipe.json"
    recipe.write_text(recipe.read_text().replace('"lr": 0.01', '"lr": 0.02'))
    shutil.rmtree(copy / "checkpoints")
    assert "recipe.json is damaged" in refused("resume", copy)


@pytest.mark.parametrize("name", [HISTORY, CLIENTS, MODELS, RESULTS])
def test_a_damaged_result_is_refused_by_load_and_made_again(name: str, copy: Path, finished: Path) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(InputError, match=f"{name} is damaged: 'fairwind resume .*' makes it again"):
        fairwind.load(copy)
    with pytest.warns(UserWarning, match=f"damaged, and made again: {name}"):
        compare(copy)
    assert bits(copy) == bits(finished)


def test_a_page_from_python_shows_no_damaged_file(copy: Path) -> None:
    found = fairwind.load(copy)
    data = bytearray((copy / CLIENTS).read_bytes())
    data[-1] ^= 1
    (copy / CLIENTS).write_bytes(data)
    with pytest.raises(InputError, match=f"{CLIENTS} is damaged"):
        found.report()


def test_results_without_content_are_damaged(copy: Path, refused: Refused) -> None:
    (copy / "results.json").write_text("{}")
    assert f"{copy / 'results.json'} is damaged: 'fairwind resume {copy}'" in refused("report", copy)


def test_a_checkpoint_nested_too_deep_falls_back_to_the_one_before(copy: Path, finished: Path) -> None:
    (copy / "results.json").unlink()
    (copy / "checkpoints" / "0000004.json").write_text("[" * 100_000)
    with pytest.warns(UserWarning, match=r"checkpoint 0000004 is refused: .*; an earlier one is used"):
        compare(copy)
    assert bits(copy) == bits(finished)
    assert (
        json.loads((copy / "results.json").read_bytes())["plan"]["executor"]["why"]
        == "the model can be stacked"
    )


def test_an_error_that_names_no_file_says_what_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for path in (Path(), tmp_path):
        full = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(InputError) as caught, explaining(path):
            raise full
        assert str(caught.value).startswith("No space left on device; the recipe is safe: make room")
        assert "None" not in str(caught.value)


@pytest.mark.parametrize("act", [lambda file: file.write_bytes(b""), Path.unlink, lambda file: cut(file)])
def test_a_history_that_is_spoilt_while_training_is_whole_in_the_end(
    act: Callable[[Path], object], tmp_path: Path, finished: Path
) -> None:
    out = tmp_path / "run"

    def spoil(lines: list[dict[str, Any]]) -> None:
        if lines[0]["round"] == 2:
            act(out / HISTORY)

    compare(out, after_evaluation=spoil)
    assert bits(out) == bits(finished)
    assert len(fairwind.load(out).runs[0].history) == 3


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def stop(lines: list[dict[str, Any]]) -> None:
    if lines[0]["round"] == 2:
        raise KeyboardInterrupt


@pytest.mark.skipif(compiler() is None, reason="needs a compiler")
def test_a_compiled_run_is_not_resumed_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler it goes on only with compiled code that is in the cache."""
    monkeypatch.setenv("FAIRWIND_COMMIT", "without git")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = tmp_path / "whole"
    compare(whole, compile="on")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        compare(out, compile="on", after_evaluation=stop)
    elsewhere = shutil.copytree(out, tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    compare(out, compile="auto")
    assert bits(out) == bits(whole)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with pytest.raises(InputError, match=r"compiler \(g\+\+ or clang\+\+\) was not found.*--compile off"):
        compare(elsewhere, compile="auto")
    assert not (elsewhere / RESULTS).exists()
    with pytest.warns(UserWarning, match="compile was on, is off; the last bits of the results may change"):
        compare(elsewhere, compile="off")
    assert json.loads((elsewhere / RESULTS).read_bytes())["config"]["compile"] == "off"


def test_a_directory_made_by_someone_else_meanwhile_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def make_again(lines: list[dict[str, Any]]) -> None:
        if lines[0]["round"] == 2:
            shutil.rmtree(out)
            out.mkdir()

    with pytest.raises(InputError, match="was moved or deleted"):
        compare(out, after_evaluation=make_again)
    assert out.exists()
