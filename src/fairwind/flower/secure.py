"""The same under SecAgg+, where the server sees only what the clients' numbers add up to.

Flower has SecAgg+ for its older kind of strategy. Here it is given one: clients are sent the model, and what
comes back is one vector, the mean of the clients'. Before the server unmasks a sum, it counts it: of what the
clients compute in a round, a second sum is unmasked only for exactly the same nodes.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flwr.compat.common.recorddict_compat as compat
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Status,
    bytes_to_ndarray,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, generate_key_pairs

from fairwind.contract import AnyAlgorithm
from fairwind.engine.settings import Model, Settings
from fairwind.errors import InputError
from fairwind.exchange.bounds import UNBOUNDED, Bounds
from fairwind.exchange.message import SHARED, WEIGHTS, Phase, RefusedError, Request
from fairwind.exchange.releases import Release, What
from fairwind.exchange.secure import POWERS, Vector, first_scales, next_scales, pack, pack_powers, unpack
from fairwind.flower.client import ClientOf, evaluating, keep, local_clients, recalled
from fairwind.flower.nodes import LOG
from fairwind.flower.records import failure, tag_of
from fairwind.flower.strategy import AlgorithmStrategy
from fairwind.task import Task

FEWEST = 2  # nodes of a sum: a single one's would be its own
ROUNDING = 1e-9  # of a mean of ones
MOST = 1000  # clients: 2³² / 2²², less some room
RELEASED: dict[Phase, What] = {"scales": "magnitudes", "train": "secure sum"}


def secure_client_app(
    task: Task | Callable[[Context], Task],
    algorithm: AnyAlgorithm | None = None,
    *,
    settings: Settings | None = None,
) -> ClientApp:
    """As `client_app`; what leaves a client is masked, whatever the server asks for."""
    client_of = local_clients(task, algorithm, settings)
    app = evaluating(client_of)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return masked(message, context, client_of)

    return app


def masked(message: Message, context: Context, client_of: ClientOf) -> Message:
    """A client's reply to any stage of SecAgg+."""

    def reply_to(message: Message, context: Context) -> Message:
        return _vector_of(message, context, client_of)

    return secaggplus_mod(message, context, reply_to)


def _vector_of(message: Message, context: Context, client_of: ClientOf) -> Message:
    """A client's vector, which is masked before it leaves."""
    asked = compat.recorddict_to_fitins(message.content, keep_input=True)
    said: Any = asked.config
    client = client_of(context, said)
    arrays = parameters_to_ndarrays(asked.parameters)
    names = client.form.names
    weights, shared = dict(zip(names, arrays, strict=False)), arrays[len(names) :]
    request = Request(
        said["phase"],
        int(said["round"]),
        str(said["training"]),
        {WEIGHTS: weights, **({SHARED: dict(zip(names, shared, strict=True))} if shared else {})},
        float(said["first-loss"]) if "first-loss" in said else None,
    )
    reply, kept = client.reply(request, recalled(context))
    keep(context, kept)
    if request.phase == "scales":
        vector = pack_powers(reply, client.sums_form)
    else:
        vector = pack(reply, client.sums_form, tuple(json.loads(str(said["scales"]))))
    tag: dict[str, Any] = {**request.tag._asdict()}
    vector = np.append(vector, 1.0)  # so that the mean ends with a one, if it is unmasked rightly
    done = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), 1, tag)
    return Message(compat.fitres_to_recorddict(done, keep_input=False), reply_to=message)


class SecureStrategy(AlgorithmStrategy):
    """An algorithm's server that is told sums of all clients, and nothing else."""

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
        if options.get("defence") is not None:
            raise InputError("under secure aggregation the server sees sums alone: no defence=")
        if options.get("privacy") is not None:
            raise InputError(
                "under secure aggregation the server sees no client, and so can clip none: no privacy="
            )
        if options.get("evaluate_in_training"):
            raise InputError("masked replies hold no evaluation: leave out evaluate_in_training")
        if options.get("over_selection") or options.get("selection", "uniform") != "uniform":
            raise InputError("SecAgg+ adds up all who are asked, drawn alike: no over_selection or selection")
        super().__init__(algorithm, model, **{**options, "sends": "sums", "bounds": UNBOUNDED})
        self.evaluations.keep_within(Bounds())  # these the server sees
        self.shares, self.threshold = shares, threshold

    def _train(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        nodes, aggregator = self._sample(grid, number), self.aggregator
        if len(nodes) > MOST:
            raise InputError(f"{len(nodes)} nodes are more than the {MOST} that SecAgg+ can add up here")
        said = self._config(config, number)

        def summed(phase: Phase) -> tuple[Vector, int] | None:
            return _Attempt(self, nodes, phase, said, grid, timeout).run()

        if aggregator.scales is None and (powers := summed("scales")) is not None:
            aggregator.scales = first_scales(powers[0])
            aggregator.begin()  # who was missing may be there now
            self._save()  # they are not asked for again
        if (scales := aggregator.scales) is not None and (found := summed("train")) is not None:
            vector, clients = found
            total = unpack(vector, aggregator.form, scales)
            if total.shortened:
                LOG.warning(
                    "round %d: %d nodes are beyond the scales, and shortened", number, total.shortened
                )
            aggregator.take_sum(total.total, total.numbers, clients)
            aggregator.scales = next_scales(total, scales)
        return self._finish(number)


class _Attempt:
    """One run of SecAgg+: its strategy, and its grid."""

    def __init__(
        self,
        strategy: SecureStrategy,
        nodes: list[int],
        phase: Phase,
        said: ConfigRecord,
        grid: Grid,
        timeout: float,
    ):
        self.strategy, self.aggregator = strategy, strategy.aggregator
        self.nodes, self.phase, self.said, self.grid, self.timeout = nodes, phase, said, grid, timeout
        self.failed: dict[int, str] = {}  # by node: why it is not in the sum
        self.release: Release | None = None  # what may be unmasked
        self.mean: Vector | None = None

    def run(self) -> tuple[Vector, int] | None:
        """The sum of the nodes' vectors, and of how many; none where too few replied."""
        itself: Any = self
        context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), strategy=itself)
        number = ConfigRecord({WorkflowKey.CURRENT_ROUND: self.aggregator.round + 1})
        context.state.config_records[MAIN_CONFIGS_RECORD] = number
        context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(
            ndarrays_to_parameters([]), True
        )
        _Workflow(self)(itself, context)
        there = () if self.release is None else self.release.nodes
        for node, why in self.failed.items():
            if str(node) not in there:
                self.aggregator.refuse(str(node), why)
        return None if self.mean is None else (self.mean * len(there), len(there))

    def may_unmask(self, nodes: Iterable[int]) -> bool:
        """Whether the sum of these nodes may be unmasked; it is counted then."""
        release = Release(RELEASED[self.phase], self.aggregator.round, nodes=tuple(map(str, sorted(nodes))))
        fewest = max(FEWEST, self.aggregator.min_replies)
        why = self.aggregator.releases.forbids(release)
        if len(release.nodes) < fewest:
            why = f"{len(release.nodes)} nodes replied, and at least {fewest} must"
        if why:
            LOG.warning("round %d: nothing is unmasked: %s", self.aggregator.round + 1, why)
            return False
        self.release = release
        if release not in self.aggregator.releases.made:
            self.aggregator.releases.note(release)
        return True

    # ---- what the workflow takes for a strategy ----

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        """The same for every node: the model, and what is asked."""
        told: dict[str, Any] = {
            **self.said,
            "phase": self.phase,
            "scales": json.dumps(self.aggregator.scales),
        }
        known = self.aggregator.first_loss("") if self.aggregator.round else None
        if known is not None:
            told["first-loss"] = known
        shared = self.aggregator.shared()
        sent = [*self.aggregator.weights().values(), *(shared.values() if shared else ())]
        asked = FitIns(ndarrays_to_parameters(sent), told)
        return [(_Node(node), asked) for node in self.nodes]

    def aggregate_fit(
        self, server_round: int, results: list[Any], failures: list[Any]
    ) -> tuple[None, dict[str, Any]]:
        """Takes the mean, unless what it ends with tells that masks are left in it."""
        mean = np.asarray(parameters_to_ndarrays(results[0][1].parameters)[0], dtype=np.float64)
        if not abs(mean[-1] - 1.0) < ROUNDING:
            raise ValueError("masks are left in the sum")
        self.mean = mean[:-1]
        return None, {}

    # ---- what it takes for a grid ----

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """The replies that may be used."""
        waiting, used = {message.metadata.dst_node_id: message for message in messages}, []
        nodes = self.strategy.nodes
        for reply in nodes.replies(self.grid, waiting.values(), self.timeout):
            node = nodes.sender(reply)
            asked = waiting.pop(node, None)
            if asked is None:
                continue
            try:
                self._check(node, asked.content.config_records[RECORD_KEY_CONFIGS], reply)
                used.append(reply)
            except RefusedError as error:
                self.failed.setdefault(node, str(error))
        for node in waiting:
            self.failed.setdefault(node, "it did not reply in time")
        return used

    def _check(self, node: int, asked: Mapping[str, Any], reply: Message) -> None:
        """Refuses a reply that failed or would let others fail, and a vector of another round."""
        if reply.has_error():
            raise RefusedError(failure(reply.error))
        if reply.metadata.src_node_id != node:
            raise RefusedError("it replies for another node")
        said: Mapping[str, Any] = {}
        try:
            fits = self._fits(node, asked, reply.content.config_records[RECORD_KEY_CONFIGS])
            if asked[Key.STAGE] == Stage.COLLECT_MASKED_VECTORS:
                said = compat.recorddict_to_fitres(reply.content, keep_input=True).metrics
        except Exception:  # whatever is raised by what was made to break its reader
            fits = False
        if not fits:
            raise RefusedError(f"its reply cannot be used, in the stage {asked[Key.STAGE]!r} of SecAgg+")
        if asked[Key.STAGE] == Stage.COLLECT_MASKED_VECTORS:
            tag_of(said).check(self.aggregator.tag(self.phase))

    def _fits(self, node: int, asked: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
        """Whether a reply has all that its stage asks for."""
        stage = asked[Key.STAGE]
        if stage == Stage.SETUP:
            keys, (own, _) = [said[Key.PUBLIC_KEY_1], said[Key.PUBLIC_KEY_2]], generate_key_pairs()
            return keys[0] != keys[1] and all(generate_shared_key(own, bytes_to_public_key(k)) for k in keys)
        if stage == Stage.SHARE_KEYS:
            others = [int(name) for name in asked if name not in (Key.STAGE, str(node))]
            return _are_for(others, said[Key.DESTINATION_LIST], said[Key.CIPHERTEXT_LIST])
        if stage == Stage.UNMASK:
            wanted = [*asked[Key.ACTIVE_NODE_ID_LIST], *asked[Key.DEAD_NODE_ID_LIST]]
            return _are_for(wanted, said[Key.NODE_ID_LIST], said[Key.SHARE_LIST])
        numbers = len(self.aggregator.form.numbers)
        length = POWERS * (1 + numbers)
        if self.phase == "train":
            length = self.aggregator.layout.parameters + 2 * numbers + 2
        arrays = [bytes_to_ndarray(each) for each in said[Key.MASKED_PARAMETERS]]
        return [(a.dtype.kind, a.shape) for a in arrays] == [("i", (1,)), ("i", (length + 1,))]


class _Workflow(SecAggPlusWorkflow):
    """SecAgg+ that asks before it unmasks."""

    def __init__(self, attempt: _Attempt):
        shares, threshold = attempt.strategy.shares, attempt.strategy.threshold
        super().__init__(shares, threshold, max_weight=1.0, clipping_range=1.0, timeout=attempt.timeout)
        self.attempt = attempt

    def unmask_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        """The last stage. Until then the server has masked vectors alone, of these nodes."""
        if not self.attempt.may_unmask(state.active_node_ids):
            return False
        try:
            return bool(super().unmask_stage(grid, context, state))
        except Exception as error:  # whatever Flower makes of parts of keys that do not fit together
            LOG.warning(
                "round %d: the sum is not used, because parts of keys that nodes sent do not fit (%s)",
                self.attempt.aggregator.round + 1,
                type(error).__name__,
            )
            return False

    def _check_threshold(self, state: Any) -> bool:
        """Whether enough nodes are left. Who fails before any has masked its vector has no part in the masks.

        Without this, Flower asks for parts of such a node's key, which nobody has.
        """
        if not state.legacy_results:
            there = state.active_node_ids
            state.sampled_node_ids = set(there)
            state.nid_to_neighbours = {node: state.nid_to_neighbours[node] & there for node in there}
        return bool(state.sampled_node_ids) and super()._check_threshold(state)


def _are_for(wanted: list[int], nodes: list[int], parts: list[bytes]) -> bool:
    """Whether there is a part of a key for each node, once."""
    return sorted(nodes) == sorted(wanted) and [type(part) for part in parts] == [bytes] * len(wanted)


class _Node(NamedTuple):
    node_id: int
