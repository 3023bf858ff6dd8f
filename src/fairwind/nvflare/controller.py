"""NVFLARE's FedAvg workflow around an algorithm's server."""

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.fedavg import FedAvg

from fairwind.data.counter import PARTICIPATE, draw, fold, mix
from fairwind.errors import InputError, python_numbers, whole
from fairwind.exchange.bounds import Bounds
from fairwind.exchange.evaluation import Evaluations, lowest_loss, scores_of
from fairwind.exchange.message import RefusedError, Sends
from fairwind.exchange.monitoring import check_file, write_metrics
from fairwind.exchange.privacy import Privacy
from fairwind.exchange.results import FederatedRun, owner_of
from fairwind.exchange.server import StalledError
from fairwind.nvflare.aggregator import AlgorithmAggregator
from fairwind.nvflare.client import find_task
from fairwind.nvflare.models import CLIENT, judged_of


class AlgorithmController(FedAvg):
    """NVFLARE's FedAvg workflow with an algorithm's server, evaluation, checkpoints and results."""

    def __init__(
        self,
        task: str,
        algorithm: str = "adafedadam",
        num_rounds: int = 100,
        *,
        seed: int = 0,
        bounds: Bounds | dict[str, float] | None = None,
        sends: Sends = "report",
        privacy: Privacy | dict[str, Any] | None = None,
        codec: str | None = None,
        min_replies: int = 1,
        max_stalled: int = 3,
        defence: str | None = None,
        clients: int | None = None,
        clients_per_round: int | None = None,
        eval_every: int = 1,
        timeout: int = 0,
        metrics: str | None = None,
        out: str | None = None,
    ):
        """For a task by its spec or reference; only its model and scores are used at the server.

        `clients` is how many there are, for algorithms that count on it; if left out, the task's, if these
        are several. A round takes all, or some drawn by the seed, and waits `timeout` seconds for them, or
        until all have replied. It is tried again if it has fewer than `min_replies` usable replies; after
        `max_stalled` such tries in a row the model is written, and the job fails. With `out`, checkpoints,
        results and the report page go into that directory, and a training that was stopped there goes on.
        `metrics` is a file for Prometheus.
        """
        numbers = num_rounds, seed, clients, clients_per_round, eval_every, timeout
        num_rounds, seed, clients, clients_per_round, eval_every, timeout = python_numbers(numbers)
        min_replies, max_stalled = python_numbers((min_replies, max_stalled))
        whole(1, num_rounds=num_rounds, eval_every=eval_every, min_replies=min_replies)
        whole(1, max_stalled=max_stalled)
        super().__init__(
            num_clients=clients_per_round, num_rounds=num_rounds, persistor_id="", ignore_result_error=True
        )
        # By these names, as JSON, a job is exported, and made anew at the server.
        self.task, self.algorithm, self.seed, self.sends, self.codec = task, algorithm, seed, sends, codec
        self.bounds = asdict(bounds) if isinstance(bounds, Bounds) else bounds
        private = Privacy(**privacy) if isinstance(privacy, dict) else privacy
        self.privacy: dict[str, Any] | None = None if private is None else {**private.described()}
        self.min_replies, self.max_stalled, self.defence = min_replies, max_stalled, defence
        self.clients, self.clients_per_round, self.eval_every = clients, clients_per_round, eval_every
        self.num_rounds, self.timeout, self.metrics, self.out = num_rounds, timeout, metrics, out

    def run(self) -> None:
        """Trains the rounds that are left."""
        if self.metrics is not None:
            check_file(self.metrics)
        task = find_task(self.task)
        bounds = Bounds(**self.bounds) if self.bounds else None
        about: Any = {"bounds": bounds, "sends": self.sends, "codec": self.codec, "defence": self.defence}
        self.aggregator = AlgorithmAggregator(
            task,
            self.algorithm,
            seed=self.seed,
            clients=self.clients,
            privacy=Privacy(**self.privacy) if self.privacy else None,
            min_replies=self.min_replies,
            max_stalled=self.max_stalled,
            **about,
        )
        scores = scores_of(task, self.aggregator.module)
        label = self.aggregator.label or "own"
        claims: Any = {"bounds": bounds or Bounds(), "lowest": lowest_loss(task)}
        self.evaluations = Evaluations(scores, label, self.seed, self.aggregator.algorithm, **claims)
        trained = self.aggregator.server, self.evaluations
        about = {"columns": self.aggregator.columns, "clients_per_round": self.clients_per_round}
        owner = owner_of(*trained, task=task.name, **about)
        self.kept = None if self.out is None else FederatedRun(Path(self.out), owner, *trained)
        server, self.wanted = self.aggregator.server, self.num_rounds
        try:
            for line in self.kept.restore() if self.kept else ():
                self.info(line)
            self._train()
            if not self.abort_signal.triggered and not self.evaluations.are_of(server.round):
                self._evaluate()
                self._save()
            if self.kept is not None and not self.abort_signal.triggered:
                self._report(self.kept)
        finally:
            if self.kept is not None:
                self.kept.close()
        if server.stopped:
            where = f"; the model after {server.round} rounds is in {self.out}" if self.out else ""
            raise StalledError(server.stopped + where)

    def _train(self) -> None:
        """NVFLARE's rounds, and as many again as did not count."""
        server, tried = self.aggregator.server, False
        with suppress(StalledError):  # of `save_model`, which is how the workflow ends
            while not tried or (server.round < self.wanted and not self.abort_signal.triggered):
                tried = True
                super().run()

    def load_model(self) -> FLModel:
        """The model that training begins with, or goes on from."""
        server = self.aggregator.server
        self.start_round, self.num_rounds = server.round, max(0, self.wanted - server.round)
        if not self.evaluations.rounds:
            self._evaluate()
        return self.aggregator.model()

    def save_model(self, model: FLModel) -> None:
        """Ends a round: an evaluation, if it is time, and a checkpoint; nothing if it did not count."""
        if self.aggregator.server.stopped:
            raise StalledError(self.aggregator.server.stopped)
        if self.aggregator.server.stalled_in_a_row:
            return
        if self.aggregator.server.round % self.eval_every == 0:
            self._evaluate()
        self._save()

    def _save(self) -> None:
        """Writes a checkpoint, and the numbers for Prometheus."""
        if self.kept is not None:
            self.kept.save()
        if self.metrics is not None:
            write_metrics(check_file(self.metrics), self.aggregator.server, self.evaluations)

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """Those that train in a round."""
        names = sorted(client.name for client in self.engine.get_clients())
        if num_clients is not None and num_clients < len(names):
            server = self.aggregator.server
            attempt = [server.stalled_in_a_row] if server.stalled_in_a_row else []
            key = fold(PARTICIPATE, self.seed, server.round, *attempt)
            chosen = draw(mix(key, torch.arange(len(names))), num_clients)
            names = [names[place] for place in chosen.tolist()]
        self.aggregator.asked = set(names)
        return names

    def send_model(self, **given: Any) -> None:
        """A round: all of its phases but the last are over when this returns. Each has the timeout."""
        aggregator, targets = self.aggregator, given["targets"]
        if aggregator.server.phase == "gradient":
            first = self._phase(given, targets) | {"callback": aggregator.accept_model}
            super().send_model(**first, timeout=self.timeout)
            aggregator.sent(targets)
            while self.get_num_standing_tasks() and not self.abort_signal.triggered:
                time.sleep(self._task_check_period)
            targets = sorted(aggregator.server.turn())
        if targets:  # to nobody would be to all
            aggregator.sent(targets)
            super().send_model(**self._phase(given, targets), timeout=self.timeout)

    def _phase(self, given: dict[str, Any], targets: list[str]) -> dict[str, Any]:
        """The same for the phase that the round is in."""
        data, workflows = self.aggregator.model(clients=targets), given["data"]
        data.start_round, data.total_rounds = workflows.start_round, workflows.total_rounds
        return {**given, "targets": targets, "data": data}

    def _evaluate(self) -> None:
        task, judged = AppConstants.TASK_VALIDATION, {}
        names = [client.name for client in self.engine.get_clients()]
        model = self.aggregator.model("evaluate", names)
        self.aggregator.sent(names, "evaluate")
        for reply in self.send_model_and_wait(task, model, timeout=self.timeout):
            client = str(reply.meta[CLIENT])
            try:
                told = judged_of(reply)
                if told.tag is not None:
                    told.tag.check(self.aggregator.server.tag("evaluate"))
                judged[client] = self.evaluations.checked(told)
            except RefusedError as error:
                self.warning(f"client {client} is not evaluated: {error}")
        if judged:
            rounds, ordered = self.aggregator.server.round, dict(sorted(judged.items()))
            self.evaluations.add(rounds, ordered, self.aggregator.server.counts())
            for line in self.evaluations.lines("client"):
                self.warning(f"round {rounds}: {line}")

    def _report(self, kept: FederatedRun) -> None:
        """Models, and results and page where clients were evaluated."""
        from fairwind.report import write_report  # what draws takes time to load

        if kept.export(self.aggregator.module, engine="NVFLARE", columns=self.aggregator.columns):
            try:
                self.info(f"results and page: {write_report(kept.path)[0]}")
            except InputError as error:  # the results are written
                self.warning(str(error))
