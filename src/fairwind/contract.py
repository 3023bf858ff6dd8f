"""The contract: an algorithm is what a client adds to a sum, and what the server does with the sum.

A client trains and reports a few numbers (`Report`). The algorithm's `client` turns them into a
coefficient for the client's update and a few more numbers to add up (`Contribution`). The executor
computes the sums over clients, and the algorithm's `server` turns them into the next model. Nothing
else is shared, so the same algorithm runs in the stacked engine, in a plain loop, in a real federation
and under secure aggregation, which only reveals sums.

This is an `Algorithm`. A method that needs more has another type, which says what it needs:

- `LocalAlgorithm`: clients modify their local steps (FedProx).
- `MemoryAlgorithm`: each client also keeps a vector between rounds (SCAFFOLD).
- `GradientAlgorithm`: the server also gets the clients' mean full gradient (Mime).
- `PersonalAlgorithm`: each client also trains a personal model (Ditto).
- `PooledAlgorithm`: there are no clients, but one place with the samples of all.
- `CohortAlgorithm`: the server sees all reports before it weights the clients (AFL);
- `GramAlgorithm`: also the inner products of the updates (FedMGDA+).
"""

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

State = TypeVar("State", bound=tuple[Any, ...])
Sums = TypeVar("Sums", bound=tuple[Any, ...])

Probe = Literal["none", "loss", "gradient"]


class Report(NamedTuple):
    """The report of one client after local training, or of K clients as (K,) tensors."""

    size: Tensor  #: S_k, training samples
    steps: Tensor  #: τ_k, local steps taken; ‖a_k‖₁ with momentum; NaN if steps are not sums of gradients
    lr: Tensor  #: η_k, the local learning rate
    update_norm: Tensor  #: ‖δ_k‖, δ_k = x_t − x_k (always a descent direction)
    loss: Tensor  #: F_k(x_t), before training; NaN unless the probe is "loss" or "gradient"
    loss0: Tensor  #: F_k(x_0); defined for the same probes
    grad_norm: Tensor  #: ‖∇F_k(x_t)‖, before training; NaN unless the probe is "gradient"


class Contribution(NamedTuple, Generic[Sums]):
    """What a client adds: `coef`·δ_k to the update, and each of `sums` to its sum."""

    coef: Tensor
    sums: Sums


class Algorithm(NamedTuple, Generic[State, Sums]):
    """Three pure functions, and what clients measure before they train.

    `client` is elementwise over clients. `State` and `Sums` are named tuples of tensors; those of a
    state keep their shapes. On a GPU a round may be recorded and replayed as a CUDA graph, so everything that
    changes must be in the state, not in Python variables.
    """

    init: Callable[[Tensor], State]  #: x_0 -> state
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums], tuple[Tensor, State]]
    """From x, the state, Σcoef·δ (float64) and the sums."""
    probe: Probe
    name: str = ""
    """Its name in results; for built-in algorithms it includes the parameters."""


class Local(NamedTuple, Generic[State]):
    """How local steps are modified: they use s(ℓ)·g + μ·(y − x) + u instead of the gradient g.

    y is the client's model, x the one it received, and ℓ the mean loss of the batch.
    """

    scale: float | Callable[[Tensor], Tensor] = 1.0  #: s, a number or elementwise over clients
    pull: float = 0.0  #: μ
    shared: Callable[[State], Tensor] | None = None  #: the server's part of u, the same for all clients


class LocalAlgorithm(NamedTuple, Generic[State, Sums]):
    """An algorithm with modified local steps."""

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
    """A vector (P,) that each client keeps between rounds; it starts at zero."""

    factor: float  #: factor · memory is added to u
    change: Callable[[Report], Change]  #: elementwise over clients


class MemoryAlgorithm(NamedTuple, Generic[State, Sums]):
    """An algorithm whose clients keep a vector; the server also gets the sum of its changes."""

    init: Callable[[Tensor, int], State]  #: x_0, and how many clients there are -> state
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums, Tensor], tuple[Tensor, State]]  #: …, Σ change (P,)
    probe: Probe
    local: Local[State]
    memory: Memory
    name: str = ""


class GradientAlgorithm(NamedTuple, Generic[State, Sums]):
    """An algorithm whose server also gets the mean full gradient at x: (1/ΣS)·Σ S_k·∇F_k(x).

    With `corrected`, local steps use g(y) − g(x) + that mean, both g on the same batch.
    """

    init: Callable[[Tensor], State]
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums, Tensor], tuple[Tensor, State]]  #: …, mean gradient (P,)
    local: Local[State]  #: its scale must be a number if steps are corrected
    corrected: bool = False
    probe: Probe = "gradient"
    name: str = ""


class PersonalAlgorithm(NamedTuple, Generic[State, Sums]):
    """An algorithm with personal models v, trained with ∇F_k(v) + λ·(v − x)."""

    init: Callable[[Tensor], State]
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums], tuple[Tensor, State]]
    probe: Probe
    pull: float  #: λ
    alone: bool = False  #: clients train alone: personal models are all there is, and nothing is sent
    name: str = ""


class PooledAlgorithm(NamedTuple, Generic[State, Sums]):
    """An algorithm for a single client that has the training samples of all: no federation."""

    init: Callable[[Tensor], State]
    client: Callable[[Report], Contribution[Sums]]
    server: Callable[[Tensor, State, Tensor, Sums], tuple[Tensor, State]]
    probe: Probe
    name: str = ""


class Cohort(NamedTuple):
    """The usable clients of a round."""

    client: Tensor  #: (n,) their indices among all clients
    report: Report  #: of (n,) tensors


class CohortAlgorithm(NamedTuple, Generic[State]):
    """An algorithm whose server sees all reports of a round before it weights the clients."""

    init: Callable[[Tensor, int], State]  #: x_0, and how many clients there are -> state
    weigh: Callable[[State, Cohort], tuple[Tensor, State]]  #: -> coefficients of updates (n,), new state
    server: Callable[[Tensor, State, Tensor], tuple[Tensor, State]]  #: x, state, Σcoef·δ (float64)
    probe: Probe
    averaged_model: Callable[[State], Tensor] | None = None  #: an additional model (P,) to evaluate
    name: str = ""


class GramAlgorithm(NamedTuple, Generic[State]):
    """The same for a server that also sees the updates' inner products δᵢ·δⱼ (n, n)."""

    init: Callable[[Tensor, int], State]
    weigh: Callable[[State, Cohort, Tensor], tuple[Tensor, State]]
    server: Callable[[Tensor, State, Tensor], tuple[Tensor, State]]
    probe: Probe
    name: str = ""


# Those whose clients contribute to a sum
SumAlgorithm = (
    Algorithm[Any, Any]
    | LocalAlgorithm[Any, Any]
    | MemoryAlgorithm[Any, Any]
    | GradientAlgorithm[Any, Any]
    | PersonalAlgorithm[Any, Any]
    | PooledAlgorithm[Any, Any]
)
WeighingAlgorithm = CohortAlgorithm[Any] | GramAlgorithm[Any]
AnyAlgorithm = SumAlgorithm | WeighingAlgorithm
TYPES = (
    Algorithm,
    LocalAlgorithm,
    MemoryAlgorithm,
    GradientAlgorithm,
    PersonalAlgorithm,
    PooledAlgorithm,
    CohortAlgorithm,
    GramAlgorithm,
)


def is_algorithm(thing: object) -> TypeGuard[AnyAlgorithm]:
    """Whether it is an algorithm of any type."""
    return isinstance(thing, TYPES)


class Stateless(NamedTuple):
    """The state of a server without state."""


def nonnegative(loss: Tensor) -> Tensor:
    """A loss, NaN if it is negative: for formulas such as F^q, which are undefined there."""
    return torch.where(loss < 0, torch.nan, loss)
