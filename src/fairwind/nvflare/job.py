"""A training as an NVFLARE job, to be simulated, exported or submitted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.job_config.api import FedJob

from fairwind.nvflare.client import AlgorithmExecutor
from fairwind.nvflare.controller import AlgorithmController


def make_job(
    task: str,
    algorithm: str = "adafedadam",
    *,
    sites: Sequence[str],
    name: str = "fairwind",
    state: str | None = None,
    **options: Any,
) -> FedJob:
    """A job in which the sites are the task's clients, in their order; options are the controller's.

    `state` is a folder at the sites, for what clients keep between rounds: then it outlasts the job.
    """
    job = FedJob(name)
    job.set_app_packages(["fairwind"])  # it is installed, and not copied into the job
    job.to_server(AlgorithmController(task, algorithm, **{"clients": len(sites)} | options))
    for number, site in enumerate(sites):
        job.to(AlgorithmExecutor(task, number, state=state), site)
    return job


def allow(workspace: str | Path, *more: str) -> None:
    """Lets jobs in a workspace build this package's classes, and more, by their paths.

    NVFLARE builds what its `class_allow_list` names, in the workspace's local/resources.json, and no more.
    """
    file = Path(workspace) / "local" / "resources.json"
    found = json.loads(file.read_text()) if file.exists() else {"format_version": 2}
    allowed = found.get("class_allow_list", DEFAULT_CLASS_ALLOW_LIST)
    found["class_allow_list"] = list(dict.fromkeys([*allowed, "fairwind.nvflare.", *more]))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=2))
