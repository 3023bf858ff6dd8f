"""Compiled code in the cache: run only as this user wrote it, and otherwise built again."""

import os
import shutil
import stat
import tempfile
import types
from pathlib import Path

import pytest
import torch

from answers import answering, run, training
from conftest import compiler_found
from damages import LIBRARY_DAMAGES
from fairwind.engine.backends import compiling
from forked import Ended

pytestmark = pytest.mark.skipif(not compiler_found(torch.device("cpu")), reason="needs a C++ compiler")
OTHER = 12345  # a user's number
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def xdg(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def entries(xdg: Path) -> list[Path]:
    return sorted(path for path in (xdg / "fairwind").rglob("*") if path.is_file())


def kept(xdg: Path) -> Path:
    (entry,) = entries(xdg)
    return entry


def test_a_damaged_library_is_built_again(tmp_path: Path, xdg: Path) -> None:
    act = answering(tmp_path)
    assert run(act, tmp_path, xdg) == Ended(0, "built\n42\n", "")
    entry = kept(xdg)
    for what, damage in LIBRARY_DAMAGES.items():
        damage(entry)
        assert run(act, tmp_path, xdg) == Ended(0, "built\n42\n", ""), what
        assert run(act, tmp_path, xdg) == Ended(0, "42\n", ""), what
        assert kept(xdg) == entry, what


@pytest.mark.crash
def test_training_does_not_crash_on_damaged_code(tmp_path: Path, xdg: Path) -> None:
    fresh = run(training, tmp_path, xdg)
    assert (fresh.code, fresh.stderr) == (0, "")
    for what in ("emptied", "truncated", "garbage", "a folder"):
        LIBRARY_DAMAGES[what](kept(xdg))
        assert run(training, tmp_path, xdg) == fresh, what
        assert run(training, tmp_path, xdg) == fresh, what


def test_a_library_of_another_name_is_not_taken(tmp_path: Path, xdg: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    act, other = answering(tmp_path), answering(there, 7)
    run(act, tmp_path, xdg)
    mine = kept(xdg)
    run(other, tmp_path, xdg)
    (another,) = {*entries(xdg)} - {mine}
    shutil.copy(another, mine)
    assert run(act, tmp_path, xdg) == Ended(0, "built\n42\n", "")


def planted(tmp_path: Path, xdg: Path) -> Path:
    """A library that another user would like to be run."""
    assert run(answering(tmp_path, 666), tmp_path, xdg).stdout == "built\n666\n"
    assert run(answering(tmp_path), tmp_path, xdg).stdout == "666\n"  # as long as it is ours
    return kept(xdg)


@as_root
def test_a_library_of_another_user_is_not_run(tmp_path: Path, xdg: Path) -> None:
    os.chown(planted(tmp_path, xdg), OTHER, OTHER)
    assert run(answering(tmp_path), tmp_path, xdg) == Ended(0, "built\n42\n", "")
    assert run(answering(tmp_path), tmp_path, xdg) == Ended(0, "42\n", "")
    assert kept(xdg).stat().st_uid == os.geteuid()


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_library_that_others_can_write_is_not_run(tmp_path: Path, xdg: Path, mode: int) -> None:
    planted(tmp_path, xdg).chmod(mode)
    assert run(answering(tmp_path), tmp_path, xdg) == Ended(0, "built\n42\n", "")
    assert run(answering(tmp_path), tmp_path, xdg) == Ended(0, "42\n", "")


@as_root
def test_a_folder_of_another_user_is_left_alone(tmp_path: Path, xdg: Path) -> None:
    entry = planted(tmp_path, xdg)
    os.chown(entry.parent, OTHER, OTHER)
    _is_left_alone(tmp_path, xdg, "belongs to another user; set XDG_CACHE_HOME")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_left_alone(tmp_path: Path, xdg: Path, mode: int) -> None:
    planted(tmp_path, xdg).parent.chmod(mode)
    _is_left_alone(tmp_path, xdg, "can be written by other users; chmod go-w it")


def _is_left_alone(tmp_path: Path, xdg: Path, why: str) -> None:
    entry = kept(xdg)
    before = entry.read_bytes()
    for _ in range(2):
        ended = run(answering(tmp_path), tmp_path, xdg, TMPDIR=str(tmp_path))
        assert (ended.code, ended.stdout) == (0, "built\n42\n")
        assert ended.stderr.count("\n") == 1
        assert ended.stderr.startswith(f"compiled code is not kept: {entry.parent} {why}")
    assert entry.read_bytes() == before
    assert [*entry.parent.iterdir()] == [entry]
    assert not [*tmp_path.glob("fairwind-*")]  # where it was built


@as_root
def test_what_root_kept_is_run(tmp_path: Path) -> None:
    """Root could change anything else as well. Such a cache is part of a container's image, for example."""
    with tempfile.TemporaryDirectory() as shared:
        folder = Path(shared)
        folder.chmod(0o755)
        answer = answering(folder)
        run(answer, tmp_path, folder)
        entry = kept(folder)
        entry.chmod(0o644)
        entry.parent.chmod(0o755)

        def act() -> None:
            os.setegid(OTHER)
            os.seteuid(OTHER)
            answer()

        assert run(act, tmp_path, folder, TMPDIR="/tmp") == Ended(0, "42\n", "")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_it_is_kept_whatever_the_umask(tmp_path: Path, xdg: Path, umask: int) -> None:
    def act() -> None:
        os.umask(umask)
        answer()

    answer = answering(tmp_path)
    assert run(act, tmp_path, xdg) == Ended(0, "built\n42\n", "")
    assert run(act, tmp_path, xdg) == Ended(0, "42\n", "")
    assert stat.S_IMODE(kept(xdg).parent.stat().st_mode) == 0o700


def test_without_a_cache_it_is_built_in_a_private_folder(tmp_path: Path) -> None:
    ended = run(answering(tmp_path), tmp_path, Path("/dev/null"), TMPDIR=str(tmp_path))
    assert (ended.code, ended.stdout) == (0, "built\n42\n")
    assert "compiled code is not kept: /dev/null/fairwind/compiled cannot be made" in ended.stderr
    assert not [*tmp_path.glob("fairwind-*")]


def test_damage_after_loading_does_no_harm(tmp_path: Path, xdg: Path) -> None:
    """A library that is mapped from its file would end the process with a bus error."""
    answer = answering(tmp_path)
    run(answer, tmp_path, xdg)

    def act() -> None:
        answer()
        os.truncate(kept(xdg), 0)
        answer()

    assert run(act, tmp_path, xdg) == Ended(0, "42\n42\n", "")


def test_libraries_of_one_process_are_not_mistaken_for_each_other(tmp_path: Path, xdg: Path) -> None:
    folders = [tmp_path / str(i) for i in range(5)]
    for folder in folders:
        folder.mkdir()
    answers = [answering(folder, i) for i, folder in enumerate(folders)]

    def act() -> None:
        for answer in answers:
            answer()

    assert run(act, tmp_path, xdg).stdout == "".join(f"built\n{i}\n" for i in range(5))
    assert run(act, tmp_path, xdg).stdout == "".join(f"{i}\n" for i in range(5))


def test_a_compiler_that_writes_nothing_is_named_and_leaves_nothing(tmp_path: Path, xdg: Path) -> None:
    ended = run(training, tmp_path, xdg, CXX="true")
    assert ended.code == 0
    for line in ended.stderr.splitlines():
        assert "steps run uncompiled, and slower: the compiler true wrote no library" in line
    assert ended.stderr
    assert entries(xdg) == []
    healed = run(training, tmp_path, xdg)
    assert (healed.code, healed.stderr) == (0, "")
    assert healed.stdout == run(training, tmp_path, tmp_path / "another").stdout


def test_a_failing_compiler_says_why_in_one_line(tmp_path: Path, xdg: Path) -> None:
    act = answering(tmp_path)
    (tmp_path / "answer-42.cpp").write_text("int answer() { return nothing; }")
    ended = run(act, tmp_path, xdg)
    assert "RuntimeError: the compiler " in ended.stderr
    assert "error: " in ended.stderr.splitlines()[-1]
    assert "nothing" in ended.stderr.splitlines()[-1]
    assert entries(xdg) == []


def test_a_library_without_its_function_is_not_kept(tmp_path: Path, xdg: Path) -> None:
    act = answering(tmp_path)
    (tmp_path / "answer-42.cpp").write_text('extern "C" int question() { return 0; }')
    assert run(act, tmp_path, xdg).code == 1
    assert entries(xdg) == []


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path, xdg: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nkill -9 $PPID\n")
    compiler.chmod(0o755)
    assert run(answering(tmp_path), tmp_path, xdg, CXX=str(compiler)).code == -9
    assert [*(xdg / "fairwind" / "compiled").iterdir()]
    assert run(answering(tmp_path), tmp_path, xdg) == Ended(0, "built\n42\n", "")
    assert [*(xdg / "fairwind" / "compiled").iterdir()] == [kept(xdg)]


def step() -> None: ...


@pytest.mark.parametrize("given", [None, "default", "own"])
def test_on_a_gpu_pytorchs_compiler_does_not_share_its_folder_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiling.INDUCTOR, raising=False)
    if given:
        value = default_cache_dir() if given == "default" else str(tmp_path / "mine")
        monkeypatch.setenv(compiling.INDUCTOR, value)
    else:
        monkeypatch.setenv(compiling.INDUCTOR, "")  # so that it is restored
        del os.environ[compiling.INDUCTOR]
    compiling.compiled_for_gpu(types.FunctionType(step.__code__, {}))
    used = Path(os.environ[compiling.INDUCTOR])
    if given == "own":
        assert used == tmp_path / "mine"
    else:
        assert used == tmp_path / "fairwind" / "compiled" / "inductor"
        assert stat.S_IMODE(used.stat().st_mode) == 0o700
