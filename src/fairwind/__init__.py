"""Fairwind: fast, fair federated learning."""

__version__ = "0.1.0"

from fairwind import algorithms, models
from fairwind.api import Result, compare, prepare, simulate
from fairwind.data.federation import Federation
from fairwind.engine.settings import Settings
from fairwind.engine.solver import Solver
from fairwind.errors import InputError

__all__ = [
    "Federation",
    "InputError",
    "Result",
    "Settings",
    "Solver",
    "algorithms",
    "compare",
    "models",
    "prepare",
    "simulate",
]
