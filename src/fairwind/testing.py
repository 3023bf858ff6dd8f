"""For authors of algorithms: what the contract asks of one, checked by one call."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fairwind.contract import Algorithm, AnyAlgorithm, Report, advance, contribute

P = 7  # parameters of the made-up models


def check_algorithm(algorithm: AnyAlgorithm) -> None:
    """Raises AssertionError, and says what is wrong, unless the algorithm keeps the contract.

    A client's contribution depends on that client alone. A client that is not usable adds nothing. Sums may
    be formed in any grouping. Functions change nothing they are given, and depend on nothing else. The state
    keeps its shapes, and the model moves down where all clients agree.
    """
    assert isinstance(algorithm, Algorithm), f"{algorithm!r} is not a fairwind.Algorithm"
    assert algorithm.probe in ("none", "loss", "gradient"), f"probe={algorithm.probe!r} is unknown"
    for check in _CHECKS:
        check(algorithm)


def reports(clients: int, seed: int) -> tuple[Report, Tensor]:
    """Made-up reports, and the updates δ (K, P) that they are of."""
    draw = torch.Generator().manual_seed(seed)
    delta = torch.randn(clients, P, generator=draw, dtype=torch.float64)

    def positive() -> Tensor:
        return torch.rand(clients, generator=draw, dtype=torch.float64) + 0.1

    size, steps = (torch.randint(1, 50, (clients,), generator=draw).double() for _ in range(2))
    lr = torch.full((clients,), 0.01, dtype=torch.float64)
    return Report(size, steps, lr, delta.norm(dim=1), positive(), positive(), positive()), delta


def total(
    algorithm: AnyAlgorithm, report: Report, delta: Tensor
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Σ coef·δ, the sums and the number of usable clients."""
    part, usable = contribute(algorithm, report)
    delta = torch.where(usable[:, None], delta, 0)
    return part.coef @ delta, type(part.sums)(*(s.sum() for s in part.sums)), usable.sum()


def _start(algorithm: AnyAlgorithm) -> tuple[Tensor, Any]:
    x = torch.randn(P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, algorithm.init(x)


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


def _elementwise(algorithm: AnyAlgorithm) -> None:
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


def _any_grouping(algorithm: AnyAlgorithm) -> None:
    report, delta = reports(6, seed=2)
    groups = [(Report(*(f[part] for f in report)), delta[part]) for part in (slice(0, 2), slice(2, 6))]
    (t1, s1, n1), (t2, s2, n2) = (total(algorithm, *group) for group in groups)
    joined = t1 + t2, type(s1)(*map(torch.add, s1, s2)), n1 + n2
    assert _same(total(algorithm, report, delta), joined), "sums over groups of clients do not add up"


def _unusable_adds_nothing(algorithm: AnyAlgorithm) -> None:
    fields = {"none": ("update_norm",), "loss": ("update_norm", "loss")}.get(
        algorithm.probe, ("update_norm", "loss", "grad_norm")
    )
    for name in ("size", *fields):
        report, _ = reports(4, seed=3)
        spoilt = getattr(report, name).clone()
        spoilt[1] = 0 if name == "size" else torch.nan
        part, usable = contribute(algorithm, report._replace(**{name: spoilt}))
        assert usable.tolist() == [True, False, True, True], f"{name} of one client spoils another"
        assert all(number[1] == 0 for number in (part.coef, *part.sums)), f"a client without {name} counts"


def _pure(algorithm: AnyAlgorithm) -> None:
    report, delta = reports(3, seed=4)
    x, state = _start(algorithm)
    summed, sums, _ = total(algorithm, report, delta)
    given = list(_flat((x, state, summed, sums, report)))
    before = [t.clone() for t in given]
    first = algorithm.server(x, state, summed, sums), algorithm.client(report)
    assert _same(before, given), "client or server changes what it is given; return new tensors instead"
    second = algorithm.server(x, state, summed, sums), algorithm.client(report)
    assert _same(first, second), "client or server gives something else the second time"


def _state_keeps_its_shapes(algorithm: AnyAlgorithm) -> None:
    report, delta = reports(3, seed=5)
    x, state = _start(algorithm)
    named = isinstance(state, tuple) and hasattr(state, "_fields")
    assert named, "the state is not a NamedTuple of tensors"
    for _ in range(3):
        new_x, new, moved = advance(algorithm, x, state, *total(algorithm, report, delta))
        assert moved, "the server's step from ordinary reports is not finite"
        assert new_x.shape == x.shape, f"the model's shape is {tuple(new_x.shape)} after a step"
        for name, old, value in zip(state._fields, state, new, strict=True):
            assert old.shape == value.shape, f"the state's {name!r} changes its shape"
        x, state = new_x, new


def _no_client_no_step(algorithm: AnyAlgorithm) -> None:
    report, delta = reports(3, seed=6)
    x, state = _start(algorithm)
    broken = report._replace(update_norm=torch.full((3,), torch.nan, dtype=torch.float64))
    new_x, new, moved = advance(algorithm, x, state, *total(algorithm, broken, delta))
    stayed = not moved and torch.equal(new_x, x) and _same(new, state)
    assert stayed, "a round without clients moves the model"


def _downwards(algorithm: AnyAlgorithm) -> None:
    report, _ = reports(4, seed=7)
    delta = torch.ones(4, P, dtype=torch.float64)
    report = report._replace(update_norm=delta.norm(dim=1))
    x = torch.zeros(P, dtype=torch.float64)
    summed, sums, _ = total(algorithm, report, delta)
    new_x, _ = algorithm.server(x, algorithm.init(x), summed, sums)
    assert (new_x < 0).all(), "δ points down the gradient reversed: the model must move against it, x − …"


_CHECKS: tuple[Callable[[AnyAlgorithm], None], ...] = (
    _elementwise,
    _any_grouping,
    _unusable_adds_nothing,
    _pure,
    _state_keeps_its_shapes,
    _no_client_no_step,
    _downwards,
)
