"""The directory of a comparison: its recipe, checkpoints, history and results."""

import errno
import hashlib
import json
import os
import shlex
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
from fairwind.errors import InputError, first_line
from fairwind.files import (
    CLIENTS,
    HISTORY,
    MODELS,
    RECIPE,
    RESULTS,
    append,
    default_cache,
    is_sealed,
    lock,
    read_json,
    sealed,
    sweep,
    write_atomic,
    write_json,
)
from fairwind.recipe import Recipe
from fairwind.references import is_reference, load_task
from fairwind.results import summarise
from fairwind.setups import Where
from fairwind.task import Task

CHECKPOINTS = "checkpoints"


class RunDirectory:
    """A directory that holds a comparison, begun or finished."""

    def __init__(self, path: Path, content: dict[str, Any], *, lost: str = ""):
        """`content` is the recipe's file; `lost` says why it had to be taken from a checkpoint."""
        self.path, self.content, self.lost = path, content, lost
        self.recipe = Recipe.from_json(content)
        self.where = Where(**{k: Path(v) for k, v in content.get("where", {}).items()})
        self.made_with: dict[str, Any] = dict(content["environment"])
        self.checkpoints = path / CHECKPOINTS
        self.identity = _identity(path)

    @classmethod
    def create(cls, path: Path, recipe: Recipe, where: Where, engine: str = "") -> "RunDirectory":
        """Begins a comparison in an empty directory that this process holds; `engine` says what trains it."""
        made_with = environment(recipe.settings.device)
        places = {k: str(v.absolute()) for k, v in where._asdict().items() if v is not None}
        content = {**recipe.to_json(), "where": places, "environment": made_with, "engine": engine}
        write_json(path / RECIPE, sealed(content))
        return cls(path, sealed(content))

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """The directory of an earlier comparison; a recipe that is lost is taken from a checkpoint."""
        try:
            content = read_json(path / RECIPE)
            if "sha256" in content and not is_sealed(content):
                raise ValueError(f"{RECIPE} is damaged (its SHA-256 differs)")
            return cls(path, content)
        except (FileNotFoundError, NotADirectoryError):
            lost = f"{path / RECIPE} is missing"
        except OSError as error:
            raise InputError(f"{path / RECIPE} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            lost = f"{path / RECIPE} cannot be read as a recipe: {first_line(error)}"
        checkpoint, _ = load_checkpoint(path / CHECKPOINTS)
        if checkpoint is not None and "recipe" in checkpoint.record:
            return cls(path, checkpoint.record["recipe"], lost=lost)
        if not (path / RECIPE).exists():
            raise InputError(f"{path} holds no run: there is no {RECIPE} in it")
        raise InputError(f"{lost}; put a copy of it there, or begin anew in another directory")

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

    def mend_recipe(self) -> list[str]:
        """Writes a recipe that was lost; returns what there is to say about it."""
        if not self.lost:
            return []
        self._check_place()
        write_json(self.path / RECIPE, self.content)
        lost, self.lost = self.lost, ""
        return [f"{lost}; it is made again from a checkpoint"]

    def restore(self, simulation: Simulation) -> list[str]:
        """Brings a simulation to the newest good checkpoint; returns what was damaged, and what is done."""
        lines = self.mend_recipe() if simulation.ranks.first else []
        checkpoint, refused = load_checkpoint(self.checkpoints, self.recipe.digest)
        if checkpoint is not None:
            simulation.restore(checkpoint)
        elif refused:
            raise InputError(
                f"no usable checkpoint in {self.checkpoints}: {refused[0]}; "
                "delete that folder to start again from round 0"
            )
        lines += [f"{refusal}; an earlier one is used" for refusal in refused]
        if simulation.ranks.first:
            spoilt = damaged(self.path) if self.finished else self._spoilt_history(simulation)
            if spoilt:
                lines.append(f"damaged, and made again: {', '.join(spoilt)}")
            self.write_history(simulation)
        return lines

    def _spoilt_history(self, simulation: Simulation) -> list[str]:
        """The history's file, where it lacks what came before the checkpoint."""
        try:
            there = (self.path / HISTORY).read_bytes()
        except OSError:
            there = b""
        return [] if there.startswith(_lines(simulation.history).encode()) else [HISTORY]

    def save(self, simulation: Simulation) -> None:
        self._check_place()
        checkpoint = simulation.checkpoint()
        record = {**checkpoint.record, "recipe": self.content}  # from which a lost recipe is made again
        save_checkpoint(self.checkpoints, checkpoint._replace(record=record), self.recipe.digest)

    def write_history(self, simulation: Simulation, since: int = 0) -> None:
        """Writes the history anew, or appends what came after its first `since` lines."""
        self._check_place()
        if since:
            append(self.path / HISTORY, _lines(simulation.history[since:]))
        else:
            write_atomic(self.path / HISTORY, _lines(simulation.history).encode())

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
        write_atomic(self.path / CLIENTS, _ordered(save(clients, metadata=metadata)))
        results = summarise(simulation, self.recipe)
        results["engine"] = self.content.get("engine") or results["engine"]  # as it was chosen at first
        results["files"] = {
            name: _digest(self.path / name) for name in (HISTORY, CLIENTS, *([MODELS] if models else []))
        }
        results = sealed(results)
        write_json(self.path / RESULTS, results)
        return results

    def _check_place(self) -> None:
        """Refuses to write where the directory no longer is: it would be made anew, without its contents."""
        if _identity(self.path) != self.identity:
            raise _moved(self.path)


def damaged(path: Path) -> list[str]:
    """Files of a finished comparison that are not as they were written."""
    try:
        results = read_json(path / RESULTS)
    except (OSError, ValueError):
        return [RESULTS]
    if "sha256" not in results and "files" not in results:  # of an older version
        return [] if "runs" in results and "summary" in results else [RESULTS]
    if not is_sealed(results):
        return [RESULTS]
    return [name for name, digest in results["files"].items() if _digest(path / name) != digest]


def check_whole(path: Path) -> None:
    """Refuses a finished comparison of which a file is damaged."""
    if spoilt := damaged(path):
        again = shlex.join(["fairwind", "resume", str(path)])
        raise InputError(f"{path / spoilt[0]} is damaged: '{again}' makes it again")


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keeps other processes from training in a directory, which is made if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}; give another --out") from None
    with lock(path) as mine:
        if not mine:
            raise InputError(f"another process is training in {path}; wait for it or stop it")
        if not os.access(path, os.W_OK):
            raise InputError(f"cannot write to {path}: permission denied; give another --out")
        try:
            sweep(path)
            yield
        finally:
            with suppress(OSError):  # whatever is in it stays
                path.rmdir()


def holds_run(path: Path) -> bool:
    """Whether a comparison was begun in a directory."""
    return (path / RECIPE).exists() or any((path / CHECKPOINTS).glob("[0-9]*.json"))


def check_free(path: Path) -> None:
    """Refuses a directory that holds anything; it is held by this process."""
    if holds_run(path):
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


def explained(error: OSError) -> str:
    """An error of the file system in a line, with the file that it is about."""
    where = f": {error.filename}" if error.filename else ""
    text = f"{error.strerror or error}{where}"
    return f"{text}; make room, then give the same command again" if _full(error) else text


@contextmanager
def explaining(path: Path, again: str = "") -> Iterator[None]:
    """Turns an error of the file system while training in a directory into a line on how to go on.

    `again` is how, if not with 'fairwind resume'.
    """
    try:
        yield
    except OSError as error:
        if not Path(str(error.filename)).is_relative_to(path):
            raise  # something of the user's
        if _identity(path) is None:
            raise _moved(path) from error
        then = "make room" if _full(error) else "mend that"
        saved = max((file.stem for file in (path / CHECKPOINTS).glob("[0-9]*.json")), default="")
        if not holds_run(path):
            advice = f"nothing was saved yet: {then}, then begin again"
        else:
            safe = f"the checkpoint of round {int(saved)}" if saved.isdigit() else "the recipe"
            go_on = again or shlex.join(["fairwind", "resume", str(path)])
            advice = f"{safe} is safe: {then}, then go on with: {go_on}"
        raise InputError(f"{error.strerror or error}: {error.filename}; {advice}") from error


def _full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _moved(path: Path) -> InputError:
    return InputError(
        f"{path} was moved or deleted while it was trained in; what was saved is where it was moved to: "
        "go on there with 'fairwind resume NEW-PLACE'"
    )


def _ordered(data: bytes) -> bytes:
    """A safetensors file with its metadata in order, which the library writes in any."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[end:]


def _lines(history: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in history)


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
