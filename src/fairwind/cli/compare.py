"""compare: several algorithms on one task."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fairwind import algorithms, setups
from fairwind.cli.finishing import finish
from fairwind.cli.options import (
    Count,
    Epochs,
    Folder,
    LocalSolver,
    Names,
    Number,
    Seconds,
    Seeds,
    Share,
    Steps,
    Whole,
    described,
)
from fairwind.cli.terminal import say
from fairwind.engine.ranks import find, join
from fairwind.engine.settings import DataOn, Engine, Precision, Settings, Switch
from fairwind.errors import InputError, in_range
from fairwind.runs.directory import RunDirectory
from fairwind.runs.folder import check_free, explaining, held, new_directory
from fairwind.runs.recipe import Recipe, changed_settings, settings_of
from fairwind.runs.references import is_reference, load_task
from fairwind.runs.spec import with_parameters
from fairwind.runs.training import train_on_other_rank
from fairwind.setups import Where
from fairwind.task import Task
from fairwind.tracking import Tracking

SETTINGS = (  # options of a comparison
    *("rounds", "solver", "momentum", "lr", "batch_size", "weight_decay", "clip", "lr_decay", "epochs"),
    *("steps", "participation", "clients_per_round", "probe_samples"),
    *("eval_every", "target", "engine", "device", "compile", "precision", "memory", "data_on", "workers"),
)


@described
@dataclass(frozen=True)
class Compare:
    """Train with several algorithms under several seeds, and show how each client fares.

    All runs are stacked and train at once. Results, curves and a report page go into a directory; a
    comparison that was stopped, or killed, goes on with 'fairwind resume DIR'.

    For example: fairwind compare synthetic --algorithms fedavg adafedadam --rounds 100
    """

    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TASK")] = "synthetic"
    """A setup, whose parameters follow a colon, as in synthetic:classes=5,sizes=li ('fairwind list' shows
    all); or your own task: FILE.py:NAME or PACKAGE.MODULE:NAME of a fairwind.Task, or of a function that
    makes one."""
    data_dir: Folder = None
    """Folder with the setup's files. If not given, data that was prepared before is used, or the Hugging Face
    hub's is downloaded."""
    glove: Folder = None
    """File, or folder, of GloVe's word vectors for sent140 (the data folder is searched if not given)."""
    cache: Folder = None
    """Folder of prepared data (XDG_CACHE_HOME/fairwind, or ~/.cache/fairwind, if not given)."""
    clients: Whole = None
    """Number of clients of a setup; the same as SETUP:clients=…"""
    algorithms: Names = algorithms.PAPER
    """Algorithms to compare, separated by spaces or commas; parameters follow a colon, as in
    adafedadam:alpha=2,warmup=0. One of your own is FILE.py:NAME of a fairwind.Algorithm. A set is named
    paper, fair, accelerated or all."""
    seeds: Seeds = (0, 1, 2)
    """Seeds of initial weights, batch order and participation; every algorithm runs under each."""
    rounds: Whole = None
    """Communication rounds (the task's own if not given)."""
    alpha: Number = None
    """AdaFedAdam's fairness: 0 weighs clients by size alone, larger is fairer (its default is 1)."""
    solver: LocalSolver = None
    """How clients train (the task's own if not given)."""
    momentum: Number = None
    """Momentum of --solver momentum or nesterov (0.9 if not given)."""
    lr: Number = None
    """Local learning rate (the task's own if not given)."""
    batch_size: Whole = None
    """Local batch size (the task's own if not given)."""
    weight_decay: Number = None
    """Local weight decay (the task's own if not given)."""
    clip: Number = None
    """Largest norm of a batch's gradient; longer ones are scaled down to it."""
    lr_decay: Number = None
    """What the local learning rate is multiplied by after every round."""
    epochs: Epochs = None
    """Local epochs a round, also parts of one, as in --epochs 0.5; two numbers, as in --epochs 1 3, are drawn
    between for each client and round."""
    steps: Steps = None
    """Local steps a round, instead of epochs; two numbers are drawn between."""
    participation: Share = 1.0
    """Share of the clients that train in a round."""
    clients_per_round: Whole = None
    """Number of clients that train in a round, instead of a share."""
    probe_samples: Whole = None
    """Samples on which clients measure loss and gradient before training (all if not given)."""
    eval_every: Count = 10
    """Rounds between evaluations of all clients on their test samples."""
    target: Number = None
    """Stop early once the average of every run has reached this, in percent if the score is accuracy."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU where there is one."""
    engine: Engine = "auto"
    """stacked trains all clients of all runs at once, loop one after another; auto takes the faster of those
    that can train the model."""
    compile: Switch = "auto"
    """Compile the local step; auto does where a compiler is found and the run is long enough."""
    precision: Precision = "auto"
    """How local steps are computed: float32 is exact; tf32 rounds the factors of products, bf16 all but
    weights and sums, both for speed on a GPU. auto is tf32 on a GPU, float32 on a CPU."""
    memory: Number = None
    """GiB that clients training at once may take; the rest wait (if not given: on a CPU 1/32, which stays
    near its cache, or more if uncompiled steps have many operations; on a GPU a quarter of its memory)."""
    data_on: DataOn = "auto"
    """Where samples are kept: on the device, or on the host, from where those of a few clients at a time are
    brought over; auto is the host for what would take more than half of a GPU's memory."""
    workers: Whole = None
    """Threads that share the clients out on a CPU (one for each core if not given)."""
    out: Folder = None
    """Directory for the results (runs/NAME-TIME if not given)."""
    checkpoint_every: Seconds = 30
    """Time between checkpoints: what a kill may cost."""
    explain: bool = False
    """Only show how the comparison would be computed, and why: nothing is trained or written."""
    track: Names = ()
    """Trackers that show the rounds, each as NAME or NAME:FOLDER: tensorboard, mlflow, wandb (offline)."""

    def run(self) -> None:
        in_range(0, math.inf, checkpoint_every=self.checkpoint_every)
        own = self._own_task()
        recipe = self.recipe(own)
        recipe.check()
        if self.explain:
            where = Where(self.data_dir, self.glove, self.cache)
            print(recipe.build(own or _load(recipe.setup, where)).plan)
            return None
        first = find().first
        tracking = Tracking(self.track if first else ())
        name = own.name if own is not None else recipe.setup.partition(":")[0]
        path = self.out or (new_directory(name) if first else Path())
        with held(path) if first else nullcontext():
            if first:
                check_free(path)
            where = Where(self.data_dir, self.glove, self.cache)
            task = own or _load(recipe.setup, where)
            simulation = recipe.build(task)
            if not first:
                return train_on_other_rank(simulation)
            verified = recipe.with_digests(task, simulation)
            with explaining(path):
                tracking.record(path)
                directory = RunDirectory.create(path, verified, where, simulation)
                directory.write_history(simulation)
            finish(directory, simulation, self.checkpoint_every, tracking)
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
        options = {name: getattr(self, name) for name in SETTINGS}
        changes = {name: value for name, value in options.items() if value is not None}
        settings: Settings
        if own is None:
            spec = setups.with_clients(self.task, self.clients)
            settings = settings_of(spec, **changes)
        else:
            spec, settings = self.task, changed_settings(own.solver, own.rounds, **changes)
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
