"""A resumable Flower strategy for any algorithm."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fairwind import algorithms
from fairwind.contract import AnyAlgorithm
from fairwind.engine.checks import build
from fairwind.engine.layout import Layout
from fairwind.engine.settings import Model
from fairwind.engine.workers import keep_memory
from fairwind.errors import first_line, python_numbers, whole
from fairwind.exchange.bounds import Bounds
from fairwind.exchange.evaluation import Evaluations, Judged, check_judged, scores_of
from fairwind.exchange.message import WEIGHTS, Phase, RefusedError, Reply, Sends
from fairwind.exchange.privacy import Privacy
from fairwind.exchange.results import FederatedRun, owner_of
from fairwind.exchange.server import Aggregator, StalledError
from fairwind.flower.nodes import LOG, Nodes
from fairwind.flower.records import (
    ARRAYS,
    CONFIG,
    from_content,
    judged_of,
    to_arrays,
    to_record,
    words_of,
)
from fairwind.runs.folder import run_name
from fairwind.runs.schema import FederatedConfig
from fairwind.scores import accuracy, as_scores
from fairwind.task import Task
from fairwind.tracking import Given, Tracking


class AlgorithmStrategy(Strategy):
    """An algorithm's server, with Flower between it and its clients."""

    def __init__(
        self,
        algorithm: str | AnyAlgorithm,
        model: Task | Model,
        *,
        seed: int = 0,
        score: Any = accuracy,
        bounds: Bounds | None = None,
        sends: Sends = "report",
        privacy: Privacy | None = None,
        clients: int | None = None,
        clients_per_round: int | None = None,
        min_nodes: int = 2,
        min_replies: int = 1,
        max_stalled: int = 3,
        eval_every: int = 1,
        out: str | Path | None = None,
        track: Given = (),
    ):
        """For a model, or that of a task.

        `clients` is how many there are, for algorithms that count on it; if left out, the task's, if these
        are several.

        A round begins when `min_nodes` are connected, and takes all that are, or some drawn by the seed. It
        is tried again if it has fewer than `min_replies` usable replies; after `max_stalled` such tries in a
        row, the model is written, and `StalledError` raised. With
        `out`, checkpoints, results and the report page go into that directory, and a training that was
        stopped there goes on. `fairwind.exchange` says what `bounds`, `sends` and `privacy` mean. `track`
        names trackers, such as "mlflow:FOLDER".
        """
        given = seed, clients, clients_per_round, min_nodes, eval_every, min_replies, max_stalled
        seed, clients, clients_per_round, min_nodes, eval_every, min_replies, max_stalled = python_numbers(
            given
        )
        whole(1, eval_every=eval_every)
        self.algorithm = algorithms.build(algorithm) if isinstance(algorithm, str) else algorithm
        self.task = model.name if isinstance(model, Task) else "a federation on Flower"
        self.module: nn.Module = build(model.model if isinstance(model, Task) else model, seed)
        scores = scores_of(model, self.module) if isinstance(model, Task) else as_scores(score)
        self.layout, self.seed = Layout.of(self.module), seed
        x = self.layout.flatten(self.module)
        if clients is None and isinstance(model, Task) and len(model.federation) > 1:
            clients = len(model.federation)
        self.aggregator = Aggregator(
            self.algorithm,
            self.layout,
            x,
            clients=clients,
            bounds=bounds,
            sends=sends,
            privacy=privacy,
            min_replies=min_replies,
            max_stalled=max_stalled,
        )
        label = self.algorithm.name or "own"
        self.evaluations = Evaluations(scores, label, seed, self.algorithm, bounds=bounds or Bounds())
        self.nodes = Nodes(seed, clients_per_round, min_nodes, secret=privacy is not None)
        self.eval_every = eval_every
        self.out = None if out is None else Path(out)
        self.run: FederatedRun | None = None
        self.tracking = Tracking(track)
        self.asked: set[int] = set()

    def summary(self) -> None:
        """Logs what is to be trained."""
        bounds = self.aggregator.bounds
        LOG.info("\t├──> %s, seed %d: clients send %s", self.algorithm.name, self.seed, self.aggregator.sends)
        few = ", or of twice an equal share among few" if bounds.share < 1 else ""
        if self.aggregator.privacy:
            LOG.info("\t└──> %s", self.aggregator.privacy)
        else:
            LOG.info("\t└──> no client has more than %.0f %% of the weight%s", 100 * bounds.share, few)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message for each client of a round: model, round, and what it may have forgotten."""
        nodes = self._sample(grid, server_round)
        self.aggregator.begin((len(nodes), self.nodes.connected))
        return self._asking(nodes, server_round, config)

    def _sample(self, grid: Grid, server_round: int) -> list[int]:
        return self.nodes.sample(grid, server_round, self.aggregator.stalled_in_a_row)

    def _asking(
        self, nodes: list[int], server_round: int, config: ConfigRecord, phase: Phase | None = None
    ) -> list[Message]:
        """A message for each node, in this phase of the round or another."""
        requests = self.aggregator.requests(map(str, nodes), phase)
        records: dict[str, ArrayRecord] = {}
        messages = []
        for node, request in zip(nodes, requests.values(), strict=True):
            for name, arrays in request.vectors.items():
                if name not in records:
                    records[name] = self._outgoing() if name == WEIGHTS else to_record(arrays)
            mine = self._config(config, server_round)
            mine.update(words_of(request))
            content = {ARRAYS if name == WEIGHTS else name: records[name] for name in request.vectors}
            kind = MessageType.EVALUATE if phase == "evaluate" else MessageType.TRAIN
            messages.append(Message(RecordDict({**content, CONFIG: mine}), node, kind))
        if phase != "evaluate":
            self.asked = set(nodes)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The server step with the usable replies; refused ones are logged and counted."""
        self._accept(server_round, replies)
        return self._finish(server_round)

    def _finish(self, server_round: int) -> tuple[ArrayRecord, MetricRecord]:
        """Ends a round, and logs what there is to say of it."""
        for line in self.aggregator.finish().lines("node"):
            LOG.warning("round %d: %s", server_round, line)
        return to_record(self.aggregator.weights()), MetricRecord({**self.aggregator.counts()})

    def _accept(self, server_round: int, replies: Iterable[Message]) -> None:
        """Hands replies to the aggregator, and whose cannot be used."""
        waiting = set(self.asked)
        for message in replies:
            node = self.nodes.sender(message)
            if node not in waiting:
                LOG.warning("node %d replies to round %d, and was not asked", node, server_round)
                continue
            waiting.remove(node)
            if message.has_error():
                reason = message.error.reason or f"error {message.error.code}"
                self.aggregator.refuse(str(node), f"it failed: {first_line(Exception(reason))}")
                continue
            try:
                reply = self._read(node, message.content)
            except RefusedError as error:
                self.aggregator.refuse(str(node), str(error))
                continue
            self.aggregator.accept(str(node), reply)
        for node in sorted(waiting):
            self.aggregator.refuse(str(node), "it did not reply in time")

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model to every node, in rounds that are evaluated."""
        if server_round % self.eval_every:
            return []
        return self._asking(sorted(grid.get_node_ids()), server_round, config, "evaluate")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average, STD, worst 30 % and more, over the scores of the nodes."""
        judged: dict[str, Judged] = {}
        for message in replies:
            node = self.nodes.sender(message)
            try:
                if message.has_error():
                    raise RefusedError(f"it failed: {first_line(Exception(message.error.reason))}")
                told = self._read_judged(message.content)
                if told.tag is not None:
                    told.tag.check(self.aggregator.tag("evaluate"))
                judged[str(node)] = check_judged(told, self.evaluations.scores)
            except RefusedError as error:
                LOG.warning("round %d: node %d is not evaluated: %s", server_round, node, error)
        if not judged:
            return None
        line = self.evaluations.add(server_round, dict(sorted(judged.items())), self.aggregator.counts())
        for words in self.evaluations.lines("node"):
            LOG.warning("round %d: %s", server_round, words)
        return MetricRecord({k: v for k, v in line.items() if isinstance(v, int | float)})

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Trains the rounds that are left, from the model's own weights unless others are given."""
        if initial_arrays is not None:
            given = to_arrays(initial_arrays)
            trained = {name: given[name] for name in self.layout.names if name in given}
            self.aggregator.begin_from(self.aggregator.form.vector(trained)[0])
        keep_memory()
        if self.out is not None:
            self.run = FederatedRun(self.out, self._owner(), self.aggregator, self.evaluations)
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result = Result()
        self.aggregator.stalled_in_a_row = 0
        self.summary()
        try:
            for line in self.run.restore() if self.run else ():
                LOG.info(line)
            result.arrays = to_record(self.aggregator.weights())
            self._begin_tracking()

            def evaluate() -> None:
                number, arrays = self.aggregator.round, result.arrays
                asked = self.configure_evaluate(number, arrays, evaluate_config, grid)
                found = self.aggregate_evaluate(number, self.nodes.replies(grid, asked, timeout))
                if found is not None:
                    self.tracking.log(self.evaluations.newest)
                    result.evaluate_metrics_clientapp[number] = found
                if evaluate_fn is not None and (central := evaluate_fn(number, arrays)) is not None:
                    result.evaluate_metrics_serverapp[number] = central

            evaluated = self.evaluations.rounds[-1] if self.evaluations.rounds else -1
            released = bool(self.aggregator.releases.made)
            if evaluated < 0 or (released and evaluated < self.aggregator.round):
                self.nodes.wait(grid)
                evaluate()
            while self.aggregator.round < num_rounds and not self.aggregator.stopped:
                self._round(num_rounds, train_config, grid, timeout, result, evaluate)
            self.tracking.finish(self._report())
        finally:
            self.tracking.close()
            if self.run is not None:
                self.run.close()
        if why := self.aggregator.stopped:
            where = f"; the model after {self.aggregator.round} rounds is in {self.out}" if self.out else ""
            raise StalledError(why + where)
        return result

    def _round(
        self,
        num_rounds: int,
        config: ConfigRecord,
        grid: Grid,
        timeout: float,
        result: Result,
        evaluate: Callable[[], None],
    ) -> None:
        """Trains, evaluates and saves a round; where too few reply, there is nothing to evaluate or save."""
        number = self.aggregator.round + 1
        LOG.info("[ROUND %d/%d]", number, num_rounds)
        new, metrics = self._train(number, result.arrays, config, grid, timeout)
        assert new is not None
        assert metrics is not None
        if self.aggregator.round < number:
            return
        result.arrays, result.train_metrics_clientapp[number] = new, metrics
        if self.aggregator.releases.made:  # what was released is not released again
            self._save()
        evaluate()
        self._save()

    def _save(self) -> None:
        if self.run is not None:
            self.run.save()

    def _train(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """A round of training."""
        asked = self.configure_train(number, arrays, config, grid)
        if self.aggregator.phase == "gradient":
            self._accept(number, self.nodes.replies(grid, asked, timeout))
            asked = self._asking(sorted(map(int, self.aggregator.turn())), number, config)
        return self.aggregate_train(number, self.nodes.replies(grid, asked, timeout))

    def _config(self, config: ConfigRecord, server_round: int) -> ConfigRecord:
        said: dict[str, str | int] = {
            "algorithm": self.algorithm.name,
            "sends": self.aggregator.sends,
            "seed": self.seed,
            "training": self.aggregator.training,
            "round": server_round - 1,  # Fairwind counts from 0
            "server-round": server_round,
        }
        return ConfigRecord({**config, **said})

    def _outgoing(self) -> ArrayRecord:
        return to_record(self.aggregator.weights())

    def _read(self, node: int, content: RecordDict) -> Reply:
        return from_content(content)

    def _read_judged(self, content: RecordDict) -> Judged:
        return judged_of(content)

    def _owner(self) -> FederatedConfig:
        trained = self.aggregator, self.evaluations
        return owner_of(*trained, task=self.task, clients_per_round=self.nodes.per_round)

    def _begin_tracking(self) -> None:
        evaluations = self.evaluations
        name = run_name(self.task) if self.out is None else self.out.resolve().name
        runs = [(evaluations.label, evaluations.seed)]
        settings = {k: v for k, v in self._owner().items() if k != "parameters"}
        self.tracking.start(name, settings, runs, evaluations.history, self.out)

    def _report(self) -> Path | None:
        """Models, and results and page where clients were evaluated."""
        if self.run is None or not self.run.export(self.module, engine="Flower"):
            return None
        from fairwind.report import write_report  # what draws takes time to load

        page = write_report(self.run.path)[0]
        LOG.info("results and page: %s", page)
        return page
