"""One vector for secure aggregation: coef·δ and the sums, divided by public scales.

Secure sums are sums of whole numbers, so numbers must be in [−1, 1]: a client divides each field by its
public scale. A client with a field beyond its scale is shortened as a whole, so that its update keeps its
direction and its length to its weight, and says so: the server learns how many were.

No two sums of one round's updates may be released, because clients that are in one alone would be their
difference. So scales come from sums of other things:

- Before the first round, every client tells for each of its fields the power of 16 that it lies below, as
  zeros and a one. The sum says how many clients lie below each power, and the largest is the scale.
- In every round, the sum of the fields' magnitudes comes with the sum. Twice that is the next round's scale:
  a client exceeds it only if it alone sends twice as much as all clients did before.
- Where a client was shortened, or a sum is lost in the steps of its scale, the next round begins as the
  first.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairwind.exchange.message import Form, Reply

BASE, LOWEST, POWERS = 16.0, -12, 25  # of what scales are powers before anything is known: 16⁻¹² to 16¹²
COARSEST = 2.0**-12  # of a scale: where the sum of magnitudes is smaller, its digits are lost in the steps
ROOM = 2.0  # how much larger than all clients' together a client's number may become until the next round

Scales = tuple[float, ...]  # what 1 stands for: in the update, and in each number in the form's order
Vector = NDArray[np.float64]


class SecretSum(NamedTuple):
    """The sums of the clients' vectors."""

    total: Tensor  # (P,) Σ coef·δ, float64
    numbers: dict[str, float]
    magnitudes: tuple[float, ...]  # Σ of the clients' largest entry of the update, and of their |numbers|
    shortened: int  # clients


def pack_powers(reply: Reply, form: Form) -> Vector:
    """For each field of a reply, a one at the power of 16 that its magnitude lies below, among zeros."""
    found = np.zeros((1 + len(form.numbers), POWERS))
    magnitudes = _magnitudes(_fields(reply, form))
    with np.errstate(divide="ignore"):
        powers = np.floor(np.log(magnitudes) / np.log(BASE)) + 1 - LOWEST
    found[np.arange(len(found)), np.clip(powers, 0, POWERS - 1).astype(int)] = 1
    return found.reshape(-1)


def first_scales(summed: Vector) -> Scales:
    """The scales that no client exceeds, from the sum of such vectors."""
    counts = np.round(summed.reshape(-1, POWERS))
    largest = POWERS - 1 - np.argmax(counts[:, ::-1] > 0, axis=1)
    return tuple((BASE ** (largest + LOWEST).astype(float)).tolist())


def pack(reply: Reply, form: Form, scales: Scales) -> Vector:
    """A reply of sums as a vector in [−1, 1]: update, numbers, magnitudes, and whether it is shortened."""
    scaled = [field / scale for field, scale in zip(_fields(reply, form), scales, strict=True)]
    magnitudes = _magnitudes(scaled)
    largest = float(magnitudes.max())
    found = np.concatenate([*scaled, magnitudes]) / max(1.0, largest)
    return np.append(np.clip(found, -1, 1), float(largest > 1))


def unpack(summed: Vector, form: Form, scales: Scales) -> SecretSum:
    """The sums behind a sum of packed vectors."""
    count = len(form.numbers)
    update, numbers, magnitudes, shortened = np.split(summed, [-2 * count - 2, -count - 2, -1])
    found = dict(zip(form.numbers, (numbers * np.array(scales[1:])).tolist(), strict=True))
    sizes = tuple((magnitudes * np.array(scales)).tolist())
    return SecretSum(torch.from_numpy(update * scales[0]), found, sizes, round(float(shortened[0])))


def next_scales(found: SecretSum, scales: Scales) -> Scales | None:
    """The scales of the round after; none where they must be found anew."""
    lost = any(size < COARSEST * scale for size, scale in zip(found.magnitudes, scales, strict=True))
    return None if found.shortened or lost else tuple(ROOM * size for size in found.magnitudes)


def _fields(reply: Reply, form: Form) -> list[Vector]:
    """The update, and each number."""
    numbers = form.checked(reply.numbers)
    update = form.vector(reply.arrays)[0].double().numpy()
    return [update, *(np.array([numbers[name]]) for name in form.numbers)]


def _magnitudes(fields: list[Vector]) -> Vector:
    return np.array([np.abs(field).max(initial=0.0) for field in fields])
