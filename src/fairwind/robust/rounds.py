"""The sums of a round in which clients lie, and a server defends itself."""

from typing import Any, NamedTuple

from torch import Tensor

from fairwind.aggregation import contribute
from fairwind.contract import Cohort, Report, SumAlgorithm
from fairwind.robust.attacks import Attack
from fairwind.robust.defence import Defence, robust_sum
from fairwind.robust.limits import Limits


class LyingSums(NamedTuple):
    """The sums of a round."""

    total: Tensor  # (P,) float64
    sums: Any
    used: int
    left_out: int  # clients whose lie made their contribution not finite
    mean: Tensor  # (P,) total to the weight, for the defences of the next round


def lying_sums(
    algorithm: SumAlgorithm,
    cohort: Cohort,
    update: Tensor,
    *,
    attack: Attack | None,
    defence: Defence | None,
    key: int,
    clients: int,
    last: Tensor,
) -> LyingSums:
    """From what the usable clients trained, updates (n, P); `key` is a hash of seed and round.

    `clients` is how many there are in the federation, `last` (P,) the mean of the last round.
    """
    report = cohort.report
    if attack is not None:
        report, update = attack.lied(cohort.client, report, update, key, clients)
    part, usable = contribute(algorithm, report)
    left_out = int((~usable).sum())
    if left_out:
        report, update = Report(*(each[usable] for each in report)), update[usable]
        part, _ = contribute(algorithm, report)
    record, used = type(part.sums), len(update)
    if defence is not None and used:
        found = robust_sum(defence, Limits(), part.coef, part.sums, update, last)
        return LyingSums(found.total, record(*found.sums), used, left_out, found.mean)
    total = part.coef.double() @ update.double()
    return LyingSums(total, record(*(each.sum() for each in part.sums)), used, left_out, last)
