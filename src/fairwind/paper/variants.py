"""AdaFedAdam with one part taken out, and FedAdam with one of its parts, for the study of the parts.

A study names them by reference, "fairwind.paper.variants:adafedadam_unnormalised". AdaFedAdam whose decay
rates adapt but not its step is Algorithm 1 as printed, `adafedadam:warmup=none`.
"""

from typing import Any

import torch
from torch import Tensor

from fairwind.algorithms.adafedadam import State, Sums, adafedadam
from fairwind.algorithms.fedadam import Moments, fedadam
from fairwind.algorithms.fedadam import Sums as Sizes
from fairwind.contract import Algorithm, Contribution, Report

LR, WARMUP = 1e-3, 6  # AdaFedAdam's defaults
# FedAdam's rate times AdaFedAdam's mean certainty in the convergence study: 3.7 on Synthetic, 3.5 on FEMNIST,
# and 1.8 on CIFAR-10, which two rates enclose.
LARGER_STEP = {"synthetic": "0.0037", "femnist": "0.0035", "cifar10": "{0.0015,0.003}"}


def adafedadam_unnormalised() -> Algorithm[State, Sums]:
    """Updates as long as the clients made them; weights, certainty and server are AdaFedAdam's."""
    whole = adafedadam(lr=LR, warmup=WARMUP)

    def client(r: Report) -> Contribution[Sums]:
        part = whole.client(r)
        return part._replace(coef=part.sums.weight)

    return whole._replace(client=client)


def adafedadam_without_certainty() -> Algorithm[State, Sums]:
    """C = 1: Adam with its own rate and decay rates, on normalised updates weighted by lag."""
    whole = adafedadam(lr=LR)

    def client(r: Report) -> Contribution[Sums]:
        part = whole.client(r)
        return part._replace(sums=Sums(part.sums.weight, part.sums.weight))

    return whole._replace(client=client)


def adafedadam_with_fixed_betas() -> Algorithm[State, Sums]:
    """The step adapts to the certainty, the decay rates do not."""
    whole = adafedadam(lr=LR, warmup=WARMUP)

    def server(x: Tensor, s: State, total: Tensor, sums: Sums) -> tuple[Tensor, State]:
        c = sums.certainty / sums.weight  # C
        adam, state = whole.server(x, s, total, Sums(sums.weight, sums.weight))
        factor = torch.where(s.rounds >= WARMUP, c, 1.0)
        return x + factor * (adam - x), state._replace(certainty=c)

    return whole._replace(server=server)


def fedadam_normalised() -> Algorithm[Moments, Sizes]:
    """FedAdam on updates divided by their number of local steps, as FedNova's are."""
    return _normalised(LR)


def fedadam_normalised_larger_step() -> Algorithm[Moments, Sizes]:
    """The same with AdaFedAdam's mean step, of FEMNIST; Synthetic's is 6 % larger."""
    return _normalised(float(LARGER_STEP["femnist"]))


def _normalised(lr: float) -> Algorithm[Any, Any]:
    def client(r: Report) -> Contribution[Sizes]:
        return Contribution(r.size / r.steps, Sizes(r.size))

    return fedadam(lr=lr)._replace(client=client)
