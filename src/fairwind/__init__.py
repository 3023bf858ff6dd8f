"""Fairwind: fast, fair federated learning."""

__version__ = "0.1.0"

from fairwind import algorithms, augment, models, scores
from fairwind.api import compare, setup, simulate
from fairwind.choosing import Tuned, tune
from fairwind.comparison import Comparison, NewClients, Result, load
from fairwind.contract import (
    Algorithm,
    Change,
    Cohort,
    CohortAlgorithm,
    Contribution,
    GradientAlgorithm,
    GramAlgorithm,
    Local,
    LocalAlgorithm,
    Memory,
    MemoryAlgorithm,
    PersonalAlgorithm,
    PooledAlgorithm,
    Report,
    Stateless,
)
from fairwind.data.federation import Federation
from fairwind.engine.settings import Settings
from fairwind.engine.solver import Solver
from fairwind.errors import InputError
from fairwind.scores import Score
from fairwind.serving.evaluation import Evaluation, evaluate
from fairwind.task import Task
from fairwind.tracking import Tracked, Tracker

__all__ = [
    "Algorithm",
    "Change",
    "Cohort",
    "CohortAlgorithm",
    "Comparison",
    "Contribution",
    "Evaluation",
    "Federation",
    "GradientAlgorithm",
    "GramAlgorithm",
    "InputError",
    "Local",
    "LocalAlgorithm",
    "Memory",
    "MemoryAlgorithm",
    "NewClients",
    "PersonalAlgorithm",
    "PooledAlgorithm",
    "Report",
    "Result",
    "Score",
    "Settings",
    "Solver",
    "Stateless",
    "Task",
    "Tracked",
    "Tracker",
    "Tuned",
    "algorithms",
    "augment",
    "compare",
    "evaluate",
    "load",
    "models",
    "scores",
    "setup",
    "simulate",
    "tune",
]
