"""A client of a real federation, which trains on its own data exactly as in the simulator."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import contribute
from fairwind.contract import AnyAlgorithm, Contribution, Local, LocalAlgorithm, Report
from fairwind.data.federation import Federation
from fairwind.data.samples import cast, take
from fairwind.engine.builder import build_executor, chunk_numbers
from fairwind.engine.checks import build, check_runs, placed
from fairwind.engine.evaluation import Scorer, client_scores, split, training_losses
from fairwind.engine.executor import Executor, RoundSums, Run
from fairwind.engine.memory import Memories
from fairwind.engine.plain import PlainModel
from fairwind.engine.plan import choose
from fairwind.engine.precision import products
from fairwind.engine.ranks import ALONE
from fairwind.engine.schedule import Planner
from fairwind.engine.settings import Settings, resolve
from fairwind.engine.workers import threads
from fairwind.errors import InputError, python_numbers, whole
from fairwind.exchange.evaluation import Judged
from fairwind.exchange.message import (
    FIRST,
    MEASURED,
    RefusedError,
    Reply,
    Sends,
    SummedAlgorithm,
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


class _Shared(NamedTuple):
    u: Tensor  # (P,) what the server adds to every step


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
        self.given = replace(settings, participation=1.0, clients_per_round=None)
        self.settings = resolve(self.given)
        self.run = Run(algorithm.name, _recorder(self.algorithm), seed)
        check_runs([Run(algorithm.name, algorithm, seed)], self.settings, ALONE)
        module = build(task.model, seed)
        own = only(task.federation, client or 0)
        dtype = next((p.dtype for p in module.parameters() if p.requires_grad), torch.float32)
        self.federation = placed(replace(own, inputs=cast(own.inputs, dtype)), self.settings)
        size = self.settings.solver.batch_size
        with self._threads(1):
            self.plain = PlainModel(module, self.federation, task.loss, task.score, size, task.augment)
            self.choice = choose(module, self.plain, self.federation, self.settings, ALONE, rows=1)
        self.layout, self.scores = self.plain.layout, self.plain.judges
        self.form = report_form(self.layout, algorithm.probe)
        self.sums_form = sums_form(self.layout, self.algorithm)
        self.executor = self._executor()

    def _executor(self) -> Executor:
        s, x = self.settings, self.plain.start[None]
        planner = Planner(self.federation, s.solver, probe_samples=s.probe_samples, first=self.number)
        memories = Memories([self.run], x, 1, room=chunk_numbers(s, x.element_size()))
        given = self.choice, self.plain, self.federation, planner, [self.run], memories
        return build_executor(*given, self.given, s).executor

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
        outcomes: list[RoundSums] = []
        with self._threads(self.executor.threads), products(self.settings.precision, x.device):
            self.executor.prepare(round)
            self.executor.round(x[None], loss0, [_Shared(u)], outcomes.append)
        (outcome,) = outcomes
        if not outcome.used[0]:
            raise RefusedError(
                "its training gave numbers that are not finite: a smaller learning rate may help"
            )
        told = self.settings.solver.accumulated(torch.ones(()))
        report = _unmasked(outcome.sums[0], self.algorithm, tells_steps=bool(torch.isfinite(told)))
        return Trained(self._reply(report, outcome.total[0]), first_loss)

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
            return float(training_losses(self._scorer, self.federation, self._received(weights)[None]))

    def evaluate(self, weights: Mapping[str, Any]) -> Judged:
        """Loss and scores of these weights on the client's test samples."""
        x, test = self._received(weights)[None], split(self.federation, "test")
        with self._judging():
            loss, *found = map(float, client_scores(self._scorer, self.federation, x, *test))
        names = [score.name for score in self.scores]
        sizes = int(self.federation.test[0]), int(self.federation.train[0])
        return Judged(*sizes, loss, dict(zip(names, found, strict=True)))

    @property
    def _scorer(self) -> Scorer:
        return self.choice.stacked or self.plain

    @contextmanager
    def _judging(self) -> Iterator[None]:
        with self._threads(1), products(self.settings.precision, self.plain.start.device):
            yield

    def _received(self, weights: Mapping[str, Any]) -> Tensor:
        return self.form.vector(weights)[0].to(self.plain.start)

    def _threads(self, count: int) -> AbstractContextManager[None]:
        return threads(count) if self.settings.device == "cpu" else nullcontext()


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


def _recorder(algorithm: SummedAlgorithm) -> LocalAlgorithm[Any, Any]:
    """An algorithm with the same local training, whose sums are δ and the report itself."""
    local = algorithm.local if isinstance(algorithm, LocalAlgorithm) else Local()
    if local.shared is not None:
        local = local._replace(shared=lambda state: state.u)
    there = ("size", "lr", "update_norm", *MEASURED[algorithm.probe])

    def client(r: Report) -> Contribution[Report]:
        # What is not measured is NaN, which would make the client unusable.
        kept = {name: getattr(r, name) if name in there else torch.zeros_like(r.size) for name in r._fields}
        kept["steps"] = torch.where(r.steps.isnan(), 0, r.steps)
        return Contribution(torch.ones_like(r.size), Report(**kept))

    def server(x: Tensor, state: Any, total: Tensor, sums: Report) -> tuple[Tensor, Any]:
        return x, state

    return LocalAlgorithm(lambda x: _Shared(x), client, server, algorithm.probe, local, algorithm.name)


def _unmasked(sums: Report, algorithm: SummedAlgorithm, *, tells_steps: bool) -> Report:
    """The report that `_recorder` summed, with NaN for what is not there."""
    there = {"size", "lr", "update_norm", *MEASURED[algorithm.probe], *(("steps",) if tells_steps else ())}
    found = {n: v if n in there else torch.full_like(v, torch.nan) for n, v in sums._asdict().items()}
    return Report(**found)
