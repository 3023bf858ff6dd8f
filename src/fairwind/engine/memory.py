"""What clients keep between rounds: a vector, or a personal model; and what a codec left out of updates."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.codecs import Codec
from fairwind.contract import Change, MemoryAlgorithm, PersonalAlgorithm
from fairwind.engine import tuning
from fairwind.engine.executor import Run
from fairwind.engine.ranks import Ranks


def first_vectors(runs: Sequence[Run], x: Tensor) -> dict[int, Tensor]:
    """What clients keep at first (P,), of those runs that keep anything: from models x (R, P)."""
    found = {}
    for r, run in enumerate(runs):
        if isinstance(run.algorithm, PersonalAlgorithm):
            found[r] = x[r]
        elif isinstance(run.algorithm, MemoryAlgorithm):
            found[r] = torch.zeros_like(x[r])
    return found


class Memories:
    """Vectors (K, P) of the clients of some runs."""

    def __init__(self, first: Mapping[int, Tensor], clients: int, device: torch.device, *, on_host: bool):
        """Each client of a run begins with the vector (P,) given."""
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
