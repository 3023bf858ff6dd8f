"""compare: several algorithms on one task."""

import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from fairwind import algorithms, setups
from fairwind.cli.options import Names, Seconds, Time, described, options_of, values
from fairwind.cli.report import nothing_left, show
from fairwind.cli.terminal import err, note, say
from fairwind.engine.ranks import find, join
from fairwind.errors import InputError, in_range
from fairwind.runs.duration import seconds_of
from fairwind.runs.folder import new_directory
from fairwind.runs.recipe import Recipe, changed_settings, settings_of
from fairwind.runs.references import is_reference, load_task
from fairwind.runs.session import Session
from fairwind.runs.spec import with_parameters
from fairwind.setups import Where
from fairwind.task import Task
from fairwind.tracking import Tracking


@described
@dataclass(frozen=True)
class Compare:
    """Train with several algorithms under several seeds, and show how each client fares.

    All runs are stacked and train at once. Results, curves and a report page go into a directory; a
    comparison that was stopped, or killed, goes on with 'fairwind resume DIR'. With more rounds, seeds or
    algorithms and the same --out, only what is missing is trained.

    For example: fairwind compare synthetic --algorithms fedavg adafedadam --rounds 100
    """

    task: Annotated[str, tyro.conf.Positional, values(str, metavar="TASK")] = "synthetic"
    """A setup, whose parameters follow a colon, as in synthetic:classes=5,sizes=li ('fairwind list' shows
    all); or your own task: FILE.py:NAME or PACKAGE.MODULE:NAME of a fairwind.Task, or of a function that
    makes one."""
    data_dir: Path | None = None
    """Folder with the setup's files. If not given, data that was prepared before is used, or the Hugging Face
    hub's is downloaded."""
    glove: Path | None = None
    """File, or folder, of GloVe's word vectors for sent140 (the data folder is searched if not given)."""
    cache: Path | None = None
    """Folder of prepared data (XDG_CACHE_HOME/fairwind, or ~/.cache/fairwind, if not given)."""
    clients: int | None = None
    """Number of clients of a setup; the same as SETUP:clients=…"""
    algorithms: Names = algorithms.PAPER
    """Algorithms to compare, separated by spaces or commas; parameters follow a colon, as in
    adafedadam:alpha=2,warmup=0. One of your own is FILE.py:NAME of a fairwind.Algorithm. A set is named
    paper, fair, accelerated or all."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initial weights, batch order and participation; every algorithm runs under each."""
    alpha: float | None = None
    """AdaFedAdam's fairness: 0 weighs clients by size alone, larger is fairer (its default is 1)."""
    settings: dict[str, object] = field(
        default_factory=dict, metadata=options_of("numbers", "rounding", "machine", "history")
    )
    out: Path | None = None
    """Directory for the results (runs/NAME-TIME if not given)."""
    checkpoint_every: Seconds = 30
    """Time between checkpoints: what a kill may cost."""
    time_budget: Time = None
    """Time of training after which it stops, such as 10m or 2h; the results say so, and the same command with
    more, or with none, goes on."""
    explain: bool = False
    """Only show how the comparison would be computed, and why: nothing is trained or written."""
    track: Names = ()
    """Trackers that show the rounds, each as NAME or NAME:FOLDER: tensorboard, mlflow, wandb (offline)."""

    def run(self) -> None:
        in_range(0, math.inf, checkpoint_every=self.checkpoint_every)
        budget = None if self.time_budget is None else seconds_of(self.time_budget, "time_budget")
        own = self._own_task()
        recipe = self.recipe(own)
        recipe.check()
        where = Where(self.data_dir, self.glove, self.cache)

        def load() -> Task:
            return own or _load(recipe.setup, where)

        if self.explain:
            return print(recipe.build(load()).plan)
        first = find().first
        tracking = Tracking(self.track if first else ())
        name = own.name if own is not None else recipe.setup.partition(":")[0]
        path = self.out or (new_directory(name) if first else None)  # in which other ranks find nothing
        trained = Session(
            recipe=recipe,
            load=load,
            where=where,
            path=path,
            every=self.checkpoint_every,
            again=shlex.join(["fairwind", "resume", str(path)]),
            say=note,
            console=err,
            tracking=tracking,
            time_budget=budget,
            finished=show,
        ).run()
        if trained is None and path is not None:
            err.print(nothing_left(path))
        return None

    def _own_task(self) -> Task | None:
        """The user's own task, if that is what is named."""
        if not is_reference(self.task):
            return None
        for name in ("data_dir", "glove", "cache", "clients"):
            if getattr(self, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} is for setups; {self.task} brings its own data")
        return load_task(self.task)

    def recipe(self, own: Task | None = None) -> Recipe:
        """What the options amount to, for a setup or a task of one's own."""
        if own is None:
            spec = setups.with_clients(self.task, self.clients)
            settings = settings_of(spec, **self.settings)
        else:
            spec, settings = self.task, changed_settings(own.solver, own.rounds, **self.settings)
        given = algorithms.with_sets(self.algorithms)
        specs = tuple(self._with_alpha(spec) for spec in given)
        if self.alpha is not None and specs == given:
            raise InputError("--alpha is AdaFedAdam's, and no adafedadam without its own alpha is compared")
        return Recipe(spec, specs, self.seeds, settings)

    def _with_alpha(self, spec: str) -> str:
        name, _, rest = spec.partition(":")
        if self.alpha is None or name != "adafedadam" or "alpha=" in rest:
            return spec
        return with_parameters(spec, alpha=self.alpha)


def _load(spec: str, where: Where) -> Task:
    """A setup's task, with a line on what its data is where it comes from files."""
    task = setups.task(spec, where, say, join())
    federation = task.federation
    if federation.origin:
        files = ", ".join(file["file"] for file in federation.origin["source"])
        say("; ".join([f"{federation.name}, from {files}", *federation.origin.get("notes", [])]))
        say("measuring every client's loss before training")
    return task
