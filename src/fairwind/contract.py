"""The contract: an algorithm is what a client adds to a sum, and what the server does with the sum.

A client trains, and describes what happened in a few numbers (`Report`). The algorithm's `client`
turns them into a coefficient for the client's update and a few more numbers to add up
(`Contribution`). The executor forms the sums over clients, and the algorithm's `server` turns them
into the next model. Nothing else is shared, so the same algorithm runs in the stacked engine, in a
plain loop, in a real federation and under secure aggregation, which can only see sums.
"""

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

State = TypeVar("State", bound=tuple[Any, ...])
Sums = TypeVar("Sums", bound=tuple[Any, ...])

Probe = Literal["none", "loss", "gradient"]


class Report(NamedTuple):
    """What one client tells after local training; or K clients at once, as (K,) tensors."""

    size: Tensor  # S_k, training samples
    steps: Tensor  # τ_k, local steps taken; ‖a_k‖₁ with momentum; NaN where steps are not sums of gradients
    lr: Tensor  # η_k, the local learning rate
    update_norm: Tensor  # ‖δ_k‖, δ_k = x_t − x_k (a descent direction, everywhere)
    loss: Tensor  # F_k(x_t), before training; NaN unless the probe is "loss" or "gradient"
    loss0: Tensor  # F_k(x_0); to be used with the same probes
    grad_norm: Tensor  # ‖∇F_k(x_t)‖, before training; NaN unless the probe is "gradient"


class Contribution(NamedTuple, Generic[Sums]):
    """What a client adds: `coef`·δ_k to the update, and each of `sums` to its sum."""

    coef: Tensor
    sums: Sums


class Algorithm(NamedTuple, Generic[State, Sums]):
    """Three pure functions, and how much the clients must measure before they train.

    `client` is elementwise over clients. `State` and `Sums` are named tuples of tensors; a state's keep their
    shapes. On a GPU a round may be recorded and replayed: what changes must be in the state, not in Python.
    """

    init: Callable[[Tensor], State]  # x_0 -> state
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums], tuple[Tensor, State]]  # x, state, Σcoef·δ (float64), sums
    probe: Probe
    name: str = ""
    """What results are called by; of the algorithms here it says the parameters, too."""


AnyAlgorithm = Algorithm[Any, Any]


class Stateless(NamedTuple):
    """The state of a server that keeps none."""


def nonnegative(loss: Tensor) -> Tensor:
    """A loss, NaN where it is negative: for formulas such as F^q, which mean nothing there."""
    return torch.where(loss < 0, torch.nan, loss)


def refuses(algorithm: AnyAlgorithm, **values: float) -> bool:
    """Whether a client cannot contribute whose report has these values, and otherwise could."""
    one = torch.ones((), dtype=torch.float64)
    usual = Report(*[one] * len(Report._fields))
    changed = usual._replace(**{name: one * value for name, value in values.items()})

    def finite(report: Report) -> bool:
        part = algorithm.client(report)
        return all(bool(torch.isfinite(number)) for number in (part.coef, *part.sums))

    return finite(usual) and not finite(changed)


def contribute(algorithm: Algorithm[Any, Sums], report: Report) -> tuple[Contribution[Sums], Tensor]:
    """Each client's contribution, and which clients are usable; the others contribute exact zeros.

    A client is usable if it took a step on at least one sample and all its numbers are finite. Its
    update must still be masked by the caller (`where`, never 0·NaN): only norms are seen here.
    """
    part = algorithm.client(report)
    measured = {"none": (), "loss": (report.loss,), "gradient": report[4:]}[algorithm.probe]
    numbers = report.size, report.lr, report.update_norm, *measured, part.coef, *part.sums
    finite = torch.isfinite(torch.stack([number.expand_as(report.size) for number in numbers])).all(0)
    usable = finite & (report.size > 0) & ~(report.steps <= 0)
    sums = type(part.sums)(*(torch.where(usable, s, 0) for s in part.sums))
    return Contribution(torch.where(usable, part.coef, 0), sums), usable


def step(
    algorithm: Algorithm[State, Sums], x: Tensor, state: State, total: Tensor, sums: Sums
) -> tuple[Tensor, State]:
    """The server's step, in the types of model and state."""
    new_x, stepped = algorithm.server(x, state, total, sums)
    new_state = (new.to(old.dtype) for new, old in zip(stepped, state, strict=True))
    return new_x.to(x.dtype), type(state)(*new_state)


def finite(*tensors: Tensor) -> Tensor:
    """Whether all their numbers are finite."""
    ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]
    return torch.stack([torch.isfinite(end) for end in ends]).all()


def advance(
    algorithm: Algorithm[State, Sums], x: Tensor, state: State, total: Tensor, sums: Sums, clients: Tensor
) -> tuple[Tensor, State, Tensor]:
    """The server's step, and whether it was taken.

    With no usable client, or if the step is not finite, model and state stay as they are.
    """
    new_x, new_state = step(algorithm, x, state, total, sums)
    moved = (clients > 0) & finite(new_x, *new_state)
    kept = (torch.where(moved, new, old) for new, old in zip(new_state, state, strict=True))
    return torch.where(moved, new_x, x), type(state)(*kept), moved
