"""Trackers show a comparison's rounds, each once: read back with the trackers' own readers."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fairwind as fw
from command import ENV, called, fairwind
from conftest import make_federation, make_model
from fairwind.tracking import KINDS, Tracked, Tracking, metrics
from narrowed import known

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries

Rounds = dict[str, dict[int, float]]  # by run: a metric after each round

OPTIONS: dict[str, Any] = {"seeds": [0, 1], "rounds": 8, "eval_every": 2, "progress": False, "compile": "off"}
NAMES = ["fedavg/0", "fedavg/1", "ditto/0", "ditto (personal)/0", "ditto/1", "ditto (personal)/1"]
SMALL = "synthetic:clients=6,features=4,classes=3"


def compare(out: Path | None, **options: Any) -> fw.Comparison:
    task = fw.Task(make_model, make_federation([12, 30, 50]), name="mine")
    return fw.compare(task, ["fedavg", "ditto"], out=out, checkpoint_every=0, **{**OPTIONS, **options})


def told(compared: fw.Comparison, metric: str = "worst30") -> Rounds:
    """What trackers must show."""
    return {
        f"{run.algorithm}/{run.seed}": {line["round"]: known(line.get(metric)) for line in run.history}
        for run in compared
    }


# ---- the trackers' readers: each gives every value that it holds, so that a doubled round shows ----


def read_tensorboard(folder: Path, metric: str) -> tuple[Rounds, dict[str, str], Path]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Rounds = {}
    settings = ""
    for run in sorted({file.parent for file in folder.glob("run/*/*/events*")}):
        events = EventAccumulator(str(run))
        events.Reload()
        entries = events.Scalars(metric)
        assert len({e.step for e in entries}) == len(entries)
        found["/".join(run.relative_to(folder / "run").parts)] = {e.step: e.value for e in entries}
        settings = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    rows = [line.strip("| ").split(" | ") for line in settings.splitlines()[2:]]
    return found, dict(rows), folder / "run" / "report.html"


def read_mlflow(folder: Path, metric: str) -> tuple[Rounds, dict[str, str], Path]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = (e for e in client.search_experiments() if e.name == "run")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    found: Rounds = {}
    for run in runs:
        if run is not parent:
            assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
            entries = client.get_metric_history(run.info.run_id, metric)
            assert len({e.step for e in entries}) == len(entries)
            found[run.info.run_name] = {e.step: e.value for e in entries}
            assert run.info.run_name == f"{run.data.params['algorithm']}/{run.data.params['seed']}"
    assert {run.info.status for run in runs} == {"FINISHED"}
    page = client.download_artifacts(parent.info.run_id, "report.html")
    return found, parent.data.params, Path(page)


def read_wandb(folder: Path, metric: str) -> tuple[Rounds, dict[str, str], Path]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: Rounds = {}
    settings: dict[str, str] = {}
    page = Path()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        records = [Record.FromString(data) for data in leveldb_log(file)]
        (run,) = (r.run for r in records if r.HasField("run"))
        for artifact in (r.request.log_artifact.artifact for r in records if r.HasField("request")):
            for entry in artifact.manifest.contents:
                page = Path(entry.local_path)
        for artifact in (r.artifact for r in records if r.HasField("artifact")):
            for entry in artifact.manifest.contents:
                page = Path(entry.local_path)
        assert run.run_group == "run"
        if run.job_type == "report":
            continue
        settings = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert run.display_name not in found, "a run has two files"
        rounds = found[run.display_name] = {}
        for history in (r.history for r in records if r.HasField("history")):
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in history.item}
            if metric in items:
                assert items["_step"] not in rounds
                rounds[items["_step"]] = items[metric]
    return found, settings, page


def leveldb_log(file: Path) -> list[bytes]:
    """The records of W&B's transaction log, for which it has no reader in Python: LevelDB's format."""
    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := -at % 32768) < 7:  # too little of a block for a header
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or last
            found.append(whole)
            whole = b""
    return found


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}
EACH = [pytest.param(kind, marks=() if kind == "tensorboard" else pytest.mark.track) for kind in KINDS]


@pytest.mark.parametrize("kind", EACH)
def test_a_tracker_shows_the_rounds_of_every_run_and_the_page(kind: str, tmp_path: Path) -> None:
    compared = compare(tmp_path / "run", track=f"{kind}:{tmp_path / 'shown'}")
    for metric in ("worst30", "avg"):
        found, settings, page = READERS[kind](tmp_path / "shown", metric)
        wanted = told(compared, metric)
        assert list(wanted) == NAMES
        assert {k: pytest.approx(v, rel=1e-6) for k, v in wanted.items()} == found
    assert settings["task"] == "mine"
    assert settings["solver/lr"] == "0.01"
    assert page.read_text() == (tmp_path / "run" / "report.html").read_text()


KILLED = """
import os, signal, sys
sys.path[:0] = {tests!r}
from pathlib import Path
from test_tracking import compare

def kill(lines):
    if lines[0]["round"] == 6:
        os.kill(os.getpid(), signal.SIGKILL)

compare(Path({out!r}), track={track!r}, after_evaluation=kill)
"""


@pytest.mark.parametrize("kind", EACH)
def test_a_run_that_was_killed_goes_on_in_its_tracker_and_no_round_doubles(kind: str, tmp_path: Path) -> None:
    """Killed after round 6 was shown and before it was saved, so that it is trained and told again."""
    out, track = tmp_path / "run", f"{kind}:{tmp_path / 'shown'}"
    code = KILLED.format(
        tests=[str(folder) for folder in Path(__file__).parents[:2]], out=str(out), track=track
    )
    with open(tmp_path / "said", "w") as said:  # no pipe, which a child of W&B's would keep open
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=ENV, timeout=300, stdout=said, stderr=said, check=False)
    assert done.returncode == -signal.SIGKILL, (tmp_path / "said").read_text()
    compared = compare(out, track=track)
    found, _, page = READERS[kind](tmp_path / "shown", "worst30")
    assert {k: pytest.approx(v, rel=1e-6) for k, v in told(compared).items()} == found
    assert page.read_text() == (out / "report.html").read_text()


def test_tensorboard_reads_a_later_process_last_whatever_its_number(tmp_path: Path) -> None:
    from fairwind.tracking.tensorboard import TensorBoard

    def show(value: float) -> None:
        tracker = TensorBoard(tmp_path)
        tracker.start(Tracked(name="run", id="1", settings={}, runs=("fedavg/0",)))
        tracker.log("fedavg/0", 0, {"avg": value})
        tracker.finish(complete=True, page=None)

    show(1.0)
    (file,) = (tmp_path / "run/fedavg/0").iterdir()
    # As if the first process had the higher number, and the other began in the same second.
    file.rename(file.with_name(f"events.out.tfevents.{int(time.time())}.~"))
    show(2.0)
    assert read_tensorboard(tmp_path, "avg")[0] == {"fedavg/0": {0: 2.0}}


@pytest.mark.slow
def test_the_command_line_tracks_and_resumes_with_the_same_trackers(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--rounds", "4", "--eval-every", "2", "--compile", "off", "--algorithms", "fedavg"]
    done = fairwind(
        "compare", SMALL, *options, "--out", str(out), "--track", f"tensorboard:{tmp_path / 'shown'}"
    )
    assert done.returncode == 0, done.stderr
    found, settings, page = read_tensorboard(tmp_path / "shown", "avg")
    assert {run: list(rounds) for run, rounds in found.items()} == {
        f"fedavg/{s}": [0, 2, 4] for s in (0, 1, 2)
    }
    assert settings["task"] == SMALL
    page.unlink()
    (out / "results.json").unlink()  # as if it had been killed just before
    assert fairwind("resume", out).returncode == 0
    assert read_tensorboard(tmp_path / "shown", "avg")[0] == found
    assert page.exists()


def test_another_comparison_of_the_same_name_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for place in ("a", "b"):
        compare(tmp_path / place / "run", track=f"tensorboard:{tmp_path / 'shown'}", rounds=2)
    assert sorted(path.name for path in (tmp_path / "shown").iterdir()) == ["run", "run-2"]


class Own:
    """A tracker as a user may write one, which breaks down at a round."""

    def __init__(self, fails: int | None = None):
        self.fails = fails
        self.found: dict[tuple[str, int], dict[str, float]] = {}
        self.end: tuple[bool, Path | None] | None = None

    def start(self, tracked: Tracked) -> None:
        self.tracked = tracked

    def log(self, run: str, round: int, metrics: Mapping[str, float]) -> None:
        if round == self.fails:
            raise ConnectionError("no route\nto host")
        self.found[run, round] = dict(metrics)

    def finish(self, *, complete: bool, page: Path | None) -> None:
        self.end = complete, page


def test_a_tracker_of_ones_own() -> None:
    own = Own()
    compared = compare(None, track=own)
    assert own.tracked.runs == tuple(NAMES)
    assert own.tracked.name.startswith("mine-")
    assert {key: value["worst30"] for key, value in own.found.items()} == {
        (name, round): value for name, rounds in told(compared).items() for round, value in rounds.items()
    }
    assert own.end == (True, None)


def test_a_tracker_that_fails_is_left_out_and_training_goes_on() -> None:
    broken = Own(fails=4)
    with pytest.warns(UserWarning, match="left out: ConnectionError: no route$") as warned:
        compared = compare(None, track=broken)
    assert len(warned) == 1
    assert compared["fedavg"].history[-1]["round"] == 8
    assert broken.end is None


def test_a_run_that_is_stopped_closes_its_trackers() -> None:
    own = Own()

    def stop(lines: list[dict[str, Any]]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(None, track=own, after_evaluation=stop)
    assert own.end == (False, None)


def test_what_is_logged_is_numbers_by_their_paths() -> None:
    line = {"algorithm": "a", "seed": 3, "round": 2, "avg": 1, "worst": None, "std": float("nan")}
    nested = {"groups": {"north/west": {"avg": 2.5, "clients": 4}}, "scores": {"F1": {"avg": 3.0}}}
    assert metrics({**line, **nested}) == {
        "avg": 1.0,
        "groups/north-west/avg": 2.5,
        "groups/north-west/clients": 4.0,
        "scores/F1/avg": 3.0,
    }


def test_a_missing_library_is_one_line_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairwind.tracking.find_spec", lambda name: None)
    for kind in KINDS:
        with pytest.raises(fw.InputError, match=rf"{kind} needs {kind}: .*'fairwind\[track\]'"):
            Tracking(f"{kind}:{tmp_path / 'shown'}")
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_track_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given, words in (
        ("tensorbord", "unknown tracker 'tensorbord': did you mean 'tensorboard'?"),
        (f"tensorboard:{tmp_path / 'file'}", "tensorboard cannot write to"),
    ):
        done = called("compare", SMALL, "--track", given, cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


KILLED_WRITING = """
import os, sys
replace = os.replace
def replaced(source, target):
    {before}
    replace(source, target)
    {after}
os.replace = replaced
sys.argv = ["fairwind", *sys.argv[1:]]
from fairwind.cli import main
main()
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_beside_the_first_write_of_the_recipe_loses_no_tracker(moment: str, tmp_path: Path) -> None:
    out, words = tmp_path / "run", ["--rounds", "2", "--seeds", "0", "--algorithms", "fedavg"]
    words = ["compare", SMALL, *words, "--out", str(out), "--track", f"tensorboard:{tmp_path / 'tracked'}"]
    kill = 'if str(target).endswith("recipe.json"): os._exit(9)'
    script = KILLED_WRITING.format(**{"before": "", "after": "", moment: kill})
    command = [sys.executable, "-c", script, *map(str, words)]
    done = subprocess.run(command, env=ENV, capture_output=True, check=False)
    assert done.returncode == 9
    assert (out / "recipe.json").exists() == (moment == "after")
    again = called("resume", out) if moment == "after" else called(*words)
    assert again.returncode == 0, again.stderr
    assert list(read_tensorboard(tmp_path / "tracked", "avg")[0]) == ["fedavg/0"]


def test_what_a_killed_comparison_was_tracked_by_is_forgotten_by_one_without(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    Tracking(f"tensorboard:{tmp_path / 'tracked'}").record(out)
    compare(out)
    assert not (out / "tracking.json").exists()


def test_a_damaged_record_of_trackers_is_named(tmp_path: Path) -> None:
    (tmp_path / "tracking.json").write_text("{")
    with pytest.warns(UserWarning, match=r"not tracked any more: .*tracking\.json is damaged"):
        assert Tracking.resumed(tmp_path).trackers == {}
