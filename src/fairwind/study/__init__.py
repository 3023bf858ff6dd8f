"""A study: panels of runs over setups, algorithms, settings and seeds.

A run is identified by everything that determines its numbers (`RunKey`). Finished runs are reused, whichever
study, machine or day they come from; missing ones are trained, those with the same data and settings stacked.
"""

from fairwind.study.grid import read_study
from fairwind.study.job import Job, clear, missing, run
from fairwind.study.panel import Panel, Study, choose, narrowed
from fairwind.study.runs import Clients, Finished, PassedOver, RunKey, read_runs

__all__ = [
    "Clients",
    "Finished",
    "Job",
    "Panel",
    "PassedOver",
    "RunKey",
    "Study",
    "choose",
    "clear",
    "missing",
    "narrowed",
    "read_runs",
    "read_study",
    "run",
]
