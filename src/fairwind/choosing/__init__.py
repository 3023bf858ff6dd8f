"""Choosing for the user: an algorithm and its parameters for a task, searched on validation samples."""

from fairwind.choosing.search import Aim, Trial
from fairwind.choosing.tuned import Tuned, tune

__all__ = ["Aim", "Trial", "Tuned", "tune"]
