"""Every client's score at the evaluated rounds."""

from collections.abc import Sequence

import torch
from torch import Tensor

LIMIT = 2**28  # bytes


class Curves:
    """The main score of each client in each run (R, K), round after round.

    If they take too much memory, every second evaluation is dropped, repeatedly.
    """

    def __init__(self, rounds: Sequence[int] = (), values: Tensor | None = None):
        self.rounds = list(rounds)
        self.values = [] if values is None else list(values)

    def add(self, round: int, score: Tensor) -> None:
        self.rounds.append(round)
        self.values.append(score.float())
        while len(self.rounds) > 2 and 4 * score.numel() * len(self.rounds) > LIMIT:
            self.rounds, self.values = self.rounds[::-2][::-1], self.values[::-2][::-1]

    def tensor(self) -> Tensor:
        """(evaluations, R, K)."""
        return torch.stack(self.values) if self.values else torch.empty(0)
