"""How an algorithm's functions are called in a round: clients contribute, and the server takes its step."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairwind.contract import (
    AnyAlgorithm,
    Cohort,
    CohortAlgorithm,
    Contribution,
    GramAlgorithm,
    MemoryAlgorithm,
    Report,
    SumAlgorithm,
    WeighingAlgorithm,
)
from fairwind.errors import InputError

State = TypeVar("State", bound=tuple[Any, ...])


def counts_clients(algorithm: AnyAlgorithm) -> bool:
    """Whether the server's state depends on how many clients there are."""
    return isinstance(algorithm, MemoryAlgorithm | CohortAlgorithm | GramAlgorithm)


def first_state(algorithm: AnyAlgorithm, x: Tensor, clients: int) -> Any:
    """The server's state at x_0, in a federation with this many clients."""
    if isinstance(algorithm, MemoryAlgorithm | CohortAlgorithm | GramAlgorithm):
        state = algorithm.init(x, clients)
    else:
        state = algorithm.init(x)
    if not _of_tensors(state):
        raise InputError(f"init gives {_kind(state)}: the state is not a NamedTuple of tensors")
    return state


def _kind(given: Any) -> str:
    """What a function gave, by the names of types."""
    name = type(given).__name__
    return f"{name}({', '.join(map(_kind, given))})" if isinstance(given, tuple) else name


def _of_tensors(given: Any) -> bool:
    """Whether it is a named tuple of tensors."""
    named = isinstance(given, tuple) and hasattr(given, "_fields")
    return named and all(isinstance(value, Tensor) for value in given)


def usable_clients(algorithm: AnyAlgorithm, report: Report, *numbers: Tensor) -> Tensor:
    """Which clients took a step on at least one sample, with numbers that are all finite."""
    measured = {"none": (), "loss": (report.loss,), "gradient": report[4:]}[algorithm.probe]
    numbers = report.size, report.lr, report.update_norm, *measured, *numbers
    finite = torch.isfinite(torch.stack([number.expand_as(report.size) for number in numbers])).all(0)
    return finite & (report.size > 0) & ~(report.steps <= 0)


def contribute(algorithm: SumAlgorithm, report: Report) -> tuple[Contribution[Any], Tensor]:
    """Each client's contribution, and which clients are usable; the others contribute zeros.

    The caller must still mask their updates (with `where`, because 0·NaN is NaN): only norms are known here.
    """
    part = algorithm.client(report)
    if not (isinstance(part, Contribution) and isinstance(part.coef, Tensor) and _of_tensors(part.sums)):
        raise InputError(
            f"client gives {_kind(part)}, not fairwind.Contribution(coef, sums): a tensor, and a NamedTuple "
            "of tensors"
        )
    usable = usable_clients(algorithm, report, part.coef, *part.sums, *_memory_changes(algorithm, report))
    sums = type(part.sums)(*(torch.where(usable, s, 0) for s in part.sums))
    return Contribution(torch.where(usable, part.coef, 0), sums), usable


def _memory_changes(algorithm: SumAlgorithm, report: Report) -> list[Tensor]:
    """The factors by which clients' memories change, as far as they depend on the report."""
    if not isinstance(algorithm, MemoryAlgorithm):
        return []
    return [factor for factor in algorithm.memory.change(report) if isinstance(factor, Tensor)]


def unasked(algorithm: AnyAlgorithm) -> tuple[str, ...]:
    """The fields of a report that clients do not measure for this algorithm, and that are NaN."""
    fields = {"none": ("loss", "loss0", "grad_norm"), "loss": ("grad_norm",)}
    return fields.get(algorithm.probe, ())


def refuses(algorithm: AnyAlgorithm, **values: float) -> bool:
    """Whether a client can no longer contribute if its report has these values."""
    one = torch.ones(1, dtype=torch.float64)
    usual = Report(*[one] * len(Report._fields))
    changed = usual._replace(**{name: one * value for name, value in values.items()})
    return makes_finite(algorithm, usual) and not makes_finite(algorithm, changed)


def makes_finite(algorithm: AnyAlgorithm, report: Report) -> bool:
    """Whether all that an algorithm makes of one client's report, of (1,) tensors, is finite."""
    if isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
        one = torch.ones(1, dtype=torch.float64)
        seen = Cohort(torch.zeros(1, dtype=torch.int64), report), one[:, None]
        coef, state = _weigh(algorithm, first_state(algorithm, one, 1), *seen)
        numbers = coef, *state
    else:
        part = algorithm.client(report)
        numbers = part.coef, *part.sums, *_memory_changes(algorithm, report)
    return all(bool(torch.isfinite(number).all()) for number in numbers)


def step(
    algorithm: SumAlgorithm, x: Tensor, state: State, total: Tensor, sums: Any, *more: Tensor
) -> tuple[Tensor, State]:
    """The server's step, in the types of model and state."""
    return _typed(x, state, algorithm.server(x, state, total, sums, *more))


def advance(
    algorithm: SumAlgorithm, x: Tensor, state: State, total: Tensor, sums: Any, clients: Tensor, *more: Tensor
) -> tuple[Tensor, State, Tensor]:
    """The server's step, and whether it was taken; `more` are the further arguments of its type.

    With no usable client, or if the step is not finite, model and state do not change.
    """
    return _unless(clients > 0, x, state, *step(algorithm, x, state, total, sums, *more))


def advance_seeing(
    algorithm: WeighingAlgorithm,
    x: Tensor,
    state: State,
    cohort: Cohort,
    gram: Callable[[], Tensor],
    summed: Callable[[Tensor], Tensor],
) -> tuple[Tensor, State, Tensor]:
    """The same for a server that sees all clients; `summed` gives Σcoef·δ in float64."""
    if not len(cohort.client):
        return x, state, torch.zeros((), dtype=torch.bool, device=x.device)
    seen = gram() if isinstance(algorithm, GramAlgorithm) else None
    coef, weighed = _weigh(algorithm, state, cohort, seen)
    new = _typed(x, state, algorithm.server(x, weighed, summed(coef)))
    return _unless(torch.isfinite(coef).all(), x, state, *new)


def _weigh(
    algorithm: WeighingAlgorithm, state: Any, cohort: Cohort, gram: Tensor | None
) -> tuple[Tensor, Any]:
    if isinstance(algorithm, GramAlgorithm):
        assert gram is not None
        given = algorithm.weigh(state, cohort, gram)
    else:
        given = algorithm.weigh(state, cohort)
    _check_pair("weigh", "coefficients", given, cohort.client.shape, state)
    return given


def _check_pair(function: str, what: str, given: Any, shape: torch.Size, state: Any) -> None:
    """Refuses what is not a tensor of a shape, and a state with the fields of the previous one."""
    pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor)
    if not (pair and _of_tensors(given[1]) and len(given[1]) == len(state)):
        raise InputError(f"{function} gives {_kind(given)}, not {what} and the new {type(state).__name__}")
    if given[0].shape != shape:
        raise InputError(f"{function} gives {what} of shape {tuple(given[0].shape)}, not {tuple(shape)}")


def _typed(x: Tensor, state: State, given: tuple[Tensor, State]) -> tuple[Tensor, State]:
    _check_pair("server", "the model", given, x.shape, state)
    new_x, stepped = given
    new_state = (new.to(old.dtype) for new, old in zip(stepped, state, strict=True))
    return new_x.to(x.dtype), type(state)(*new_state)


def _unless(
    moved: Tensor, x: Tensor, state: State, new_x: Tensor, new_state: State
) -> tuple[Tensor, State, Tensor]:
    """The new model and state if these are finite, else the previous ones."""
    moved = moved & finite(new_x, *new_state)
    kept = (torch.where(moved, new, old) for new, old in zip(new_state, state, strict=True))
    return torch.where(moved, new_x, x), type(state)(*kept), moved


def finite(*tensors: Tensor) -> Tensor:
    """Whether all their numbers are finite."""
    ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]
    return torch.stack([torch.isfinite(end) for end in ends]).all()
