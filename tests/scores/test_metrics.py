import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairwind.intervals import jackknife
from fairwind.metrics import METRICS, fairness, over_seeds
from fairwind.report.table import MEASURES, measures
from fairwind.scores import Kind

accuracies = st.lists(st.floats(0, 100), min_size=1, max_size=40)


def test_by_hand() -> None:
    found = fairness([0, 50, 100, 100, 80], [5, 1, 0, 0, 1], [1, 2, 1, 4, 2])
    assert list(found) == list(METRICS)
    assert found["avg"] == 66
    assert found["std"] == pytest.approx(math.sqrt((66**2 + 16**2 + 34**2 + 34**2 + 14**2) / 5))
    assert found["worst30"] == 25  # 30 % of 5 clients are 1.5: the worst two
    assert found["best30"] == 100
    assert found["worst"] == 0
    assert found["avg_weighted"] == 76
    spread = (1 * 76**2 + 2 * 26**2 + 1 * 24**2 + 4 * 24**2 + 2 * 4**2) / 10
    assert found["std_weighted"] == pytest.approx(math.sqrt(spread))
    assert found["worst30_weighted"] == pytest.approx((1 * 0 + 2 * 50) / 3)  # the same two, by size
    assert found["rsd_error"] == pytest.approx(found["std"] / 34)
    assert found["loss_avg"] == pytest.approx(1.4)
    assert found["loss_worst30"] == 3


@pytest.mark.parametrize(("clients", "tail"), [(1, 1), (3, 1), (4, 2), (10, 3), (16, 5), (100, 30)])
def test_thirty_percent_is_rounded_up(clients: int, tail: int) -> None:
    values = np.arange(clients, dtype=float)
    assert fairness(values, values, np.ones(clients))["worst30"] == pytest.approx(np.arange(tail).mean())


def test_equal_clients_at_the_edge_of_the_worst_30_percent_count_alike() -> None:
    """Four clients, two of them the worst: one of 10 %, and half of each of the two of 20 %."""
    found = fairness([20, 10, 20, 90], [0] * 4, [1, 2, 3, 4])
    assert found["worst30_weighted"] == pytest.approx((2 * 10 + 0.5 * 1 * 20 + 0.5 * 3 * 20) / (2 + 2))


@given(accuracies)
def test_gini_and_jain_are_their_definitions(values: list[float]) -> None:
    a = np.array(values)
    found = fairness(a, a, np.ones(len(a)))
    if a.sum() < 1e-3:
        return
    pairs = np.abs(a[:, None] - a[None, :]).sum()
    assert found["gini"] == pytest.approx(pairs / (2 * len(a) ** 2 * a.mean()), abs=1e-9)
    assert found["jain"] == pytest.approx(a.sum() ** 2 / (len(a) * (a**2).sum()), abs=1e-9)
    assert 0 <= found["gini"] < 1
    assert 1 / len(a) - 1e-9 <= found["jain"] <= 1 + 1e-9


@given(accuracies, st.randoms())
def test_client_order_does_not_matter(values: list[float], random: Random) -> None:
    sizes = [i % 7 + 1 for i in range(len(values))]
    order = list(range(len(values)))
    random.shuffle(order)
    straight = fairness(values, values, sizes)
    shuffled = fairness([values[i] for i in order], [values[i] for i in order], [sizes[i] for i in order])
    assert straight == pytest.approx(shuffled, abs=1e-6, nan_ok=True)


def test_equal_clients_are_perfectly_fair() -> None:
    found = fairness([70] * 9, [1] * 9, [10] * 9)
    assert [found[name] for name in ("std", "gini", "jain", "rsd_error")] == pytest.approx(
        [0, 0, 1, 0], abs=0
    )


@pytest.mark.parametrize("value", [0, 100])
def test_extremes_are_defined(value: int) -> None:
    found = fairness([value] * 4, [0] * 4, [3] * 4)
    assert all(math.isfinite(v) for v in found.values())


def test_clients_without_test_samples_are_left_out() -> None:
    with_empty = fairness([10, math.nan, 90], [1, math.nan, 2], [5, 0, 7])
    assert with_empty == fairness([10, 90], [1, 2], [5, 7])


def test_sampling_noise_is_taken_out() -> None:
    """Clients with one true accuracy differ by sampling alone; clients with true spread keep theirs."""
    rng = np.random.default_rng(0)
    n = rng.integers(2, 20, 4000)

    def measured(true: np.ndarray) -> dict[str, float]:
        return fairness(100 * rng.binomial(n, true) / n, n, n)

    alike = measured(np.full(4000, 0.7))
    assert alike["std"] > 14
    assert alike["std_beyond_noise"] < 3
    spread = measured(rng.uniform(0.4, 1, 4000))
    assert spread["std_beyond_noise"] == pytest.approx(100 * 0.6 / math.sqrt(12), abs=1)


def test_a_loss_that_is_not_a_number_is_not_hidden() -> None:
    found = fairness([10, 20, 30, 40], [1, math.nan, 3, 2], [5, 5, 5, 5])
    assert math.isnan(found["loss_avg"])
    assert math.isnan(found["loss_worst30"])


def test_every_metric_has_a_column_and_an_interval() -> None:
    assert [measure.key for measure in MEASURES] == list(METRICS)
    scores, sizes = np.array([[50.0, 60.0, 90.0]]), np.ones(3)
    values = jackknife(scores, 1 - scores / 100, sizes, 1).values
    assert set(values) | {"worst"} == set(METRICS)


@pytest.mark.parametrize(("kind", "better"), [("accuracy", 5.0), ("higher", 0.5), ("lower", -0.5)])
def test_what_a_column_calls_best_is_better(kind: Kind, better: float) -> None:
    scores, losses, sizes = np.array([10.0, 40.0, 70.0, 80.0]), np.array([4.0, 2.0, 1.0, 0.5]), [5, 9, 20, 3]
    bad = fairness(scores, losses, sizes, kind)
    good = fairness(scores + better, losses - 0.1, sizes, kind)
    findings: Any = {
        "scores": [{"name": "some", "kind": kind}],
        "summary": [{"avg": {"mean": bad["avg"]}}],
    }
    columns = {measure.key: measure.best for measure in measures(findings)}
    assert set(columns) == set(bad)
    for key, best in columns.items():
        if good[key] != pytest.approx(bad[key]) and key not in ("rsd_error", "std_beyond_noise"):
            # Those two are of a spread, and also change with the average.
            assert (good[key] > bad[key]) == (best == "highest"), key


def test_over_seeds() -> None:
    assert over_seeds([1.0, 3.0]) == {"mean": 2, "std": 1}
    assert over_seeds([1.0, None]) == {"mean": None, "std": None}
