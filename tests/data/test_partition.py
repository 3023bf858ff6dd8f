from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import NaturalIdPartitioner
from hypothesis import given
from hypothesis import strategies as st

from fairwind import InputError
from fairwind.data.partition import by_key, dirichlet, iid


def balanced(classes: int = 10, each: int = 200) -> np.ndarray:
    return np.random.RandomState(0).permutation(np.repeat(np.arange(classes), each))


def test_by_key_forms_the_clients_of_flwr_datasets() -> None:
    keys = np.random.RandomState(0).choice(["w10", "w2", "w1", "v"], 50).tolist()
    owner, names = by_key(keys)
    theirs = NaturalIdPartitioner(partition_by="writer")
    theirs.dataset = Dataset.from_dict({"writer": keys, "row": list(range(50))})
    assert len(names) == theirs.num_partitions
    for k in range(len(names)):
        part = theirs.load_partition(k)
        assert list(part["row"]) == np.flatnonzero(owner == k).tolist()
        assert set(part["writer"]) == {names[k]}


@pytest.mark.parametrize("beta", [0.05, 0.1, 0.5, 1, 100])
def test_dirichlet_deals_every_sample_and_leaves_no_client_almost_empty(beta: float) -> None:
    labels = balanced(each=20_000)
    for seed in range(10):
        owner = dirichlet(labels, 16, beta, seed)
        counts = np.stack([np.bincount(owner[labels == c], minlength=16) for c in range(10)])
        assert (counts.sum(1) == 20_000).all()
        assert counts.sum(0).min() >= 20_000 / 160 - 10  # up to rounding


def test_dirichlet_draws_again_where_a_client_has_too_little() -> None:
    """At β = 0.05 many a first draw leaves some client below 1/(10·K)."""
    labels = balanced(each=20_000)
    first = [np.random.RandomState(seed).dirichlet([0.05] * 16, 10).sum(0).min() for seed in range(20)]
    assert 0 < sum(least < 1 / 160 for least in first) < 20
    for seed, least in enumerate(first):
        found = np.bincount(dirichlet(labels, 16, 0.05, seed), minlength=16).min() / 20_000
        if least >= 1 / 160:
            assert found == pytest.approx(least, abs=10 / 20_000)  # the first draw is kept
        else:
            assert found > least


def test_dirichlet_shares_have_the_distributions_mean_and_variance() -> None:
    """A share under Dir(β, …) over K clients has mean 1/K and variance (1/K)(1 − 1/K)/(Kβ + 1)."""
    labels, K, beta = balanced(), 5, 2.0
    shares = np.concatenate(
        [
            np.bincount(owner[labels == c], minlength=K) / 200
            for seed in range(200)
            for owner in [dirichlet(labels, K, beta, seed)]
            for c in range(10)
        ]
    )
    assert shares.mean() == pytest.approx(1 / K)
    assert shares.var() == pytest.approx((1 / K) * (1 - 1 / K) / (K * beta + 1), rel=0.05)


def test_a_class_is_shuffled_before_it_is_cut() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    owner = dirichlet(labels, 4, 1.0, 0)
    assert not (np.diff(owner) >= 0).all()


def test_iid_deals_each_class_evenly() -> None:
    labels = balanced()
    owner = iid(labels, 16, 0)
    counts = np.stack([np.bincount(owner[labels == c], minlength=16) for c in range(10)])
    assert counts.min() >= 12
    assert counts.max() <= 13


@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_partitions_follow_their_seed(seed: int, clients: int) -> None:
    labels = balanced(classes=3, each=20)
    assert np.array_equal(dirichlet(labels, clients, 1.0, seed), dirichlet(labels, clients, 1.0, seed))
    assert np.array_equal(iid(labels, clients, seed), iid(labels, clients, seed))


def test_other_seeds_deal_otherwise() -> None:
    labels = balanced()
    assert not np.array_equal(dirichlet(labels, 4, 1.0, 0), dirichlet(labels, 4, 1.0, 1))
    assert not np.array_equal(iid(labels, 4, 0), iid(labels, 4, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0, 0), "clients=0"),
        ((61, 1.0, 0), "clients=61"),
        ((4, 0.0, 0), "beta=0"),
        ((4, 1.0, -1), "seed"),
    ],
)
def test_parameters_out_of_range_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dirichlet(balanced(classes=3, each=20), *arguments)
