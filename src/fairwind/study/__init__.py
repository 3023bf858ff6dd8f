"""A study: panels of runs over setups, algorithms, settings and seeds, put together from finished runs.

A run is known by what decides its numbers (`RunKey`). What is missing is trained, runs of the same data and
settings stacked. What was trained before is found by its key, whichever study, machine or day it comes from.
"""

from fairwind.study.grid import read_study
from fairwind.study.job import Job, missing, run
from fairwind.study.panel import Panel, Study, choose, narrowed
from fairwind.study.runs import Finished, RunKey, read_runs

__all__ = [
    "Finished",
    "Job",
    "Panel",
    "RunKey",
    "Study",
    "choose",
    "missing",
    "narrowed",
    "read_runs",
    "read_study",
    "run",
]
