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
    """The samples of some of a plan's clients in the order in which they are taken; on the data's device."""

    size: Tensor  # (N,) samples in an epoch
    steps: Tensor  # (N,)
    base: Tensor  # (N,) where the client's samples begin in `order`
    key: Tensor  # (N,) for dropout
    order: Tensor  # (Σ size·epochs,) sample indices, epoch after epoch


class Lot(NamedTuple):
    """The same before an order is drawn: what does not change from round to round with the same clients."""

    entry: Tensor  # (N,) which of the plan's clients these are
    client: Tensor  # (N,) and of the federation's
    size: Tensor  # (N,)
    steps: Tensor  # (N,)
    base: Tensor  # (N,)
    sample: Tensor  # (Σ,) samples as they lie
    epoch_entry: Tensor  # (S,) for each epoch of each client, the client,
    epoch: Tensor  # (S,) and the epoch
    segment: Tensor  # (Σ,) each sample's epoch in these
    place: Tensor  # (Σ,) and its place there
    shuffled: bool
    taken: Tensor | None  # which of the samples in their order are taken, if not all

    def drawn(self, order_key: Tensor, dropout_key: Tensor) -> Work:
        """Every epoch shuffled within itself: one sort for all."""
        order = self.sample
        if self.shuffled:
            keys = mix(order_key[self.epoch_entry], self.epoch)
            order = order[shuffle(self.segment, self.place, keys)]
        if self.taken is not None:
            order = order[self.taken]
        return Work(self.size, self.steps, self.base, dropout_key[self.entry], order)


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

    def training(self, plan: Plan, entries: Tensor) -> Lot:
        """What the given clients of a plan train on."""
        size, epochs, steps = plan.size[entries], plan.epochs[entries], plan.steps[entries]
        owner, epoch = segments(epochs)
        return self._lot(plan, entries, size, steps, size * epochs, entries[owner], epoch, True, None)

    def probing(self, plan: Plan, entries: Tensor, batch_size: int) -> Lot:
        """What the given clients measure their loss and gradient on, in batches of the given size."""
        whole = plan.size[entries]
        size = self.probed(whole)
        steps = (size + batch_size - 1) // batch_size
        some, taken = self.probe_samples is not None, None
        if some:  # the first samples of the first epoch
            taken = _spread(whole.cumsum(0) - whole, size, self.device)
        return self._lot(plan, entries, size, steps, size, entries, torch.zeros_like(entries), some, taken)

    def probed(self, size: Tensor) -> Tensor:
        """How many samples a client of this size measures its loss and gradient on."""
        return size if self.probe_samples is None else size.clamp(max=self.probe_samples)

    @property
    def repeats(self) -> bool:
        """Whether the same clients take the same steps in every round, if in another order."""
        return self.participants == len(self.federation) and self.solver.fewest == self.solver.most

    @property
    def device(self) -> torch.device:
        return self.federation.inputs.device

    def keys(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """What decides orders and dropout, on the data's device."""
        return plan.order_key.to(self.device), plan.dropout_key.to(self.device)

    def _lot(
        self,
        plan: Plan,
        entries: Tensor,
        size: Tensor,
        steps: Tensor,
        length: Tensor,  # of each client's samples, all epochs together
        owner: Tensor,
        epoch: Tensor,
        shuffled: bool,
        taken: Tensor | None,
    ) -> Lot:
        base, client = length.cumsum(0) - length, plan.client[entries]
        whole = plan.size[owner]
        segment, place = segments(whole.to(self.device), int(whole.sum()))
        sample = self.federation.start[plan.client[owner]].to(self.device)[segment] + place
        return Lot(
            entry=entries.to(self.device),
            client=client.to(self.device),
            size=size.to(self.device),
            steps=steps.to(self.device),
            base=base.to(self.device),
            sample=sample,
            epoch_entry=owner.to(self.device),
            epoch=epoch.to(self.device),
            segment=segment,
            place=place,
            shuffled=shuffled,
            taken=taken,
        )

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
