"""The directory of a comparison: its recipe, checkpoints, history and results."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors.torch import save

from fairwind import setups
from fairwind.data import store
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.engine.simulation import Simulation
from fairwind.environment import changes, environment
from fairwind.errors import InputError
from fairwind.files import (
    CLIENTS,
    HISTORY,
    MODELS,
    RECIPE,
    RESULTS,
    append,
    default_cache,
    lock,
    read_json,
    sweep,
    write_atomic,
    write_json,
)
from fairwind.recipe import Recipe
from fairwind.references import is_reference, load_task
from fairwind.results import summarise
from fairwind.setups import Where
from fairwind.task import Task


class RunDirectory:
    """A directory that holds a comparison, begun or finished."""

    def __init__(self, path: Path, recipe: Recipe, where: Where, made_with: dict[str, Any]):
        self.path, self.recipe, self.where, self.made_with = path, recipe, where, made_with
        self.checkpoints = path / "checkpoints"
        self.identity = _identity(path)

    @classmethod
    def create(cls, path: Path, recipe: Recipe, where: Where) -> "RunDirectory":
        """Begins a comparison in an empty directory that this process holds."""
        made_with = environment(recipe.settings.device)
        places = {k: str(v.absolute()) for k, v in where._asdict().items() if v is not None}
        write_json(path / RECIPE, {**recipe.to_json(), "where": places, "environment": made_with})
        return cls(path, recipe, where, made_with)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """The directory of an earlier comparison."""
        try:
            content = read_json(path / RECIPE)
            where = Where(**{k: Path(v) for k, v in content.get("where", {}).items()})
            return cls(path, Recipe.from_json(content), where, content["environment"])
        except OSError:
            raise InputError(f"{path} holds no run: there is no {RECIPE} in it") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path / RECIPE} cannot be read as a recipe: {error}") from None

    @property
    def finished(self) -> bool:
        return (self.path / RESULTS).exists()

    def changed(self) -> list[str]:
        """What is not as it was when the run began, and may change its last bits."""
        return changes(self.made_with, environment(self.recipe.settings.device))

    def task(self, cache: Path | None = None) -> Task:
        """The very task that the run began with."""
        recipe = self.recipe
        if is_reference(recipe.setup):
            return load_task(recipe.setup)
        if recipe.in_python:
            raise InputError(
                f"the task {recipe.setup!r} of {self.path} was made in Python: go on there, with the same "
                f"fairwind.compare(…, out={str(self.path)!r})"
            )
        where = self.where if cache is None else self.where._replace(cache=cache)
        if recipe.data is None:
            return setups.task(recipe.setup)
        entry = store.find(recipe.data, where.cache)
        if entry is None:
            cache = where.cache or default_cache()
            given = {"data-dir": where.data_dir, "glove": where.glove, "cache": where.cache}
            options = "".join(f" --{name} {value}" for name, value in given.items() if value is not None)
            raise InputError(
                f"the data of this run (digest {recipe.data[:12]}…) is not in {cache}: "
                f"make it again with 'fairwind data {recipe.setup}{options}', or name its --cache"
            )
        return setups.task_on(recipe.setup, entry.load())

    def restore(self, simulation: Simulation) -> list[str]:
        """Brings a simulation to the newest good checkpoint; returns what was refused on the way."""
        checkpoint, refused = load_checkpoint(self.checkpoints, self.recipe.digest)
        if checkpoint is not None:
            simulation.restore(checkpoint)
        elif refused:
            raise InputError(
                f"no usable checkpoint in {self.checkpoints}: {refused[0]}; "
                "delete that folder to start again from round 0"
            )
        if simulation.ranks.first:
            self.write_history(simulation)
        return refused

    def save(self, simulation: Simulation) -> None:
        self._check_place()
        save_checkpoint(self.checkpoints, simulation.checkpoint(), self.recipe.digest)

    def write_history(self, simulation: Simulation, since: int = 0) -> None:
        """Writes the history anew, or appends what came after its first `since` lines."""
        self._check_place()
        lines = "".join(json.dumps(line, allow_nan=False) + "\n" for line in simulation.history[since:])
        if since:
            append(self.path / HISTORY, lines)
        else:
            write_atomic(self.path / HISTORY, lines.encode())

    def write_results(self, simulation: Simulation, *, models: bool = True) -> dict[str, Any]:
        """The trained models and every client's numbers; last the results, which say that all is there."""
        self._check_place()
        if models:
            trained = {
                f"{run.label}/{run.seed}/{name}": value.cpu().contiguous()
                for r, run in enumerate(simulation.runs)
                for name, value in simulation.state_dict(r).items()
            }
            write_atomic(self.path / MODELS, save(trained))
        clients = {
            "score": simulation.score.float(),
            "loss": simulation.loss.float(),
            "curves": simulation.curves.tensor(),
            "train_size": simulation.federation.train,
            "test_size": simulation.federation.test,
        }
        others = zip(simulation.scores[1:], simulation.further, strict=True)
        clients |= {f"score.{score.name}": found.float() for score, found in others}
        metadata = {
            "names": json.dumps(simulation.federation.names),
            "rounds": json.dumps(simulation.curves.rounds),
        }
        write_atomic(self.path / CLIENTS, save(clients, metadata=metadata))
        results = summarise(simulation, self.recipe)
        results["files"] = {
            name: _digest(self.path / name) for name in (HISTORY, CLIENTS, *([MODELS] if models else []))
        }
        results["sha256"] = results_digest(results)
        write_json(self.path / RESULTS, results)
        return results

    def damaged(self) -> list[str]:
        """Finished files that are not as they were written."""
        try:
            results = read_json(self.path / RESULTS)
            if "sha256" in results and results["sha256"] != results_digest(results):
                return [RESULTS]
            files = results.get("files", {})
            return [name for name, digest in files.items() if _digest(self.path / name) != digest]
        except (OSError, ValueError):
            return [RESULTS]

    def _check_place(self) -> None:
        """Refuses to write where the directory no longer is: it would be made anew, without its contents."""
        if _identity(self.path) != self.identity:
            raise InputError(
                f"{self.path} was moved or deleted while it was trained in; what was saved is where it was "
                "moved to: go on there with 'fairwind resume NEW-PLACE'"
            )


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keeps other processes from training in a directory, which is made if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}; give another --out") from None
    try:
        with lock(path) as mine:
            if not mine:
                raise InputError(f"another process is training in {path}; wait for it or stop it")
            if not os.access(path, os.W_OK):
                raise InputError(f"cannot write to {path}: permission denied; give another --out")
            sweep(path)
            yield
    finally:
        with suppress(OSError):  # whatever is in it stays
            path.rmdir()


def check_free(path: Path) -> None:
    """Refuses a directory that holds anything; it is held by this process."""
    if (path / RECIPE).exists():
        raise InputError(
            f"{path} already holds a run: go on with 'fairwind resume {path}', or give another --out"
        )
    if any(path.iterdir()):
        raise InputError(f"{path} is not empty: give another --out, so that nothing is overwritten")


def new_directory(name: str) -> Path:
    """A directory under runs/ that nobody else has, made for a comparison of that name."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.") or "run"
    begun = f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in range(1, 1000):
        path = Path("runs") / (begun if number == 1 else f"{begun}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"cannot write to {path.parent}: {error.strerror}; give --out") from None
    raise InputError("there are a thousand runs of this second: give --out")


def explained(error: OSError, again: str = "") -> str:
    """What an error of the file system means for a run."""
    where = f": {error.filename}" if error.filename else ""
    text = f"{error.strerror or error}{where}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += "; what was saved before is safe: make room, then go on"
        text += f" with: {again}" if again else " with 'fairwind resume DIR'"
    return text


def results_digest(results: dict[str, Any]) -> str:
    """SHA-256 of results, but for the digest itself."""
    content = {key: value for key, value in results.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "missing"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
