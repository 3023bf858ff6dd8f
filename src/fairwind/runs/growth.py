"""A comparison grows: more rounds, seeds or algorithms, of which only what is missing is trained.

It grows in a folder of its own, in the comparison's directory, so that what was finished stays readable. Runs
that are added train first, up to the round of the others; from there on all train together. In the end
the folder's files take the places of the earlier ones.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fairwind.contract import PooledAlgorithm
from fairwind.engine.checkpoint import Checkpoint
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError
from fairwind.runs.directory import RunDirectory
from fairwind.runs.files import ADDED, CLIENTS, GROWING, HISTORY, MODELS, RECIPE, RESULTS, write_atomic
from fairwind.runs.folder import CHECKPOINTS, holds_run
from fairwind.runs.recipe import Recipe


def growing(path: Path) -> RunDirectory | None:
    """What the comparison of a directory grows into, if that was begun."""
    return RunDirectory.open(path / GROWING) if holds_run(path / GROWING) else None


def finished_at(path: Path) -> Path:
    """Where the finished files of a directory are: below it, if a kill kept them from taking their places."""
    return path / GROWING if (path / GROWING / RESULTS).exists() else path


def settle(path: Path) -> None:
    """Puts the files of a grown comparison into the places of the earlier ones; nothing if it still grows.

    A kill in between loses nothing: until the end the grown files are whole in their folder.
    """
    grown = path / GROWING
    if not (grown / RESULTS).exists():
        return
    (path / CHECKPOINTS).mkdir(exist_ok=True)
    kept = sorted(
        (grown / CHECKPOINTS).glob("[0-9]*"), reverse=True
    )  # SafeTensors before the JSON that vouches
    for name in (HISTORY, MODELS, CLIENTS, *(f"{CHECKPOINTS}/{file.name}" for file in kept), RECIPE, RESULTS):
        if (grown / name).exists():
            write_atomic(path / name, (grown / name).read_bytes())
    for file in (path / CHECKPOINTS).glob("[0-9]*"):
        if file.name not in {each.name for each in kept}:
            file.unlink(missing_ok=True)
    done = path / f".{GROWING}.{os.getpid()}.partial"  # which counts no more, and is swept after a kill
    grown.rename(done)
    shutil.rmtree(done)


@dataclass(frozen=True)
class Growth:
    """From the comparison of a directory to a larger one."""

    source: RunDirectory
    recipe: Recipe  #: Of the larger one.
    build: Callable[[list[tuple[str, int]], int], Simulation]
    """Some runs at round 0, to be trained for so many rounds, and no condition stops them."""
    train: Callable[[Simulation, RunDirectory, float], None]
    """Trains what is left of the rounds, or until the time budget is used up, less so many seconds."""
    say: Callable[[list[str]], None]  #: Of damaged files.
    tell: Callable[[str], None]  #: How it goes.

    def begin(self, simulation: Simulation) -> RunDirectory:
        """The folder in which the larger comparison goes on, with a checkpoint of all runs after a round."""
        ranks, place = simulation.ranks, self.source.path / GROWING
        ranks.meet()  # every rank has read what was begun
        if ranks.first:
            self.say(self.source.mend_recipe())
            if not holds_run(place):
                place.mkdir(exist_ok=True)
                RunDirectory.create(place, self.recipe, self.source.where, simulation)
        ranks.meet()
        directory = RunDirectory.open(place)
        if differs := directory.recipe.differs(self.recipe):
            raise InputError(
                f"{self.source.path} is growing already, into a comparison that differs in its {differs}: "
                f"finish that first, by the command or call that began it, or delete {place}"
            )
        if not any(directory.checkpoints.glob("[0-9]*.json")):
            checkpoint, lines = self.source.newest()
            self.say(lines if ranks.first else [])
            if checkpoint is not None:
                self._join(checkpoint, simulation, directory)
        ranks.meet()
        return directory

    def _join(self, checkpoint: Checkpoint, simulation: Simulation, directory: RunDirectory) -> None:
        """Brings the runs that are added to the round of the others, and keeps a checkpoint of all."""
        places = {(run.label, run.seed): r for r, run in enumerate(simulation.runs)}
        known = self.source.recipe.runs
        pooled = {
            run for run in places if isinstance(simulation.runs[places[run]].algorithm, PooledAlgorithm)
        }
        parts = [(checkpoint, [places[run] for run in sorted(known, key=lambda run: run in pooled)])]
        if missing := [run for run in places if run not in known]:
            parts.append((self._added(missing, checkpoint, directory), [places[run] for run in missing]))
        simulation.restore(simulation.checkpoint_from(parts))
        if simulation.ranks.first:
            directory.save(simulation)
            directory.write_history(simulation)
            shutil.rmtree(directory.path / ADDED, ignore_errors=True)

    def _added(self, runs: list[tuple[str, int]], others: Checkpoint, within: RunDirectory) -> Checkpoint:
        """The runs that are added, after the round of the others."""
        added, place = self.build(runs, others.round), within.path / ADDED
        ranks = added.ranks
        ranks.meet()
        if ranks.first and not holds_run(place):
            place.mkdir(exist_ok=True)
            RunDirectory.create(place, self.recipe, self.source.where, added)
        ranks.meet()
        directory = RunDirectory.open(place)
        checkpoint, lines = directory.newest()
        if (
            checkpoint is not None and checkpoint.round > others.round
        ):  # the others have lost their last rounds
            ranks.meet()
            if ranks.first:
                shutil.rmtree(directory.checkpoints)
            ranks.meet()
        self.say(lines)
        self.tell(f"{len(runs)} of the runs are new, and train first, to round {others.round} of the others")
        directory.restore(added)
        self.train(added, directory, others.record["seconds"])
        if added.round < others.round:
            why = "" if added.stopping.stopped is None else added.stopping.stopped["why"]
            raise InputError(
                f"{why} when the new runs were at round {added.round}, before {others.round}: "
                "nothing is lost, and the same with more time goes on"
            )
        return added.checkpoint()
