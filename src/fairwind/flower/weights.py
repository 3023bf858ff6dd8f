"""A strategy for apps that reply as FedAvg's do: with trained weights and metrics."""

import math
from typing import Any

from flwr.app import ArrayRecord, RecordDict

from fairwind.aggregation import refuses
from fairwind.algorithms import NEEDS
from fairwind.contract import AnyAlgorithm, GradientAlgorithm
from fairwind.engine.settings import Model
from fairwind.errors import InputError
from fairwind.exchange.evaluation import Judged
from fairwind.exchange.message import MEASURED, RefusedError, Reply, keeps
from fairwind.flower.records import from_content, judged_of, to_record
from fairwind.flower.strategy import AlgorithmStrategy
from fairwind.task import Task

# Names of metrics in replies, and what they are here
NAMES = {"num-examples": "size", "lr": "lr", "steps": "steps", "loss": "loss", "grad-norm": "grad_norm"}


class WeightsStrategy(AlgorithmStrategy):
    """The contribution is computed here, from the weights a client was sent and those it sends back.

    Replies have a state dict, and the metric "num-examples". Algorithms that ask for more find it in further
    metrics: "lr" and "steps" of local training; "loss", the mean over the training samples before training;
    "grad-norm", the norm of its gradient there. Others are ignored. Buffers are sent out as they are in the
    model given.
    """

    def __init__(
        self,
        algorithm: str | AnyAlgorithm,
        model: Task | Model,
        *,
        lr: float | None = None,
        steps: float | None = None,
        **options: Any,
    ):
        """As for `AlgorithmStrategy`; `lr` and `steps` are those of clients that do not tell them."""
        super().__init__(algorithm, model, **options)
        if keeps(self.algorithm) or isinstance(self.algorithm, GradientAlgorithm):
            raise InputError(
                f"{self.algorithm.name} needs {NEEDS[type(self.algorithm)]}, and replies of weights have no "
                "such vector: take AlgorithmStrategy and client_app"
            )
        self.sent = self.aggregator.weights()
        if lr is None and not refuses(self.algorithm, lr=math.nan):
            lr = 1.0  # whatever it is
        self.usual = {name: value for name, value in (("lr", lr), ("steps", steps)) if value is not None}

    def _outgoing(self) -> ArrayRecord:
        self.sent = self.aggregator.weights()
        self.layout.load(self.aggregator.x, self.module)
        return to_record({name: value.numpy() for name, value in self.module.state_dict().items()})

    def _read(self, node: int, content: RecordDict) -> Reply:
        reply = from_content(content, tagged=False)
        wanted = {"size", "lr", "steps", *MEASURED[self.algorithm.probe]}
        numbers = dict(self.usual)
        numbers |= {NAMES[k]: v for k, v in reply.numbers.items() if k in NAMES and NAMES[k] in wanted}
        if "loss0" in wanted and "loss" in numbers:
            known = self.aggregator.first_loss(str(node)) if self.aggregator.round else None
            numbers["loss0"] = numbers["loss"] if known is None else known
        arrays = {}
        for name, before in self.sent.items():
            after = reply.arrays.get(name)
            if after is None:
                raise RefusedError(f"its arrays are not the model's: {name!r} missing")
            if after.shape != before.shape or after.dtype != before.dtype:
                arrays[name] = after  # to be refused with its reason
            else:
                arrays[name] = before - after
        return Reply(arrays, numbers)

    def _read_judged(self, content: RecordDict) -> Judged:
        return judged_of(content, tagged=False)
