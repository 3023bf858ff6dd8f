"""A training as an NVFLARE job, to be simulated, exported or submitted."""

from collections.abc import Sequence
from typing import Any

from nvflare.job_config.api import FedJob

from fairwind.nvflare.client import AlgorithmExecutor
from fairwind.nvflare.controller import AlgorithmController


def make_job(
    task: str, algorithm: str = "adafedadam", *, sites: Sequence[str], name: str = "fairwind", **options: Any
) -> FedJob:
    """A job in which the sites are the task's clients, in their order; options are the controller's."""
    job = FedJob(name)
    job.set_app_packages(["fairwind"])  # it is installed, and not copied into the job
    job.to_server(AlgorithmController(task, algorithm, **options))
    for number, site in enumerate(sites):
        job.to(AlgorithmExecutor(task, number), site)
    return job
