"""What must hold for every algorithm, whatever it computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairwind.aggregation import advance, contribute
from fairwind.algorithms import REGISTRY
from fairwind.contract import Report
from fairwind.testing import P, reports, total

pytestmark = pytest.mark.parametrize("name", REGISTRY)


def assert_same(a: tuple, b: tuple) -> None:
    for one, other in zip(a, b, strict=True):
        if isinstance(one, tuple):
            assert_same(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 2**31), k=st.integers(1, 20))
@settings(deadline=None, max_examples=20)
def test_client_order_does_not_matter(name: str, seed: int, k: int) -> None:
    algorithm = REGISTRY[name]()
    report, delta = reports(k, seed)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    shuffled = Report(*(field[order] for field in report))
    assert_same(total(algorithm, report, delta), total(algorithm, shuffled, delta[order]))


@given(seed=st.integers(0, 2**31), k=st.integers(2, 20), cut=st.floats(0, 1))
@settings(deadline=None, max_examples=20)
def test_partial_sums_in_any_grouping_agree(name: str, seed: int, k: int, cut: float) -> None:
    algorithm = REGISTRY[name]()
    report, delta = reports(k, seed)
    at = round(cut * k)
    groups = [(Report(*(f[part] for f in report)), delta[part]) for part in (slice(0, at), slice(at, k))]
    (t1, s1, n1), (t2, s2, n2) = (total(algorithm, *group) for group in groups)
    joined = t1 + t2, type(s1)(*map(torch.add, s1, s2)), n1 + n2
    assert_same(total(algorithm, report, delta), joined)


def test_client_is_elementwise(name: str) -> None:
    algorithm = REGISTRY[name]()
    report, _ = reports(5, seed=1)
    together = algorithm.client(report)
    for k in range(5):
        alone = algorithm.client(Report(*(field[k] for field in report)))
        assert torch.equal(alone.coef, together.coef[k])
        assert all(torch.equal(a, b[k]) for a, b in zip(alone.sums, together.sums, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("field", ["update_norm", "loss", "grad_norm"])
def test_a_client_that_is_not_finite_counts_exactly_as_if_absent(name: str, field: str, bad: float) -> None:
    algorithm = REGISTRY[name]()
    needed = {"none": {"update_norm"}, "loss": {"update_norm", "loss"}}
    report, delta = reports(6, seed=2)
    spoilt = getattr(report, field).clone()
    spoilt[3] = bad
    ill = report._replace(**{field: spoilt})
    part, usable = contribute(algorithm, ill)
    if field not in needed.get(algorithm.probe, {"update_norm", "loss", "grad_norm"}):
        assert usable.all()  # what an algorithm does not ask for cannot spoil it
        return
    assert usable.tolist() == [True, True, True, False, True, True]
    assert part.coef[3] == 0
    assert all(s[3] == 0 for s in part.sums)
    delta[3] = bad
    rest = [0, 1, 2, 4, 5]
    without = Report(*(f[rest] for f in report))
    assert_same(total(algorithm, ill, delta), total(algorithm, without, delta[rest]))


@pytest.mark.parametrize("field", ["size", "steps"])
def test_an_empty_client_counts_exactly_as_if_absent(name: str, field: str) -> None:
    algorithm = REGISTRY[name]()
    report, _ = reports(4, seed=3)
    emptied = getattr(report, field).clone()
    emptied[0] = 0
    part, usable = contribute(algorithm, report._replace(**{field: emptied}))
    assert usable.tolist() == [False, True, True, True]
    assert part.coef[0] == 0
    assert all(s[0] == 0 for s in part.sums)


def test_with_no_usable_client_model_and_state_stay(name: str) -> None:
    algorithm = REGISTRY[name]()
    report, delta = reports(3, seed=4)
    x = torch.randn(P, dtype=torch.float64)
    state = algorithm.init(x)
    x, state, moved = advance(algorithm, x, state, *total(algorithm, report, delta))
    assert moved
    broken = report._replace(update_norm=torch.full((3,), torch.nan, dtype=torch.float64))
    new_x, new_state, moved = advance(algorithm, x, state, *total(algorithm, broken, delta))
    assert not moved
    assert torch.equal(new_x, x)
    assert all(torch.equal(a, b) for a, b in zip(new_state, state, strict=True))


def test_a_server_step_that_is_not_finite_is_not_taken(name: str) -> None:
    algorithm = REGISTRY[name]()
    report, delta = reports(3, seed=5)
    x = torch.randn(P, dtype=torch.float64)
    summed, sums, clients = total(algorithm, report, delta)
    state = algorithm.init(x)
    new_x, new_state, moved = advance(algorithm, x, state, summed * torch.inf, sums, clients)
    assert not moved
    assert torch.equal(new_x, x)
    assert all(torch.equal(a, b) for a, b in zip(new_state, state, strict=True))


def test_functions_are_pure(name: str) -> None:
    algorithm = REGISTRY[name]()
    report, delta = reports(3, seed=6)
    x = torch.randn(P, dtype=torch.float64)
    state = algorithm.init(x)
    summed, sums, _ = total(algorithm, report, delta)
    before = [t.clone() for t in (x, *state, summed, *sums, *report)]
    algorithm.server(x, state, summed, sums)
    algorithm.client(report)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, *state, summed, *sums, *report), strict=True))


def test_the_model_moves_down_the_updates(name: str) -> None:
    """All clients agree on δ: the model must step against it, wherever it stands."""
    algorithm = REGISTRY[name]()
    report, _ = reports(4, seed=7)
    delta = torch.ones(4, P, dtype=torch.float64)
    report = report._replace(update_norm=delta.norm(dim=1))
    x = torch.zeros(P, dtype=torch.float64)
    summed, sums, _ = total(algorithm, report, delta)
    new_x, _ = algorithm.server(x, algorithm.init(x), summed, sums)
    assert (new_x < 0).all()
