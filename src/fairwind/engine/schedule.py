"""Who trains in a round, on which batches, in which order; all of it a hash of (seed, round, …)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.counter import DROPOUT, EPOCHS, ORDER, PARTICIPATE, fold, mix, segments, shuffle
from fairwind.data.federation import Federation
from fairwind.engine.solver import Solver
from fairwind.errors import InputError


class Plan(NamedTuple):
    """Who trains in a round, and how long: M clients, possibly of several seeds; on the host."""

    seed: Tensor  # (M,) index into the seeds
    client: Tensor  # (M,)
    size: Tensor  # (M,) n, training samples
    epochs: Tensor  # (M,)
    steps: Tensor  # (M,) τ
    order_key: Tensor  # (M,) hash of (seed, round, client), for the order of samples
    dropout_key: Tensor  # (M,) the same for dropout


class Work(NamedTuple):
    """The samples of some of a plan's clients, drawn up when they are needed; on the data's device."""

    size: Tensor  # (N,) samples in an epoch
    steps: Tensor  # (N,)
    base: Tensor  # (N,) where the client's samples begin in `order`
    key: Tensor  # (N,) for dropout
    order: Tensor  # (Σ size·epochs,) sample indices, epoch after epoch


@dataclass(frozen=True)
class Schedule:
    """Draws the plan of any round, in any order of rounds."""

    federation: Federation
    solver: Solver
    participation: float | int = 1.0
    """Share of the clients in a round (a float in (0, 1]), or their number (an int)."""
    probe_samples: int | None = None
    """Training samples on which F_k and ∇F_k are measured, drawn anew each round; None is all of them."""

    def __post_init__(self) -> None:
        _ = self.participants  # refuses what cannot be

    @property
    def participants(self) -> int:
        """Clients in each round."""
        clients, asked = len(self.federation), self.participation
        if isinstance(asked, int) and 1 <= asked <= clients:
            return asked
        if isinstance(asked, float) and 0 < asked <= 1:
            return max(1, round(asked * clients))
        raise InputError(
            f"participation={asked} is neither a share up to 1.0 nor a number of clients from 1 to {clients}"
        )

    def plan(self, seeds: list[int], round: int) -> Plan:
        """Who trains in a round under each seed."""
        chosen = [self._choose(seed, round) for seed in seeds]
        client = torch.cat(chosen)
        seed = torch.repeat_interleave(torch.tensor([len(c) for c in chosen]))
        size = self.federation.train[client]
        drawn, order, dropout = (
            mix(torch.tensor([fold(use, s, round) for s in seeds])[seed], client)
            for use in (EPOCHS, ORDER, DROPOUT)
        )
        epochs = self.solver.fewest + drawn % (self.solver.most - self.solver.fewest + 1)
        per_epoch = (size + self.solver.batch_size - 1) // self.solver.batch_size
        return Plan(seed, client, size, epochs, per_epoch * epochs, order, dropout)

    def training(self, plan: Plan, entries: Tensor) -> Work:
        """What the given clients of a plan train on: every epoch shuffled within itself."""
        size, epochs, steps = plan.size[entries], plan.epochs[entries], plan.steps[entries]
        owner, epoch = segments(epochs)
        order = self._shuffled(plan, entries[owner], epoch)
        return self._work(size, size * epochs, steps, plan.dropout_key[entries], order)

    def probing(self, plan: Plan, entries: Tensor, batch_size: int) -> Work:
        """What the given clients measure their loss and gradient on, in batches of the given size."""
        whole = plan.size[entries]
        size = self.probed(whole)
        if self.probe_samples is None:
            order = _spread(self.federation.start[plan.client[entries]], size, self.device)
        else:  # the first samples of the first epoch
            shuffled = self._shuffled(plan, entries, torch.zeros_like(entries))
            order = shuffled[_spread(whole.cumsum(0) - whole, size, self.device)]
        steps = (size + batch_size - 1) // batch_size
        return self._work(size, size, steps, plan.dropout_key[entries], order)

    def probed(self, size: Tensor) -> Tensor:
        """How many samples a client of this size measures its loss and gradient on."""
        return size if self.probe_samples is None else size.clamp(max=self.probe_samples)

    @property
    def device(self) -> torch.device:
        return self.federation.inputs.device

    def _shuffled(self, plan: Plan, entries: Tensor, epoch: Tensor) -> Tensor:
        """Samples of one epoch of each of the given clients, shuffled: one sort for all."""
        keys = mix(plan.order_key[entries], epoch).to(self.device)
        size = plan.size[entries]
        segment, place = segments(size.to(self.device), int(size.sum()))
        start = self.federation.start[plan.client[entries]].to(self.device)
        return (start[segment] + place)[shuffle(segment, place, keys)]

    def _work(self, size: Tensor, taken: Tensor, steps: Tensor, key: Tensor, order: Tensor) -> Work:
        base = taken.cumsum(0) - taken
        return Work(*(field.to(self.device) for field in (size, steps, base, key, order)))

    def _choose(self, seed: int, round: int) -> Tensor:
        clients = torch.arange(len(self.federation))
        if self.participants == len(clients):
            return clients
        drawn = torch.argsort(mix(fold(PARTICIPATE, seed, round), clients), stable=True)
        return drawn[: self.participants].sort().values


def _spread(start: Tensor, size: Tensor, device: torch.device) -> Tensor:
    """The numbers from each start, as many as its size says."""
    segment, place = segments(size.to(device), int(size.sum()))
    return start.to(device)[segment] + place


def batches(work: Work, client: Tensor, step: Tensor, batch_size: int) -> Tensor:
    """The samples (N, B) of N batches, each of one of the work's clients at one of its steps.

    Where a batch has no more samples, or the client no more steps, the client's own first sample stands in,
    bit-inverted and thus negative: another client's must not be touched, not even masked.
    """
    size, base, steps = work.size[client, None], work.base[client, None], work.steps[client, None]
    step = step[:, None]
    per_epoch = (size + batch_size - 1) // batch_size
    epoch = step // per_epoch
    place = (step - epoch * per_epoch) * batch_size + torch.arange(batch_size, device=step.device)
    inside = (place < size) & (step < steps)
    picked = work.order[torch.where(inside, base + epoch * size + place, base)]
    return torch.where(inside, picked, ~picked)
