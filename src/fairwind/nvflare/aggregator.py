"""An algorithm's server as NVFLARE's aggregator: replies are added up as they come."""

from collections.abc import Iterable
from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from fairwind.contract import AnyAlgorithm
from fairwind.engine.checks import build
from fairwind.engine.layout import Division
from fairwind.engine.modules import columns_of
from fairwind.exchange.bounds import Bounds
from fairwind.exchange.message import WEIGHTS, Phase, RefusedError, Sends
from fairwind.exchange.privacy import Privacy
from fairwind.exchange.server import Aggregator
from fairwind.nvflare.models import CLIENT, SAID, reply_of
from fairwind.runs.recipe import build_algorithm
from fairwind.task import Task


class AlgorithmAggregator(ModelAggregator):
    """Any algorithm, for `FedAvg(aggregator=…)`; a workflow begins with its `model()`.

    Where an algorithm's round begins with another phase (Mime), the workflow must ask for that one before.
    """

    def __init__(
        self,
        task: Task,
        algorithm: str | AnyAlgorithm,
        *,
        seed: int = 0,
        clients: int | None = None,
        bounds: Bounds | None = None,
        sends: Sends = "report",
        privacy: Privacy | None = None,
        codec: str | None = None,
        min_replies: int = 1,
        max_stalled: int = 3,
        defence: str | None = None,
    ):
        """Of the task the model is used, the names of columns, and how many clients it has, if several.

        `fairwind.exchange` says what the other options mean; `defence` is a robust sum, such as "median", and
        `fairwind.codecs` says what a `codec` is. With `privacy`, ε is that of a training in which all clients
        take part, because NVFLARE's log says who was drawn.
        """
        super().__init__()
        self.algorithm = build_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
        self.label = algorithm if isinstance(algorithm, str) else algorithm.name
        self.module, self.seed = build(task.model, seed), seed
        self.columns = task.federation.meanings or columns_of(self.module)  # what sites arrange theirs by
        division = Division.of(self.module, task.sharing)
        self.layout = division.shared
        x = self.layout.flatten(self.module)
        if clients is None and len(task.federation) > 1:
            clients = len(task.federation)
        about: Any = {"bounds": bounds, "sends": sends, "privacy": privacy, "codec": codec}
        about |= {"defence": defence, "min_replies": min_replies, "max_stalled": max_stalled}
        about |= {"division": division, "statistics": division.averaged_part.flatten(self.module)}
        self.server = Aggregator(self.algorithm, self.layout, x, clients=clients, **about)
        self.asked: set[str] = set()  # clients of the round; who sends nothing is named

    def model(self, phase: Phase | None = None, clients: Iterable[str] = ()) -> FLModel:
        """What clients are sent, all the same: weights, round, and what they may have forgotten."""
        server, asked = self.server, sorted(clients) or [""]
        one = min(asked, key=server.kept.__contains__)  # it is sent more if it keeps nothing
        request = server.requests([one], phase)[one]
        said: dict[str, object] = {"algorithm": self.label, "sends": server.sends, "seed": self.seed}
        said |= {"round": request.round, "phase": request.phase, "training": request.training}
        said["vectors"] = {name: each for name, each in request.vectors.items() if name != WEIGHTS}
        said["kept"] = dict(server.kept)
        if server.codec is not None:
            said["codec"] = server.codec.name
        said["columns"] = {place: list(names) for place, names in self.columns.items()}
        if server.round:  # the server holds each to what it said first
            said["first-loss"] = server.first_loss("")
        meta = {SAID: said}
        return FLModel(ParamsType.FULL, server.weights(), current_round=server.round, meta=meta)

    def sent(self, clients: Iterable[str], phase: Phase | None = None) -> None:
        """Counts what clients are sent, all the same."""
        asked = sorted(clients)
        one = min(asked, key=self.server.kept.__contains__, default="")
        self.server.sent([self.server.requests([one], phase)[one]] * len(asked))

    def reset_stats(self) -> None:
        """Begins a round."""
        self.server.begin()

    def accept_model(self, model: FLModel) -> None:
        """Adds a client's reply, or notes why it does not count."""
        client = str(model.meta[CLIENT])
        try:
            self.server.accept(client, reply_of(model))
        except RefusedError as error:
            self.server.refuse(client, str(error))

    def aggregate_model(self) -> FLModel:
        """The algorithm's step with the replies that can be used; whose cannot is logged, and counted."""
        for client in sorted(self.asked - self.server.counted):
            self.server.refuse(client, "it sent no update in time")
        done = self.server.finish()
        for line in done.lines("client"):
            self.warning(f"round {done.number + 1}: {line}")
        return self.model()
