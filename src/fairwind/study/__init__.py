"""A study: panels of runs over setups, algorithms, settings and seeds.

A run is identified by everything that determines its numbers (`RunKey`). Finished runs are reused, whichever
study, machine or day they come from; missing ones are trained, those with the same data and settings stacked.
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
