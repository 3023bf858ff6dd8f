"""What is recorded of the environment of a run."""

import subprocess
from pathlib import Path

import pytest

from fairwind.runs.environment import environment

ROOT = Path(__file__).parents[2]


def test_runs_from_a_checkout_say_their_commit() -> None:
    """The folder of the source tree is found from this module's place, which may move."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout")
    commit = environment("cpu")["commit"]
    assert commit is not None
    assert commit.removesuffix("+") == done.stdout.strip()


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRWIND_COMMIT", "1234abc")
    assert environment("cpu")["commit"] == "1234abc"
