"""The page of a run that is not finished: true while it goes on, and no trouble to it."""

import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fairwind
from command import ENV, refused, succeeded
from exchanged import Exchange, task_of
from fairwind import Federation
from fairwind.errors import InputError
from fairwind.exchange import FederatedRun
from fairwind.exchange.evaluation import Evaluations, Judged
from fairwind.exchange.results import owner_of
from fairwind.report import live, write_report
from fairwind.report.interim import read_interim, write_interim
from fairwind.report.live import follow
from fairwind.runs.files import HISTORY, RESULTS, lock
from fairwind.scores import accuracy
from forked import bits, strays
from narrowed import facts_of

SMALL = "synthetic:clients=6,features=5,classes=3"
OPTIONS: dict[str, Any] = {
    "rounds": 6, "eval_every": 2, "compile": "off", "checkpoint_every": 0, "progress": False,
}  # fmt: skip


def compare(out: Path, **options: Any) -> fairwind.Comparison:
    return fairwind.compare(fairwind.setup(SMALL), ["fedavg", "ditto"], out=out, **OPTIONS | options)


class StoppedError(Exception):
    pass


def stopped_after(out: Path, evaluations: int) -> Path:
    """A run that was stopped when it had been evaluated so often."""
    seen = []

    def stop(lines: Any) -> None:
        seen.append(lines)
        if len(seen) == evaluations:
            raise StoppedError

    with pytest.raises(StoppedError):
        compare(out, after_evaluation=stop)
    return out


def test_while_it_runs_the_page_says_so_and_the_run_is_not_disturbed(tmp_path: Path) -> None:
    compare(tmp_path / "alone")
    said: list[str] = []

    def look(lines: Any) -> None:
        record, path = write_interim(tmp_path / "watched")
        said.append(record.state)
        assert record.running
        assert record.state in path.read_text()

    found = compare(tmp_path / "watched", after_evaluation=look)
    assert [words.partition(",")[0] for words in said] == [f"Round {t} of 6" for t in (0, 2, 4, 6)]
    assert "still running: these are interim numbers" in said[0]
    assert bits(tmp_path / "watched") == bits(tmp_path / "alone")
    assert strays(tmp_path / "watched") == []
    found.report()
    assert not (tmp_path / "watched" / "interim.html").exists()


def test_numbers_of_a_stopped_run_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    out = stopped_after(tmp_path / "run", 3)  # evaluated at round 4; the checkpoint is of round 3
    record = read_interim(out)
    assert not record.running
    assert record.state.startswith("Stopped at round 4 of 6: these are interim numbers. Go on with: fairwind")
    assert "Tables and clients are those of round 2" in record.state
    assert [row["algorithm"] for row in record.results["runs"]] == ["fedavg", "ditto", "ditto (personal)"]
    lines = [line for line in record.history if line["round"] == 2]
    assert [row["final"]["avg"] for row in record.results["runs"]] == [line["avg"] for line in lines]
    assert record.score.mean(axis=1) == pytest.approx([line["avg"] for line in lines], rel=1e-4)
    assert len(record.names) == len(record.train_size) == 6
    assert record.rounds == (0, 2)
    assert facts_of(record.results["federation"])["clients"] == 6


def test_the_command_writes_an_interim_page_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = stopped_after(tmp_path / "run", 2)
    said = succeeded("report", out)
    assert f"Go on with: fairwind resume {out}" in said.stderr.replace("\n", " ")
    assert f"interim report: {out / 'interim.html'}" in said.stdout
    assert not (out / "report.html").exists()


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    out = stopped_after(tmp_path / "run", 3)
    text = (out / HISTORY).read_text()
    lines = text.splitlines()
    (out / HISTORY).write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    record = read_interim(out)
    assert record.history == [json.loads(line) for line in lines[:-1]]
    assert {row["rounds"] for row in record.results["runs"]} == {2}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda text: b"\xff" + text[1:], "damaged in line 1"),
        (lambda text: b"3\n" + text, "damaged in line 1"),
        (lambda text: b"[" * 100_000 + b"\n" + text, "damaged in line 1"),
        (lambda text: text.replace(b'"round": 2', b'"round": []', 1), "damaged in line"),
        (lambda text: text.replace(b'"avg": ', b'"avg": 1', 1), "damaged, as a checkpoint tells"),
    ],
    ids=["no text", "a number", "nested", "no round", "another number"],
)
def test_a_damaged_history_of_an_unfinished_run_is_one_line(
    act: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    out = stopped_after(tmp_path / "run", 2)
    (out / HISTORY).write_bytes(act((out / HISTORY).read_bytes()))
    assert f"{out / HISTORY} is {message}" in refused("report", out)


@pytest.mark.parametrize("act", [Path.unlink, lambda file: file.write_bytes(b"")], ids=["deleted", "emptied"])
def test_a_lost_history_of_an_unfinished_run_is_the_checkpoints(
    act: Callable[[Path], object], tmp_path: Path
) -> None:
    out = stopped_after(tmp_path / "run", 2)
    before = read_interim(out)
    act(out / HISTORY)
    assert read_interim(out).history == before.history[:3]  # what came after it is lost


def test_of_a_damaged_checkpoint_nothing_is_shown(tmp_path: Path) -> None:
    out = stopped_after(tmp_path / "run", 3)
    before = read_interim(out)
    older, newest = sorted((out / "checkpoints").glob("*.safetensors"))
    data = newest.read_bytes()
    tensors = 8 + int.from_bytes(data[:8], "little")
    newest.write_bytes(data[:tensors] + bytes(byte ^ 1 for byte in data[tensors:]))
    assert (read_interim(out).score == before.score).all()
    older.unlink()
    assert not read_interim(out).names


def test_without_a_checkpoint_the_history_is_shown(tmp_path: Path) -> None:
    out = stopped_after(tmp_path / "run", 2)
    shutil.rmtree(out / "checkpoints")
    record, path = write_interim(out)
    assert record.names == []
    assert "Single clients are shown once there is a checkpoint." in record.state
    assert "FedAvg" in path.read_text()


def test_before_the_first_evaluation_one_line_says_so(tmp_path: Path) -> None:
    out = stopped_after(tmp_path / "run", 1)
    (out / HISTORY).write_text("")
    with pytest.raises(InputError, match="nothing has been evaluated in"):
        read_interim(out)


def test_a_page_that_comes_too_late_is_taken_away(tmp_path: Path) -> None:
    compare(tmp_path / "run")
    write_report(tmp_path / "run")
    write_interim(tmp_path / "run")  # the run finished while the page was made
    assert not (tmp_path / "run" / "interim.html").exists()
    assert (tmp_path / "run" / "report.html").exists()


def fetched(address: str, host: str | None = None) -> str:
    request = urllib.request.Request(address, headers={} if host is None else {"Host": host})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def test_a_live_page_follows_the_run_and_stops_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PATIENCE", 60.0)
    out = tmp_path / "run"
    said: list[str] = []
    thread: list[threading.Thread] = []
    states, pages = [], []

    def look(lines: Any) -> None:
        if not thread:
            thread.append(threading.Thread(target=follow, args=(out, said.append, 0.05)))
            thread[0].start()
        while not said:
            time.sleep(0.05)
        states.append(fetched(said[0].split()[0] + "state"))
        pages.append(fetched(said[0].split()[0]))

    compare(out, after_evaluation=look)
    address = said[0].split()[0]
    assert address.startswith("http://127.0.0.1:")
    assert len(set(states)) == 4
    for t, (state, page) in enumerate(zip(states, pages, strict=True)):
        assert f"Round {2 * t} of 6, still running" in page
        assert f'"live":"{state}"' in page  # by which it sees that there is something new
        assert "connect-src 'self'" in page
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetched(address, host="evil.example")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetched(address + "recipe.json")
    last = fetched(address)
    assert "still running" not in last
    assert '"live":""' in last
    thread[0].join(30)
    assert not thread[0].is_alive()
    assert (out / RESULTS).exists()


def test_a_browser_that_goes_away_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "PATIENCE", 0.0)
    out = stopped_after(tmp_path / "run", 2)
    said: list[str] = []
    with lock(out):
        thread = threading.Thread(target=follow, args=(out, said.append, 0.05))
        thread.start()
        while not said:
            time.sleep(0.05)
        address = said[0].split()[0]
        host = urllib.parse.urlsplit(address).netloc
        for request in (f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n", "GET / HT"):
            with socket.create_connection((live.HOST, int(host.partition(":")[2]))) as browser:
                # Closed so, the server is told at once that nobody listens.
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                browser.sendall(request.encode())
                time.sleep(0.1)
        assert "still running" in fetched(address)
    thread.join(30)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_ctrl_c_ends_the_following_and_not_the_run(tmp_path: Path) -> None:
    out = stopped_after(tmp_path / "run", 2)
    with lock(out) as mine:  # as the process that trains does
        assert mine
        command = [sys.executable, "-m", "fairwind", "report", "--live", str(out)]
        # A shell makes what it starts in the background ignore this signal, tests too.
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENV, preexec_fn=heard)
        assert process.stderr is not None
        address = process.stderr.readline().split()[0]
        assert "still running" in fetched(address)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "no longer followed; the run goes on" in said


def test_a_real_federations_training_has_an_interim_page(ragged: Federation, tmp_path: Path) -> None:
    task = task_of(ragged)
    exchange = Exchange(task, "fedavg")
    evaluations = Evaluations([accuracy], "fedavg", 0)
    owner = owner_of(exchange.server, evaluations, task="hospitals", clients_per_round=None)
    run = FederatedRun(tmp_path / "run", owner, exchange.server, evaluations)
    for number in range(3):
        judged = {f"c{k}": Judged(5, 20, 0.5, {"accuracy": 20.0 * k + number}) for k in range(4)}
        evaluations.add(number, judged, {})
        run.save()
        exchange.round()
    record, path = write_interim(tmp_path / "run")
    assert record.state == "Round 2, still running: these are interim numbers."
    assert record.names == ["c0", "c1", "c2", "c3"]
    assert record.score.tolist() == [[2.0, 22.0, 42.0, 62.0]]
    assert "FedAvg on hospitals" in path.read_text()
    run.close()
    assert read_interim(tmp_path / "run").state.startswith("Stopped at round 2: these are interim numbers.")
