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
    """The local work of M clients, possibly of several seeds; all but `order` on the host."""

    seed: Tensor  # (M,) index into the seeds
    client: Tensor  # (M,)
    size: Tensor  # (M,) n, training samples
    steps: Tensor  # (M,) τ
    base: Tensor  # (M,) where the client's batches begin in `order`
    key: Tensor  # (M,) hash of (seed, round, client), for dropout
    order: Tensor  # (Σ n·epochs,) sample indices, epoch after epoch; on the data's device

    def to(self, device: torch.device) -> "Plan":
        return Plan(*(field.to(device) for field in self))


@dataclass(frozen=True)
class Schedule:
    """Draws the plan of any round, in any order of rounds."""

    federation: Federation
    solver: Solver
    participation: float | int = 1.0
    """Share of the clients in a round (a float in (0, 1]), or their number (an int)."""
    probe_samples: int | None = None
    """Training samples on which F_k and ∇F_k are measured, drawn anew each round; None is all of them."""

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

    def probed(self, size: Tensor) -> Tensor:
        """Samples a client of this size measures its loss and gradient on: the first of its first epoch."""
        return size if self.probe_samples is None else size.clamp(max=self.probe_samples)

    def plan(self, seeds: list[int], round: int) -> Plan:
        """The work of one round under each seed."""
        chosen = [self._choose(seed, round) for seed in seeds]
        client = torch.cat(chosen)
        seed = torch.repeat_interleave(torch.tensor([len(c) for c in chosen]))
        size = self.federation.train[client]
        epochs = self._keys(EPOCHS, seeds, round)[seed]
        epochs = self.solver.fewest + mix(epochs, client) % (self.solver.most - self.solver.fewest + 1)
        per_epoch = (size + self.solver.batch_size - 1) // self.solver.batch_size
        base = (size * epochs).cumsum(0) - size * epochs

        # One segment for each client and epoch, shuffled within itself.
        owner, epoch = segments(epochs)
        keys = mix(mix(self._keys(ORDER, seeds, round)[seed], client)[owner], epoch)
        device = self.federation.inputs.device
        segment, place = segments(size[owner].to(device))
        picked = shuffle(segment, place, keys.to(device))
        order = (self.federation.start[client][owner].to(device)[segment] + place)[picked]

        dropout = mix(self._keys(DROPOUT, seeds, round)[seed], client)
        return Plan(seed, client, size, per_epoch * epochs, base, dropout, order)

    def _choose(self, seed: int, round: int) -> Tensor:
        clients = torch.arange(len(self.federation))
        if self.participants == len(clients):
            return clients
        drawn = torch.argsort(mix(fold(PARTICIPATE, seed, round), clients), stable=True)
        return drawn[: self.participants].sort().values

    @staticmethod
    def _keys(use: int, seeds: list[int], round: int) -> Tensor:
        return torch.tensor([fold(use, seed, round) for seed in seeds])


def batches(plan: Plan, entry: Tensor, step: Tensor, batch_size: int) -> Tensor:
    """The samples (N, B) of N batches, each a client's (an entry of the plan) at one of its steps.

    Where a batch has no more samples, or the client no more steps, the client's own first sample stands in,
    bit-inverted and thus negative: another client's must not be touched, not even masked.
    """
    size, base, steps = plan.size[entry, None], plan.base[entry, None], plan.steps[entry, None]
    step = step[:, None]
    per_epoch = (size + batch_size - 1) // batch_size
    epoch = step // per_epoch
    place = (step - epoch * per_epoch) * batch_size + torch.arange(batch_size, device=step.device)
    inside = (place < size) & (step < steps)
    picked = plan.order[torch.where(inside, base + epoch * size + place, base)]
    return torch.where(inside, picked, ~picked)
