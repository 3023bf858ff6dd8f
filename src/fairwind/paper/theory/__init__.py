"""The paper's theory beside measurements on small convex problems: every claim gets a verdict.

    from fairwind.paper.theory import study
    for check in study("reduced"):
        print(check["name"], check["verdict"])

Theorem 1 is in `accumulation` and `extremes`, Theorem 2 in `guarantee`, the bias of pseudo-gradients
(Section 4.3) in `bias`, Equation 6 and the minimax limit in `fairness`, Section 3.2 in `shrinking`.
"""

from fairwind.paper.theory.accumulation import bound_of_theorem1, equal_budgets
from fairwind.paper.theory.bias import unequal_curvature, unequal_smoothness
from fairwind.paper.theory.extremes import best_case, worst_case
from fairwind.paper.theory.fairness import fair_direction, minimax_limit
from fairwind.paper.theory.guarantee import bound_of_theorem2
from fairwind.paper.theory.problems import Check, Row, Scale
from fairwind.paper.theory.shrinking import shrinking_gradients
from fairwind.runs.schema import Verdict

CHECKS = (
    equal_budgets,
    bound_of_theorem1,
    best_case,
    worst_case,
    bound_of_theorem2,
    unequal_smoothness,
    unequal_curvature,
    fair_direction,
    minimax_limit,
    shrinking_gradients,
)


def study(scale: Scale, seed: int = 0) -> list[Check]:
    """All checks; the full scale takes under a minute on one core, the smoke scale a few seconds."""
    return [check(scale, seed) for check in CHECKS]


__all__ = ["CHECKS", "Check", "Row", "Scale", "Verdict", "study"]
