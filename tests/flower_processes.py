"""A real federation on this machine: a SuperLink and SuperNodes as processes, with TLS and authentication."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "flower-app"
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(what: Callable[[], Any], seconds: float, why: str, pause: float = 0.5) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, f"{why} did not happen within {seconds} s"
        time.sleep(pause)
    return found


class Deployment:
    """Processes that were started here, all of which know `mark`."""

    def __init__(self, folder: Path, nodes: int):
        self.folder, self.mark, self.port = folder, uuid.uuid4().hex, free_port()
        self.superlink: subprocess.Popen[bytes] | None = None
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.node_ids: dict[int, str] = {}
        quiet = ("TELEMETRY_ENABLED=0", "DISABLE_UPDATE_CHECK=1", "DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1")
        own = {"FLWR_HOME": str(folder / "home"), "FAIRWIND_TEST": self.mark, "OMP_NUM_THREADS": "1"}
        path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "200"}
        self.environment = {
            **os.environ,
            **dict(f"FLWR_{each}".split("=") for each in quiet),
            **own,
            **path,
        }
        self.secrets = folder / "secrets"
        command = [
            sys.executable,
            EXAMPLE / "credentials.py",
            self.secrets,
            "127.0.0.1",
            "--nodes",
            nodes + 1,
        ]
        subprocess.run([str(word) for word in command], check=True, env=self.environment)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.secrets / "ca.crt"}"\n'
        )

    def popen(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            command = [str(BIN / str(words[0])), *map(str, words[1:])]
            return subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def flwr(self, *words: object) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, words)],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_superlink(self) -> None:
        secrets = self.secrets
        certificates = "--ssl-ca-certfile", secrets / "ca.crt", "--ssl-certfile", secrets / "server.pem"
        self.superlink = self.popen(
            "superlink",
            "flower-superlink",
            *certificates,
            "--ssl-keyfile",
            secrets / "server.key",
            "--enable-supernode-auth",
            *("--host", "127.0.0.1", "--port", self.port),
            *("--database", self.folder / "state.db"),
        )
        log = self.folder / "superlink.log"
        wait_for(lambda: f"https://127.0.0.1:{self.port}" in log.read_text(), 120, "a SuperLink's start")

    def register(self, number: int) -> None:
        said = json.loads(
            self.flwr(
                "supernode", "register", self.secrets / f"node-{number}.pub", "here", "--format", "json"
            )
        )
        self.node_ids[number] = str(said["node-id"])

    def start_node(self, number: int) -> subprocess.Popen[bytes]:
        self.nodes[number] = self.popen(
            f"node-{number}",
            "flower-supernode",
            *("--root-certificates", self.secrets / "ca.crt"),
            *("--superlink", f"127.0.0.1:{self.port}"),
            *("--auth-supernode-private-key", self.secrets / f"node-{number}.key"),
            *("--node-config", f"partition-id={number}"),
            *("--host", "127.0.0.1", "--port", free_port()),
        )
        return self.nodes[number]

    def run(self, app: Path = EXAMPLE, **config: Any) -> str:
        """Starts a run of the example app, or of another; returns its number."""
        words = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items())
        said = json.loads(self.flwr("run", app, "here", "--run-config", words, "--format", "json"))
        return str(said["run-id"])

    def processes(self, *words: str) -> list[int]:
        """Those of this deployment, whose commands have these words."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                mine = self.mark.encode() in (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mine and command and all(word in command for word in words):
                found.append(int(entry.name))
        return found

    def kill(self, *words: str) -> int:
        """Kills those processes at once; returns how many there were."""
        found = self.processes(*words)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return len(found)

    def kill_node(self, number: int) -> None:
        """Kills a SuperNode with all that it has started."""
        os.killpg(self.nodes[number].pid, signal.SIGKILL)
        self.nodes[number].wait()

    def kill_superlink(self) -> None:
        """Kills the SuperLink with all that it has started."""
        assert self.superlink is not None
        os.killpg(self.superlink.pid, signal.SIGKILL)
        self.superlink.wait()
        self.kill("flwr-serverapp")
        (self.folder / "superlink.log").write_text("")

    def stop(self) -> None:
        """Stops everything."""
        started = [each for each in (*self.nodes.values(), self.superlink) if each is not None]
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        wait_for(lambda: not self.kill(), 30, "the end of all processes")
