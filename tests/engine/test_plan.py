"""Who trains on what, and that nothing else decides it."""

from typing import Any

import pytest
import torch

from batches import FEDERATION, client_batches
from fairwind import InputError, Settings, Solver
from fairwind.data.counter import fold, mix, scramble
from fairwind.engine.schedule import Planner


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_epoch_visits_every_training_sample_once(epochs: int) -> None:
    planner = Planner(FEDERATION, Solver(batch_size=4, epochs=epochs))
    for k, (start, size) in enumerate(zip(FEDERATION.start.tolist(), FEDERATION.train.tolist(), strict=True)):
        found = client_batches(planner, [0], 5, k)
        per_epoch = -(-size // 4)
        assert len(found) == epochs * per_epoch
        assert [len(b) for b in found[: per_epoch - 1]] == [4] * (per_epoch - 1)  # only the last is partial
        for e in range(epochs):
            visited = found[e * per_epoch : (e + 1) * per_epoch]
            assert sorted(s for b in visited for s in b) == list(range(start, start + size))


def test_order_changes_with_seed_round_and_epoch() -> None:
    planner = Planner(FEDERATION, Solver(batch_size=45, epochs=2))
    orders = [client_batches(planner, [seed], round, 4) for seed in (0, 1) for round in (0, 1)]
    flat = [tuple(epoch) for order in orders for epoch in order]
    assert len(set(flat)) == 8


def test_a_seed_is_planned_alike_alone_and_among_others() -> None:
    planner = Planner(FEDERATION, Solver(batch_size=4, epochs=(1, 3)), clients_per_round=5)
    together = planner.plan([3, 7, 9], round=2)
    alone = planner.plan([7], round=2)
    mine = (together.seed == 1).nonzero()[:, 0]
    for field in ("client", "size", "epochs", "steps", "order_key", "dropout_key"):
        assert torch.equal(getattr(together, field)[mine], getattr(alone, field))
    for i in range(5):
        assert client_batches(planner, [3, 7, 9], 2, int(mine[i])) == client_batches(planner, [7], 2, i)


@pytest.mark.parametrize(
    ("asked", "clients"),
    [
        ({"participation": 0.5}, 4),
        ({"clients_per_round": 3}, 3),
        ({"clients_per_round": 1}, 1),
        ({"participation": 1}, 8),
        ({"participation": 0.01}, 1),
    ],
)
def test_participation_is_a_share_or_a_number(asked: dict[str, Any], clients: int) -> None:
    planner = Planner(FEDERATION, Solver(), **asked)
    seen = set()
    for round in range(60):
        plan = planner.plan([0], round)
        assert len(set(plan.client.tolist())) == clients
        seen |= set(plan.client.tolist())
    assert seen == set(range(8))  # nobody is forgotten


@pytest.mark.parametrize("asked", [0, 9, -1, 0.0, 1.5])
def test_participation_that_cannot_be_is_refused(asked: float | int) -> None:
    with pytest.raises(InputError, match=r"participation.* is not a share"):
        Settings(participation=asked)
    with pytest.raises(InputError, match="clients_per_round"):
        Planner(FEDERATION, Solver(), clients_per_round=Settings(clients_per_round=asked).clients_per_round)  # type: ignore[arg-type]


def test_drawn_epochs_are_uniform_over_clients_and_rounds() -> None:
    planner = Planner(FEDERATION, Solver(batch_size=100, epochs=(1, 3)))
    drawn = torch.stack(
        [planner.plan([0], t).steps for t in range(600)]
    )  # one batch an epoch: steps = epochs
    counts = torch.bincount(drawn.flatten(), minlength=4)
    assert counts[0] == 0
    expected = drawn.numel() / 3
    assert ((counts[1:] - expected).abs() < 5 * expected**0.5).all()
    assert (drawn.double().std(0) > 0.5).all()  # every client's vary over rounds


def test_the_hash_is_the_same_for_integers_and_tensors() -> None:
    keys = [0, 1, 2, 12345, 2**32 - 1]
    assert scramble(torch.tensor(keys)).tolist() == [scramble(k) for k in keys]
    assert mix(fold(3, 1), torch.tensor(keys)).tolist() == [mix(fold(3, 1), k) for k in keys]


def test_the_hash_has_known_values() -> None:
    """Results made on one machine must be made again on every other."""
    assert [fold(1, 0), fold(2, 7, 3), fold(0, 0, 0)] == [3811535168, 802121545, 354805152]


def test_each_input_bit_flips_each_output_bit_about_half_the_time() -> None:
    numbers = torch.arange(20_000) * 7919
    for bit in range(32):
        changed = scramble(numbers & 0xFFFFFFFF) ^ scramble((numbers ^ (1 << bit)) & 0xFFFFFFFF)
        rates = torch.stack([(changed >> b & 1).double().mean() for b in range(32)])
        assert (rates - 0.5).abs().max() < 0.05


def test_scramble_is_a_bijection() -> None:
    found = scramble(torch.arange(1 << 20))
    assert len(found.unique()) == 1 << 20  # type: ignore[no-untyped-call]
