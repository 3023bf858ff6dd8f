"""What clients keep between rounds: a vector, or a personal model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairwind.contract import Change, MemoryAlgorithm, PersonalAlgorithm
from fairwind.engine import tuning
from fairwind.engine.executor import Run
from fairwind.engine.ranks import Ranks


class Memories:
    """Vectors (K, P) of the clients of those runs that keep any."""

    def __init__(self, runs: Sequence[Run], x: Tensor, clients: int, *, on_host: bool):
        """From models x (R, P)."""
        keeping = [
            r for r, run in enumerate(runs) if isinstance(run.algorithm, MemoryAlgorithm | PersonalAlgorithm)
        ]
        self.device = x.device
        place = torch.device("cpu") if on_host else x.device
        self.values: dict[int, Tensor] = {}
        for r in keeping:
            own = isinstance(runs[r].algorithm, PersonalAlgorithm)  # starts at x_0
            first = x[r].to(place) if own else x.new_zeros((), device=place)
            self.values[r] = first.expand(clients, x.shape[1]).clone()

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
