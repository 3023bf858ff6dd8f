"""The same under SecAgg+, where the server sees only what the clients' numbers add up to.

A round is tried again until its scales fit. If other nodes reply then, the difference of the two sums is what
a single node sent.

Flower has SecAgg+ for its older kind of strategy. Here it is given one: clients are sent the model, and what
comes back is one vector, the mean of the clients'.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import flwr.compat.common.recorddict_compat as compat
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid

from fairwind.contract import AnyAlgorithm
from fairwind.engine.settings import Model, Settings
from fairwind.errors import InputError
from fairwind.exchange.bounds import UNBOUNDED
from fairwind.exchange.message import SHARED, WEIGHTS, Request
from fairwind.exchange.secure import first_scales, fits, fitted, pack, unpack
from fairwind.flower.client import evaluating, keep, local_clients, recalled
from fairwind.flower.nodes import LOG
from fairwind.flower.records import to_record
from fairwind.flower.strategy import AlgorithmStrategy
from fairwind.task import Task

TRIES = 8  # of a round, until scales fit: the first round may need a few, later ones hardly any
MOST = 1000  # clients: 2³² / 2²², less some room


def secure_client_app(
    task: Task | Callable[[Context], Task],
    algorithm: AnyAlgorithm | None = None,
    *,
    settings: Settings | None = None,
) -> ClientApp:
    """As `client_app`; what leaves a client is masked."""
    client_of = local_clients(task, algorithm, settings)
    app = evaluating(client_of)

    @app.train(mods=[secaggplus_mod])
    def train(message: Message, context: Context) -> Message:
        asked = compat.recorddict_to_fitins(message.content, keep_input=True)
        config = asked.config
        client = client_of(context, config)
        arrays = parameters_to_ndarrays(asked.parameters)
        names = client.form.names
        weights, shared = dict(zip(names, arrays, strict=False)), arrays[len(names) :]
        request = Request(
            "train",
            int(config["round"]),
            str(config["training"]),
            {WEIGHTS: weights, **({SHARED: dict(zip(names, shared, strict=True))} if shared else {})},
            float(config["first-loss"]) if "first-loss" in config else None,
        )
        reply, kept = client.reply(request, recalled(context))
        keep(context, kept)
        vector = pack(reply, client.sums_form, tuple(json.loads(str(config["scales"]))))
        done = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), 1, {})
        return Message(compat.fitres_to_recorddict(done, keep_input=False), reply_to=message)

    return app


class SecureStrategy(AlgorithmStrategy):
    """An algorithm's server that is told sums and nothing else, one for each attempt at a round."""

    def __init__(
        self,
        algorithm: str | AnyAlgorithm,
        model: Task | Model,
        *,
        shares: float = 1.0,
        threshold: float = 0.6,
        **options: Any,
    ):
        """`shares` and `threshold` are SecAgg+'s: which share of the nodes gets a part of a node's key, and
        which share of these parts is needed."""
        if options.get("bounds") is not None or options.get("sends", "sums") != "sums":
            raise InputError("under secure aggregation the server sees sums alone, and bounds no client")
        if options.get("privacy") is not None:
            raise InputError(
                "under secure aggregation the server sees no client, and so can clip none: no privacy="
            )
        if options.get("evaluate_in_training"):
            raise InputError("masked replies hold no evaluation: leave out evaluate_in_training")
        if options.get("over_selection") or options.get("selection", "uniform") != "uniform":
            raise InputError("SecAgg+ adds up all who are asked, drawn alike: no over_selection or selection")
        super().__init__(algorithm, model, **{**options, "sends": "sums", "bounds": UNBOUNDED})
        self.scales = first_scales(self.aggregator.form)
        self.shares, self.threshold = shares, threshold

    def _train(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        nodes = self.nodes.sample(grid, number)
        if len(nodes) > MOST:
            raise InputError(f"{len(nodes)} nodes are more than the {MOST} that SecAgg+ can add up here")
        for _ in range(TRIES):
            mean, clients = self._secret_mean(nodes, number, config, grid, timeout)
            if mean is None:
                break
            form, scales = self.aggregator.form, self.scales
            found = unpack(np.asarray(mean, dtype=np.float64) * clients, form, scales)
            self.scales = fitted(found, clients, scales)
            if fits(found, clients, scales):
                self.aggregator.take_sum(found.total, found.numbers, clients)
                break
            LOG.info("round %d: scales did not fit (%d clipped); again", number, sum(found.clipped))
        done = self.aggregator.finish()
        for line in done.lines():
            LOG.warning("round %d: %s", number, line)
        return to_record(self.aggregator.weights()), MetricRecord({**self.aggregator.counts()})

    def _secret_mean(
        self, nodes: list[int], number: int, config: ConfigRecord, grid: Grid, timeout: float
    ) -> tuple[Any, int]:
        """The mean of the clients' vectors, and of how many; None where too few replied."""
        said = self._config(config, number)
        said["scales"] = json.dumps(self.scales)
        known = self.aggregator.first_loss("") if self.aggregator.round else None
        if known is not None:
            said["first-loss"] = known
        told: dict[str, Any] = {**said}
        shared = self.aggregator.shared()
        sent = [*self.aggregator.weights().values(), *(shared.values() if shared else ())]
        asking: Any = _Asking(nodes, FitIns(ndarrays_to_parameters(sent), told), [])
        context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), strategy=asking)
        context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: number})
        context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(
            ndarrays_to_parameters([]), True
        )
        SecAggPlusWorkflow(self.shares, self.threshold, max_weight=1.0, clipping_range=1.0, timeout=timeout)(
            grid, context
        )
        return asking.found[0] if asking.found else (None, 0)


class _Node(NamedTuple):
    node_id: int


class _Asking(NamedTuple):
    """What SecAgg+'s workflow takes for a strategy."""

    nodes: list[int]
    asked: FitIns
    found: list[tuple[Any, int]]

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        return [(_Node(node), self.asked) for node in self.nodes]

    def aggregate_fit(
        self, server_round: int, results: list[Any], failures: list[Any]
    ) -> tuple[None, dict[str, Any]]:
        self.found.append((parameters_to_ndarrays(results[0][1].parameters)[0], len(results)))
        return None, {}
