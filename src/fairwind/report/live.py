"""The page of a run that is still going, served on 127.0.0.1, made anew whenever there is something new."""

import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from safetensors import SafetensorError

from fairwind.errors import InputError, first_line
from fairwind.report.html import escaped
from fairwind.report.interim import read_interim
from fairwind.report.page import figures, page
from fairwind.report.record import read_record
from fairwind.runs.files import HISTORY, RESULTS, is_held
from fairwind.runs.folder import CHECKPOINTS

HOST = "127.0.0.1"
PATIENCE = 10.0  # seconds that a browser has to fetch the last page


class Page:
    """The newest page of a directory, and a name for what it shows."""

    def __init__(self, directory: Path):
        self.directory, self.lock = directory, Lock()
        self.made: tuple[str, str] = ("", "")
        self.last_seen = False  # whether somebody was given the page of an ended run

    def ended(self) -> bool:
        return (self.directory / RESULTS).exists() or is_held(self.directory) is False

    def state(self) -> str:
        """Changes whenever there is something new to show."""
        history, finished = self.directory / HISTORY, (self.directory / RESULTS).exists()
        size = history.stat().st_size if history.exists() else 0
        newest = max((file.stem for file in (self.directory / CHECKPOINTS).glob("[0-9]*.json")), default="")
        return f"{size}-{newest}-{'finished' if finished else 'ended' if self.ended() else 'running'}"

    def html(self) -> str:
        """Made anew if there is something new; the last one asks for no other."""
        with self.lock:
            state, ended = self.state(), self.ended()
            if state != self.made[0]:
                finished = (self.directory / RESULTS).exists()
                record = read_record(self.directory) if finished else read_interim(self.directory)
                self.made = state, page(record, figures(record), live="" if ended else state)
            self.last_seen |= ended
            return self.made[1]


def follow(directory: Path, say: Callable[[str], None], every: float = 1.0) -> None:
    """Serves the page until the run has ended; `say` is told where."""
    served = Page(directory)
    server = _Server((HOST, 0), _handler(served))
    server.daemon_threads = True
    say(f"http://{HOST}:{server.server_port}/ shows it, and refreshes; Ctrl-C stops that, and not the run")
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        while not served.ended():
            time.sleep(every)
        until = time.monotonic() + PATIENCE
        while not served.last_seen and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.5)  # for the answer to arrive
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser that went away is no error
            super().handle_error(request, client_address)


def _handler(served: Page) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            own = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]  # type: ignore[attr-defined]
            if self.headers.get("Host") not in own:  # another site's script, by a name that leads here
                self._answer(403, "text/plain", "no")
            elif self.path == "/state":
                self._answer(200, "text/plain", served.state())
            elif self.path != "/":
                self._answer(404, "text/plain", "nothing here")
            else:
                self._page()

        def _page(self) -> None:
            try:
                code, text = 200, served.html()
            except (InputError, OSError, ValueError, LookupError, SafetensorError) as error:
                code, text = 503, f"<!doctype html><title>Fairwind</title><p>{escaped(first_line(error))}</p>"
            self._answer(code, "text/html", text)

        def _answer(self, code: int, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            if code == 503:
                self.send_header("Refresh", "2")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *_: object) -> None:
            pass

    return Handler
