"""What clients keep between rounds: vectors, models, parts of these, and what a codec left out of updates."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.codecs import Codec
from fairwind.contract import Change, MemoryAlgorithm, PersonalAlgorithm
from fairwind.engine import tuning
from fairwind.engine.executor import Run
from fairwind.engine.layout import Division, Layout
from fairwind.engine.ranks import Ranks

COUNTER = "num_batches_tracked"  # ends the name of PyTorch's number of batches in statistics


class Memories:
    """Vectors (K, ·) of the clients of those runs that keep any."""

    def __init__(self, first: Mapping[int, Tensor], clients: int, device: torch.device, *, on_host: bool):
        """From the first vector of all clients, by run; it computes on the device."""
        self.device = device
        place = torch.device("cpu") if on_host else device
        self.values = {r: vector.to(place).expand(clients, -1).clone() for r, vector in first.items()}

    def take(self, r: int, clients: Tensor) -> Tensor:
        """The vectors of some clients (n, P), on the computing device."""
        found = self.values[r]
        return found.index_select(0, clients.to(found.device)).to(self.device)

    def add(self, r: int, clients: Tensor, change: Tensor) -> None:
        """Adds to the vectors of some clients."""
        found = self.values[r]
        found.index_add_(0, clients.to(found.device), change.to(found.device))

    def put(self, r: int, clients: Tensor, new: Tensor) -> None:
        """Replaces the vectors of some clients."""
        found = self.values[r]
        found.index_copy_(0, clients.to(found.device), new.to(found.device))

    def share(self, r: int, clients: Tensor, mine: Tensor, ranks: Ranks) -> None:
        """Takes over the vectors of clients (n,) that trained on other ranks; `mine` (n,) trained here."""
        at_once = max(1, tuning.MAX_EXCHANGED_NUMBERS // self.values[r].shape[1])
        for some, own in zip(torch.split(clients, at_once), torch.split(mine, at_once), strict=True):
            rows = self.take(r, some).masked_fill_(~own[:, None].to(self.device), 0)
            self.put(r, some, ranks.sum(rows)[0])


def first_vectors(runs: Sequence[Run], x: Tensor, own: Tensor) -> dict[int, Tensor]:
    """By run, what its algorithm's clients keep at first: zeros (P,), or a whole model.

    From models x (R, P) and the part that is a client's own at first, (R, ·).
    """
    found = {}
    for r, run in enumerate(runs):
        if isinstance(run.algorithm, MemoryAlgorithm):
            found[r] = torch.zeros_like(x[r])
        elif isinstance(run.algorithm, PersonalAlgorithm):
            found[r] = torch.cat([x[r], own[r]])
    return found


class OwnParts:
    """What of the model is not in the vector x that algorithms see, for every run.

    A client's own part is what it keeps, followed by statistics that are averaged by sample counts.
    """

    def __init__(self, division: Division, first: Tensor, sizes: Tensor, *, on_host: bool):
        """From the own parts at first (R, ·); `sizes` (K,) are the clients' training samples."""
        self.width, self.kept, self.device = first.shape[1], division.kept_numbers, first.device
        device = self.device
        keeping = {r: own[: self.kept] for r, own in enumerate(first)} if self.kept else {}
        self.start = first
        self.memories = Memories(keeping, len(sizes), device, on_host=on_host)
        self.sizes = sizes.to(device)
        self.trained = torch.zeros(len(first), len(sizes), dtype=torch.bool, device=device)
        self.averages = first[:, self.kept :].clone()  # (R, ·)
        self.counters = counters(division.own.part(slice(division.kept, None))).to(device)
        self.recomputed = division.recomputes
        self._forget()

    def _forget(self) -> None:
        """Begins the sums of a round."""
        self.total = torch.zeros_like(self.averages, dtype=torch.float64)
        self.weight = torch.zeros(len(self.averages), dtype=torch.float64, device=self.averages.device)

    def take(self, r: int, clients: Tensor) -> Tensor:
        """The own parts of some clients (n, ·), from which they train and probe."""
        averages = self.averages[r].expand(len(clients), -1)
        return torch.cat([self.memories.take(r, clients), averages], 1) if self.kept else averages

    def put(self, r: int, clients: Tensor, new: Tensor, usable: Tensor) -> None:
        """Takes over the own parts of some clients (n, ·) after training, if usable and finite."""
        usable = usable & torch.isfinite(new).all(1)
        clients, new = clients[usable], new[usable]
        self.trained[r, clients] = True
        if self.kept:
            self.memories.put(r, clients, new[:, : self.kept])
        if self.averages.shape[1] and not self.recomputed:
            weights = self.sizes[clients].double()
            self.total[r] += weights @ new[:, self.kept :].double()
            self.weight[r] += weights.sum()

    def share(self, r: int, clients: Tensor, mine: Tensor, ranks: Ranks) -> None:
        """Takes over what clients (n,) of other ranks keep, and their sums; `mine` (n,) trained here."""
        if self.kept:
            self.memories.share(r, clients, mine, ranks)
        (trained,) = ranks.sum((self.trained[r, clients] & mine).double())
        self.trained[r, clients] = trained > 0
        self.total[r], self.weight[r] = ranks.sum(self.total[r], self.weight[r])

    def average(self) -> None:
        """Ends a round: the statistics become their clients' mean."""
        if self.averages.shape[1] and not self.recomputed:
            mean = mean_statistics(self.total, self.weight[:, None], self.counters).to(self.averages.dtype)
            self.averages.copy_(torch.where(self.weight[:, None] > 0, mean, self.averages))
            self._forget()

    def of_clients(self, r: int, clients: Tensor) -> Tensor:
        """What some clients keep (n, ·), to be evaluated: the clients' mean for those that never trained."""
        kept = self.memories.take(r, clients)
        known = self.trained[r, clients.to(self.device)]
        if known.all():
            return kept
        return torch.where(known[:, None], kept, self.mean(r))

    def mean(self, r: int) -> Tensor:
        """The mean, by sample counts, of what clients keep that trained; else what all began from."""
        values = self.memories.values[r]
        weights = torch.where(self.trained[r], self.sizes, 0).double().to(values.device)
        if not weights.any():
            return values[0].to(self.trained.device)
        return (weights @ values.double() / weights.sum()).to(values.dtype).to(self.trained.device)

    def load(self, own: Tensor) -> None:
        """Begins a round from an own part (·,), where there is one run of one client."""
        for kept in self.memories.values.values():
            kept.copy_(own[None, : self.kept])
        self.averages.copy_(own[None, self.kept :])
        self.trained.fill_(False)
        self._forget()

    @property
    def finite(self) -> bool:
        """Whether all own parts after a round could be taken over, if there are any."""
        return not self.width or bool(self.trained.all())

    def statistics(self) -> Tensor:
        """The averaged statistics (·,) of a round's clients, or those before; where there is one run."""
        return self.total[0] / self.weight[0] if self.weight[0] > 0 else self.averages[0]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of them."""
        found = {f"own.{r}": value for r, value in self.memories.values.items()}
        found |= {"trained": self.trained} if self.kept else {}
        return found | ({"averages": self.averages} if self.averages.shape[1] else {})


def counters(layout: Layout) -> Tensor:
    """Which of a layout's numbers (·,) count batches."""
    parts = zip(layout.names, layout.sizes, strict=True)
    whole = [torch.full((size,), name.endswith(COUNTER)) for name, size in parts]
    return torch.cat([torch.zeros(0, dtype=torch.bool), *whole])


def mean_statistics(total: Tensor, weight: Tensor, counters: Tensor) -> Tensor:
    """The mean of statistics, given sums over clients and of their weights; numbers of batches are whole."""
    mean = total / weight.clamp(min=1)
    return torch.where(counters, mean.round(), mean)


class Compression(NamedTuple):
    """How the updates of all runs are sent, and what was left out of those so far."""

    codec: Codec
    errors: Memories

    def sent(self, r: int, clients: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
        """What arrives of updates (n, P), and what is left out of them."""
        whole = updates + self.errors.take(r, clients)
        arrived = self.codec.rounded(whole)
        return arrived, whole.sub_(arrived)

    def keep(self, r: int, clients: Tensor, usable: Tensor, left_out: Tensor) -> None:
        """Stores what is left out, of the clients (n,) that count."""
        before = self.errors.take(r, clients)
        self.errors.put(r, clients, torch.where(usable[:, None], left_out, before))


def changed(
    change: Change, memory: Callable[[], Tensor], shared: Tensor | float, update: Tensor, usable: Tensor
) -> Tensor:
    """By how much memories (n, P) change, given the server's u (P,) and updates δ (n, P).

    The updates are overwritten. Memories are only read if the change depends on them.
    """
    rows = len(update)
    if isinstance(change.update, Tensor):
        found = update.mul_(change.update.to(update.dtype).expand(rows)[:, None])
    else:
        found = update.mul_(change.update) if change.update else update.zero_()
    terms: list[tuple[float | Tensor, Callable[[], Tensor | float]]]
    terms = [(change.own, memory), (change.shared, lambda: shared)]
    for number, vectors in terms:
        if isinstance(number, Tensor):
            each = number.to(found.dtype).expand(rows)[:, None]
            found.addcmul_(each, torch.as_tensor(vectors(), dtype=found.dtype, device=found.device))
        elif number:
            found.add_(vectors(), alpha=number)
    return found.masked_fill_(~usable[:, None], 0)
