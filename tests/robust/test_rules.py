"""Robust means against independent ones: NumPy's, SciPy's and Flower's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fairwind.robust import rules

K, P = 9, 7
Floats = NDArray[np.float64]


def drawn(seed: int, clients: int = K, *, liars: int = 0) -> Tensor:
    vectors = np.random.default_rng(seed).normal(size=(clients, P)) + 1.0
    vectors[:liars] *= -100
    return torch.from_numpy(vectors)


def counts(seed: int, clients: int = K) -> Tensor:
    """Weights that are whole numbers, so that a client may also be written down so many times."""
    return torch.from_numpy(np.random.default_rng(seed).integers(1, 6, clients)).double()


def repeated(d: Tensor, w: Tensor) -> Floats:
    return np.repeat(d.numpy(), w.long().numpy(), axis=0)


def close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-9, atol=1e-12)


SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_weighted_median_is_that_of_clients_written_down_several_times(seed: int) -> None:
    d, w = drawn(seed), counts(seed)
    close(rules.median(d, w), np.median(repeated(d, w), axis=0))
    even = drawn(seed, 8)
    close(rules.median(even, torch.ones(8).double()), np.median(even.numpy(), axis=0))


@pytest.mark.parametrize("cut", [0, 1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_weighted_trimmed_mean_is_that_of_clients_written_down_several_times(seed: int, cut: int) -> None:
    d, w = drawn(seed), counts(seed)
    rows = np.sort(repeated(d, w), axis=0)
    close(rules.trimmed_mean(d, w, cut / len(rows)), rows[cut : len(rows) - cut].mean(0))


def test_columns_are_trimmed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    d, w = drawn(0), counts(0)
    whole = rules.trimmed_mean(d, w, 0.2)
    monkeypatch.setattr(rules, "COLUMNS", 2 * K)
    assert torch.equal(rules.trimmed_mean(d, w, 0.2), whole)


def krum_by_hand(d: Floats, w: Floats, liars: int, keep: int) -> Floats:
    scores = []
    for i in range(len(d)):
        others = sorted(float(((d[i] - d[j]) ** 2).sum()) for j in range(len(d)) if j != i)
        scores.append(sum(others[: len(d) - liars - 2]))
    chosen = sorted(range(len(d)), key=scores.__getitem__)[:keep]
    return np.average(d[chosen], axis=0, weights=w[chosen])


@pytest.mark.parametrize(("liars", "keep"), [(0, 1), (2, 7), (3, 1), (3, 4)])
@pytest.mark.parametrize("seed", SEEDS)
def test_multikrum_is_that_of_two_loops(seed: int, liars: int, keep: int) -> None:
    d, w = drawn(seed, liars=liars), counts(seed)
    close(rules.multikrum(d, w, liars, keep), krum_by_hand(d.numpy(), w.numpy(), liars, keep))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_point_has_a_smaller_sum_of_distances_than_the_geometric_median(seed: int) -> None:
    d, w = drawn(seed, liars=2), counts(seed)
    found = rules.geometric_median(d, w).numpy()
    away = found - d.numpy()
    pulls = away / np.linalg.norm(away, axis=1, keepdims=True)
    assert np.abs(w.numpy() @ pulls).max() < 1e-6 * float(w.sum())  # the gradient of a convex function


def test_the_geometric_median_may_be_a_clients_vector() -> None:
    d = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).double()
    assert rules.geometric_median(d, torch.ones(5).double()).norm() < 1e-6
    same = torch.ones(4, 3).double()
    assert torch.equal(rules.geometric_median(same, torch.ones(4).double()), same[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_centred_clipping_is_that_of_a_loop(seed: int) -> None:
    d, w, centre = drawn(seed, liars=2), counts(seed), drawn(seed + 100)[0]
    lengths = [float(np.linalg.norm(row)) for row in (d - centre).numpy()]
    top = sorted(lengths)[(K - 1) // 2]
    expected = centre.numpy().copy()
    for k in range(K):
        expected += float(w[k] / w.sum()) * min(1.0, top / lengths[k]) * (d - centre).numpy()[k]
    close(rules.centred_clipping(d, w, centre), expected)


RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "trimmed": lambda d, w: rules.trimmed_mean(d, w, 0.3),
    "median": rules.median,
    "multikrum": lambda d, w: rules.multikrum(d, w, 3, 7),
    "geometric": rules.geometric_median,
    "clipping": lambda d, w: rules.centred_clipping(d, w, torch.zeros(P).double()),
}


@given(st.integers(0, 1000), st.sampled_from(sorted(RULES)), st.floats(1, 1e12))
def test_three_of_ten_cannot_carry_a_robust_mean_away(seed: int, name: str, factor: float) -> None:
    d, w = drawn(seed, 10), torch.ones(10).double()
    d[:3] *= -factor
    honest = d[3:]
    assert RULES[name](d, w).norm() <= 2 * honest.norm(dim=1).max()


@given(st.integers(0, 1000), st.sampled_from(sorted(RULES)))
def test_a_robust_mean_does_not_depend_on_the_order_of_clients(seed: int, name: str) -> None:
    d, w = drawn(seed), counts(seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(K))
    torch.testing.assert_close(RULES[name](d, w), RULES[name](d[order], w[order]), rtol=1e-6, atol=1e-8)


def test_they_are_flowers_rules() -> None:
    pytest.importorskip("flwr")
    from flwr.serverapp.strategy import FedMedian, FedTrimmedAvg, Krum, MultiKrum

    from liars import flower_mean

    for seed in SEEDS:
        d, w = drawn(seed, 10, liars=2), counts(seed, 10)
        one = torch.ones(10).double()
        close(rules.median(d, one), flower_mean(FedMedian(), d, w))
        close(rules.trimmed_mean(d, one, 0.2), flower_mean(FedTrimmedAvg(beta=0.2), d, w))
        close(rules.multikrum(d, w, 2, 1), flower_mean(Krum(num_malicious_nodes=2), d, w))
        many = MultiKrum(num_malicious_nodes=2, num_nodes_to_select=5)
        close(rules.multikrum(d, w, 2, 5), flower_mean(many, d, w))
