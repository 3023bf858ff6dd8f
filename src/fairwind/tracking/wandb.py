"""Weights & Biases, offline: folders that `wandb sync` uploads."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # before it is imported: nothing is sent

import wandb

from fairwind.tracking import Tracked

PROJECT = "fairwind"


class WandB:
    """A run of W&B's for each algorithm/seed, grouped by comparison, under FOLDER/wandb."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs: dict[str, Any] = {}
        self.replaced: list[Path] = []

    def start(self, tracked: Tracked) -> None:
        self.tracked = tracked
        for number, name in enumerate(tracked.runs):
            algorithm, _, seed = name.rpartition("/")
            # An offline run cannot be opened again. Its successor holds all rounds, and takes its place.
            self.replaced += self.folder.glob(f"wandb/offline-run-*-{tracked.id}-{number}")
            config = {**tracked.settings, "algorithm": algorithm, "seed": int(seed)}
            self.runs[name] = self._init(name, f"{tracked.id}-{number}", config)

    def _init(self, name: str, id: str, config: Mapping[str, object], job: str = "train") -> Any:
        return wandb.init(
            mode="offline",
            dir=str(self.folder),
            project=PROJECT,
            group=self.tracked.name,
            job_type=job,
            name=name,
            id=id,
            config=dict(config),
            reinit="create_new",  # runs side by side
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, run: str, round: int, metrics: Mapping[str, float]) -> None:
        self.runs[run].log(dict(metrics), step=round)

    def finish(self, *, complete: bool, page: Path | None) -> None:
        if page is not None:
            self.runs["report"] = self._init("report", f"{self.tracked.id}-report", {}, "report")
            artifact = wandb.Artifact(f"report-{self.tracked.id}", type="report")
            artifact.add_file(str(page))
            self.runs["report"].log_artifact(artifact)
        for run in self.runs.values():
            run.finish(exit_code=0 if complete else 1)
        for folder in self.replaced:
            shutil.rmtree(folder, ignore_errors=True)
