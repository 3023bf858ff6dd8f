"""For authors of algorithms: tests the contract in one call."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import (
    advance,
    advance_seeing,
    contribute,
    first_state,
    unasked,
    usable_clients,
)
from fairwind.contract import (
    Algorithm,
    AnyAlgorithm,
    Cohort,
    CohortAlgorithm,
    GradientAlgorithm,
    GramAlgorithm,
    MemoryAlgorithm,
    PersonalAlgorithm,
    PooledAlgorithm,
    Report,
    SumAlgorithm,
    is_algorithm,
)
from fairwind.errors import InputError

P, CLIENTS = 7, 6  # parameters of the made-up models, and clients


class Round(NamedTuple):
    """The results of a round."""

    x: Tensor
    state: Any
    moved: Tensor


def check_algorithm(algorithm: AnyAlgorithm) -> None:
    """Raises AssertionError, with the reason, if the algorithm violates the contract.

    A client's contribution depends on that client alone. A client that is not usable adds nothing. Sums may
    be computed in any grouping. Functions are pure: they do not change their arguments, and depend on nothing
    else, in particular on nothing that clients measure for another probe only. The state keeps its shapes.
    If all clients agree, the model moves in their descent direction.
    """
    assert is_algorithm(algorithm), f"{algorithm!r} is not a fairwind.Algorithm, or of another of its types"
    assert algorithm.probe in ("none", "loss", "gradient"), f"probe={algorithm.probe!r} is unknown"
    try:
        rehearse(algorithm, *_start(algorithm), *reports(CLIENTS, seed=0))  # refuses what is of a wrong type
        if not isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
            for check in _OF_SUMS:
                check(algorithm)
        for check in _OF_ALL:
            check(algorithm)
    except AssertionError:
        raise
    except Exception as error:  # whatever an author's function raises
        said = str(error) if isinstance(error, InputError) else f"it fails: {type(error).__name__}: {error}"
        raise AssertionError(said) from error


def reports(clients: int, seed: int) -> tuple[Report, Tensor]:
    """Made-up reports, and their updates δ (K, P)."""
    draw = torch.Generator().manual_seed(seed)
    delta = torch.randn(clients, P, generator=draw, dtype=torch.float64)

    def positive() -> Tensor:
        return torch.rand(clients, generator=draw, dtype=torch.float64) + 0.1

    size, steps = (torch.randint(1, 50, (clients,), generator=draw).double() for _ in range(2))
    lr = torch.full((clients,), 0.01, dtype=torch.float64)
    return Report(size, steps, lr, delta.norm(dim=1), positive(), positive(), positive()), delta


def rehearse(algorithm: AnyAlgorithm, x: Tensor, state: Any, report: Report, delta: Tensor) -> Round:
    """A round of an algorithm of any type on made-up reports and updates δ (K, P) of all K clients.

    Clients' memories are zero, and their mean gradient is the mean update, weighted by size.
    """
    if isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
        usable = usable_clients(algorithm, report)
        delta = delta[usable]
        cohort = Cohort(usable.nonzero()[:, 0], Report(*(field[usable] for field in report)))
        return Round(
            *advance_seeing(
                algorithm, x, state, cohort, lambda: delta @ delta.mT, lambda coef: coef.double() @ delta
            )
        )
    more: tuple[Tensor, ...] = ()
    usable = contribute(algorithm, report)[1]
    if isinstance(algorithm, MemoryAlgorithm):
        shared, change = algorithm.local.shared, algorithm.memory.change(report)
        changes = change.shared * (0 if shared is None else shared(state)) + _column(change.update) * delta
        more = (torch.where(usable[:, None], changes, 0).sum(0),)
    elif isinstance(algorithm, GradientAlgorithm):
        size = torch.where(usable, report.size, 0)
        more = (size @ torch.where(usable[:, None], delta, 0) / size.sum().clamp(min=1),)
    return Round(*advance(algorithm, x, state, *total(algorithm, report, delta), *more))


def client_numbers(algorithm: AnyAlgorithm, state: Any, report: Report) -> list[Tensor]:
    """Everything that clients compute, as numbers."""
    if isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
        return []
    part = algorithm.client(report)
    found = [part.coef, *part.sums]
    if isinstance(algorithm, PersonalAlgorithm):
        return [*found, torch.tensor(algorithm.pull)]
    if isinstance(algorithm, Algorithm | PooledAlgorithm):
        return found
    local = algorithm.local
    scale = local.scale(report.loss) if callable(local.scale) else torch.tensor(local.scale)
    found += [scale, torch.tensor(local.pull)]
    if local.shared is not None:
        found.append(local.shared(state))
    if isinstance(algorithm, MemoryAlgorithm):
        change = algorithm.memory.change(report)
        found += [torch.as_tensor(number) for number in (algorithm.memory.factor, *change)]
    return found


def _column(numbers: float | Tensor) -> float | Tensor:
    return numbers[:, None] if isinstance(numbers, Tensor) and numbers.ndim else numbers


def total(
    algorithm: SumAlgorithm, report: Report, delta: Tensor
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Σ coef·δ, the sums and the number of usable clients."""
    part, usable = contribute(algorithm, report)
    delta = torch.where(usable[:, None], delta, 0)
    return part.coef @ delta, type(part.sums)(*(s.sum() for s in part.sums)), usable.sum()


def _start(algorithm: AnyAlgorithm) -> tuple[Tensor, Any]:
    x = torch.randn(P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, first_state(algorithm, x, CLIENTS)


def _flat(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _same(one: Any, other: Any) -> bool:
    pairs = zip(_flat(one), _flat(other), strict=True)
    return all(
        torch.allclose(a.double(), b.double(), rtol=1e-12, atol=1e-12, equal_nan=True) for a, b in pairs
    )


def _elementwise(algorithm: SumAlgorithm) -> None:
    report, _ = reports(5, seed=1)
    together = algorithm.client(report)
    for number in (together.coef, *together.sums):
        assert number.shape == (5,), f"client returns shape {tuple(number.shape)} for 5 clients, not (5,)"
    for k in range(5):
        alone = algorithm.client(Report(*(field[k] for field in report)))
        pairs = zip((alone.coef, *alone.sums), (together.coef, *together.sums), strict=True)
        assert all(torch.equal(a, b[k]) for a, b in pairs), (
            "what client computes for one client depends on the other clients"
        )


def _any_grouping(algorithm: SumAlgorithm) -> None:
    report, delta = reports(6, seed=2)
    groups = [(Report(*(f[part] for f in report)), delta[part]) for part in (slice(0, 2), slice(2, 6))]
    (t1, s1, n1), (t2, s2, n2) = (total(algorithm, *group) for group in groups)
    joined = t1 + t2, type(s1)(*map(torch.add, s1, s2)), n1 + n2
    assert _same(total(algorithm, report, delta), joined), "sums over groups of clients do not add up"


def _local_part_is_elementwise(algorithm: SumAlgorithm) -> None:
    if isinstance(algorithm, Algorithm | PersonalAlgorithm | PooledAlgorithm):
        return
    local = algorithm.local
    if callable(local.scale):
        losses = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
        alone = torch.stack([local.scale(loss) for loss in losses])
        assert torch.equal(local.scale(losses), alone), "a client's scale depends on the other clients"
    if local.shared is not None:
        x, state = _start(algorithm)
        assert local.shared(state).shape == x.shape, "what the server shares is not of the model's shape"


def _unusable_adds_nothing(algorithm: SumAlgorithm) -> None:
    for name in ("size", *_needed(algorithm)):
        report, _ = reports(4, seed=3)
        spoilt = getattr(report, name).clone()
        spoilt[1] = 0 if name == "size" else torch.nan
        part, usable = contribute(algorithm, report._replace(**{name: spoilt}))
        assert usable.tolist() == [True, False, True, True], f"{name} of one client spoils another"
        assert all(number[1] == 0 for number in (part.coef, *part.sums)), f"a client without {name} counts"


def _needed(algorithm: AnyAlgorithm) -> tuple[str, ...]:
    """The fields of a report that must be finite."""
    fields = {"none": ("update_norm",), "loss": ("update_norm", "loss")}
    return fields.get(algorithm.probe, ("update_norm", "loss", "grad_norm"))


def _absent_is_unusable(algorithm: AnyAlgorithm) -> None:
    """Checks that an unusable client has no effect."""
    for name in ("size", *_needed(algorithm)):
        report, delta = reports(CLIENTS, seed=3)
        spoilt = getattr(report, name).clone()
        spoilt[-1] = 0 if name == "size" else torch.nan
        x, state = _start(algorithm)
        found = rehearse(algorithm, x, state, report._replace(**{name: spoilt}), delta)
        fewer = Report(*(field[:-1] for field in report))
        assert _same(found, rehearse(algorithm, x, state, fewer, delta[:-1])), (
            f"a client without {name} changes what becomes of the others"
        )


def _pure(algorithm: AnyAlgorithm) -> None:
    report, delta = reports(CLIENTS, seed=4)
    x, state = _start(algorithm)
    given = list(_flat((x, state, delta, report)))
    before = [t.clone() for t in given]
    first = rehearse(algorithm, x, state, report, delta)
    assert _same(before, given), "a function changes what it is given; return new tensors instead"
    second = rehearse(algorithm, x, state, report, delta)
    assert _same(first, second), "a function gives something else the second time"


def _any_order(algorithm: AnyAlgorithm) -> None:
    report, delta = reports(CLIENTS, seed=8)
    x, state = _start(algorithm)
    order = torch.arange(CLIENTS - 1, -1, -1)
    other = Report(*(field[order] for field in report))
    found, turned = (
        rehearse(algorithm, x, state, each, change).x
        for each, change in ((report, delta), (other, delta[order]))
    )
    assert torch.allclose(found, turned, rtol=1e-9, atol=1e-12), "the order of clients matters"


def _state_keeps_its_shapes(algorithm: AnyAlgorithm) -> None:
    report, delta = reports(CLIENTS, seed=5)
    x, state = _start(algorithm)
    for _ in range(3):
        new_x, new, moved = rehearse(algorithm, x, state, report, delta)
        assert moved, "the server's step from ordinary reports is not finite"
        assert new_x.shape == x.shape, f"the model's shape is {tuple(new_x.shape)} after a step"
        for name, old, value in zip(state._fields, state, new, strict=True):
            assert old.shape == value.shape, f"the state's {name!r} changes its shape"
        x, state = new_x, new


def _reads_what_it_asks_for(algorithm: AnyAlgorithm) -> None:
    report, delta = reports(CLIENTS, seed=9)
    x, state = _start(algorithm)
    expected = rehearse(algorithm, x, state, report, delta)
    for name in unasked(algorithm):
        unknown = report._replace(**{name: torch.full_like(report.size, torch.nan)})
        found = rehearse(algorithm, x, state, unknown, delta)
        assert _same(expected, found), (
            f"it reads {name!r}, which clients do not measure with probe={algorithm.probe!r}"
        )


def _no_client_no_step(algorithm: AnyAlgorithm) -> None:
    report, delta = reports(CLIENTS, seed=6)
    x, state = _start(algorithm)
    broken = report._replace(update_norm=torch.full((CLIENTS,), torch.nan, dtype=torch.float64))
    new_x, new, moved = rehearse(algorithm, x, state, broken, delta)
    stayed = not moved and torch.equal(new_x, x) and _same(new, state)
    assert stayed, "a round without clients moves the model"


def _downwards(algorithm: AnyAlgorithm) -> None:
    report, _ = reports(CLIENTS, seed=7)
    delta = torch.ones(CLIENTS, P, dtype=torch.float64)
    report = report._replace(update_norm=delta.norm(dim=1))
    x = torch.zeros(P, dtype=torch.float64)
    new_x = rehearse(algorithm, x, first_state(algorithm, x, CLIENTS), report, delta).x
    assert (new_x < 0).all(), "δ points down the gradient reversed: the model must move against it, x − …"


_OF_SUMS: tuple[Callable[[SumAlgorithm], None], ...] = (
    _elementwise,
    _any_grouping,
    _unusable_adds_nothing,
    _local_part_is_elementwise,
)
_OF_ALL: tuple[Callable[[AnyAlgorithm], None], ...] = (
    _state_keeps_its_shapes,
    _pure,
    _reads_what_it_asks_for,
    _any_order,
    _absent_is_unusable,
    _no_client_no_step,
    _downwards,
)
