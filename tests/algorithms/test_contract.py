"""What must hold for every algorithm, whatever it computes; `check_algorithm` asks the rest."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairwind.aggregation import advance, contribute, first_state
from fairwind.algorithms import REGISTRY
from fairwind.contract import CohortAlgorithm, GramAlgorithm, Report, SumAlgorithm
from fairwind.testing import P, Round, rehearse, reports, total

SUMS = [name for name, build in REGISTRY.items() if not isinstance(build(), CohortAlgorithm | GramAlgorithm)]


def summing(name: str) -> SumAlgorithm:
    algorithm = REGISTRY[name]()
    assert not isinstance(algorithm, CohortAlgorithm | GramAlgorithm)
    return algorithm


of_all = pytest.mark.parametrize("name", REGISTRY)
of_sums = pytest.mark.parametrize("name", SUMS)


def assert_same(a: tuple[Any, ...], b: tuple[Any, ...], tolerance: float = 1e-12) -> None:
    for one, other in zip(a, b, strict=True):
        if isinstance(one, tuple):
            assert_same(one, other, tolerance)
        else:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def played(name: str, report: Report, delta: torch.Tensor, clients: int) -> Round:
    x = torch.randn(P, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    algorithm = REGISTRY[name]()
    return rehearse(algorithm, x, first_state(algorithm, x, clients), report, delta)


@of_all
@given(seed=st.integers(0, 2**31), k=st.integers(1, 20))
@settings(deadline=None, max_examples=20)
def test_client_order_does_not_matter(name: str, seed: int, k: int) -> None:
    report, delta = reports(k, seed)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    shuffled = Report(*(field[order] for field in report))
    torch.testing.assert_close(
        played(name, report, delta, k).x, played(name, shuffled, delta[order], k).x, rtol=1e-8, atol=1e-9
    )


@of_sums
@given(seed=st.integers(0, 2**31), k=st.integers(2, 20), cut=st.floats(0, 1))
@settings(deadline=None, max_examples=20)
def test_partial_sums_in_any_grouping_agree(name: str, seed: int, k: int, cut: float) -> None:
    algorithm = summing(name)
    report, delta = reports(k, seed)
    at = round(cut * k)
    groups = [(Report(*(f[part] for f in report)), delta[part]) for part in (slice(0, at), slice(at, k))]
    (t1, s1, n1), (t2, s2, n2) = (total(algorithm, *group) for group in groups)
    joined = t1 + t2, type(s1)(*map(torch.add, s1, s2)), n1 + n2
    assert_same(total(algorithm, report, delta), joined)


@of_all
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("field", ["update_norm", "loss", "grad_norm"])
def test_a_client_that_is_not_finite_counts_exactly_as_if_absent(name: str, field: str, bad: float) -> None:
    needed = {"none": {"update_norm"}, "loss": {"update_norm", "loss"}}
    report, delta = reports(6, seed=2)
    spoilt = getattr(report, field).clone()
    spoilt[5] = bad
    ill = report._replace(**{field: spoilt})
    if field not in needed.get(REGISTRY[name]().probe, {"update_norm", "loss", "grad_norm"}):
        # What an algorithm does not ask for cannot spoil it.
        assert_same(played(name, ill, delta, 6), played(name, report, delta, 6))
        return
    delta[5] = bad
    fewer = Report(*(f[:5] for f in report))
    assert_same(played(name, ill, delta, 6), played(name, fewer, delta[:5], 6))


@of_sums
@pytest.mark.parametrize("field", ["size", "steps"])
def test_an_empty_client_adds_exact_zeros(name: str, field: str) -> None:
    algorithm = summing(name)
    report, _ = reports(4, seed=3)
    emptied = getattr(report, field).clone()
    emptied[0] = 0
    part, usable = contribute(algorithm, report._replace(**{field: emptied}))
    assert usable.tolist() == [False, True, True, True]
    assert part.coef[0] == 0
    assert all(s[0] == 0 for s in part.sums)


@of_all
def test_with_no_usable_client_model_and_state_stay(name: str) -> None:
    algorithm = REGISTRY[name]()
    report, delta = reports(3, seed=4)
    x = torch.randn(P, dtype=torch.float64)
    x, state, moved = rehearse(algorithm, x, first_state(algorithm, x, 3), report, delta)
    assert moved
    broken = report._replace(update_norm=torch.full((3,), torch.nan, dtype=torch.float64))
    new_x, new_state, moved = rehearse(algorithm, x, state, broken, delta)
    assert not moved
    assert torch.equal(new_x, x)
    assert all(torch.equal(a, b) for a, b in zip(new_state, state, strict=True))


@of_sums
def test_a_server_step_that_is_not_finite_is_not_taken(name: str) -> None:
    algorithm = summing(name)
    report, delta = reports(3, seed=5)
    x = torch.randn(P, dtype=torch.float64)
    summed, sums, clients = total(algorithm, report, delta)
    state = first_state(algorithm, x, 3)
    more = (x,) if hasattr(algorithm, "memory") or hasattr(algorithm, "corrected") else ()
    new_x, new_state, moved = advance(algorithm, x, state, summed * torch.inf, sums, clients, *more)
    assert not moved
    assert torch.equal(new_x, x)
    assert all(torch.equal(a, b) for a, b in zip(new_state, state, strict=True))
