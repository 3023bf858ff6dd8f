"""Replies as NVFLARE's FLModels, and back."""

from typing import Any

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fairwind.exchange.evaluation import Judged
from fairwind.exchange.message import WEIGHTS, Phase, RefusedError, Reply, Request, Tag, read_tag

# Names in a model's meta
SAID, NUMBERS, SECOND, FAILED = "fairwind", "fairwind-numbers", "fairwind-second", "fairwind-failed"
TAG = "fairwind-tag"
CLIENT = "client_name"  # there NVFLARE's controllers say whose a result is, whatever the client says


def as_model(reply: Reply | Judged, received: FLModel | None = None) -> FLModel:
    """A client's reply to the task "train", or to "validate", as it is sent.

    A training loop of one's own gives the model that it has `received`, which says which request it is.
    Updates are what was received less what was trained: NVFLARE's differences with the other sign.
    """
    said = received.meta.get(SAID, {}) if received is not None else {}
    tag = {name: said.get(name) for name in Tag._fields} if reply.tag is None else reply.tag._asdict()
    if isinstance(reply, Judged):
        further = None if reply.further is None else _as_metrics(reply.further)
        return FLModel(metrics={**_as_metrics(reply), "further": further}, meta={TAG: tag})
    meta: dict[str, Any] = {NUMBERS: reply.numbers, TAG: tag}
    if reply.second is not None:
        meta[SECOND] = reply.second
    return FLModel(params_type=ParamsType.DIFF, params=reply.arrays, meta=meta)


def _as_metrics(judged: Judged) -> dict[str, Any]:
    return {name: value for name, value in judged._asdict().items() if name not in ("further", "tag")}


def failed(why: str) -> FLModel:
    """What a client sends instead, so that the server can tell why."""
    return FLModel(params_type=ParamsType.DIFF, params={FAILED: np.zeros(0)}, meta={FAILED: why})


def reply_of(model: FLModel) -> Reply:
    """The reply in a model; whatever is wrong with it is refused, here or by the checks that follow."""
    if FAILED in model.meta:
        raise RefusedError(f"it failed: {str(model.meta[FAILED])[:200]!r}")
    arrays, numbers, second = model.params, model.meta.get(NUMBERS), model.meta.get(SECOND)
    if not isinstance(arrays, dict) or not isinstance(numbers, dict):
        raise RefusedError(f"it has no {NUMBERS!r} in its meta: send what fairwind.nvflare.as_model gives")
    if second is not None and not isinstance(second, dict):
        raise RefusedError(f"its {SECOND!r} is no dict of arrays but a {type(second).__name__}")
    return Reply(arrays, numbers, second, _tag_of(model))


def _tag_of(model: FLModel) -> Tag:
    """Which request a model says that it answers."""
    said = model.meta.get(TAG)
    if not isinstance(said, dict):
        raise RefusedError("it does not say which request it answers: send as_model(…, received)")
    return read_tag(*(said.get(name) for name in Tag._fields))


def request_of(model: FLModel, site: str, phase: Phase) -> Request:
    """What a site is asked; `phase` is that of its task, unless the server says more."""
    said = model.meta[SAID]
    return Request(
        said.get("phase", phase),
        int(said["round"]),
        str(said.get("training", "")),
        {WEIGHTS: model.params, **said.get("vectors", {})},
        said.get("first-loss"),
        said.get("kept", {}).get(site),
    )


def judged_of(model: FLModel) -> Judged:
    """The evaluation in a model."""
    said: Any = model.metrics
    try:
        judged, further = _judged(said), said.get("further")
        judged = judged if further is None else judged._replace(further=_judged(further))
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        raise RefusedError("its evaluation cannot be read") from None
    return judged._replace(tag=_tag_of(model))


def _judged(said: Any) -> Judged:
    scores = {str(name): float(value) for name, value in said["scores"].items()}
    size: Any = float(said["size"])  # whether it is whole is checked with the rest
    train_size: Any = float(said["train_size"])
    return Judged(size, train_size, float(said["loss"]), scores)
