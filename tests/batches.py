"""A client's batches: those that are planned, and the same by hand."""

import torch
from torch import Tensor, nn

from conftest import make_federation
from fairwind.data.counter import ORDER, fold, mix
from fairwind.engine.schedule import Planner, places

FEDERATION = make_federation([1, 2, 3, 17, 45, 8, 1, 26])


def client_batches(planner: Planner, seeds: list[int], round: int, i: int) -> list[list[int]]:
    """The batches of a plan's i-th client, without padding."""
    plan = planner.plan(seeds, round)
    start = int(planner.federation.start[plan.client[i]])
    mine = range(start, start + int(plan.size[i]))
    steps = torch.arange(int(plan.steps[i]))
    selection = planner.training(plan, torch.tensor([i]))
    order = selection.order(plan.order_key, plan.dropout_key)
    at, padding = places(selection, torch.zeros_like(steps), steps, planner.solver.batch_size)
    padded = order.samples[at] ^ padding
    assert all(
        (s if s >= 0 else ~s) in mine for row in padded.tolist() for s in row
    )  # padding is its own too
    return [[s for s in row if s >= 0] for row in padded.tolist()]


def batches_by_hand(size: int, steps: int, seed: int, round: int, client: int) -> list[list[int]]:
    """The first batches of four of an endless row of epochs, each sorted by the hashes of its samples."""
    found: list[list[int]] = []
    epoch = 0
    while len(found) < steps:
        key = mix(mix(fold(ORDER, seed, round), client), epoch)
        order = sorted(range(size), key=lambda place: mix(key, place))
        found += [order[at : at + 4] for at in range(0, size, 4)]
        epoch += 1
    return found[:steps]


@torch.no_grad()
def put(model: nn.Module, values: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.copy_(value)
