"""The contract: an algorithm is what a client adds to a sum, and what the server does with the sum.

A client trains, and describes what happened in a few numbers (`Report`). The algorithm's `client`
turns them into a coefficient for the client's update and a few more numbers to add up
(`Contribution`). The executor forms the sums over clients, and the algorithm's `server` turns them
into the next model. Nothing else is shared, so the same algorithm runs in the stacked engine, in a
plain loop, in a real federation and under secure aggregation, which can only see sums.

That is an `Algorithm`. A method that needs more is of another type, which says what it needs:

- `LocalAlgorithm`: clients bend their local steps (FedProx).
- `MemoryAlgorithm`: each client keeps a vector, too (SCAFFOLD).
- `GradientAlgorithm`: the clients' mean full gradient is summed as well (Mime).
- `PersonalAlgorithm`: each client trains a model of its own beside the global one (Ditto).
- `CohortAlgorithm`: the server weighs clients having seen all their reports (AFL),
- `GramAlgorithm`: and the inner products of their updates (FedMGDA+).
"""

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

State = TypeVar("State", bound=tuple[Any, ...])
Sums = TypeVar("Sums", bound=tuple[Any, ...])

Probe = Literal["none", "loss", "gradient"]


class Report(NamedTuple):
    """What one client tells after local training; or K clients at once, as (K,) tensors."""

    size: Tensor  #: S_k, training samples
    steps: Tensor  #: τ_k, local steps taken; ‖a_k‖₁ with momentum; NaN where steps are not sums of gradients
    lr: Tensor  #: η_k, the local learning rate
    update_norm: Tensor  #: ‖δ_k‖, δ_k = x_t − x_k (a descent direction, everywhere)
    loss: Tensor  #: F_k(x_t), before training; NaN unless the probe is "loss" or "gradient"
    loss0: Tensor  #: F_k(x_0); to be used with the same probes
    grad_norm: Tensor  #: ‖∇F_k(x_t)‖, before training; NaN unless the probe is "gradient"


class Contribution(NamedTuple, Generic[Sums]):
    """What a client adds: `coef`·δ_k to the update, and each of `sums` to its sum."""

    coef: Tensor
    sums: Sums


class Algorithm(NamedTuple, Generic[State, Sums]):
    """Three pure functions, and how much the clients must measure before they train.

    `client` is elementwise over clients. `State` and `Sums` are named tuples of tensors; a state's keep their
    shapes. On a GPU a round may be recorded and replayed: what changes must be in the state, not in Python.
    """

    init: Callable[[Tensor], State]  #: x_0 -> state
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums], tuple[Tensor, State]]
    """From x, the state, Σcoef·δ (float64) and the sums."""
    probe: Probe
    name: str = ""
    """What results are called by; of the algorithms here it says the parameters, too."""


class Local(NamedTuple, Generic[State]):
    """How a client's steps are bent: they go down s(ℓ)·g + μ·(y − x) + u, not down the gradient g.

    y is the client's model, x the one it received, and ℓ the mean loss of the batch.
    """

    scale: float | Callable[[Tensor], Tensor] = 1.0  #: s, a number or elementwise over clients
    pull: float = 0.0  #: μ
    shared: Callable[[State], Tensor] | None = None  #: what the server adds to u, the same for all clients


class LocalAlgorithm(NamedTuple, Generic[State, Sums]):
    """An algorithm whose clients bend their local steps."""

    init: Callable[[Tensor], State]
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums], tuple[Tensor, State]]
    probe: Probe
    local: Local[State]
    name: str = ""


class Change(NamedTuple):
    """How a client's memory changes after training: by own·memory + shared·(the server's u) + update·δ."""

    own: float | Tensor = 0.0
    shared: float | Tensor = 0.0
    update: float | Tensor = 0.0


class Memory(NamedTuple):
    """A vector (P,) that each client keeps from round to round; at first it is zero."""

    factor: float  #: it is added to u, times this
    change: Callable[[Report], Change]  #: elementwise over clients


class MemoryAlgorithm(NamedTuple, Generic[State, Sums]):
    """An algorithm whose clients keep a vector; the server is given the sum of its changes, too."""

    init: Callable[[Tensor, int], State]  #: x_0, and how many clients there are -> state
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums, Tensor], tuple[Tensor, State]]  #: …, Σ change (P,)
    probe: Probe
    local: Local[State]
    memory: Memory
    name: str = ""


class GradientAlgorithm(NamedTuple, Generic[State, Sums]):
    """An algorithm whose server is given the mean full gradient at x, too: (1/ΣS)·Σ S_k·∇F_k(x).

    Where steps are `corrected`, their gradient is g(y) − g(x) + that mean, both g on the same batch.
    """

    init: Callable[[Tensor], State]
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums, Tensor], tuple[Tensor, State]]  #: …, mean gradient (P,)
    local: Local[State]  #: whose scale is a number, if steps are corrected
    corrected: bool = False
    probe: Probe = "gradient"
    name: str = ""


class PersonalAlgorithm(NamedTuple, Generic[State, Sums]):
    """An algorithm beside which each client trains a model v of its own, down ∇F_k(v) + λ·(v − x)."""

    init: Callable[[Tensor], State]
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums], tuple[Tensor, State]]
    probe: Probe
    pull: float  #: λ
    name: str = ""


class Cohort(NamedTuple):
    """The usable clients of a round."""

    client: Tensor  #: (n,) their numbers among all clients
    report: Report  #: of (n,) tensors


class CohortAlgorithm(NamedTuple, Generic[State]):
    """An algorithm whose server sees all reports of a round before it weighs the clients."""

    init: Callable[[Tensor, int], State]  #: x_0, and how many clients there are -> state
    weigh: Callable[[State, Cohort], tuple[Tensor, State]]  #: -> coefficients of updates (n,), new state
    server: Callable[[Tensor, State, Tensor], tuple[Tensor, State]]  #: x, state, Σcoef·δ (float64)
    probe: Probe
    also: Callable[[State], Tensor] | None = None  #: a further model (P,) to be evaluated: an average
    name: str = ""


class GramAlgorithm(NamedTuple, Generic[State]):
    """The same for a server that sees the updates' inner products δᵢ·δⱼ (n, n), too."""

    init: Callable[[Tensor, int], State]
    weigh: Callable[[State, Cohort, Tensor], tuple[Tensor, State]]
    server: Callable[[Tensor, State, Tensor], tuple[Tensor, State]]
    probe: Probe
    name: str = ""


# What gives its clients' contributions one by one, to be summed
SumAlgorithm = (
    Algorithm[Any, Any]
    | LocalAlgorithm[Any, Any]
    | MemoryAlgorithm[Any, Any]
    | GradientAlgorithm[Any, Any]
    | PersonalAlgorithm[Any, Any]
)
SeeingAlgorithm = CohortAlgorithm[Any] | GramAlgorithm[Any]
AnyAlgorithm = SumAlgorithm | SeeingAlgorithm
TYPES = (
    Algorithm,
    LocalAlgorithm,
    MemoryAlgorithm,
    GradientAlgorithm,
    PersonalAlgorithm,
    CohortAlgorithm,
    GramAlgorithm,
)


def is_algorithm(thing: object) -> TypeGuard[AnyAlgorithm]:
    """Whether it is an algorithm of any type."""
    return isinstance(thing, TYPES)


class Stateless(NamedTuple):
    """The state of a server that keeps none."""


def nonnegative(loss: Tensor) -> Tensor:
    """A loss, NaN where it is negative: for formulas such as F^q, which mean nothing there."""
    return torch.where(loss < 0, torch.nan, loss)
