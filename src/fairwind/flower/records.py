"""Replies as Flower's records, and back."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fairwind.errors import first_line
from fairwind.exchange.evaluation import Judged
from fairwind.exchange.message import Arrays, RefusedError, Reply

ARRAYS, METRICS, CONFIG, SHARED = "arrays", "metrics", "config", "shared"  # names of records
SIZES = ("num-examples", "train-examples")


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Arrays by name, as a record."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def to_content(reply: Reply) -> RecordDict:
    """A client's reply, as the content of a message."""
    return RecordDict({ARRAYS: to_record(reply.arrays), METRICS: MetricRecord(dict(reply.numbers))})


def from_content(content: RecordDict) -> Reply:
    """The reply in a message; its arrays are read without pickle, and whatever is wrong is refused."""
    return Reply(arrays_in(content), dict(_one(content, METRICS, MetricRecord)))


def arrays_in(content: RecordDict, name: str = ARRAYS) -> Arrays:
    """The arrays of a record in a message."""
    return to_arrays(_one(content, name, ArrayRecord))


def to_arrays(record: ArrayRecord) -> Arrays:
    """A record's arrays, which may have been made to break their reader."""
    found = {}
    for name, array in record.items():
        try:
            found[name] = array.numpy()
        except Exception as error:  # whatever NumPy makes of such bytes
            raise RefusedError(f"{name!r} cannot be read: {first_line(error)}") from None
    return found


def config_of(content: RecordDict) -> Mapping[str, Any]:
    """What a server says to a client besides the model."""
    said: Mapping[str, Any] = _one(content, CONFIG, ConfigRecord)
    return said


def judged_content(judged: Judged) -> RecordDict:
    """A client's evaluation, as the content of a message."""
    sizes = dict(zip(SIZES, judged[:2], strict=True))
    return RecordDict({METRICS: MetricRecord({**sizes, "loss": judged.loss, **judged.scores})})


def judged_of(content: RecordDict) -> Judged:
    """The evaluation in a message."""
    said = dict(_one(content, METRICS, MetricRecord))
    for name, value in said.items():
        if isinstance(value, list):
            raise RefusedError(f"its {name} is no number but a list")
    size = said.pop(SIZES[0], None)
    if size is None:
        raise RefusedError(f"it does not tell its {SIZES[0]}")
    loss = float(said.pop("loss", float("nan")))
    return Judged(size, said.pop(SIZES[1], 0), loss, {name: float(v) for name, v in said.items()})


def _one(content: RecordDict, name: str, kind: type) -> Any:
    if name not in content or not isinstance(content[name], kind):
        raise RefusedError(
            f"it has no {kind.__name__} {name!r}, but {', '.join(map(repr, content)) or 'nothing'}"
        )
    return content[name]
