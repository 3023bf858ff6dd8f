"""Fairwind's algorithms on NVFLARE: aggregator, controller, executor. `pip install fairwind[nvflare]`.

The algorithms are those of the simulator, and so is local training; see `fairwind.exchange` for what clients
and server tell each other.
"""

from fairwind.nvflare.aggregator import AlgorithmAggregator
from fairwind.nvflare.client import AlgorithmExecutor
from fairwind.nvflare.controller import AlgorithmController
from fairwind.nvflare.job import allow, make_job
from fairwind.nvflare.models import as_model

__all__ = [
    "AlgorithmAggregator",
    "AlgorithmController",
    "AlgorithmExecutor",
    "allow",
    "as_model",
    "make_job",
]
