"""MLflow: a local store, with an experiment for each comparison."""

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before it is imported

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from fairwind.tracking import Tracked

for chatty in ("mlflow", "alembic"):
    logging.getLogger(chatty).setLevel(logging.WARNING)

ID = "fairwind.id"
SECONDS = 5.0  # between writes to the data base, each of which takes some 30 ms
MOST = 1000  # metrics in one write


class MLflow:
    """FOLDER/mlflow.db and FOLDER/artifacts: a run for the comparison, and one in it for each algorithm/seed.

    A data base of SQLite's, because MLflow's store of plain files is no longer maintained.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.ids: dict[str, str] = {}  # of runs, by their names
        self.known: dict[str, dict[str, set[int]]] = {}  # of a resumed run: by metric, the rounds it has
        self.waiting: dict[str, list[Metric]] = {}
        self.written = time.monotonic()

    def start(self, tracked: Tracked) -> None:
        self.client = MlflowClient(tracking_uri=f"sqlite:///{self.folder / 'mlflow.db'}")
        artifacts = (self.folder / "artifacts").as_uri()
        found = self.client.get_experiment_by_name(tracked.name)
        experiment = found.experiment_id if found else self.client.create_experiment(tracked.name, artifacts)
        mine = self.client.search_runs([experiment], f"tags.`{ID}` = '{tracked.id}'", max_results=5000)
        before = {run.info.run_name: run.info.run_id for run in mine}
        self.parent = self._run(experiment, tracked.name, before, tracked, {})
        for name in tracked.runs:
            algorithm, _, seed = name.rpartition("/")
            params = {"algorithm": algorithm, "seed": seed}
            self.ids[name] = self._run(experiment, name, before, tracked, params)

    def _run(
        self, experiment: str, name: str, before: dict[str, str], tracked: Tracked, params: dict[str, str]
    ) -> str:
        """The id of a run: begun anew, or going on."""
        if name in before:
            self.client.update_run(before[name], status="RUNNING")
            self.known[name] = {}
            return before[name]
        nested = {"mlflow.parentRunId": self.parent} if params else {}
        run = self.client.create_run(experiment, run_name=name, tags={ID: tracked.id, **nested})
        given = [Param(k, v) for k, v in {**tracked.settings, **params}.items()]
        self.client.log_batch(run.info.run_id, params=given, tags=[RunTag("mlflow.source.name", "fairwind")])
        return str(run.info.run_id)

    def log(self, run: str, round: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        waiting = self.waiting.setdefault(run, [])
        for metric, value in metrics.items():
            name = re.sub(r"[^/\w.\- :]", "_", metric)  # of groups' labels it allows no more
            if round not in self._rounds(run, name):
                waiting.append(Metric(name, value, now, round))
        if time.monotonic() - self.written > SECONDS or len(waiting) > MOST:
            self._write()

    def _rounds(self, run: str, metric: str) -> set[int]:
        """The rounds of which the store holds a metric from an earlier process."""
        if run not in self.known:
            return set()
        known: dict[str, set[int]] = self.known[run]
        if metric not in known:
            history: list[Any] = self.client.get_metric_history(self.ids[run], metric)
            known[metric] = {entry.step for entry in history}
        return known[metric]

    def _write(self) -> None:
        for run, waiting in self.waiting.items():
            for begin in range(0, len(waiting), MOST):
                self.client.log_batch(self.ids[run], metrics=waiting[begin : begin + MOST])
        self.waiting, self.written = {}, time.monotonic()

    def finish(self, *, complete: bool, page: Path | None) -> None:
        self._write()
        if page is not None:
            self.client.log_artifact(self.parent, str(page))
        for run in (*self.ids.values(), self.parent):
            self.client.set_terminated(run, "FINISHED" if complete else "KILLED")
