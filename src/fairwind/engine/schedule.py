"""Participants, batches and their order in a round, all from hashes of (seed, round, …)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.data.counter import DROPOUT, EPOCHS, ORDER, PARTICIPATE, draw, fold, mix, segments, shuffle
from fairwind.data.federation import Federation
from fairwind.engine.settings import ClientSelection
from fairwind.engine.solver import Solver
from fairwind.errors import InputError


class Plan(NamedTuple):
    """The participants of a round and their steps: an entry for each client of each seed; on the host."""

    seed: Tensor  # (M,) index into the seeds
    client: Tensor  # (M,)
    size: Tensor  # (M,) n, training samples
    epochs: Tensor  # (M,) begun, if not completed
    steps: Tensor  # (M,) τ
    personal_steps: Tensor  # (M,) the first of them, if these train the personal part alone
    order_key: Tensor  # (M,) hash of (seed, round, client), for the order of samples
    dropout_key: Tensor  # (M,) the same for dropout


class Order(NamedTuple):
    """The samples of some entries in training order; on the data's device."""

    size: Tensor  # (N,) samples in an epoch
    steps: Tensor  # (N,)
    base: Tensor  # (N,) where the entry's samples begin in `samples`
    dropout_key: Tensor  # (N,)
    samples: Tensor  # (Σ size·epochs,) sample indices, epoch after epoch


class Selection(NamedTuple):
    """The same before shuffling: what does not change between rounds with the same clients."""

    entry: Tensor  # (N,) which of the plan's entries these are
    client: Tensor  # (N,) their clients
    size: Tensor  # (N,)
    steps: Tensor  # (N,)
    base: Tensor  # (N,)
    first: Tensor  # (Σ,) for each sample of each epoch, where its client's samples begin
    epoch_entry: Tensor  # (S,) for each epoch of each entry, the entry,
    epoch: Tensor  # (S,) and the epoch
    segment: Tensor  # (Σ,) each sample's place among these epochs
    place: Tensor  # (Σ,) and its place in the epoch
    longest: int  # samples of an epoch, at most
    shuffled: bool
    taken: Tensor | None  # which of the samples in their order are taken, if not all
    brought: (
        Tensor | None
    )  # the clients whose training samples are copied to the device, if they are on the host

    def order(self, order_key: Tensor, dropout_key: Tensor) -> Order:
        """Shuffles every epoch, with one sort for all."""
        place = self.place
        if self.shuffled:
            keys = mix(order_key[self.epoch_entry], self.epoch)
            place = shuffle(self.segment, place, keys, self.longest)
        samples = self.first + place
        if self.taken is not None:
            samples = samples[self.taken]
        return Order(self.size, self.steps, self.base, dropout_key[self.entry], samples)


@dataclass(frozen=True)
class Planner:
    """Computes the plan of any round, in any order of rounds."""

    federation: Federation
    solver: Solver
    participation: float = 1.0
    """Share of the clients in a round."""
    clients_per_round: int | None = None
    """Their number instead, if given."""
    probe_samples: int | None = None
    """Training samples on which F_k and ∇F_k are measured, drawn anew each round; None is all of them."""
    first: int = 0
    """The index of the federation's first client among all clients, if it holds only some of them."""
    selection: ClientSelection = "uniform"

    def __post_init__(self) -> None:
        _ = self.participants  # refuses impossible numbers

    @property
    def participants(self) -> int:
        """Clients in each round."""
        clients, asked = len(self.federation), self.clients_per_round
        if asked is None:
            return max(1, round(self.participation * clients))
        if asked > clients:
            raise InputError(
                f"clients_per_round={asked} is more than the {clients} clients of the federation"
            )
        return asked

    @property
    def repeats(self) -> bool:
        """Whether the same clients take the same numbers of steps in every round."""
        return self.participants == len(self.federation) and self.solver.work[0] == self.solver.work[1]

    def plan(self, seeds: list[int], round: int) -> Plan:
        """Who trains in a round under each seed."""
        chosen = [self._choose(seed, round) for seed in seeds]
        client = torch.cat(chosen)
        seed = torch.repeat_interleave(torch.tensor([len(c) for c in chosen]))
        size = self.federation.train[client]
        drawn, order, dropout = _hashes((EPOCHS, ORDER, DROPOUT), seeds, round, seed, self.first + client)
        per_epoch = (size + self.solver.batch_size - 1) // self.solver.batch_size
        steps = self.solver.local_steps(self.solver.drawn_work(drawn), per_epoch)
        first = self.solver.personal_steps(steps, per_epoch)
        return Plan(seed, client, size, -(-steps // per_epoch), steps, first, order, dropout)

    def with_keys(self, plan: Plan, seeds: list[int], round: int) -> Plan:
        """The plan of another round in which the same clients take the same steps."""
        order, dropout = _hashes((ORDER, DROPOUT), seeds, round, plan.seed, self.first + plan.client)
        return plan._replace(order_key=order, dropout_key=dropout)

    def training(self, plan: Plan, entries: Tensor, *, bring: bool = False) -> Selection:
        """The training samples of some entries; `bring` if only their clients' samples are on the device."""
        steps, epochs = plan.steps[entries], plan.epochs[entries]
        return self._selection(plan, entries, plan.size[entries], steps, epochs, bring)

    def probing(self, plan: Plan, entries: Tensor, batch_size: int, *, bring: bool = False) -> Selection:
        """The probe samples of some entries, in batches of the given size."""
        size = self.probed(plan.size[entries])
        return self._selection(plan, entries, size, -(-size // batch_size), None, bring)

    def probed(self, size: Tensor) -> Tensor:
        """The number of probe samples of a client of this size."""
        return size if self.probe_samples is None else size.clamp(max=self.probe_samples)

    def _selection(
        self, plan: Plan, entries: Tensor, size: Tensor, steps: Tensor, epochs: Tensor | None, bring: bool
    ) -> Selection:
        """The selection for entries that use all their samples several times, or some of them once."""
        device, client, taken = self.federation.device, plan.client[entries], None
        if epochs is None:
            length, owner, epoch = size, entries, torch.zeros_like(entries)
            if self.probe_samples is not None:  # the first samples of the first epoch
                whole = plan.size[entries]
                segment, place = segments(size.to(device), int(size.sum()))
                taken = (whole.cumsum(0) - whole).to(device)[segment] + place
        else:
            length = size * epochs
            which, epoch = segments(epochs)
            owner = entries[which]
        whole = plan.size[owner]
        segment, place = segments(whole.to(device), int(whole.sum()))
        start, brought = self.federation.start[plan.client[owner]], None
        if bring:  # they will be stored one client after another
            brought, which = torch.unique(plan.client[owner], return_inverse=True)
            sizes = self.federation.train[brought]
            start = (sizes.cumsum(0) - sizes)[which]
        return Selection(
            entry=entries.to(device),
            client=client.to(device),
            size=size.to(device),
            steps=steps.to(device),
            base=(length.cumsum(0) - length).to(device),
            first=start.to(device)[segment],
            epoch_entry=owner.to(device),
            epoch=epoch.to(device),
            segment=segment,
            place=place,
            longest=int(whole.max()) if len(whole) else 0,
            shuffled=epochs is not None or taken is not None,
            taken=taken,
            brought=brought,
        )

    def _choose(self, seed: int, round: int) -> Tensor:
        clients = torch.arange(len(self.federation))
        if self.participants == len(clients):
            return clients
        weights = self.federation.train.double() if self.selection == "size" else None
        return draw(mix(fold(PARTICIPATE, seed, round), clients), self.participants, weights)


def _hashes(
    uses: tuple[int, ...], seeds: list[int], round: int, seed: Tensor, client: Tensor
) -> tuple[Tensor, ...]:
    """For each use, a hash of (use, seed, round, client) of every entry."""
    keys = torch.tensor([[fold(use, s, round) for s in seeds] for use in uses])
    return tuple(mix(keys[:, seed], client).unbind())


def places(selection: Selection, entry: Tensor, step: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """The positions, among the ordered samples, of N batches (N, B), each of an entry and step; and padding.

    If a batch has no more samples, or the entry no more steps, it is padded with its own first sample:
    another client's must not be used, not even masked. There padding is −1, elsewhere 0.
    """
    size, base = selection.size[entry, None], selection.base[entry, None]
    steps, step = selection.steps[entry, None], step[:, None]
    per_epoch = (size + batch_size - 1) // batch_size
    epoch = step // per_epoch
    place = (step - epoch * per_epoch) * batch_size + torch.arange(batch_size, device=step.device)
    inside = (place < size) & (step < steps)
    return torch.where(inside, base + epoch * size + place, base), inside.long() - 1
