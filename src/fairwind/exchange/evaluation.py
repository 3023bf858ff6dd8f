"""Clients' evaluations in a real federation, round by round, as they report them."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from fairwind.contract import AnyAlgorithm
from fairwind.engine.evaluation import EvaluatedModel, views_of
from fairwind.engine.executor import Run
from fairwind.engine.losses.loss import cross_entropy
from fairwind.engine.losses.pytorch import as_module
from fairwind.engine.plain import PlainModel
from fairwind.exchange.bounds import FEWEST, UNBOUNDED, Bounds
from fairwind.exchange.message import RefusedError, Tag
from fairwind.metrics import finite, history_line, model_metrics, no_metrics
from fairwind.robust.limits import ceiling
from fairwind.runs.schema import HistoryLine, ModelMetrics
from fairwind.scores import Score, as_scores
from fairwind.task import Task

ROUNDING = 1e-4  # by which a score may be beyond its limits
NOT_NEGATIVE = nn.CrossEntropyLoss, nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss
LIMIT = 200_000  # scores that are kept of earlier rounds; beyond, every second round is dropped, and so on


class Judged(NamedTuple):
    """A client's loss and scores on its test samples; NaN without test samples."""

    size: int
    train_size: int
    loss: float
    scores: dict[str, float]  # by name; accuracies in percent
    further: "Judged | None" = None  # of a further model: the client's own, or an averaged one
    tag: Tag | None = None  # none from an evaluation of one's own


class Record(TypedDict):
    """All evaluations, as a checkpoint holds them."""

    clients: list[str]
    sizes: list[tuple[int, int]]  # of `clients`: test and training samples
    rounds: list[int]
    said: list[list[float | None]]  # by round, the main score of `clients`
    last: dict[str, tuple[int, int, float | None, dict[str, float | None]]]  # as `Judged`
    history: list[HistoryLine]
    further: NotRequired["Record"]


def scores_of(task: Task, module: nn.Module) -> tuple[Score, ...]:
    """The scores of a task with this model: those asked for, or the one that follows from its loss."""
    if task.score is not None:
        return as_scores(task.score)
    dtype = next((p.dtype for p in module.parameters() if p.requires_grad), torch.float32)
    federation = task.federation.narrowed(dtype)
    return PlainModel.fitted(module, federation, task.loss, sharing=task.sharing).judges


def lowest_loss(task: Task) -> float:
    """The least loss that a client may have: zero of the usual ones; others may be negative."""
    module = as_module(task.loss)
    weight = getattr(module, "weight", None)
    usual = task.loss is cross_entropy or type(module) in NOT_NEGATIVE
    return 0.0 if usual and (weight is None or bool((weight >= 0).all())) else -math.inf


def check_judged(judged: Judged, scores: Sequence[Score], lowest: float = -math.inf) -> Judged:
    """The same with these scores alone; impossible values are refused, such as losses below the `lowest`."""
    for size in (judged.size, judged.train_size):
        if not 0 <= size < 2**53 or size != int(size):
            raise RefusedError(f"it tells of {size:.3g} samples")
    if judged.size and not math.isfinite(judged.loss):
        raise RefusedError(f"its loss is {judged.loss}, which is not finite")
    if judged.size and judged.loss < lowest - ROUNDING:
        raise RefusedError(f"its loss is {judged.loss:.3g}, which is negative")
    for score in scores:
        if score.name not in judged.scores:
            raise RefusedError(f"it does not tell its {score.name}")
        value = judged.scores[score.name]
        low, high = (lowest, math.inf) if score.is_loss else score.limits
        undefined = math.isnan(value) and score.kind != "accuracy"
        if judged.size and math.isinf(value):
            raise RefusedError(f"its {score.name} is {value}, which is not finite")
        if judged.size and not (undefined or low - ROUNDING <= value <= high + ROUNDING):
            what = "no percentage" if score.kind == "accuracy" else f"not from {low:g} to {high:g}"
            raise RefusedError(f"its {score.name} is {value:.3g}, which is {what}")
    further = None if judged.further is None else check_judged(judged.further, scores, lowest)
    known = {score.name: judged.scores[score.name] for score in scores}
    return Judged(int(judged.size), int(judged.train_size), judged.loss, known, further, judged.tag)


def within_bounds(
    judged: Mapping[str, Judged], scores: Sequence[Score], bounds: Bounds
) -> tuple[dict[str, Judged], dict[str, list[str]]]:
    """Evaluations, cut to what a single client may claim; and what was cut, by client, in words.

    Sizes, which weigh, are bounded as in training: by the median of the others, and by a share of all. A
    loss, and a score where lower is better, is at most so many times the median of the others, and as much
    below zero: some losses are negative.
    """
    found, notes = dict(judged), dict[str, list[str]]()

    def cut(what: str, values: dict[str, float], tops: dict[str, float], change: Change) -> None:
        for client, top in tops.items():
            if abs(value := values[client]) > top:
                top = math.copysign(top, value)
                found[client] = change(found[client], top)
                notes.setdefault(client, []).append(f"{what} of {value:.3g} taken as {top:.3g}")

    sizes = {client: float(told.size) for client, told in judged.items()}
    cut("a number of test samples", sizes, _size_limits(sizes, bounds), _with_size)
    sizes = {client: float(told.train_size) for client, told in judged.items()}
    cut("a number of training samples", sizes, _size_limits(sizes, bounds), _with_train_size)
    tested = {client: told for client, told in judged.items() if told.size}
    losses = {client: told.loss for client, told in tested.items()}
    cut("a loss", losses, _times_median(losses, bounds.loss), lambda told, top: told._replace(loss=top))
    for name in (score.name for score in scores if score.kind == "lower"):
        values = {client: told.scores[name] for client, told in tested.items()}
        cut(f"a score {name}", values, _times_median(values, bounds.loss), partial(_with_score, name))
    return found, notes


Change = Callable[[Judged, float], Judged]


def _with_size(judged: Judged, size: float) -> Judged:
    return judged._replace(size=int(size))


def _with_train_size(judged: Judged, size: float) -> Judged:
    return judged._replace(train_size=int(size))


def _with_score(name: str, judged: Judged, value: float) -> Judged:
    return judged._replace(scores={**judged.scores, name: value})


def _size_limits(sizes: Mapping[str, float], bounds: Bounds) -> dict[str, float]:
    """What each size is at most: so many times the median of the others, and the share of all."""
    sizes = {client: size for client, size in sizes.items() if size > 0}
    tops = _times_median(sizes, bounds.size)
    cut = [min(size, tops.get(client, math.inf)) for client, size in sizes.items()]
    top = ceiling(cut, bounds.share, together=math.inf)
    limits = {client: min(tops.get(client, math.inf), top) for client in sizes}
    return {client: float(max(1, int(limit))) for client, limit in limits.items() if limit < math.inf}


def _times_median(values: Mapping[str, float], factor: float) -> dict[str, float]:
    """For each of enough clients, the factor times the median of the others, where that is not zero."""
    known = {client: abs(value) for client, value in values.items() if not math.isnan(value)}
    if len(known) <= FEWEST or math.isinf(factor):
        return {}
    ascending, others = sorted(known, key=known.__getitem__), len(known) - 1
    found = {}
    for place, client in enumerate(ascending):
        middle = ((others - 1) // 2, others // 2)
        median = sum(known[ascending[k + (k >= place)]] for k in middle) / 2
        if median > 0:
            found[client] = factor * median
    return found


class Evaluations:
    """The evaluations of a run's models."""

    def __init__(
        self,
        scores: Sequence[Score],
        label: str,
        seed: int,
        algorithm: AnyAlgorithm | None = None,
        *,
        bounds: Bounds = UNBOUNDED,
        lowest: float = -math.inf,
    ):
        """An algorithm with a further model to evaluate has a second line in the history, by its label.

        `lowest` is the least loss that a client may have.
        """
        self.lowest = lowest
        self.scores, self.label, self.seed = tuple(scores), label, seed
        self.notes: dict[str, list[str]] = {}  # by client: what was cut in the last evaluation
        self.views = [EvaluatedModel(label, seed, 0)]
        if algorithm is not None:
            self.views = views_of([Run(label, algorithm, seed)])
        self.further = Evaluations(scores, self.views[1].label, seed) if len(self.views) > 1 else None
        self.keep_within(bounds)
        self.clients: list[str] = []  # in the order in which they were first heard
        self.sizes: dict[str, tuple[int, int]] = {}  # test and training samples, as last said
        self.rounds: list[int] = []
        self.said: list[dict[str, float]] = []  # by evaluated round: clients' main scores
        self.last: dict[str, Judged] = {}  # in the last evaluation
        self.history: list[HistoryLine] = []

    def checked(self, judged: Judged) -> Judged:
        """A client's evaluation without what nobody asked for; impossible values are refused."""
        return check_judged(judged, self.scores, self.lowest)

    def keep_within(self, bounds: Bounds) -> None:
        """Takes these bounds on what a single client may claim from now on."""
        self.bounds = bounds
        if self.further is not None:
            self.further.keep_within(bounds)

    def lines(self, kind: str) -> list[str]:
        """What was cut in the last evaluation, a line for each client; `kind` is what clients are called."""
        found = [f"{kind} {client} is not believed: {', '.join(what)}" for client, what in self.notes.items()]
        return found + (self.further.lines(kind) if self.further is not None else [])

    def add(self, round: int, judged: Mapping[str, Judged], more: Mapping[str, float]) -> HistoryLine:
        """The fairness of a round's model, with further numbers of the round, as a line of the history."""
        line = self._line(round, judged, more)
        self.history.append(line)
        if self.further is not None:
            own = {client: told.further or self._nothing for client, told in judged.items()}
            self.history.append(self.further._line(round, own, more))
        return line

    @property
    def _nothing(self) -> Judged:
        return Judged(0, 0, math.nan, {score.name: math.nan for score in self.scores})

    def are_of(self, round: int) -> bool:
        """Whether the last evaluation is of the model after so many rounds."""
        return self.rounds[-1:] == [round]

    @property
    def newest(self) -> list[HistoryLine]:
        """The lines of the last evaluation."""
        return self.history[-len(self.views) :]

    def _line(self, round: int, judged: Mapping[str, Judged], more: Mapping[str, float]) -> HistoryLine:
        judged, self.notes = within_bounds(judged, self.scores, self.bounds)
        self.clients += [client for client in judged if client not in self.sizes]
        self.sizes |= {client: (told.size, told.train_size) for client, told in judged.items()}
        self.last = dict(judged)
        self.rounds.append(round)
        self.said.append({client: told.scores[self.scores[0].name] for client, told in judged.items()})
        while len(self.rounds) > 2 and len(self.rounds) * len(self.clients) > LIMIT:
            self.rounds, self.said = self.rounds[::-2][::-1], self.said[::-2][::-1]
        metrics = {score.name: self._metrics(score) for score in self.scores}
        return history_line(self.label, self.seed, round, metrics, more)

    def _metrics(self, score: Score) -> ModelMetrics:
        tested = [judged for judged in self.last.values() if judged.size]
        if not tested:
            return no_metrics(score.kind)
        scored = [judged.scores[score.name] for judged in tested]
        losses, sizes = [judged.loss for judged in tested], [judged.size for judged in tested]
        return model_metrics(scored, losses, sizes, score.kind)

    def of_clients(self) -> dict[str, Tensor]:
        """Every client's numbers, as a comparison keeps them; NaN where a client said nothing."""
        last = [self.last.get(client, self._nothing) for client in self.clients]
        curves = [[said.get(client, math.nan) for client in self.clients] for said in self.said]
        sizes = torch.tensor([self.sizes[client] for client in self.clients]).view(-1, 2)
        numbers = {
            "score": torch.tensor([[judged.scores[self.scores[0].name] for judged in last]]),
            "loss": torch.tensor([[judged.loss for judged in last]]),
            "curves": torch.tensor(curves).view(len(curves), 1, len(self.clients)),
            "train_size": sizes[:, 1].contiguous(),
            "test_size": sizes[:, 0].contiguous(),
        }
        for score in self.scores[1:]:
            numbers[f"score.{score.name}"] = torch.tensor([[judged.scores[score.name] for judged in last]])
        if self.further is not None:  # rows of runs, but for the sizes
            others = self.further.of_clients()
            for name in numbers.keys() - {"train_size", "test_size"}:
                numbers[name] = torch.cat([numbers[name], others[name]], int(name == "curves"))
        return numbers

    def record(self) -> Record:
        """Everything, as JSON."""
        record: Record = {
            "clients": self.clients,
            "sizes": [self.sizes[client] for client in self.clients],
            "rounds": self.rounds,
            "said": [[finite(said).get(c, None) for c in self.clients] for said in self.said],
            "last": {
                client: (judged.size, judged.train_size, _known(judged.loss), finite(judged.scores))
                for client, judged in self.last.items()
            },
            "history": self.history,
        }
        if self.further is not None:
            record["further"] = self.further.record()
        return record

    def restore(self, record: Record) -> None:
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
        if self.further is not None:
            self.further.restore(record["further"])


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value
