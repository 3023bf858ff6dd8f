"""The library that draws, in a process of its own: where memory is short it ends its process at once."""

import atexit
import base64
import json
import os
import subprocess
import sys
import threading
from typing import Any

import vl_convert  # noqa: F401, so that it is missed here

from fairwind.errors import InputError

WORK = """
import base64, json, sys, vl_convert
for line in sys.stdin:
    name, given, options = json.loads(line)
    try:
        made = getattr(vl_convert, name)(*given, **options)
        answer = {"made": base64.b64encode(made.encode() if isinstance(made, str) else made).decode()}
    except BaseException as error:  # a failure of native code is no Exception
        answer = {"error": " ".join(str(error).split())[:300]}
    print(json.dumps(answer), flush=True)
"""


class Drawing:
    """The process, which starts at the first call, and anew after it ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.owner = 0  # a fork must not share it
        atexit.register(self.end)

    def call(self, name: str, *given: Any, **options: Any) -> bytes:
        """What a function of the library makes of arguments that are JSON."""
        with self.lock:
            try:
                process = self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps([name, given, options]) + "\n")
                process.stdin.flush()
                answer = json.loads(process.stdout.readline())
            except (OSError, ValueError) as error:
                self.end()
                raise InputError(
                    "the library that draws charts (vl-convert) ended without an answer, perhaps for want of "
                    "memory"
                ) from error
        if "error" in answer:
            raise InputError(f"the library that draws charts (vl-convert) failed: {answer['error']}")
        return base64.b64decode(answer["made"])

    def _running(self) -> "subprocess.Popen[str]":
        if self.process is None or self.owner != os.getpid():
            path = os.pathsep.join(filter(None, sys.path))
            self.owner, self.process = (
                os.getpid(),
                subprocess.Popen(
                    [sys.executable, "-P", "-c", WORK],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=os.environ | {"PYTHONPATH": path},
                ),
            )
        return self.process

    def end(self) -> None:
        """Ends the process, if this one started it."""
        process, self.process = self.process, None
        if process is not None and self.owner == os.getpid():
            process.kill()
            process.communicate()


DRAWING = Drawing()
call = DRAWING.call
