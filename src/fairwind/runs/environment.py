"""The environment of a run: versions, processor, device, commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from fairwind.engine.ranks import find
from fairwind.runs.schema import Environment


def environment(device: str) -> Environment:
    """The environment, as recorded with results."""
    from fairwind import __version__

    on_gpu = device.startswith("cuda")
    world = find().world
    made: Environment = {
        "fairwind": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "ranks": world,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if world == 1:
        del made["ranks"]
    return made


def changes(before: Environment, now: Environment) -> list[str]:
    """Differences since a run started, which may change results in the last bits."""
    old: dict[str, object] = {"ranks": 1, **before}
    new: dict[str, object] = {"ranks": 1, **now}
    watched = "fairwind", "torch", "processor", "threads", "device", "ranks"
    return [f"{k} was {old.get(k)}, is {new[k]}" for k in watched if old.get(k) != new[k]]


def _commit() -> str | None:
    """The commit of the source tree, with + if there are uncommitted changes; None if installed.

    For a copy without git history, the variable FAIRWIND_COMMIT names the commit.
    """
    if commit := os.environ.get("FAIRWIND_COMMIT"):
        return commit
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != here.parents[2]:
            return None
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"
