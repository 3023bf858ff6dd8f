"""Central client-level differential privacy: contributions clipped to public bounds, and noise on the sum.

A round releases one vector: Σ coef·δ and the algorithm's sums. Each field is divided by a public scale. A
client's vector is then shortened, as a whole, to a norm of at most L, and noise of standard deviation σ·L is
added to every number of the sum. A client's vector depends on its own data and on earlier releases, and on no
other client. So replacing one client changes the sum by at most 2·L, whatever it sends: a round is a Gaussian
mechanism with noise multiplier σ/2. What the server does with the noisy sum is post-processing.

An update has thousands of numbers, a sum is one. So a sum at its bound has half the norm of an update at its
bound: this costs the update little, and the sum has twice the noise to its bound.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairwind.errors import InputError, in_range, positive, store_python_numbers
from fairwind.exchange.capping import Capped, Term
from fairwind.runs.schema import PrivacyConfig

PART = 0.5  # of a sum at its bound in the norm; an update at its bound has 1
CLEAR = 2.0  # standard deviations of its noise that the sum of weights must be above, for a step to be taken
BLOCK = 1 << 16  # numbers that are noised at once


@dataclass(frozen=True)
class Privacy:
    """Bounds on what a client contributes, all of them public, and the noise on the sum.

    A client within all bounds counts in full; another's contribution is scaled down as a whole, so that its
    update keeps its direction and its length to its weight. Algorithms' sums must not be negative.
    """

    clip: float
    """The norm of a client's coef·δ to its weight. With FedAvg this is the norm of its update."""
    weight: float
    """A client's weight, the first of the algorithm's sums. With FedAvg this is its training samples."""
    noise: float
    """σ, the noise's standard deviation to the bound on a client's norm; 0 only clips, and is not private."""
    delta: float
    """δ, at which ε is told: less than 1 / the number of clients."""
    further: float = 1.0
    """Any further sum to the weight. With AdaFedAdam this is a client's certainty."""
    draw: Callable[[int], bytes] = field(default=os.urandom, repr=False, compare=False)
    """Where the noise's random bytes come from: the operating system. Another source is for tests alone."""

    def __post_init__(self) -> None:
        store_python_numbers(self)
        positive(clip=self.clip, weight=self.weight, further=self.further)
        in_range(0, math.inf, noise=self.noise)
        if not all(0 < scale < math.inf for scale in self.scales(2)):
            raise InputError(f"clip={self.clip}, weight={self.weight}: their product is out of range")
        positive(delta=self.delta)
        if self.delta >= 1:
            raise InputError(f"delta={self.delta} is out of range: 0 < delta < 1, and less than 1 / clients")

    def scales(self, sums: int) -> tuple[float, ...]:
        """What the fields are divided by: coef·δ, and each of the sums."""
        further = self.further * self.weight / PART
        return self.clip * self.weight, self.weight / PART, *[further] * (sums - 1)

    def limit(self, sums: int) -> float:
        """L, the norm of a client that is at all of its bounds."""
        return math.sqrt(1 + sums * PART**2)

    def factor(self, update_norm: float, sums: tuple[float, ...]) -> float:
        """What a contribution is multiplied by, from ‖coef·δ‖ and its sums."""
        scales = self.scales(len(sums))
        norm = math.hypot(*(value / scale for value, scale in zip((update_norm, *sums), scales, strict=True)))
        limit = self.limit(len(sums))
        return 1.0 if norm <= limit else limit / norm

    def deviations(self, sums: int) -> tuple[float, ...]:
        """The noise's standard deviation in each number of Σ coef·δ, and in each sum."""
        return tuple(self.noise * self.limit(sums) * scale for scale in self.scales(sums))

    def noised(self, total: Tensor, sums: tuple[float, ...]) -> tuple[Tensor, tuple[float, ...]]:
        """Sums as they are released: with noise, and the algorithm's own at least zero, as they truly are."""
        in_total, *in_sums = self.deviations(len(sums))
        if not self.noise:
            return total, sums
        total = total.clone()
        for part in torch.split(total, BLOCK):
            part.add_(torch.from_numpy(gaussian(len(part), self.draw)).to(part), alpha=in_total)
        drawn = gaussian(len(sums), self.draw).tolist()
        noisy = (s + deviation * g for s, deviation, g in zip(sums, in_sums, drawn, strict=True))
        return total, tuple(max(0.0, each) for each in noisy)

    def is_clear(self, sums: tuple[float, ...]) -> bool:
        """Whether the sum of weights stands out of its noise, so that it can be divided by."""
        return sums[0] > CLEAR * self.deviations(len(sums))[1]

    def described(self) -> PrivacyConfig:
        """The bounds and the noise, by name."""
        return {
            "clip": self.clip,
            "weight": self.weight,
            "noise": self.noise,
            "delta": self.delta,
            "further": self.further,
        }


class PrivateSum:
    """Adds contributions, each clipped, one at a time."""

    def __init__(self, parameters: int, sums: int, privacy: Privacy):
        self.total = torch.zeros(parameters, dtype=torch.float64)
        self.sums, self.privacy = (0.0,) * sums, privacy

    def add(self, term: Term) -> None:
        """Takes a contribution of finite numbers."""
        length = float(torch.linalg.vector_norm(term.update, dtype=torch.float64))
        factor = self.privacy.factor(abs(term.coef) * length, term.sums)
        self.total.add_(term.update, alpha=term.coef * factor)
        self.sums = tuple(a + b * factor for a, b in zip(self.sums, term.sums, strict=True))

    def finish(self) -> Capped:
        """What all add up to, noised. Who does not reply has added zero, so there is always a sum."""
        total, sums = self.privacy.noised(self.total, self.sums)
        return Capped(total, sums, int(self.privacy.is_clear(sums)), [{} for _ in (*sums, total)], "")


def gaussian(count: int, draw: Callable[[int], bytes]) -> NDArray[np.float64]:
    """Standard normal numbers from random bytes, by Box and Muller's formula.

    They are floating-point numbers: attacks on their last bits (Mironov 2012) are not defended against.
    """
    pairs = (count + 1) // 2
    whole = np.frombuffer(draw(16 * pairs), dtype=np.uint64).reshape(2, pairs) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((whole[0] + 1) * 2.0**-53))  # of (0, 1], so that it is finite
    angle = 2 * math.pi * 2.0**-53 * whole[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
