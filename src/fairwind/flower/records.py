"""Replies as Flower's records, and back."""

import re
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict

from fairwind.errors import first_line
from fairwind.exchange.evaluation import Judged
from fairwind.exchange.kept import Kept
from fairwind.exchange.message import (
    WEIGHTS,
    Arrays,
    Phase,
    RefusedError,
    Reply,
    Request,
    Tag,
    read_tag,
)

# Names of records; `JUDGED` is an evaluation beside what was trained.
ARRAYS, METRICS, CONFIG, SECOND, JUDGED = "arrays", "metrics", "config", "second", "judged"
KEPT = "fairwind"  # what those of a node's state begin with,
CODED = f"{KEPT}-coded"  # and of these what a codec left out
SIZES = ("num-examples", "train-examples")
SCORE = "score-"  # what scores begin with, which may have any names; those of apps of one's own do not
FURTHER = "further-"  # what a further model's numbers begin with


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Arrays by name, as a record."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def to_content(reply: Reply) -> RecordDict:
    """A client's reply, as the content of a message."""
    second = {} if reply.second is None else {SECOND: to_record(reply.second)}
    arrays, numbers = to_record(reply.arrays), MetricRecord(dict(reply.numbers))
    return RecordDict({ARRAYS: arrays, METRICS: numbers, **second, **_tagged(reply.tag)})


def from_content(content: RecordDict, *, tagged: bool = True) -> Reply:
    """The reply in a message; its arrays are read without pickle, and whatever is wrong is refused.

    Apps that do not know Fairwind's messages reply without a tag.
    """
    second = arrays_in(content, SECOND) if SECOND in content else None
    reply = Reply(arrays_in(content), dict(_one(content, METRICS, MetricRecord)), second)
    return reply._replace(tag=tag_of(config_of(content))) if tagged else reply


def tag_of(said: Mapping[str, Any]) -> Tag:
    """Which request a reply says that it answers."""
    return read_tag(*(said.get(name) for name in Tag._fields))


def _tagged(tag: Tag | None) -> dict[str, ConfigRecord]:
    return {} if tag is None else {CONFIG: ConfigRecord({**tag._asdict()})}


def asks_to_judge(content: RecordDict) -> bool:
    """Whether the model received is evaluated, too, before it is trained."""
    return bool(config_of(content).get(JUDGED, False))


def words_of(request: Request) -> dict[str, str | int | float]:
    """What a server says besides vectors."""
    said: dict[str, str | int | float] = {"phase": request.phase, "round": request.round}
    said["training"] = request.training
    if request.first_loss is not None:
        said["first-loss"] = request.first_loss
    return said if request.kept is None else said | {"kept": request.kept}


def request_of(content: RecordDict, phase: Phase) -> Request:
    """What a client is asked; `phase` is that of its message, unless the server says more."""
    said = config_of(content)
    first, kept = said.get("first-loss"), said.get("kept")
    names = [name for name in content if isinstance(content[name], ArrayRecord)]
    return Request(
        said.get("phase", phase),
        int(said["round"]),
        str(said.get("training", "")),
        {WEIGHTS if name == ARRAYS else name: arrays_in(content, name) for name in names},
        None if first is None else float(first),
        None if kept is None else int(kept),
    )


def kept_in(state: RecordDict) -> Kept:
    """What a node's state keeps."""
    if KEPT not in state:
        return Kept()
    said = dict(_one(state, KEPT, ConfigRecord))
    first = said.get("first-loss")
    vectors: dict[int, Arrays] = {}
    left_out: dict[int, Arrays] = {}
    for name in state:
        kind, _, number = name.rpartition("-")
        if kind in (KEPT, CODED):
            (vectors if kind == KEPT else left_out)[int(number)] = arrays_in(state, name)
    return Kept(str(said["training"]), None if first is None else float(first), vectors, left_out)


def keep_in(state: RecordDict, kept: Kept) -> None:
    """Writes it into a node's state."""
    for name in [name for name in state if name.startswith(KEPT)]:
        del state[name]
    first = {} if kept.first_loss is None else {"first-loss": kept.first_loss}
    state[KEPT] = ConfigRecord({"training": kept.training, **first})
    for kind, vectors in ((KEPT, kept.vectors), (CODED, kept.left_out)):
        for number, arrays in vectors.items():
            state[f"{kind}-{number}"] = to_record(arrays)


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


def judged_content(judged: Judged, name: str = METRICS) -> RecordDict:
    """A client's evaluation, as the content of a message."""
    said: dict[str, Any] = {**dict(zip(SIZES, judged[:2], strict=True)), **_said(judged)}
    if judged.further is not None:
        said |= {f"{FURTHER}{name}": value for name, value in _said(judged.further).items()}
    return RecordDict({name: MetricRecord(said), **_tagged(judged.tag)})


def _said(judged: Judged) -> dict[str, float]:
    return {"loss": judged.loss} | {f"{SCORE}{name}": value for name, value in judged.scores.items()}


def judged_of(content: RecordDict, name: str = METRICS, *, tagged: bool = True) -> Judged:
    """The evaluation in a message, with a tag as of `from_content`."""
    said = dict(_one(content, name, MetricRecord))
    for name, value in said.items():
        if isinstance(value, list):
            raise RefusedError(f"its {name} is no number but a list")
    size = said.pop(SIZES[0], None)
    if size is None:
        raise RefusedError(f"it does not tell its {SIZES[0]}")
    sizes = size, said.pop(SIZES[1], 0)
    more = {name: said.pop(name) for name in list(said) if name.startswith(FURTHER)}
    further = _scored(sizes, {name.removeprefix(FURTHER): v for name, v in more.items()}) if more else None
    tag = tag_of(config_of(content)) if tagged else None
    return _scored(sizes, said)._replace(further=further, tag=tag)


def _scored(sizes: tuple[int, int], said: dict[str, Any]) -> Judged:
    numbers = {name: float(value) for name, value in said.items()}
    scores = {name.removeprefix(SCORE): value for name, value in numbers.items() if name.startswith(SCORE)}
    return Judged(*sizes, numbers.get("loss", float("nan")), numbers | scores)


def failure(error: Error) -> str:
    """Why a node failed; of an exception, which Flower sends with its text, the type alone."""
    reason = error.reason or f"error {error.code}"
    raised = re.match(r"<class '([^']+)'>:<", reason)
    return f"it failed: {raised[1] if raised else reason}"


def _one(content: RecordDict, name: str, kind: type) -> Any:
    if name not in content or not isinstance(content[name], kind):
        raise RefusedError(
            f"it has no {kind.__name__} {name!r}, but {', '.join(map(repr, content)) or 'nothing'}"
        )
    return content[name]
