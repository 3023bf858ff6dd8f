"""Clients' evaluations in a real federation, round by round, as they report them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairwind.data.samples import cast
from fairwind.engine.plain import PlainModel
from fairwind.exchange.message import RefusedError
from fairwind.metrics import fairness, finite
from fairwind.scores import Score, as_scores
from fairwind.task import Task

LIMIT = 200_000  # scores that are kept of earlier rounds; beyond, every second round is dropped, and so on


class Judged(NamedTuple):
    """A client's loss and scores on its test samples; NaN without test samples."""

    size: int
    train_size: int
    loss: float
    scores: dict[str, float]  # by name; accuracies in percent


def scores_of(task: Task, module: nn.Module) -> tuple[Score, ...]:
    """The scores of a task with this model: those asked for, or the one that follows from its loss."""
    if task.score is not None:
        return as_scores(task.score)
    dtype = next((p.dtype for p in module.parameters() if p.requires_grad), torch.float32)
    federation = replace(task.federation, inputs=cast(task.federation.inputs, dtype))
    return PlainModel.fitted(module, federation, task.loss).judges


def check_judged(judged: Judged, scores: Sequence[Score]) -> Judged:
    """Refuses impossible values."""
    for size in (judged.size, judged.train_size):
        if not 0 <= size < 2**53:
            raise RefusedError(f"it tells of {size:.3g} samples")
    for score in scores:
        if score.name not in judged.scores:
            raise RefusedError(f"it does not tell its {score.name}")
        value = judged.scores[score.name]
        if judged.size and score.kind == "accuracy" and not 0 <= value <= 100:
            raise RefusedError(f"its {score.name} is {value:.3g}, which is no percentage")
        if judged.size and score.kind == "accuracy" and math.isnan(judged.loss):
            raise RefusedError("its loss is NaN")
    return judged


class Evaluations:
    """The evaluations of a run's models."""

    def __init__(self, scores: Sequence[Score], label: str, seed: int):
        self.scores, self.label, self.seed = tuple(scores), label, seed
        self.clients: list[str] = []  # in the order in which they were first heard
        self.sizes: dict[str, tuple[int, int]] = {}  # test and training samples, as last said
        self.rounds: list[int] = []
        self.said: list[dict[str, float]] = []  # by evaluated round: clients' main scores
        self.last: dict[str, Judged] = {}  # in the last evaluation
        self.history: list[dict[str, Any]] = []

    def add(self, round: int, judged: Mapping[str, Judged], more: Mapping[str, float]) -> dict[str, Any]:
        """The fairness of a round's model, with further numbers of the round, as a line of the history."""
        self.clients += [client for client in judged if client not in self.sizes]
        self.sizes |= {client: (each.size, each.train_size) for client, each in judged.items()}
        self.last = dict(judged)
        self.rounds.append(round)
        self.said.append({client: each.scores[self.scores[0].name] for client, each in judged.items()})
        while len(self.rounds) > 2 and len(self.rounds) * len(self.clients) > LIMIT:
            self.rounds, self.said = self.rounds[::-2][::-1], self.said[::-2][::-1]
        found = [self._fairness(score) for score in self.scores]
        line: dict[str, Any] = {"algorithm": self.label, "seed": self.seed, "round": round, **found[0]}
        line |= {name: value for name, value in finite(more).items() if name not in line}
        if self.scores[1:]:
            line["scores"] = {s.name: each for s, each in zip(self.scores[1:], found[1:], strict=True)}
        self.history.append(line)
        return line

    def _fairness(self, score: Score) -> dict[str, float | None]:
        tested = [each for each in self.last.values() if each.size]
        if not tested:
            return {}
        scored = [each.scores[score.name] for each in tested]
        losses, sizes = [each.loss for each in tested], [each.size for each in tested]
        return finite(fairness(scored, losses, sizes, score.kind))

    def of_clients(self) -> dict[str, Tensor]:
        """Every client's numbers, as a comparison keeps them; NaN where a client said nothing."""
        nobody = Judged(0, 0, math.nan, {score.name: math.nan for score in self.scores})
        last = [self.last.get(client, nobody) for client in self.clients]
        curves = [[said.get(client, math.nan) for client in self.clients] for said in self.said]
        sizes = torch.tensor([self.sizes[client] for client in self.clients]).view(-1, 2)
        found = {
            "score": torch.tensor([[each.scores[self.scores[0].name] for each in last]]),
            "loss": torch.tensor([[each.loss for each in last]]),
            "curves": torch.tensor(curves).view(len(curves), 1, len(self.clients)),
            "train_size": sizes[:, 1].contiguous(),
            "test_size": sizes[:, 0].contiguous(),
        }
        for score in self.scores[1:]:
            found[f"score.{score.name}"] = torch.tensor([[each.scores[score.name] for each in last]])
        return found

    def record(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "clients": self.clients,
            "sizes": [self.sizes[client] for client in self.clients],
            "rounds": self.rounds,
            "said": [[finite(said).get(c, None) for c in self.clients] for said in self.said],
            "last": {
                client: [*each[:2], finite({"": each.loss})[""], finite(each.scores)]
                for client, each in self.last.items()
            },
            "history": self.history,
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restores from a record."""
        self.clients = list(record["clients"])
        self.sizes = {c: (a, b) for c, (a, b) in zip(self.clients, record["sizes"], strict=True)}
        self.rounds, self.history = list(record["rounds"]), list(record["history"])
        self.said = [
            {c: v for c, v in zip(self.clients, said, strict=False) if v is not None}
            for said in record["said"]
        ]
        self.last = {
            client: Judged(size, train, _number(loss), {name: _number(v) for name, v in scores.items()})
            for client, (size, train, loss, scores) in record["last"].items()
        }


def _number(value: float | None) -> float:
    return math.nan if value is None else value
