"""The directory of a comparison: its recipe, checkpoints, history and results."""

import json
import shlex
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fairwind import setups
from fairwind.data import store
from fairwind.data.federation import Federation
from fairwind.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fairwind.engine.evaluation import Evaluation
from fairwind.engine.settings import NUMBERS, Settings, names_of
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError, first_line, printable
from fairwind.runs.environment import changes, environment
from fairwind.runs.files import (
    HISTORY,
    RECIPE,
    RESULTS,
    append,
    default_cache,
    read_json,
    read_sealed,
    sealed,
    write_atomic,
    write_json,
)
from fairwind.runs.folder import CHECKPOINTS, FEDERATED, identity, is_federated, moved, resuming
from fairwind.runs.recipe import Recipe
from fairwind.runs.references import is_reference, load_task
from fairwind.runs.results import about, summarise
from fairwind.runs.schema import Environment, ResultsFile
from fairwind.runs.seals import damaged, finish, history_lines
from fairwind.setups import Where
from fairwind.task import Task


class RunDirectory:
    """A directory that holds a comparison, begun or finished."""

    def __init__(self, path: Path, content: dict[str, Any], *, lost: str = ""):
        """`content` is the recipe's file; `lost` says why it was restored from a checkpoint, if it was."""
        self.path, self.content, self.lost = path, content, lost
        self.recipe = Recipe.from_json(content)
        self.where = Where(**{k: Path(v) for k, v in content.get("where", {}).items()})
        self.made_with = cast(Environment, dict(content["environment"]))
        self.checkpoints = path / CHECKPOINTS
        self.identity = identity(path)

    @classmethod
    def create(cls, path: Path, recipe: Recipe, where: Where, simulation: Simulation) -> "RunDirectory":
        """Starts a comparison in an empty, locked directory."""
        made_with = environment(recipe.settings.device)
        places = {k: str(v.absolute()) for k, v in where._asdict().items() if v is not None}
        content = {**recipe.to_json(), "where": places, "environment": made_with}
        content |= {"plan": simulation.plan.to_json(), **about(simulation)}
        write_json(path / RECIPE, sealed(content))
        return cls(path, sealed(content))

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """The directory of an earlier comparison; a lost recipe is restored from a checkpoint."""
        try:
            content = read_sealed(path / RECIPE)
        except (FileNotFoundError, NotADirectoryError):
            lost = f"{path / RECIPE} is missing"
        except OSError as error:
            raise InputError(f"{path / RECIPE} cannot be read: {error.strerror}") from None
        except ValueError as error:
            lost = f"{path / RECIPE} cannot be read as a recipe: {first_line(error)}"
        else:
            if FEDERATED in content:
                raise InputError(_trained_elsewhere(path))
            return cls._of(path, content)
        checkpoint, _ = load_checkpoint(path / CHECKPOINTS)
        if checkpoint is not None and "recipe" in checkpoint.record:
            return cls._of(path, checkpoint.record["recipe"], lost)
        if not (path / RECIPE).exists():
            raise InputError(f"{path} holds no run: there is no {RECIPE} in it")
        raise InputError(f"{lost}; put a copy of it there, or begin anew in another directory")

    @classmethod
    def _of(cls, path: Path, content: dict[str, Any], lost: str = "") -> "RunDirectory":
        """From an intact recipe, which another version of Fairwind may have written."""
        from fairwind import __version__

        try:
            return cls(path, content, lost=lost)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            made_by = (content.get("environment") or {}).get("fairwind", "another version")
            raise InputError(
                f"the recipe of {path} is not understood ({first_line(error)}): it was written by fairwind "
                f"{made_by}, and this is {__version__}; take that version"
            ) from None

    @property
    def finished(self) -> bool:
        return (self.path / RESULTS).exists()

    @property
    def trained(self) -> int:
        """The rounds behind it: those of the newest checkpoint, or of the results."""
        saved = [int(file.stem) for file in self.checkpoints.glob("[0-9]*.json") if file.stem.isdigit()]
        with suppress(OSError, ValueError, LookupError, TypeError):
            saved.append(int(read_json(self.path / RESULTS)["runs"][0]["rounds"]))
        return max(saved, default=0)

    def check_version(self) -> None:
        """Refuses a comparison that a version of Fairwind with other numbers, or none, began."""
        if self.recipe.numbers != NUMBERS:
            raise InputError(
                f"{self.path} was begun by another version of Fairwind ({self.made_with['fairwind']}), whose "
                "numbers may differ, and cannot go on: give another out; fairwind.load reads what is finished"
            )

    def changed(self, settings: Settings) -> list[str]:
        """What is said of differences since the run started, in the environment or the machine's settings."""
        found = changes(self.made_with, environment(settings.device))
        for name in names_of("machine", "rounding"):
            old, new = getattr(self.recipe.settings, name), getattr(settings, name)
            found += [f"{name} was {old}, is {new}"] if old != new else []
        return [f"{change}; the last bits of the results may change with it" for change in found]

    @property
    def code(self) -> list[str]:
        """The files and modules of users that going on with it imports, as absolute paths."""
        named = filter(is_reference, (self.recipe.setup, *self.recipe.algorithms))
        return [printable(str(Path(name).absolute()) if ".py:" in name else name, 1000) for name in named]

    def task(self, cache: Path | None = None) -> Task:
        """The task that the run started with."""
        recipe = self.recipe
        if is_reference(recipe.setup):
            return load_task(recipe.setup)
        if recipe.in_python:
            name = self.content.get("task", recipe.setup)
            raise InputError(
                f"the task {name!r} of {self.path} was made in Python: go on there, with the same "
                f"fairwind.compare(…, out={str(self.path)!r})"
            )
        where = self.where if cache is None else self.where._replace(cache=cache)
        prepared = self.content.get("federation", {}).get("digest")
        if prepared is None:
            return setups.task(recipe.setup)
        entry = store.find(prepared, where.cache)
        if entry is None:
            cache = where.cache or default_cache()
            given = {"data-dir": where.data_dir, "glove": where.glove, "cache": where.cache}
            options = "".join(f" --{name} {value}" for name, value in given.items() if value is not None)
            raise InputError(
                f"the data of this run (digest {prepared[:12]}…) is not in {cache}: "
                f"make it again with 'fairwind data {recipe.setup}{options}', or name its --cache"
            )
        return setups.task_on(recipe.setup, entry.load())

    def mend_recipe(self) -> list[str]:
        """Writes a lost recipe again; returns messages about it."""
        if not self.lost:
            return []
        self._check_place()
        write_json(self.path / RECIPE, self.content)
        lost, self.lost = self.lost, ""
        return [f"{lost}; it is made again from a checkpoint"]

    def restore(self, simulation: Simulation) -> list[str]:
        """Restores a simulation from the newest intact checkpoint; returns messages about damaged files."""
        lines = self.mend_recipe() if simulation.ranks.first else []
        checkpoint, refused = self.newest()
        if checkpoint is not None:
            simulation.restore(checkpoint)
            if self.finished and "stopped" in checkpoint.record:  # its results are made again
                simulation.stop(checkpoint.record["stopped"])
        lines += refused
        if simulation.ranks.first:
            spoilt = damaged(self.path) if self.finished else self._spoilt_history(simulation)
            if spoilt:
                lines.append(f"damaged, and made again: {', '.join(spoilt)}")
            self.write_history(simulation)
        return lines

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint, and messages about damaged ones; refused if none is left."""
        checkpoint, refused = load_checkpoint(self.checkpoints, self.recipe.digest)
        if checkpoint is None and refused:
            raise InputError(
                f"no usable checkpoint in {self.checkpoints}: {refused[0]}; "
                "delete that folder to start again from round 0"
            )
        return checkpoint, [f"{refusal}; an earlier one is used" for refusal in refused]

    def _spoilt_history(self, simulation: Simulation) -> list[str]:
        """The history's file, if it lacks lines from before the checkpoint."""
        try:
            there = (self.path / HISTORY).read_bytes()
        except OSError:
            there = b""
        return [] if there.startswith(history_lines(simulation.history).encode()) else [HISTORY]

    def save(self, simulation: Simulation) -> None:
        self._check_place()
        checkpoint = simulation.checkpoint()
        federation = simulation.federation
        # A lost recipe is restored from a checkpoint; the rest is for interim pages.
        who: dict[str, object] = {"names": list(federation.names), "groups": list(federation.groups)}
        _, judged = federation.part(simulation.watched)  # the samples that the scores are of
        sizes = {"train_size": federation.train, "test_size": judged}
        checkpoint = checkpoint._replace(
            record={**checkpoint.record, "recipe": self.content, **who},
            tensors={**checkpoint.tensors, **sizes},
        )
        save_checkpoint(self.checkpoints, checkpoint, self.recipe.digest)

    def write_history(self, simulation: Simulation, since: int = 0) -> None:
        """Rewrites the history, or appends what came after its first `since` lines."""
        self._check_place()
        if since:
            append(self.path / HISTORY, history_lines(simulation.history[since:]))
        else:
            write_atomic(self.path / HISTORY, history_lines(simulation.history).encode())

    def write_results(self, simulation: Simulation, *, models: bool = True) -> ResultsFile:
        """Writes the history, the trained models and every client's numbers, then the results: the end.

        Without models the run is a study's, and its history is compressed.
        """
        self._check_place()
        trained = {
            f"{view.label}/{view.seed}/{name}": value.cpu().contiguous()
            for i, view in enumerate(simulation.final_views if models else ())
            for name, value in simulation.state_dict(i).items()
        }
        final = simulation.final()
        curves, federation = simulation.curves.tensor(), simulation.federation
        unwatched = curves.new_full(
            (len(curves), len(final.views) - len(simulation.views), len(federation)), nan
        )
        clients = {
            **_numbers(simulation, final, federation),
            "curves": torch.cat([curves, unwatched], 1) if unwatched.numel() else curves,
        }
        metadata = {
            "names": json.dumps(simulation.federation.names),
            "rounds": json.dumps(simulation.curves.rounds),
        }
        if simulation.federation.groups:
            metadata["groups"] = json.dumps(simulation.federation.groups)
        new, of_new = federation.new_clients, simulation.final_of_new_clients()
        if new is not None and of_new is not None:
            clients |= {f"new.{key}": value for key, value in _numbers(simulation, of_new, new).items()}
            metadata["new_names"] = json.dumps(new.names)
        results = summarise(simulation, self.recipe, self.content.get("plan"))
        return finish(self.path, results, simulation.history, clients, metadata, trained if models else None)

    def _check_place(self) -> None:
        """Refuses to write if the directory was moved: it would be created again without its contents."""
        if identity(self.path) != self.identity:
            raise moved(self.path)


def _numbers(simulation: Simulation, now: Evaluation, federation: Federation) -> dict[str, Tensor]:
    """Every client's scores and losses under each model (views, K), and its numbers of samples."""
    others = zip(simulation.scores[1:], now.other_scores, strict=True)
    return {
        "score": now.score.float(),
        "loss": now.loss.float(),
        **{f"score.{score.name}": found.float() for score, found in others},
        "train_size": federation.train,
        "test_size": federation.test,
    }


def check_begun(path: Path) -> None:
    """Refuses a directory that holds neither a comparison nor a real federation's training."""
    if not is_federated(path):
        RunDirectory.open(path)


def _trained_elsewhere(path: Path) -> str:
    """How to resume a real federation's training, which fairwind's commands cannot."""
    if (path / RESULTS).exists():
        show = shlex.join(["fairwind", "report", str(path)])
        return f"{path} holds a real federation's training, which is finished: '{show}' shows it"
    return (
        f"{path} holds a real federation's training, which is not finished: give {resuming(path)}, and it "
        "goes on after the last round"
    )
