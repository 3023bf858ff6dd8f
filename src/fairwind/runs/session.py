"""A comparison, from the lock of its directory to its results: Python, commands and studies all train so."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from fairwind.contract import AnyAlgorithm
from fairwind.engine.ranks import find, join
from fairwind.engine.settings import Settings, names_of
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError
from fairwind.runs.directory import RunDirectory
from fairwind.runs.files import RESULTS
from fairwind.runs.folder import check_free, check_writable, explaining, held, holds_run, writable
from fairwind.runs.growth import Growth, growing, settle
from fairwind.runs.recipe import Recipe, on_the_same_machine
from fairwind.runs.results import Evaluated, summarise, warnings_of
from fairwind.runs.schema import Results
from fairwind.runs.seals import damaged, read_history, read_results
from fairwind.runs.training import Console, Plain, asks_to_stop, train
from fairwind.setups import WHERE, Where
from fairwind.task import Task
from fairwind.tracking import Tracking


class Trained(NamedTuple):
    """What was trained, and the content of its results.json."""

    simulation: Simulation
    results: Results


def begun_or_new(path: Path) -> RunDirectory | None:
    """The comparison that was begun in a directory; if there is none, the directory must be empty."""
    if holds_run(path):
        return RunDirectory.open(path)
    check_free(path)
    return None


@dataclass(frozen=True, kw_only=True)
class Session:
    """How a comparison is trained, shown and written."""

    recipe: Recipe | None = None
    """What is trained; None is what the directory says, task and all."""
    load: Callable[[], Task] | None = None
    """The recipe's task, loaded once the directory is locked."""
    own: Mapping[str, AnyAlgorithm] = field(default_factory=dict)  #: Those that no spec names, by label.
    path: Path | None = None  #: The directory; None keeps nothing.
    find: Callable[[Path], RunDirectory | None] = begun_or_new
    """What was begun in the directory; refuses it if nothing may have been, or something must."""
    where: Where = WHERE  #: The files of the data, and the cache.
    models: bool = True
    """Whether trained models are kept, and a last checkpoint, from which damaged results are made again."""
    wait: bool = False  #: Whether another process that trains in the directory is waited for.
    every: float = 30  #: Seconds between checkpoints.
    again: str = ""  #: How a user goes on, if training is stopped.
    explain: bool = True
    """Whether an error of the file system becomes a line that says how to go on."""
    say: Callable[[str], object]
    """For what the user should know before training: damaged files, another machine."""
    console: Console | None = None  #: Where progress is shown.
    tracking: Tracking | None = None  #: The trackers; None are those that the directory names.
    after_evaluation: Evaluated | None = None
    time_budget: float | None = None  #: Seconds of training after which it stops.
    finished: Callable[[Path], Path | None] = lambda path: None
    """Called with the finished directory, which is still locked; returns its page, if it wrote one."""

    def run(self) -> Trained | None:
        """Trains the rounds that are left, and writes the results; None if no round was left."""
        path, ranks = self.path, join()
        first = ranks.first
        with ExitStack() as stack:
            ranks.meet()  # until here every rank may have read the directory as it was
            if path is not None and first:
                stack.enter_context(held(path, wait=self.wait, reading=os.path.exists(path / RESULTS)))
                if self.explain:
                    stack.enter_context(explaining(path, self.again))
                settle(path)
            ranks.meet()  # all ranks read it settled
            directory = self._directory(first)
            complete = path is not None and (path / RESULTS).exists() and not damaged(path)
            goes_on = complete and path is not None and self._goes_on(path)
            larger = growing(path) if path is not None and self.recipe is None else None
            if not complete or goes_on or larger or (directory is not None and self.recipe is not None):
                recipe, simulation = self._build(
                    directory, larger
                )  # refuses a directory of another comparison
                grows = directory is not None and (goes_on or larger or recipe.grows(directory.recipe))
                complete = complete and not grows
            if complete:
                self._nothing_left(directory)
                return None
            if path is not None and first:
                check_writable(path)
            if directory is not None:
                self._say(directory.changed(recipe.settings))
                simulation.ranks.meet()  # from here on no other process changes the checkpoints
                if grows:
                    directory = self._grow(directory, recipe, simulation)
                self._say(directory.restore(simulation))
            if not first:
                train(simulation)
                return Trained(simulation, summarise(simulation, recipe))
            if directory is not None and self.console is not None:
                self.console.print(f"going on at round {simulation.round} of {recipe.settings.rounds}")
            tracking = self.tracking or (Tracking.resumed(path) if path is not None else Tracking())
            stack.enter_context(tracking)
            if path is not None and directory is None:
                tracking.record(path)
                directory = RunDirectory.create(path, recipe, self.where, simulation)
                self._say(directory.restore(simulation))
            trained = self._train(simulation, recipe, directory, tracking)
            self._say(warnings_of(simulation) if self.console is None else [])
            return trained

    def _goes_on(self, path: Path) -> bool:
        """Whether finished results were stopped by what does not stop them any more."""
        results = read_results(path)
        by = results.get("stopped", {}).get("by")
        if by == "time_budget":
            return self.time_budget is None or results["timing"]["seconds"] < self.time_budget
        if by == "after_evaluation":
            newest = read_history(path, results)[-len(results["runs"]) :]
            return self.after_evaluation is None or not asks_to_stop(self.after_evaluation, newest)
        return False

    def _grow(self, source: RunDirectory, recipe: Recipe, simulation: Simulation) -> RunDirectory:
        """The folder in which what is missing is trained, at the round that is done."""

        def build(runs: list[tuple[str, int]], rounds: int) -> Simulation:
            settings = replace(recipe.settings, rounds=rounds, target=None, patience=None)
            return replace(recipe, settings=settings).build(self._task(source), self.own, runs)

        def bring(added: Simulation, directory: RunDirectory, spent: float) -> None:
            budget = None if self.time_budget is None else self.time_budget - spent
            if not find().first:
                return train(added)
            shown, again = self.console, self.again
            return train(added, directory, console=shown, every=self.every, again=again, time_budget=budget)

        console = self.console or Plain(quiet=True)
        return Growth(source, recipe, build, bring, self._say, console.print).begin(simulation)

    def _task(self, directory: RunDirectory) -> Task:
        """The task that is given, or that the directory names."""
        return self.load() if self.load is not None else directory.task(self.where.cache)

    def _directory(self, first: bool) -> RunDirectory | None:
        """What was begun; ranks other than 0 refuse nothing."""
        if self.path is None:
            return None
        if first:
            return self.find(self.path)
        return RunDirectory.open(self.path) if holds_run(self.path) else None

    def _nothing_left(self, directory: RunDirectory | None) -> None:
        """The end of a comparison that is finished."""
        if find().first and self.path is not None:
            self._say(directory.mend_recipe() if directory is not None else [])
            try:
                self.finished(self.path)
            except InputError as error:
                if writable(self.path):
                    raise
                self.say(str(error))

    def _build(
        self, directory: RunDirectory | None, larger: RunDirectory | None
    ) -> tuple[Recipe, Simulation]:
        """The simulation at round 0, and its recipe, which must have all that the directory has.

        `larger` is what the directory's comparison grows into, if nothing else is said.
        """
        recipe = self.recipe
        if recipe is None or self.load is None:
            assert directory is not None
            recipe, task = (larger or directory).recipe, directory.task(self.where.cache)
        else:
            task = self.load()
            if directory is not None:
                self._say(_kept(recipe.settings, directory.recipe.settings))
                settings = on_the_same_machine(recipe.settings, directory.recipe.settings)
                recipe = replace(recipe, settings=settings)
        if directory is not None:
            directory.check_version()
        lacks = "" if directory is None else recipe.lacks(directory.recipe, directory.trained)
        if lacks:
            raise InputError(
                f"{self.path} holds more than is asked for ({lacks}): ask for all of it, and for more if you "
                "like, or give another out"
            )
        simulation = recipe.build(task, self.own)
        recipe = recipe.with_digests(task, simulation, rehearse=self.path is not None)
        if directory is not None:
            differs = directory.recipe.differs(recipe.part(directory.recipe))
            if differs and self.recipe is not None:
                raise InputError(f"{self.path} holds a run that differs in its {differs}; give another out")
            if differs:
                raise InputError(
                    f"{self.path} was started with a task that differs in its {differs}: "
                    "restore it, or start in another directory"
                )
        return recipe, simulation

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)

    def _train(
        self, simulation: Simulation, recipe: Recipe, directory: RunDirectory | None, tracking: Tracking
    ) -> Trained:
        """Trains, and writes the results."""
        tracking.begin(simulation, recipe, self.path)
        train(
            simulation,
            directory,
            console=self.console,
            every=self.every,
            again=self.again,
            after_evaluation=tracking.and_then(self.after_evaluation),
            time_budget=self.time_budget,
            save_last=self.models,
        )
        final = simulation.final().lines  # of models in the history, only if that is of other samples
        tracking.log(final[len(simulation.views) if simulation.watched == "test" else 0 :], "test/")
        if directory is None:
            results, page = summarise(simulation, recipe), None
        else:
            assert self.path is not None
            results = directory.write_results(simulation, models=self.models)
            settle(self.path)
            page = self.finished(self.path)
        tracking.finish(page)
        return Trained(simulation, results)


def _kept(given: Settings, before: Settings) -> list[str]:
    """What is said of settings that stay as they were, although others are given."""
    plain = Settings()
    return [
        f"{name} stays {getattr(before, name)}, as the comparison began"
        for name in names_of("history")
        if getattr(given, name) not in (getattr(plain, name), getattr(before, name))
    ]
