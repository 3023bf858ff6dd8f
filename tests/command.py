"""The command line, run as a user runs it."""

import io
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from fairwind.cli import main

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def fairwind(*words: object, cwd: Path | None = None, **environment: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairwind", *map(str, words)]
    env = ENV | environment
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=300, check=False)


def called(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has all modules loaded: for commands that are refused."""
    out, err = io.StringIO(), io.StringIO()
    before, shown = sys.argv, warnings.showwarning
    sys.argv = ["fairwind", *map(str, words)]
    place = chdir(cwd) if cwd is not None else nullcontext()
    try:
        with place, redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stop:
        return subprocess.CompletedProcess(sys.argv, int(stop.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv, warnings.showwarning = before, shown


def succeeded(*words: object, **environment: Any) -> subprocess.CompletedProcess[str]:
    done = fairwind(*words, **environment)
    assert done.returncode == 0, done.stderr
    return done


def refused(*words: object, **environment: Any) -> str:
    """What a command says that must fail: one line of error, exit code 2."""
    done = fairwind(*words, **environment) if environment else called(*words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("fairwind: error: "), done.stderr
    assert done.stderr.count("fairwind: error") == 1
    return last


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)


def lines(out: Path) -> int:
    """Of a run's history."""
    return len((out / "history.jsonl").read_text().splitlines())
