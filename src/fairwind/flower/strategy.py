"""A resumable Flower strategy for any algorithm."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fairwind import algorithms
from fairwind.contract import AnyAlgorithm
from fairwind.data.counter import EVALUATE, fold
from fairwind.data.values import ColumnNames
from fairwind.engine.checks import build
from fairwind.engine.layout import ALL_SHARED, Division
from fairwind.engine.modules import columns_of
from fairwind.engine.settings import ClientSelection, Model
from fairwind.engine.workers import keep_memory
from fairwind.errors import InputError, python_numbers, whole
from fairwind.exchange.bounds import Bounds, within
from fairwind.exchange.evaluation import Evaluations, Judged, lowest_loss, scores_of
from fairwind.exchange.message import WEIGHTS, Phase, RefusedError, Reply, Sends
from fairwind.exchange.monitoring import check_file, write_metrics
from fairwind.exchange.privacy import Privacy
from fairwind.exchange.results import FederatedRun, owner_of
from fairwind.exchange.server import Aggregator, StalledError
from fairwind.flower.nodes import LOG, Nodes, select
from fairwind.flower.records import (
    ARRAYS,
    CONFIG,
    JUDGED,
    METRICS,
    failure,
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
        codec: str | None = None,
        defence: str | None = None,
        clients: int | None = None,
        columns: ColumnNames | None = None,
        clients_per_round: int | None = None,
        over_selection: float = 0.0,
        selection: ClientSelection = "uniform",
        min_nodes: int = 2,
        min_replies: int = 1,
        max_stalled: int = 3,
        eval_every: int = 1,
        evaluate_in_training: bool = False,
        evaluate_share: float = 1.0,
        metrics: str | Path | None = None,
        out: str | Path | None = None,
        track: Given = (),
    ):
        """For a model, or that of a task.

        `clients` is how many there are, for algorithms that count on it; if left out, the task's, if these
        are several. `columns` are the names of columns, as {"inputs": ["age", "weight"]}, in the order in
        which the model takes them; if left out, the task's. Nodes whose columns have names need them.

        A round begins when `min_nodes` are connected, and takes all that are, or some drawn by the seed:
        alike, or by their sizes with the `selection` "size". With `over_selection`, more are asked by that
        share, and the round ends when `clients_per_round` have replied. It is tried again if it has fewer
        than `min_replies` usable replies; after `max_stalled` such tries in a row, the model is written, and
        `StalledError` raised.

        With `out`, checkpoints, results and the report page go into that directory, and a training that was
        stopped there goes on. `fairwind.exchange` says what `bounds`, `sends` and `privacy` mean, and
        `fairwind.codecs` what a `codec` is. `defence` is a robust sum, such as "median". `track` names
        trackers, such as "mlflow:FOLDER".

        With `evaluate_in_training`, a round's model is evaluated by the nodes that train in the next one, in
        the same message. The last round's is evaluated by all nodes. `evaluate_share` is the share of nodes,
        drawn by the seed, that evaluate. `metrics` is a file for Prometheus (`fairwind.exchange.monitoring`).
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
        sharing = model.sharing if isinstance(model, Task) else ALL_SHARED
        known = model.federation.meanings if isinstance(model, Task) else {}
        self.columns = columns or known or columns_of(self.module)  # what nodes arrange theirs by
        division = Division.of(self.module, sharing)
        self.layout, self.seed = division.shared, seed
        x = self.layout.flatten(self.module)
        if clients is None and isinstance(model, Task) and len(model.federation) > 1:
            clients = len(model.federation)
        about: Any = {"bounds": bounds, "sends": sends, "privacy": privacy, "codec": codec}
        about |= {"defence": defence, "min_replies": min_replies, "max_stalled": max_stalled}
        about |= {"division": division, "statistics": division.averaged_part.flatten(self.module)}
        self.aggregator = Aggregator(self.algorithm, self.layout, x, clients=clients, **about)
        label = self.algorithm.name or "own"
        claims: Any = {"bounds": bounds or Bounds()}
        claims |= {"lowest": lowest_loss(model)} if isinstance(model, Task) else {}
        self.evaluations = Evaluations(scores, label, seed, self.algorithm, **claims)
        spare, secret = python_numbers(over_selection), privacy is not None
        self.nodes = Nodes(seed, clients_per_round, min_nodes, secret=secret, spare=spare)
        if selection not in get_args(ClientSelection):
            raise InputError(f"selection={selection!r} is not one of {', '.join(get_args(ClientSelection))}")
        if selection == "size" and secret:
            raise InputError("privacy is accounted for nodes that are drawn alike: leave out selection")
        self.selection = selection
        self.evaluate_share = float(python_numbers(evaluate_share))
        if not 0 < self.evaluate_share <= 1:
            raise InputError(f"evaluate_share={evaluate_share} is out of range: it is a share, in (0, 1]")
        self.metrics_file = None if metrics is None else check_file(metrics)
        self.eval_every, self.evaluate_in_training = eval_every, evaluate_in_training
        self.out = None if out is None else Path(out)
        self.run: FederatedRun | None = None
        self.tracking = Tracking(track)
        self.asked: set[int] = set()
        self.judged: dict[str, Judged] = {}  # by node, of the model that is being evaluated
        self.metrics: dict[int, MetricRecord] = {}  # by evaluated round

    def summary(self) -> None:
        """Logs what is to be trained."""
        bounds = self.aggregator.bounds
        LOG.info("\t├──> %s, seed %d: clients send %s", self.algorithm.name, self.seed, self.aggregator.sends)
        few = ", or of twice an equal share among few" if bounds.share < 1 else ""
        if self.aggregator.defence_spec:
            LOG.info("\t├──> defence: %s", self.aggregator.defence_spec)
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
        self.judged = {}
        return self._asking(nodes, server_round, config)

    def _sample(self, grid: Grid, server_round: int) -> list[int]:
        return self.nodes.sample(grid, server_round, self.aggregator.stalled_in_a_row, self._sizes())

    def _sizes(self) -> dict[str, float] | None:
        """The sizes that nodes are drawn by, if not all alike, within the bounds."""
        if self.selection == "uniform":
            return None
        known = {node: float(train) for node, (_, train) in self.evaluations.sizes.items() if train > 0}
        known |= {node: each["size"] for node, each in self.aggregator.seen.numbers.items() if "size" in each}
        bounded = within(list(known.values()), self.aggregator.bounds.size)
        return dict(zip(known, bounded, strict=True))

    def _asking(
        self, nodes: list[int], server_round: int, config: ConfigRecord, phase: Phase | None = None
    ) -> list[Message]:
        """A message for each node, in this phase of the round or another."""
        judging = (phase or self.aggregator.phase) == "train" and self._judges(server_round)
        requests = self.aggregator.requests(map(str, nodes), phase, judging=judging)
        records: dict[str, ArrayRecord] = {}
        messages = []
        for node, request in zip(nodes, requests.values(), strict=True):
            for name, arrays in request.vectors.items():
                if name not in records:
                    records[name] = to_record(arrays)
            mine = self._config(config, server_round)
            mine.update(words_of(request) | ({JUDGED: True} if judging else {}))
            content = {ARRAYS if name == WEIGHTS else name: records[name] for name in request.vectors}
            kind = MessageType.EVALUATE if phase == "evaluate" else MessageType.TRAIN
            messages.append(Message(RecordDict({**content, CONFIG: mine}), node, kind))
        self.aggregator.sent(requests.values())
        if phase != "evaluate":
            self.asked = set(nodes)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The server step with the usable replies; refused ones are logged and counted."""
        self._accept(server_round, replies)
        if self._judges(server_round):
            self._evaluated(server_round - 1)
        return self._finish(server_round)

    def _finish(self, server_round: int) -> tuple[ArrayRecord, MetricRecord]:
        """Ends a round, and logs what there is to say of it."""
        for line in self.aggregator.finish().lines("node"):
            LOG.warning("round %d: %s", server_round, line)
        return to_record(self.aggregator.weights()), MetricRecord({**self.aggregator.counts()})

    def _accept(self, server_round: int, replies: Iterable[Message]) -> None:
        """Hands replies to the aggregator, and whose cannot be used."""
        waiting, wanted = set(self.asked), self.nodes.wanted
        for message in replies:
            node = self.nodes.sender(message)
            if node not in waiting:
                LOG.warning("node %d replies to round %d, and was not asked", node, server_round)
                continue
            waiting.remove(node)
            if message.has_error():
                self.aggregator.refuse(str(node), failure(message.error))
                continue
            try:
                reply = self._read(node, message.content)
            except RefusedError as error:
                self.aggregator.refuse(str(node), str(error))
                continue
            why = self.aggregator.accept(str(node), reply)
            if not why and self._judges(server_round) and JUDGED in message.content:
                self._note_judged(server_round - 1, message, JUDGED)
            if wanted is not None and len(self.aggregator.counted) >= wanted:
                break
        enough = wanted is not None and len(self.aggregator.counted) >= wanted
        late = f"it is late: {wanted} others have replied" if enough else "it did not reply in time"
        for node in sorted(waiting):
            self.aggregator.refuse(str(node), late)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model to every node that evaluates it."""
        self.judged = {}
        nodes = sorted(grid.get_node_ids())
        if self.evaluate_share < 1:
            count = max(1, round(self.evaluate_share * len(nodes)))
            nodes = select(nodes, count, fold(EVALUATE, self.seed, server_round))
        return self._asking(nodes, server_round, config, "evaluate")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average, STD, worst 30 % and more, over the scores of the nodes."""
        for message in replies:
            self._note_judged(server_round, message)
        return self._evaluated(server_round)

    def _judges(self, server_round: int) -> bool:
        """Whether the nodes of a round evaluate the model that they receive, which is the last round's."""
        due = not (server_round - 1) % self.eval_every
        return self.evaluate_in_training and due and not self.evaluations.are_of(server_round - 1)

    def _note_judged(self, server_round: int, message: Message, name: str = METRICS) -> None:
        """Notes the evaluation in a reply, or logs why it is refused."""
        node = self.nodes.sender(message)
        try:
            if message.has_error():
                raise RefusedError(failure(message.error))
            if name == METRICS:
                told = self._read_judged(message.content)
            else:  # the reply beside which it is has the tag
                told = judged_of(message.content, name, tagged=False)
            if told.tag is not None:
                told.tag.check(self.aggregator.tag("evaluate"))
            self.judged[str(node)] = self.evaluations.checked(told)
        except RefusedError as error:
            LOG.warning("round %d: node %d is not evaluated: %s", server_round, node, error)

    def _evaluated(self, server_round: int) -> MetricRecord | None:
        """Adds what was noted to the history."""
        if not self.judged:
            return None
        judged, self.judged = dict(sorted(self.judged.items())), {}
        line = self.evaluations.add(server_round, judged, self.aggregator.counts())
        for words in self.evaluations.lines("node"):
            LOG.warning("round %d: %s", server_round, words)
        self.tracking.log(self.evaluations.newest)
        found = MetricRecord({k: v for k, v in line.items() if isinstance(v, int | float)})
        self.metrics[server_round] = found
        return found

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
        result.evaluate_metrics_clientapp = self.metrics = {}
        self.aggregator.stalled_in_a_row = 0
        self.summary()
        try:
            for line in self.run.restore() if self.run else ():
                LOG.info(line)
            result.arrays = to_record(self.aggregator.weights())
            self._begin_tracking()

            def evaluate() -> None:
                number, arrays = self.aggregator.round, result.arrays
                if self._is_due(num_rounds):
                    asked = self.configure_evaluate(number, arrays, evaluate_config, grid)
                    self.aggregate_evaluate(number, self.nodes.replies(grid, asked, timeout))
                if evaluate_fn is not None and (central := evaluate_fn(number, arrays)) is not None:
                    result.evaluate_metrics_serverapp[number] = central

            ended = self.aggregator.round >= num_rounds  # and killed before its evaluation, perhaps
            if self._is_due(num_rounds) and (ended or not self.evaluate_in_training):
                self.nodes.wait(grid)
                evaluate()
                if ended:
                    self._save()
                    self._monitor()
            while self.aggregator.round < num_rounds and not self.aggregator.stopped:
                self._round(num_rounds, train_config, grid, timeout, result, evaluate)
            if self.aggregator.stopped and self._is_due(num_rounds):
                evaluate()
                self._save()
                self._monitor()
            self.tracking.finish(self._report())
        finally:
            self.tracking.close()
            if self.run is not None:
                self.run.close()
        if why := self.aggregator.stopped:
            where = f"; the model after {self.aggregator.round} rounds is in {self.out}" if self.out else ""
            raise StalledError(why + where)
        return result

    def _is_due(self, num_rounds: int) -> bool:
        """Whether the model is to be evaluated now: every so many rounds, and where training ends."""
        number = self.aggregator.round
        every = not number % self.eval_every or number >= num_rounds or bool(self.aggregator.stopped)
        return every and not self.evaluations.are_of(number)

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
            self._monitor()
            return
        result.arrays, result.train_metrics_clientapp[number] = new, metrics
        if self.aggregator.releases.made:  # what was released is not released again
            self._save()
        if number == num_rounds or not self.evaluate_in_training:
            evaluate()
        self._save()
        self._monitor()

    def _monitor(self) -> None:
        if self.metrics_file is not None:
            write_metrics(self.metrics_file, self.aggregator, self.evaluations)

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
        if self.aggregator.codec is not None:
            said["codec"] = self.aggregator.codec.name
        if self.columns:
            said["columns"] = json.dumps(self.columns)
        return ConfigRecord({**config, **said})

    def _read(self, node: int, content: RecordDict) -> Reply:
        return from_content(content)

    def _read_judged(self, content: RecordDict) -> Judged:
        return judged_of(content)

    def _owner(self) -> FederatedConfig:
        trained = self.aggregator, self.evaluations
        owner = owner_of(
            *trained, task=self.task, clients_per_round=self.nodes.per_round, columns=self.columns
        )
        if self.selection != "uniform":
            owner["selection"] = self.selection
        return owner

    def _begin_tracking(self) -> None:
        evaluations = self.evaluations
        name = run_name(self.task) if self.out is None else self.out.resolve().name
        runs = [(evaluations.label, evaluations.seed)]
        settings = {k: v for k, v in self._owner().items() if k not in ("parameters", "start")}
        self.tracking.start(name, settings, runs, evaluations.history, self.out)

    def _report(self) -> Path | None:
        """Models, and results and page where clients were evaluated."""
        if self.run is None or not self.run.export(self.module, engine="Flower", columns=self.columns):
            return None
        from fairwind.report import write_report  # what draws takes time to load

        try:
            page = write_report(self.run.path)[0]
        except InputError as error:  # the results are written
            LOG.warning("%s", error)
            return None
        LOG.info("results and page: %s", page)
        return page
