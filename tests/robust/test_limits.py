"""What liars can have of a round, whatever they say; and what honest clients keep."""

import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fairwind as fw
from exchanged import Exchange
from fairwind.exchange import Bounds
from fairwind.robust.limits import OFF, Limits, Size, ceiling, factors

USUAL = Limits()
SHARE, TOGETHER, NORM, FURTHER = USUAL
WEIGHTS = st.floats(1e-6, 1e6)
LIES = st.floats(0, 1e300)


def limited(weights: list[float], limits: Limits = USUAL) -> list[float]:
    cut = factors([Size(weight, 1.0) for weight in weights], limits)
    return [weight * each.weight for weight, each in zip(weights, cut, strict=True)]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Weights of honest clients, and of fewer liars."""
    honest = draw(st.lists(WEIGHTS, min_size=3, max_size=40))
    return honest, draw(st.lists(LIES, max_size=len(honest) - 1))


@given(rounds())
def test_no_client_has_more_than_its_share(told: tuple[list[float], list[float]]) -> None:
    weights = [*told[0], *told[1]]
    there = sum(weight > 0 for weight in weights)
    found = limited(weights)
    assert max(found) <= max(SHARE, 2 / there) * sum(found) * (1 + 1e-9)


@given(rounds())
def test_liars_together_have_no_more_than_is_stated(told: tuple[list[float], list[float]]) -> None:
    """What f median weights are of all weights up to the median, and a quarter more."""
    honest, lies = told
    found = limited([*honest, *lies])
    there = [weight for weight in (*honest, *lies) if weight > 0]
    median, together = statistics.median(there), max(TOGETHER, 2 / len(there))
    base = sum(min(weight, median) for weight in there)
    most = (len(lies) * median + together * base) / ((1 + together) * base)
    assert sum(found[len(honest) :]) <= most * sum(found) * (1 + 1e-9)


@given(st.integers(3, 60), st.data())
def test_among_equal_clients_it_is_a_number(honest: int, data: st.DataObject) -> None:
    liars = data.draw(st.integers(0, honest - 1))
    together = max(TOGETHER, 2 / (honest + liars))
    most = (liars / (honest + liars) + together) / (1 + together)
    found = limited([1.0] * honest + data.draw(st.lists(LIES, min_size=liars, max_size=liars)))
    assert sum(found[honest:]) <= min(most, 1.0) * sum(found) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("liars", "weight", "length"), [(1, 0.1, 0.18), (5, 0.4, 0.57), (6, 0.44, 0.61), (9, 0.56, 0.72)]
)
def test_the_shares_that_the_documentation_states(liars: int, weight: float, length: float) -> None:
    """Of 20 equal nodes: of the weight, and of the lengths of all updates, each in the weight."""
    honest = 20 - liars
    sizes = [Size(1.0, 1.0)] * honest + [Size(1e9, 1e9)] * liars
    cut = factors(sizes, Limits())
    weights = [size.weight * each.weight for size, each in zip(sizes, cut, strict=True)]
    lengths = [w * size.length * each.update for w, size, each in zip(weights, sizes, cut, strict=True)]
    assert sum(weights[honest:]) / sum(weights) == pytest.approx(weight, abs=0.006)
    assert sum(lengths[honest:]) / sum(lengths) == pytest.approx(length, abs=0.006)


@given(rounds())
def test_nobody_falls_below_an_equal_share_because_others_were_cut(
    told: tuple[list[float], list[float]],
) -> None:
    weights = [*told[0], *told[1]]
    assume(sum(weights) < math.inf)
    found = limited(weights)
    there = sum(weight > 0 for weight in weights)
    for before, after in zip(weights, found, strict=True):
        least = min(before / sum(weights), 1 / there)
        assert after / sum(found) >= least * (1 - 1e-9)


@given(st.lists(WEIGHTS, min_size=4, max_size=40), st.data())
def test_colluders_cannot_raise_the_ceiling(honest: list[float], data: st.DataObject) -> None:
    liars = data.draw(st.integers(1, len(honest) - 1))
    tops = [ceiling([*honest, *[lie] * liars], SHARE, TOGETHER) for lie in (1e9, 1e30, 1e300)]
    assert tops[0] == pytest.approx(tops[1]) == pytest.approx(tops[2])
    assert tops[0] <= max(honest) * (1 + len(honest) + liars)


def test_five_of_twenty_get_no_more_than_twice_the_others_weight() -> None:
    assert ceiling([1.0] * 15 + [1e9] * 5, 0.2, TOGETHER) == pytest.approx(2.0)


@given(st.lists(st.floats(0.8, 1.25), min_size=1, max_size=60))
def test_honest_clients_that_differ_little_are_not_cut(weights: list[float]) -> None:
    assert limited(weights) == weights


@given(rounds())
def test_lengths_and_further_sums_are_multiples_of_the_median(
    told: tuple[list[float], list[float]],
) -> None:
    values = [*told[0], *told[1]]
    cut = factors([Size(1.0, value, (value,)) for value in values], Limits())
    there = [value for value in values if value > 0]
    median, few = statistics.median(there), 12 / len(there)
    for value, each in zip(values, cut, strict=True):
        assert value * each.update == pytest.approx(min(value, max(NORM, few) * median))
        assert value * each.further[0] == pytest.approx(min(value, max(FURTHER, few) * median))


@given(st.lists(LIES, max_size=2))
def test_two_clients_have_no_neighbours(weights: list[float]) -> None:
    assert limited(weights) == weights


@given(st.lists(LIES, max_size=30))
def test_limits_that_are_off_cut_nothing(weights: list[float]) -> None:
    assert limited(weights, OFF) == weights


@pytest.mark.parametrize("spec", ["fedavg", "adafedadam", "qfedavg"])
def test_the_first_tutorials_honest_nodes_are_not_cut_in_the_first_round(spec: str) -> None:
    task = fw.setup("synthetic:clients=4")
    bounded, unbounded = Exchange(task, spec, bounds=Bounds()), Exchange(task, spec)
    assert bounded.round().lines() == unbounded.round().lines() == []
    assert bounded.server.x.equal(unbounded.server.x)
