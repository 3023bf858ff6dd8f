"""The page of a run that is not finished, from its recipe, its history and its newest checkpoint.

Nothing but interim.html is written, whole or not at all, and the process that trains is not waited for.
"""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fairwind import scores
from fairwind.engine.checkpoint import read_record
from fairwind.errors import InputError
from fairwind.exchange.evaluation import Evaluations
from fairwind.exchange.evaluation import Record as EvaluationsRecord
from fairwind.report.page import INTERIM, figures, page
from fairwind.report.record import TESTED, RecipeFacts, Record, read_curves
from fairwind.runs.directory import RunDirectory
from fairwind.runs.files import HISTORY, RECIPE, RESULTS, is_held, is_sealed, read_json, write_atomic
from fairwind.runs.folder import CHECKPOINTS, FEDERATED
from fairwind.runs.results import config_of, run_row, summary_of
from fairwind.runs.schema import (
    FederatedConfig,
    FederationName,
    FindingsSoFar,
    HistoryLine,
    ScoreKind,
    TimingSoFar,
)
from fairwind.scores import Score

Lines = list[HistoryLine]


class Clients(NamedTuple):
    """What a checkpoint says of the clients, and of the time."""

    round: int
    seconds: float
    score: NDArray[np.float32]
    loss: NDArray[np.float32] | None
    train_size: NDArray[np.int64]
    test_size: NDArray[np.int64]
    names: list[str]
    groups: tuple[str, ...]
    rounds: tuple[int, ...]
    curves: NDArray[np.float32] | None
    left_out: list[int]
    stalled: list[int]
    history: Lines


class FederatedRecord(TypedDict):
    """What a checkpoint of a real federation holds beside its tensors, as far as it is read here."""

    evaluations: EvaluationsRecord
    seconds: float


NOBODY = np.zeros(0, np.int64)
UNTIMED: TimingSoFar = {"seconds": None, "rounds_per_second": None}


def write_interim(directory: Path) -> tuple[Record, Path]:
    """Writes interim.html into the directory, unless the run has finished meanwhile; returns its path."""
    record = read_interim(directory)
    path = write_atomic(directory / INTERIM, page(record, figures(record)).encode())
    if (directory / RESULTS).exists():
        path.unlink(missing_ok=True)
    return record, path


def read_interim(directory: Path) -> Record:
    """A run as far as it is; refused where nothing has been evaluated yet, or no run is there."""
    federated = _federated(directory)
    if federated is not None:
        return _of_federation(directory, federated)
    run = RunDirectory.open(directory)
    recipe, known = run.recipe, _of_checkpoint(directory)
    history = _read_history(directory, known)
    at, lines = _newest(directory, history, known)
    clients = known if known is not None and known.rounds and known.rounds[-1] == at else None
    task = run.content.get("task", "")
    results: FindingsSoFar = {
        "setup": recipe.setup,
        "task": task,
        "command": recipe.command(),
        "config": config_of(recipe, recipe.settings),
        "scores": run.content.get("scores") or [_score(name) for name in recipe.judged_by[1:]],
        "parts": run.content.get("parts", TESTED),
        "environment": run.made_with,
        "federation": run.content.get("federation") or FederationName(name=task or recipe.setup),
        "data": recipe.data,
        "runs": [],
        "summary": [],
        "timing": UNTIMED,
    }
    if recipe.sharing:
        results["sharing"] = recipe.sharing
    again = shlex.join(["fairwind", "resume", str(directory)])
    facts = cast(RecipeFacts, run.content)
    return _record(directory, results, history, lines, clients, recipe.settings.rounds, again, facts)


def _read_history(directory: Path, known: Clients | None) -> Lines:
    """The lines that are whole; the last one may be being written. A checkpoint's must be among them."""
    try:
        data = (directory / HISTORY).read_bytes()
    except FileNotFoundError:
        data = b""
    remedy = "to go on with the training makes it again"
    lines: Lines = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            lines.append(_line(json.loads(line)))
        except (ValueError, RecursionError):
            raise InputError(f"{directory / HISTORY} is damaged in line {number}: {remedy}") from None
    kept = [] if known is None else known.history
    if lines[: len(kept)] != kept[: len(lines)]:
        raise InputError(f"{directory / HISTORY} is damaged, as a checkpoint tells: {remedy}")
    return max(lines, kept, key=len)


def _line(content: object) -> HistoryLine:
    """A line of the history; ValueError if it is none."""
    if not isinstance(content, dict) or not {"algorithm", "seed", "avg", "worst30"} <= content.keys():
        raise ValueError
    if type(content.get("round")) is not int:
        raise ValueError
    return cast(HistoryLine, content)


def _newest(directory: Path, history: Lines, known: Clients | None) -> tuple[int, Lines]:
    """The round whose numbers are shown, and its line of every run.

    The last evaluation that is in a checkpoint, so that clients and averages are of one model; before
    there is a checkpoint, the last one of all runs.
    """
    if not history:
        raise InputError(f"nothing has been evaluated in {directory} yet: wait for the first evaluation")
    by_round: dict[int, Lines] = {}
    for line in history:
        by_round.setdefault(line["round"], []).append(line)
    runs = len(by_round[history[0]["round"]])
    whole = [t for t, lines in by_round.items() if len(lines) == runs]
    kept = known.rounds[-1] if known is not None and known.rounds else None
    at = kept if kept in whole else max(whole)
    return at, by_round[at]


def _record(
    directory: Path,
    results: FindingsSoFar,
    history: Lines,
    lines: Lines,
    clients: Clients | None,
    rounds: int | None,
    again: str,
    recipe: RecipeFacts | None,
) -> Record:
    """Lines of the history and a checkpoint's clients as the record of a finished run has them."""
    left_out = stalled = [0] * len(lines)
    # Runs with further models have more lines than counts, which are left to the finished page.
    if clients is not None and len(clients.left_out) == len(lines):
        left_out, stalled = clients.left_out, clients.stalled
    rows = [
        run_row(
            line,
            line["round"],
            left_out=left_out[r],
            stalled=stalled[r],
            baseline=(recipe or {}).get("baselines", {}).get(line["algorithm"]),
        )
        for r, line in enumerate(lines)
    ]
    now = max(history[-1]["round"], clients.round if clients else 0)
    seconds = clients.seconds if clients and clients.round else None
    rate = clients.round / max(seconds, 1e-9) if clients and seconds else None
    running = is_held(directory)
    results["runs"], results["summary"] = rows, summary_of(rows)
    results["timing"] = {"seconds": seconds, "rounds_per_second": rate}
    unknown = np.full((len(rows), 0), np.nan, np.float32)
    return Record(
        results=results,
        history=history,
        score=unknown if clients is None else clients.score,
        train_size=NOBODY if clients is None else clients.train_size,
        test_size=NOBODY if clients is None else clients.test_size,
        names=[] if clients is None else clients.names,
        loss=None if clients is None else clients.loss,
        groups=() if clients is None else clients.groups,
        rounds=() if clients is None else clients.rounds,
        curves=None if clients is None else clients.curves,
        recipe=recipe,
        state=_state(running, now, rounds, lines[0]["round"], clients is None, again),
        running=bool(running),
    )


def _state(running: bool | None, now: int, rounds: int | None, at: int, alone: bool, again: str) -> str:
    of = f"round {now:,}" if rounds is None else f"round {now:,} of {rounds:,}"
    if running:
        said = f"{of.capitalize()}, still running: these are interim numbers."
    else:
        word = "Not finished" if running is None else "Stopped"
        said = f"{word} at {of}: these are interim numbers. Go on with: {again}."
    if alone:
        return f"{said} Single clients are shown once there is a checkpoint."
    return (
        said if at == now else f"{said} Tables and clients are those of round {at:,}, the last checkpoint’s."
    )


def _of_checkpoint(directory: Path) -> Clients | None:
    """The clients in the newest checkpoint that can be read; older versions' do not say who they are."""
    for path in sorted((directory / CHECKPOINTS).glob("[0-9]*.json"), reverse=True):
        with _vanishing():
            content = read_record(path)
            record = content["record"]
            with safe_open(path.with_suffix(".safetensors"), framework="numpy") as file:
                rounds, curves = read_curves(file, record["evaluated"])
                return Clients(
                    round=content["round"],
                    seconds=record["seconds"],
                    score=file.get_tensor("score").astype(np.float32),
                    loss=file.get_tensor("loss").astype(np.float32),
                    train_size=file.get_tensor("train_size"),
                    test_size=file.get_tensor("test_size"),
                    names=record["names"],
                    groups=tuple(record["groups"]),
                    rounds=rounds,
                    curves=curves,
                    left_out=file.get_tensor("left_out").tolist(),
                    stalled=file.get_tensor("stalled").tolist(),
                    history=record["history"],
                )
    return None


@contextmanager
def _vanishing() -> Iterator[None]:
    """A checkpoint may be removed while it is read, or be damaged: then the one before it is taken."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError):
        return


def _federated(directory: Path) -> FederatedConfig | None:
    """What a real federation's training is known by, where the directory holds one."""
    try:
        content = read_json(directory / RECIPE)
    except (OSError, ValueError):
        return None
    owner: FederatedConfig | None = content.get(FEDERATED) if is_sealed(content) else None
    return owner


def _of_federation(directory: Path, owner: FederatedConfig) -> Record:
    """A real federation's training, of which the server keeps what clients said."""
    clients, judged = None, [_score("accuracy")]
    for path in sorted((directory / CHECKPOINTS).glob("[0-9]*.json"), reverse=True):
        with _vanishing():
            content = read_record(path)
            record: FederatedRecord = content["record"]
            _, _, _, said = next(iter(record["evaluations"]["last"].values()))
            judged = [_score(name) for name in said]
            asked = [Score(score["name"], lambda o, t: o, score["kind"]) for score in judged]
            evaluations = Evaluations(asked, owner["algorithm"], owner["seed"])
            evaluations.restore(record["evaluations"])
            numbers = {name: value.numpy() for name, value in evaluations.of_clients().items()}
            clients = Clients(
                round=content["round"],
                seconds=record["seconds"],
                score=numbers["score"].astype(np.float32),
                loss=numbers["loss"].astype(np.float32),
                train_size=numbers["train_size"],
                test_size=numbers["test_size"],
                names=evaluations.clients,
                groups=(),
                rounds=tuple(evaluations.rounds),
                curves=numbers["curves"].astype(np.float32),
                left_out=[],
                stalled=[],
                history=evaluations.history,
            )
            break
    history = _read_history(directory, clients)
    at, lines = _newest(directory, history, clients)
    task = owner.get("task", "")
    results: FindingsSoFar = {
        "setup": task,
        "task": task,
        "command": "",
        "config": owner,
        "scores": judged,
        "environment": None,
        "federation": {"name": task},
        "data": None,
        "runs": [],
        "summary": [],
        "timing": UNTIMED,
    }
    shown = clients if clients is not None and clients.rounds[-1] == at else None
    return _record(directory, results, history, lines, shown, None, "the same training, started again", None)


def _score(name: str) -> ScoreKind:
    """A score of which the name is known: one of Fairwind's says what kind it is."""
    own = getattr(scores, name, None)
    return {"name": name, "kind": own.kind if isinstance(own, Score) else "higher"}
