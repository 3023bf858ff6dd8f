"""A client of a real federation, which trains on its own data exactly as in the simulator."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import contribute, usable_clients
from fairwind.contract import AnyAlgorithm, Report
from fairwind.data.federation import Federation
from fairwind.data.samples import take
from fairwind.engine.builder import build_engine
from fairwind.engine.checks import build, check_runs
from fairwind.engine.evaluation import client_scores, split, training_losses
from fairwind.engine.executor import Run
from fairwind.engine.machine import matmul_precision
from fairwind.engine.ranks import ALONE
from fairwind.engine.settings import Settings
from fairwind.errors import InputError, python_numbers, whole
from fairwind.exchange.evaluation import Judged
from fairwind.exchange.message import (
    FIRST,
    MEASURED,
    RefusedError,
    Reply,
    Sends,
    check_type,
    from_report,
    report_form,
    sums_form,
)
from fairwind.task import Task


class Trained(NamedTuple):
    """The result of a client's round."""

    reply: Reply
    first_loss: float | None  # to be remembered for later rounds


class LocalClient:
    """A client that trains from the weights it is sent."""

    def __init__(
        self,
        task: Task,
        algorithm: AnyAlgorithm,
        client: int | None = None,
        *,
        number: int | None = None,
        seed: int = 0,
        settings: Settings | None = None,
        sends: Sends = "report",
    ):
        """Of the task's clients the one given, or the only one.

        Batches are drawn by the `number` of the client among all, which is `client` unless given.
        """
        client, number, seed = python_numbers((client, number, seed))
        self.algorithm, self.sends, self.seed = check_type(algorithm), sends, seed
        if client is None and len(task.federation) > 1:
            raise InputError(f"the task has {len(task.federation)} clients: say which of them this is")
        if client is not None and not 0 <= client < len(task.federation):
            raise InputError(f"client {client} is not one of the task's {len(task.federation)}")
        self.number = number if number is not None else client or 0
        whole(0, number=self.number)
        settings = settings or Settings(solver=task.solver, workers=1)
        if settings.compile != "off":  # it pays in a simulation, which trains many clients at once
            settings = replace(settings, compile="off")
        settings = replace(settings, participation=1.0, clients_per_round=None)
        runs = [Run(algorithm.name, algorithm, seed)]
        check_runs(runs, settings, ALONE)
        self.engine = build_engine(
            {seed: build(task.model, seed)},
            only(task.federation, client or 0),
            runs,
            settings,
            loss=task.loss,
            score=task.score,
            augment=task.augment,
            first_client=self.number,
        )
        self.settings, self.federation = self.engine.settings, self.engine.federation
        self.executor, self.plain = self.engine.executor, self.engine.plain
        self.layout, self.scores = self.plain.layout, self.plain.judges
        self.form = report_form(self.layout, algorithm.probe)
        self.sums_form = sums_form(self.layout, self.algorithm)

    def start(self) -> Tensor:
        """The model that training begins from (P,)."""
        return self.plain.start

    def train(
        self,
        weights: Mapping[str, Any],
        round: int,
        *,
        first_loss: float | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> Trained:
        """Trains in a round, counted from 0, from weights by name.

        `first_loss` is what the client remembers, or was told by the server; without it, it is measured at
        these weights. `shared` is what the server adds to every step, for algorithms that have it.
        """
        x = self._received(weights)
        u = self._received(shared) if shared is not None else torch.zeros_like(x)
        if first_loss is None and self.algorithm.probe != "none":
            first_loss = self.loss(weights)
        known = torch.nan if first_loss is None else first_loss
        loss0 = torch.full((1, 1), known, dtype=torch.float64, device=x.device)
        with self.engine.threads(self.executor.threads), matmul_precision(self.settings.precision, x.device):
            self.executor.prepare(round)
            ((_, _, report, update),) = self.executor.updates(x[None], loss0, lambda run: u)
        steps = torch.where(report.steps.isnan(), 0, report.steps)  # some solvers do not have them
        told = steps, *(getattr(report, name) for name in MEASURED[self.algorithm.probe])
        if not usable_clients(self.algorithm, report, *told)[0]:
            raise RefusedError(
                "its training gave numbers that are not finite: a smaller learning rate may help"
            )
        return Trained(self._reply(Report(*(number[0] for number in report)), update[0].double()), first_loss)

    def _reply(self, report: Report, delta: Tensor) -> Reply:
        if self.sends == "report":
            return Reply(self.form.arrays(delta), from_report(report, self.form))
        part, usable = contribute(self.algorithm, report)
        if not usable:
            raise RefusedError("its contribution is not finite")
        numbers = {name: float(value) for name, value in part.sums._asdict().items()}
        if self.algorithm.probe != "none":
            numbers |= dict(zip(FIRST, (float(report.loss0), 1.0), strict=True))
        form = self.sums_form
        arrays = form.arrays(part.coef * delta)
        form.vector(arrays)  # what does not fit into float32 is refused here already
        return Reply(arrays, numbers)

    def loss(self, weights: Mapping[str, Any]) -> float:
        """The loss of the training samples."""
        with self._judging():
            return float(training_losses(self.engine.scorer, self.federation, self._received(weights)[None]))

    def evaluate(self, weights: Mapping[str, Any]) -> Judged:
        """Loss and scores of these weights on the client's test samples."""
        x, test = self._received(weights)[None], split(self.federation, "test")
        with self._judging():
            loss, *found = map(float, client_scores(self.engine.scorer, self.federation, x, *test))
        names = [score.name for score in self.scores]
        sizes = int(self.federation.test[0]), int(self.federation.train[0])
        return Judged(*sizes, loss, dict(zip(names, found, strict=True)))

    @contextmanager
    def _judging(self) -> Iterator[None]:
        with self.engine.threads(1), matmul_precision(self.settings.precision, self.plain.start.device):
            yield

    def _received(self, weights: Mapping[str, Any]) -> Tensor:
        return self.form.vector(weights)[0].to(self.plain.start)


def only(federation: Federation, client: int) -> Federation:
    """The federation that contains only this client."""
    begin, own = int(federation.start[client]), slice(client, client + 1)
    samples = slice(begin, begin + int(federation.sizes[client]))
    return replace(
        federation,
        inputs=take(federation.inputs, samples),
        targets=take(federation.targets, samples),
        start=torch.zeros_like(federation.start[own]),
        train=federation.train[own],
        test=federation.test[own],
        validation=federation.validation[own],
        names=federation.names[own],
    )
