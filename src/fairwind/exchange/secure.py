"""One vector for secure aggregation: coef·δ and the sums, divided by public scales.

Secure sums are sums of whole numbers. A client divides each field by its public scale and clips what lies
outside [−1, 1]. It adds how many numbers it clipped, so that the server learns of it from the sum. After a
round the server fits the scales to what the sums were.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairwind.exchange.message import Form, Reply

ROOM = 16.0  # how much larger than the mean client's a number may be
COARSEST = 2.0**-12  # of a scale: where the mean is smaller, its digits are lost in the steps
FIRST_SCALE, LEAST = 2.0**20, 2.0**-40  # before anything is known; and where a sum counts as zero

Scales = tuple[float, ...]  # what 1 stands for: in the update, and in each number in the form's order


def first_scales(form: Form) -> Scales:
    """Those of a first round."""
    return (FIRST_SCALE,) * (1 + len(form.numbers))


class SecretSum(NamedTuple):
    """The sums of the clients' vectors."""

    total: Tensor  # (P,) Σ coef·δ, float64
    numbers: dict[str, float]
    clipped: tuple[int, ...]  # of the update, and of each number: how many were

    def means(self, clients: int) -> tuple[float, ...]:
        """The mean client's largest entry of the update, and its numbers."""
        sizes = float(self.total.abs().max()), *map(abs, self.numbers.values())
        return tuple(size / clients for size in sizes)


def pack(reply: Reply, form: Form, scales: Scales) -> NDArray[np.float64]:
    """A reply of sums as a vector in [−1, 1]: update, numbers, and which share of each field was clipped."""
    numbers = form.checked(reply.numbers)
    update = form.vector(reply.arrays)[0].double().numpy()
    fields = [update, *(np.array([numbers[name]]) for name in form.numbers)]
    scaled = [field / scale for field, scale in zip(fields, scales, strict=True)]
    clipped = [np.mean(np.abs(field) > 1) for field in scaled]
    return np.concatenate([np.clip(np.concatenate(scaled), -1, 1), clipped])


def unpack(summed: NDArray[np.float64], form: Form, scales: Scales) -> SecretSum:
    """The sums behind a sum of packed vectors."""
    count = len(form.numbers)
    update, numbers, clipped = np.split(summed, [-2 * count - 1, -count - 1])
    found = dict(zip(form.numbers, (numbers * np.array(scales[1:])).tolist(), strict=True))
    many = np.ceil(clipped * ([len(update)] + [1] * count) - 0.5).astype(int)
    return SecretSum(torch.from_numpy(update * scales[0]), found, tuple(many.tolist()))


def fitted(found: SecretSum, clients: int, scales: Scales) -> Scales:
    """Scales with room around what the mean client sent, and larger ones where something was clipped."""
    new = []
    for mean, scale, clipped in zip(found.means(clients), scales, found.clipped, strict=True):
        new.append(scale / COARSEST if clipped else max(ROOM * mean, scale * COARSEST, LEAST))
    return tuple(new)


def fits(found: SecretSum, clients: int, scales: Scales) -> bool:
    """Whether nothing was clipped, and no sum is lost in the steps of its scale."""
    fine = (
        mean >= COARSEST * scale or scale <= LEAST
        for mean, scale in zip(found.means(clients), scales, strict=True)
    )
    return not any(found.clipped) and all(fine)
