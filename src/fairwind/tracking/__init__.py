"""Trackers: a comparison's rounds in TensorBoard, MLflow or Weights & Biases, or in one of your own."""

import math
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol, TypedDict, cast

from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError, first_line, needs_extra, unknown
from fairwind.runs.files import TRACKING, read_json, write_json
from fairwind.runs.folder import RUNS, run_name
from fairwind.runs.recipe import Recipe, to_jsonable
from fairwind.runs.results import Evaluated
from fairwind.runs.schema import HistoryLine, SettingsConfig


class Tracked(NamedTuple):
    """A comparison, as trackers know it."""

    name: str  #: Its directory's, or its task's with the time.
    id: str  #: Stays the same when the comparison is resumed.
    settings: dict[str, str]  #: Task, rounds, solver and so on, as texts.
    runs: tuple[str, ...]  #: Their names, algorithm/seed.


class Recorded(TypedDict, total=False):
    """tracking.json of a comparison's directory."""

    trackers: list[str]
    id: str


class Tracker(Protocol):
    """Where a comparison is shown while it trains."""

    def start(self, tracked: Tracked) -> None:
        """Begins, or goes on with what was begun under the same id."""

    def log(self, run: str, round: int, metrics: Mapping[str, float]) -> None:
        """A run's metrics after a round. A resumed comparison gives earlier rounds again; none may double."""

    def finish(self, *, complete: bool, page: Path | None) -> None:
        """Closes. `complete` where no round is left; then `page` is the report, if there is a directory."""


def _tensorboard(folder: Path) -> Tracker:
    from fairwind.tracking.tensorboard import TensorBoard

    return TensorBoard(folder)


def _mlflow(folder: Path) -> Tracker:
    from fairwind.tracking.mlflow import MLflow

    return MLflow(folder)


def _wandb(folder: Path) -> Tracker:
    from fairwind.tracking.wandb import WandB

    return WandB(folder)


class Kind(NamedTuple):
    """A tracker that can be named on a command line."""

    build: Callable[[Path], Tracker]
    needs: tuple[str, ...]  # modules


KINDS = {
    "tensorboard": Kind(_tensorboard, ("tensorboard",)),
    "mlflow": Kind(_mlflow, ("mlflow", "sqlalchemy", "alembic")),
    "wandb": Kind(_wandb, ("wandb",)),
}
Given = str | Tracker | Sequence[str | Tracker]


class Tracking:
    """The trackers of a comparison; one that fails is left out with a warning, and training goes on."""

    def __init__(self, given: Given = ()):
        """`given` are trackers, or their names: "mlflow:FOLDER", or "mlflow", which is runs/mlflow."""
        several = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
        self.trackers: dict[str, Tracker] = {}
        for one in several:
            name, tracker = _named(one) if isinstance(one, str) else (type(one).__name__, one)
            self.trackers[name] = tracker

    @classmethod
    def resumed(cls, path: Path) -> "Tracking":
        """The trackers that a comparison began with, as far as they are to be had here."""
        made = cls()
        recorded = _recorded(path)
        if not recorded and (path / TRACKING).exists():
            warnings.warn(f"not tracked any more: {path / TRACKING} is damaged", stacklevel=2)
        for spec in recorded.get("trackers", []):
            try:
                made.trackers |= cls(spec).trackers
            except InputError as error:
                warnings.warn(f"not tracked any more: {error}", stacklevel=2)
        return made

    def record(self, path: Path) -> None:
        """Writes the trackers into the directory of a comparison, before the recipe: no kill loses them."""
        if self.trackers:
            record: Recorded = {
                "trackers": [spec for spec in self.trackers if ":" in spec],
                "id": _id_of(path),
            }
            write_json(path / TRACKING, record)
        else:  # of a comparison that was killed before it had a recipe
            (path / TRACKING).unlink(missing_ok=True)

    def begin(self, simulation: Simulation, recipe: Recipe, path: Path | None) -> None:
        """A comparison, with the rounds that are behind it; `path` is its directory."""
        settings: SettingsConfig = to_jsonable(asdict(recipe.settings))
        runs = [(view.label, view.seed) for view in simulation.final_views]
        task = recipe.setup or simulation.name
        name = run_name(task) if path is None else path.resolve().name
        self.start(name, {"task": task, **settings}, runs, simulation.history, path)

    def start(
        self,
        name: str,
        settings: Mapping[str, object],
        runs: Iterable[tuple[str, int]],
        history: Iterable[HistoryLine],
        path: Path | None = None,
    ) -> None:
        """The same for whatever has runs and a history."""
        if not self.trackers:
            return
        if path is not None:
            self.record(path)
        names = tuple(f"{label}/{seed}" for label, seed in runs)
        tracked = Tracked(name, _id_of(path), flat(settings), names)
        self._each(lambda tracker: tracker.start(tracked))
        self.log(history)

    def log(self, lines: Iterable[HistoryLine], prefix: str = "") -> None:
        """Lines of the history, one for each run and evaluated round; metrics are named with the prefix."""
        for line in lines:
            run = f"{line['algorithm']}/{line['seed']}"
            numbers = {f"{prefix}{name}": value for name, value in metrics(line).items()}
            self._each(partial(_log, run=run, round=line["round"], metrics=numbers))

    def and_then(self, after_evaluation: Evaluated | None) -> Evaluated:
        """What to call after an evaluation: the trackers, and a function of the user's."""

        def evaluated(lines: list[HistoryLine]) -> object:
            self.log(lines)
            return None if after_evaluation is None else after_evaluation(lines)

        return evaluated

    def finish(self, page: Path | None = None) -> None:
        """Closes all, with the report page."""
        self._each(lambda tracker: tracker.finish(complete=True, page=page))
        self.trackers = {}

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes what is open, where training did not come to its end."""
        self._each(lambda tracker: tracker.finish(complete=False, page=None))
        self.trackers = {}

    def _each(self, call: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # among the libraries
                    call(tracker)
            except Exception as error:  # whatever a library, a disk or a user's class may raise
                del self.trackers[name]
                why = f"{type(error).__name__}: {first_line(error)}"
                warnings.warn(f"{name} failed and is left out: {why}", stacklevel=2)


def _log(tracker: Tracker, run: str, round: int, metrics: Mapping[str, float]) -> None:
    tracker.log(run, round, metrics)


def _named(spec: str) -> tuple[str, Tracker]:
    """A tracker by its name and folder, which is made; and both in full."""
    kind, _, place = spec.partition(":")
    if kind not in KINDS:
        raise unknown("tracker", kind, KINDS)
    for module in KINDS[kind].needs:
        if find_spec(module) is None:
            raise needs_extra(kind, module, "track")
    folder = (Path(place) if place else RUNS / kind).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{kind} cannot write to {folder}: {error.strerror}") from None
    return f"{kind}:{folder}", KINDS[kind].build(folder)


def _recorded(path: Path | None) -> Recorded:
    try:
        return {} if path is None else cast(Recorded, read_json(path / TRACKING))
    except (OSError, ValueError):
        return {}


def _id_of(path: Path | None) -> str:
    """By which trackers know a comparison, or a new one."""
    return str(_recorded(path).get("id", "")) or uuid.uuid4().hex[:12]


def metrics(line: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers of a history's line, those of groups and further scores by their paths."""
    numbers = {}
    for name, value in _leaves(line):
        if name not in ("seed", "round") and isinstance(value, int | float) and math.isfinite(value):
            numbers[name] = float(value)
    return numbers


def flat(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings as texts, those of the solver as solver/lr and so on."""
    return {name: "none" if value is None else str(value) for name, value in _leaves(settings)}


def _leaves(content: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    for key, value in content.items():
        name = prefix + str(key).replace("/", "-")
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}/")
        else:
            yield name, value
