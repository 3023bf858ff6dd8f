"""A client of a real federation, which trains on its own data exactly as in the simulator."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import contribute, usable_clients
from fairwind.contract import (
    Algorithm,
    AnyAlgorithm,
    GradientAlgorithm,
    LocalAlgorithm,
    MemoryAlgorithm,
    PersonalAlgorithm,
    Report,
)
from fairwind.data.federation import Federation
from fairwind.data.samples import take
from fairwind.engine.builder import build_engine
from fairwind.engine.checks import build, check_runs
from fairwind.engine.evaluation import client_scores, split, training_losses
from fairwind.engine.executor import Run
from fairwind.engine.machine import matmul_precision
from fairwind.engine.memory import changed
from fairwind.engine.settings import Settings
from fairwind.errors import InputError, python_numbers, whole
from fairwind.exchange.evaluation import Judged
from fairwind.exchange.kept import Kept
from fairwind.exchange.message import (
    AVERAGED,
    FIRST,
    FIRST_MODEL,
    GRADIENT,
    LOST,
    MEASURED,
    SHARED,
    WEIGHTS,
    Arrays,
    RefusedError,
    Reply,
    Request,
    Sends,
    check_one_sum,
    corrects,
    from_report,
    keeps,
    report_form,
    sums_form,
)
from fairwind.task import Task


class Trained(NamedTuple):
    """The result of a client's round."""

    reply: Reply
    first_loss: float | None  # to be remembered for later rounds
    kept: Arrays | None  # the client's new memory or personal model, to be remembered likewise


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
        if sends == "sums":
            check_one_sum(algorithm, "replies of sums have no more")
        self.algorithm, self.sends, self.seed = algorithm, sends, seed
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
        check_runs(runs, settings)
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
        self.form = report_form(self.layout, algorithm.probe, keeps=keeps(algorithm))
        if isinstance(algorithm, Algorithm | LocalAlgorithm):
            self.sums_form = sums_form(self.layout, algorithm)

    def start(self) -> Tensor:
        """The model that training begins from (P,)."""
        return self.plain.start

    def reply(self, request: Request, kept: Kept) -> tuple[Reply, Kept]:
        """Does what a server asks; returns the reply, and what the client is to keep."""
        kept, vectors = kept.of(request.training), request.vectors
        if request.phase == "gradient":
            return self.measure(vectors[WEIGHTS], request.round)._replace(tag=request.tag), kept
        first_loss = request.first_loss if kept.first_loss is None else kept.first_loss
        trained = self.train(
            vectors[WEIGHTS],
            request.round,
            first_loss=first_loss,
            shared=vectors.get(SHARED),
            gradient=vectors.get(GRADIENT),
            kept=self._recalled(request, kept),
        )
        reply = trained.reply._replace(tag=request.tag)
        if keeps(self.algorithm) and request.kept is not None and request.kept not in kept.vectors:
            reply = reply._replace(numbers={**reply.numbers, LOST: float(request.kept)})
        return reply, kept.after(request, trained.first_loss, trained.kept)

    def judge(self, request: Request, kept: Kept) -> Judged:
        """Evaluates the model that a server sends, and the client's own or the averaged one if there is."""
        weights, further = request.vectors[WEIGHTS], request.vectors.get(AVERAGED)
        if isinstance(self.algorithm, PersonalAlgorithm):
            recalled = self._recalled(request, kept.of(request.training))
            further = weights if recalled is None else recalled
            if self.algorithm.alone:  # there is no other model
                return self.evaluate(further)._replace(tag=request.tag)
        judged = self.evaluate(weights)._replace(tag=request.tag)
        return judged if further is None else judged._replace(further=self.evaluate(further))

    def _recalled(self, request: Request, kept: Kept) -> Arrays | None:
        """The memory or personal model that the client goes on from, if it has one."""
        if request.kept is None:
            return request.vectors.get(FIRST_MODEL)
        return kept.vectors.get(request.kept)

    def train(
        self,
        weights: Mapping[str, Any],
        round: int,
        *,
        first_loss: float | None = None,
        shared: Mapping[str, Any] | None = None,
        gradient: Mapping[str, Any] | None = None,
        kept: Mapping[str, Any] | None = None,
    ) -> Trained:
        """Trains in a round, counted from 0, from weights by name.

        `first_loss` is what the client remembers, or was told by the server; without it, it is measured at
        these weights. `shared` is what the server adds to every step, for algorithms that have it; `gradient`
        the clients' mean gradient, where it corrects the steps. `kept` is the client's memory, zero if left
        out; or its personal model, which begins at these weights.
        """
        x = self._received(weights)
        u = self._received(shared) if shared is not None else torch.zeros_like(x)
        if first_loss is None and self.algorithm.probe != "none":
            first_loss = self.loss(weights)
        known = torch.nan if first_loss is None else first_loss
        loss0 = torch.full((1, 1), known, dtype=torch.float64, device=x.device)
        gradients = {} if gradient is None else {0: self._received(gradient)}
        if corrects(self.algorithm) and not gradients:
            raise InputError(
                f"{self.algorithm.name} corrects its steps by the clients' mean gradient: give it"
            )
        for memory in self.engine.memories.values.values():
            personal = isinstance(self.algorithm, PersonalAlgorithm)
            begin = self._received(kept) if kept is not None else x if personal else torch.zeros_like(x)
            memory.copy_(begin[None])
        with self._computing():
            self.executor.prepare(round)
            ((_, _, report, update),) = self.executor.updates(x[None], loss0, lambda run: u, gradients)
        steps = torch.where(report.steps.isnan(), 0, report.steps)  # some solvers do not have them
        told = steps, *(getattr(report, name) for name in MEASURED[self.algorithm.probe])
        if not usable_clients(self.algorithm, report, *told)[0]:
            raise RefusedError(
                "its training gave numbers that are not finite: a smaller learning rate may help"
            )
        second = self._second(report, update, u, gradients)
        reply = self._reply(Report(*(number[0] for number in report)), update[0].double(), second)
        new = [self.form.arrays(memory[0].clone()) for memory in self.engine.memories.values.values()]
        return Trained(reply, first_loss, new[0] if new else None)

    def measure(self, weights: Mapping[str, Any], round: int) -> Reply:
        """The full gradient at weights by name, for algorithms whose server asks for it before training."""
        x = self._received(weights)
        with self._computing():
            self.executor.prepare(round)
            gradients = self.executor.gradients(x[None])
        if 0 not in gradients:
            raise RefusedError("its gradient is not finite")
        return Reply(self.form.arrays(gradients[0]), {"size": float(self.federation.train[0])})

    @contextmanager
    def _computing(self) -> Iterator[None]:
        device = self.plain.start.device
        with self.engine.threads(self.executor.threads), matmul_precision(self.settings.precision, device):
            yield

    def _second(
        self, report: Report, update: Tensor, shared: Tensor, gradients: dict[int, Tensor]
    ) -> Tensor | None:
        """What is sent with the update (1, P), if anything is; a client's memory is changed, too."""
        if isinstance(self.algorithm, GradientAlgorithm) and not self.algorithm.corrected:
            return gradients[0]
        if not isinstance(self.algorithm, MemoryAlgorithm):
            return None
        memory, one = self.engine.memories.values[0], torch.ones(1, dtype=torch.bool, device=update.device)
        change = self.algorithm.memory.change(report)
        added = changed(change, lambda: memory.to(update.device), shared, update.clone(), one)
        if not torch.isfinite(added).all():
            raise RefusedError("the change of its memory is not finite")
        memory.add_(added.to(memory.device))
        return added[0]

    def _reply(self, report: Report, delta: Tensor, second: Tensor | None) -> Reply:
        if self.sends == "report":
            further = None if second is None else self.form.arrays(second)
            return Reply(self.form.arrays(delta), from_report(report, self.form), further)
        assert isinstance(self.algorithm, Algorithm | LocalAlgorithm)
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
