"""A strategy for apps that reply as FedAvg's do: with trained weights and metrics."""

import math
from typing import Any

from flwr.app import RecordDict

from fairwind.aggregation import refuses
from fairwind.algorithms import NEEDS
from fairwind.contract import AnyAlgorithm, GradientAlgorithm
from fairwind.engine.layout import ALL_SHARED
from fairwind.engine.settings import Model
from fairwind.errors import InputError
from fairwind.exchange.evaluation import Judged
from fairwind.exchange.message import MEASURED, RefusedError, Reply, keeps
from fairwind.flower.records import from_content, judged_of
from fairwind.flower.strategy import AlgorithmStrategy
from fairwind.task import Task

# Names of metrics in replies, and what they are here
NAMES = {"num-examples": "size", "lr": "lr", "steps": "steps", "loss": "loss", "grad-norm": "grad_norm"}


class WeightsStrategy(AlgorithmStrategy):
    """The contribution is computed here, from the weights a client was sent and those it sends back.

    Clients are sent the trainable parameters alone, which an app loads with `strict=False`: what is frozen,
    and buffers, never change here. Replies have these parameters, and may have a whole state dict; and the
    metric "num-examples". Algorithms that ask for more find it in further metrics: "lr" and "steps" of local
    training; "loss", the mean over the training samples before training; "grad-norm", the norm of its
    gradient there. Others are ignored.
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
        if isinstance(model, Task) and model.sharing != ALL_SHARED:
            raise InputError(
                "replies of weights have no personal parts and no statistics of batch norm: take "
                "AlgorithmStrategy and client_app"
            )
        if options.get("evaluate_in_training"):
            raise InputError(
                "apps of one's own evaluate when they are asked to: leave out evaluate_in_training"
            )
        if options.get("codec") is not None:
            raise InputError("apps of one's own send weights, which no codec is for: leave out codec")
        super().__init__(algorithm, model, **options)
        if keeps(self.algorithm) or isinstance(self.algorithm, GradientAlgorithm):
            raise InputError(
                f"{self.algorithm.name} needs {NEEDS[type(self.algorithm)]}, and replies of weights have no "
                "such vector: take AlgorithmStrategy and client_app"
            )
        if lr is None and not refuses(self.algorithm, lr=math.nan):
            lr = 1.0  # whatever it is
        self.usual = {name: value for name, value in (("lr", lr), ("steps", steps)) if value is not None}

    def _read(self, node: int, content: RecordDict) -> Reply:
        reply = from_content(content, tagged=False)
        wanted = {"size", "lr", "steps", *MEASURED[self.algorithm.probe]}
        numbers = dict(self.usual)
        numbers |= {NAMES[k]: v for k, v in reply.numbers.items() if k in NAMES and NAMES[k] in wanted}
        if "loss0" in wanted and "loss" in numbers:
            known = self.aggregator.first_loss(str(node)) if self.aggregator.round else None
            numbers["loss0"] = numbers["loss"] if known is None else known
        arrays = {}
        for name, before in self.aggregator.weights().items():
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
