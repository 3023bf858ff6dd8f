"""Charts as files, and the script that pages draw them with; both are made by V8, in a child process.

V8 ends its process where it lacks memory or address space. A child's end is an error that can be told.
"""

import base64
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import vl_convert

from fairwind.errors import InputError

CHILD = """
import base64, json, sys
sys.path.append(sys.argv[1])
import vl_convert
for name, given in json.load(sys.stdin):
    made = getattr(vl_convert, name)(**given)
    made = made.encode() if isinstance(made, str) else made
    print(base64.b64encode(made).decode(), flush=True)
"""


class Drawing(NamedTuple):
    """A call of the drawing library."""

    what: str  # it makes, in an error's words
    function: str
    given: dict[str, Any]


def drawn(asked: Sequence[Drawing]) -> list[bytes]:
    """What the drawing library makes of each."""
    place = str(Path(vl_convert.__file__).parents[1])
    calls = json.dumps([[each.function, each.given] for each in asked])
    # -P: what lies in the current folder is not the child's library.
    child = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, place], input=calls.encode(), capture_output=True, check=False
    )
    made = [base64.b64decode(line) for line in child.stdout.splitlines(keepends=True) if line.endswith(b"\n")]
    if child.returncode != 0:
        missing = asked[min(len(made), len(asked) - 1)].what
        raise InputError(f"{missing} cannot be drawn: {_why(child)}")
    return made


def _why(child: subprocess.CompletedProcess[bytes]) -> str:
    """How the child ended."""
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return (
            f"the drawing library was ended by {name}, as where it lacks memory: give it more, or raise the "
            "limit ('ulimit -v unlimited')"
        )
    said = child.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"the drawing library ended with code {child.returncode}"
