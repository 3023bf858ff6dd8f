"""Replies as NVFLARE's FLModels, and back."""

from typing import Any

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fairwind.exchange.evaluation import Judged
from fairwind.exchange.message import RefusedError, Reply

SAID, NUMBERS, FAILED = "fairwind", "fairwind-numbers", "fairwind-failed"  # names in a model's meta
CLIENT = "client_name"  # there NVFLARE's controllers say whose a result is, whatever the client says


def as_model(reply: Reply | Judged) -> FLModel:
    """A client's reply to the task "train", or to "validate", as it is sent.

    Updates are what was received less what was trained: NVFLARE's differences with the other sign.
    """
    if isinstance(reply, Judged):
        return FLModel(metrics=reply._asdict())
    return FLModel(params_type=ParamsType.DIFF, params=reply.arrays, meta={NUMBERS: reply.numbers})


def failed(why: str) -> FLModel:
    """What a client sends instead, so that the server can tell why."""
    return FLModel(params_type=ParamsType.DIFF, params={FAILED: np.zeros(0)}, meta={FAILED: why})


def reply_of(model: FLModel) -> Reply:
    """The reply in a model; whatever is wrong with it is refused, here or by the checks that follow."""
    if FAILED in model.meta:
        raise RefusedError(f"it failed: {str(model.meta[FAILED])[:200]!r}")
    arrays, numbers = model.params, model.meta.get(NUMBERS)
    if not isinstance(arrays, dict) or not isinstance(numbers, dict):
        raise RefusedError(f"it has no {NUMBERS!r} in its meta: send what fairwind.nvflare.as_model gives")
    return Reply(arrays, numbers)


def judged_of(model: FLModel) -> Judged:
    """The evaluation in a model."""
    said: Any = model.metrics
    try:
        scores = {str(name): float(value) for name, value in said["scores"].items()}
        return Judged(int(said["size"]), int(said["train_size"]), float(said["loss"]), scores)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        raise RefusedError("its evaluation cannot be read") from None
