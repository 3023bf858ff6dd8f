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
from fairwind.data.values import ColumnNames
from fairwind.engine.builder import build_engine
from fairwind.engine.checks import build, check_runs
from fairwind.engine.evaluation import client_scores, split, training_losses
from fairwind.engine.executor import Run
from fairwind.engine.machine import find_machine, matmul_precision
from fairwind.engine.memory import changed
from fairwind.engine.settings import Settings
from fairwind.errors import InputError, python_numbers, whole
from fairwind.exchange.compression import compress
from fairwind.exchange.evaluation import Judged
from fairwind.exchange.kept import Kept
from fairwind.exchange.message import (
    AVERAGED,
    FIRST,
    FIRST_MODEL,
    GRADIENT,
    LOST,
    MEASURED,
    OWN,
    SHARED,
    WEIGHTS,
    Arrays,
    RefusedError,
    Reply,
    Request,
    Sends,
    arrays_of,
    check_one_sum,
    check_statistics,
    codec_for,
    corrects,
    from_report,
    keeps,
    report_form,
    sums_form,
    vector_of,
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
        codec: str | None = None,
        columns: ColumnNames | None = None,
    ):
        """Of the task's clients the one given, or the only one.

        Batches are drawn by the `number` of the client among all, which is `client` unless given. Updates are
        sent by a `codec`, if the server asks for one. Columns with names are brought into the order of the
        server's `columns`, and refused if it has none ({}).
        """
        client, number, seed = python_numbers((client, number, seed))
        if sends == "sums":
            check_one_sum(algorithm, "replies of sums have no more")
        self.algorithm, self.sends, self.seed = algorithm, sends, seed
        self.codec = None if codec is None else codec_for(codec, algorithm, sends)
        if client is None and len(task.federation) > 1:
            raise InputError(f"the task has {len(task.federation)} clients: say which of them this is")
        if client is not None and not 0 <= client < len(task.federation):
            raise InputError(f"client {client} is not one of the task's {len(task.federation)}")
        self.number = number if number is not None else client or 0
        whole(0, number=self.number)
        settings = settings or Settings(solver=task.solver, workers=1)
        if settings.codec is not None:
            raise InputError("a real federation's codec is the server's choice: leave it out of settings")
        if settings.compile != "off":  # it pays in a simulation, which trains many clients at once
            settings = replace(settings, compile="off")
        on_gpu = find_machine(settings).on_gpu
        if settings.engine == "auto" and settings.precision != "bf16" and not on_gpu:
            settings = replace(settings, engine="loop")  # trying to stack takes a second of a core
        settings = replace(settings, participation=1.0, clients_per_round=None)
        federation = only(task.federation, client or 0)
        try:
            federation = _arranged(federation, columns)
        except InputError as error:  # which names columns, and quotes no data
            raise RefusedError(str(error)) from None
        runs = [Run(algorithm.name, algorithm, seed)]
        check_runs(runs, settings)
        self.engine = build_engine(
            {seed: build(task.model, seed)},
            federation,
            runs,
            settings,
            loss=task.loss,
            score=task.score,
            augment=task.augment,
            sharing=task.sharing,
            first_client=self.number,
        )
        self.settings, self.federation = self.engine.settings, self.engine.federation
        self.executor, self.plain = self.engine.executor, self.engine.plain
        self.layout, self.scores = self.plain.layout, self.plain.judges
        self.own, self.division = self.engine.own, self.plain.division
        self.keeps = keeps(algorithm) or bool(self.division.kept)
        check_statistics(self.division, sends, codec)
        self.form = report_form(self.layout, algorithm.probe, keeps=self.keeps)
        if isinstance(algorithm, Algorithm | LocalAlgorithm):
            self.sums_form = sums_form(self.layout, algorithm)

    def start(self) -> Tensor:
        """The model that training begins from (P,)."""
        return self.plain.start

    def reply(self, request: Request, kept: Kept) -> tuple[Reply, Kept]:
        """Does what a server asks; returns the reply, and what the client is to keep."""
        kept, vectors = kept.of(request.training), request.vectors
        if request.phase == "gradient":
            recalled = self._recalled(request, kept)
            reply = self.measure(vectors[WEIGHTS], request.round, recalled)
            return reply._replace(tag=request.tag), kept
        first_loss = request.first_loss if kept.first_loss is None else kept.first_loss
        trained = self.train(
            vectors[WEIGHTS],
            request.round,
            first_loss=first_loss,
            shared=vectors.get(SHARED),
            gradient=vectors.get(GRADIENT),
            first=vectors.get(FIRST_MODEL),
            kept=self._recalled(request, kept),
        )
        reply, left_out, number = trained.reply._replace(tag=request.tag), None, request.kept
        if number is not None and self._has_lost(number, kept):
            reply = reply._replace(numbers={**reply.numbers, LOST: float(number)})
        if self.codec is not None:
            before = None if number is None else kept.left_out.get(number)
            reply, left_out = compress(reply, self.codec, before)
        return reply, kept.after(request, trained.first_loss, trained.kept, left_out)

    def _has_lost(self, number: int, kept: Kept) -> bool:
        """Whether what was kept of a round is lost."""
        lost = self.keeps and number not in kept.vectors
        return lost or (self.codec is not None and number not in kept.left_out)

    def judge(self, request: Request, kept: Kept) -> Judged:
        """Evaluates the model that a server sends, and the client's own or the averaged one if there is."""
        weights, further = request.vectors[WEIGHTS], request.vectors.get(AVERAGED)
        recalled = self._recalled(request, kept.of(request.training))
        whole = self._begin(weights, recalled)
        if isinstance(self.algorithm, PersonalAlgorithm):
            first = request.vectors.get(FIRST_MODEL, weights)
            personal = self._judged(self._memory(recalled, self._received(first)))
            if self.algorithm.alone:  # there is no other model
                return personal._replace(tag=request.tag)
            return self._judged(whole)._replace(tag=request.tag, further=personal)
        judged = self._judged(whole)._replace(tag=request.tag)
        if further is None:
            return judged
        averaged = torch.cat([self._received(further), whole[self.layout.parameters :]])
        return judged._replace(further=self._judged(averaged))

    def _recalled(self, request: Request, kept: Kept) -> Arrays | None:
        """What the client goes on from, if it has kept anything."""
        return None if request.kept is None else kept.vectors.get(request.kept)

    def _begin(self, weights: Mapping[str, Any], kept: Mapping[str, Any] | None) -> Tensor:
        """The whole model (·,) that the client begins from, with its own part."""
        statistics, own = self.division.averaged_part, self.plain.own_start.clone()
        kept_part = self.division.kept_part
        if kept is not None and kept_part.names:
            mine = {name.removeprefix(OWN): a for name, a in kept.items() if name.startswith(OWN)}
            own[: kept_part.parameters] = vector_of(kept_part, mine).to(own)
        if statistics.names:
            own[kept_part.parameters :] = vector_of(statistics, weights).to(own)
        return torch.cat([self._received(weights), own])

    def _memory(self, kept: Mapping[str, Any] | None, x: Tensor) -> Tensor:
        """The client's memory (P,), or its personal model, a whole one that begins at x."""
        personal = isinstance(self.algorithm, PersonalAlgorithm)
        if kept is not None:
            mine = {name: array for name, array in kept.items() if not name.startswith(OWN)}
            return vector_of(self.plain.whole if personal else self.layout, mine).to(x)
        return torch.cat([x, self.plain.own_start]) if personal else torch.zeros_like(x)

    def train(
        self,
        weights: Mapping[str, Any],
        round: int,
        *,
        first_loss: float | None = None,
        shared: Mapping[str, Any] | None = None,
        gradient: Mapping[str, Any] | None = None,
        first: Mapping[str, Any] | None = None,
        kept: Mapping[str, Any] | None = None,
    ) -> Trained:
        """Trains in a round, counted from 0, from weights by name.

        `first_loss` is what the client remembers, or was told by the server; without it, it is measured at
        these weights. `shared` is what the server adds to every step, for algorithms that have it; `gradient`
        the clients' mean gradient, where it corrects the steps. `kept` is what the client has kept: its own
        part of the model, and its memory, zero if left out; or its personal model, which begins at the
        `first` model, or else at these weights.
        """
        x, whole = self._received(weights), self._begin(weights, kept)
        u = self._received(shared) if shared is not None else torch.zeros_like(x)
        if first_loss is None and self.algorithm.probe != "none":
            first_loss = self._loss(whole)
        known = torch.nan if first_loss is None else first_loss
        loss0 = torch.full((1, 1), known, dtype=torch.float64, device=x.device)
        gradients = {} if gradient is None else {0: self._received(gradient)}
        if corrects(self.algorithm) and not gradients:
            raise InputError(
                f"{self.algorithm.name} corrects its steps by the clients' mean gradient: give it"
            )
        for memory in self.engine.memories.values.values():
            memory.copy_(self._memory(kept, x if first is None else self._received(first))[None])
        self.own.load(whole[len(x) :])
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
        alone = isinstance(self.algorithm, PersonalAlgorithm) and self.algorithm.alone
        if not (alone or self.own.finite):
            raise RefusedError("its own part of the model is not finite: a smaller learning rate may help")
        statistics = arrays_of(self.division.averaged_part, self.own.statistics())
        reply = reply._replace(arrays=reply.arrays | statistics)
        return Trained(reply, first_loss, self._new_arrays() or None)

    def _new_arrays(self) -> Arrays:
        """What the client keeps after a round."""
        found: Arrays = {}
        for memory in self.engine.memories.values.values():
            personal = isinstance(self.algorithm, PersonalAlgorithm)
            found |= arrays_of(self.plain.whole if personal else self.layout, memory[0].clone())
        for part in self.own.memories.values.values():
            own = arrays_of(self.division.kept_part, part[0].clone())
            found |= {f"{OWN}{name}": array for name, array in own.items()}
        return found

    def measure(self, weights: Mapping[str, Any], round: int, kept: Mapping[str, Any] | None = None) -> Reply:
        """The full gradient at weights by name, for algorithms whose server asks for it before training."""
        x = self._received(weights)
        self.own.load(self._begin(weights, kept)[len(x) :])
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
        """The loss of the training samples, with the part that the client has at first."""
        return self._loss(self._begin(weights, None))

    def _loss(self, whole: Tensor) -> float:
        with self._judging():
            return float(training_losses(self.engine.prober, self.federation, whole[None]))

    def evaluate(self, weights: Mapping[str, Any], kept: Mapping[str, Any] | None = None) -> Judged:
        """Loss and scores of these weights, with what the client has kept, on its test samples."""
        return self._judged(self._begin(weights, kept))

    def _judged(self, whole: Tensor) -> Judged:
        test = split(self.federation, "test")
        with self._judging():
            loss, *found = map(float, client_scores(self.engine.scorer, self.federation, whole[None], *test))
        names = [score.name for score in self.scores]
        sizes = int(self.federation.test[0]), int(self.federation.train[0])
        return Judged(*sizes, loss, dict(zip(names, found, strict=True)))

    @contextmanager
    def _judging(self) -> Iterator[None]:
        with self.engine.threads(1), matmul_precision(self.settings.precision, self.plain.start.device):
            yield

    def _received(self, weights: Mapping[str, Any]) -> Tensor:
        """The vector (P,) of weights by name, without statistics."""
        statistics = self.division.averaged_part.names
        shared = {name: array for name, array in weights.items() if name not in statistics}
        return self.form.vector(shared)[0].to(self.plain.start)


def _arranged(federation: Federation, columns: ColumnNames | None) -> Federation:
    """A site's samples with columns in the server's order; None is of a site that has no server."""
    for place, names in federation.columns.items():
        if columns is not None and place not in columns and len(names) > 1:
            raise InputError(
                f"the {place} have columns with names ({', '.join(names)}), and the server does not say in "
                f"which order its model takes them: give it a task with names, or columns={{{place!r}: […]}}"
            )
    return federation.arranged(columns or {}, "the server's")


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
