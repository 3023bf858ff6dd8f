"""The command line, run as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def fairwind(*words: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairwind", *map(str, words)]
    env = ENV | environment
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=300, check=False)


def succeeded(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    done = fairwind(*words, **environment)
    assert done.returncode == 0, done.stderr
    return done


def refused(*words: object, **environment: str) -> str:
    """What a command says that must fail: one line of error, exit code 2."""
    done = fairwind(*words, **environment)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("fairwind: error: "), done.stderr
    assert done.stderr.count("fairwind: error") == 1
    return last
