"""compare, resume and report: several algorithms on one setup."""

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import tyro
from safetensors import SafetensorError

from fairwind import algorithms, setups
from fairwind.cli.terminal import advance, err, help_along, out, say
from fairwind.comparison import Recipe, RunDirectory, settings_of
from fairwind.data.federation import Federation
from fairwind.engine.precision import Precision
from fairwind.engine.ranks import find, join
from fairwind.engine.settings import Engine, Switch
from fairwind.engine.simulation import Simulation
from fairwind.errors import InputError, first_line
from fairwind.files import RESULTS
from fairwind.setups import Where

SETTINGS = (  # options of a comparison
    *(
        "rounds",
        "solver",
        "momentum",
        "lr",
        "batch_size",
        "weight_decay",
        "clip",
        "lr_decay",
        "epochs",
        "participation",
        "probe_samples",
    ),
    *("eval_every", "engine", "device", "compile", "precision", "memory", "workers"),
)


@dataclass(frozen=True)
class Compare:
    """Train with several algorithms under several seeds, and show how each client fares.

    All runs are stacked and train at once. Results, curves and a report page go into a directory; a
    comparison that was stopped, or killed, goes on with 'fairwind resume DIR'.
    """

    setup: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SETUP")] = "synthetic"
    """Data, model and solver that belong together; parameters follow a colon, as in
    synthetic:classes=5,sizes=li. 'fairwind list' shows all."""
    data_dir: Path | None = None
    """Folder with the setup's files. If not given, data that was prepared before is used, or the Hugging Face
    hub's is downloaded."""
    glove: Path | None = None
    """File, or folder, of GloVe's word vectors for sent140 (the data folder is searched if not given)."""
    cache: Path | None = None
    """Folder of prepared data (XDG_CACHE_HOME/fairwind, or ~/.cache/fairwind, if not given)."""
    clients: int | None = None
    """Number of clients; the same as SETUP:clients=…"""
    algorithms: tuple[str, ...] = algorithms.PAPER
    """Algorithms to compare; parameters follow a colon, as in adafedadam:alpha=2,warmup=0."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initial weights, batch order and participation; every algorithm runs under each."""
    rounds: int | None = None
    """Communication rounds (the setup's own if not given)."""
    alpha: float | None = None
    """AdaFedAdam's fairness: 0 weighs clients by size alone, larger is fairer (its default is 1)."""
    solver: Literal["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop"] | None = None
    """How clients train (the setup's own if not given)."""
    momentum: float | None = None
    """Momentum of --solver momentum or nesterov (0.9 if not given)."""
    lr: float | None = None
    """Local learning rate (the setup's own if not given)."""
    batch_size: int | None = None
    """Local batch size (the setup's own if not given)."""
    weight_decay: float | None = None
    """Local weight decay (the setup's own if not given)."""
    clip: float | None = None
    """Largest norm of a batch's gradient; longer ones are scaled down to it."""
    lr_decay: float | None = None
    """What the local learning rate is multiplied by after every round."""
    epochs: int | tuple[int, int] | None = None
    """Local epochs a round; two numbers, as in --epochs 1 3, are drawn between for each client and round."""
    participation: int | float = 1.0
    """Clients in a round: a share with a point, as in 0.1, or a number, as in 10; 1.0 is all."""
    probe_samples: int | None = None
    """Samples on which clients measure loss and gradient before training (all if not given)."""
    eval_every: int = 10
    """Rounds between evaluations of all clients' test accuracy."""
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
    memory: float | None = None
    """GiB that clients training at once may take; the rest wait (if not given: on a CPU 1/32, which stays
    near its cache; on a GPU a quarter of its memory)."""
    workers: int | None = None
    """Threads that share the clients out on a CPU (one for each core if not given)."""
    out: Path | None = None
    """Directory for the results (runs/SETUP-TIME if not given)."""
    checkpoint_every: float = 30
    """Seconds between checkpoints: what a kill may cost."""

    def run(self) -> None:
        recipe = self.recipe()
        recipe.check()
        path = self.out or Path("runs") / f"{self.setup.partition(':')[0]}-{datetime.now():%Y%m%d-%H%M%S}"
        if find().first:
            RunDirectory.check_free(path)
        where = Where(self.data_dir, self.glove, self.cache)
        federation = _load(recipe.setup, where)
        simulation = recipe.build(federation)
        if not simulation.ranks.first:
            return help_along(simulation)
        # with nothing left open
        recipe = replace(recipe, settings=simulation.settings, data=federation.origin.get("digest"))
        directory = RunDirectory.create(path, recipe, where)
        with directory.locked():
            directory.write_history(simulation)
            _train(directory, simulation, self.checkpoint_every)
        return None

    def recipe(self) -> Recipe:
        """What the options amount to."""
        spec = setups.with_clients(self.setup, self.clients)
        given = {name: getattr(self, name) for name in SETTINGS}
        settings = settings_of(spec, **{name: value for name, value in given.items() if value is not None})
        specs = tuple(self._with_alpha(algorithm) for algorithm in self.algorithms)
        if self.alpha is not None and specs == self.algorithms:
            raise InputError("--alpha is AdaFedAdam's, and no adafedadam without its own alpha is compared")
        return Recipe(spec, specs, self.seeds, settings)

    def _with_alpha(self, spec: str) -> str:
        name, colon, rest = spec.partition(":")
        if self.alpha is None or name != "adafedadam" or "alpha=" in rest:
            return spec
        return f"{name}:alpha={self.alpha:g}" + ("," + rest if colon else "")


@dataclass(frozen=True)
class Resume:
    """Go on with a comparison that was stopped or killed; it ends as if it never had been."""

    directory: tyro.conf.Positional[Path]
    """The comparison's directory."""
    checkpoint_every: float = 30
    """Seconds between checkpoints: what a kill may cost."""
    cache: Path | None = None
    """Folder of prepared data (the one the comparison began with if not given)."""

    def run(self) -> None:
        directory = RunDirectory.open(self.directory)
        if (self.directory / RESULTS).exists():
            err.print("finished: nothing is left to train")
            return _show(self.directory) if find().first else None
        for change in directory.changed():
            err.print(f"fairwind: {change}; the last bits of the results may change with it", soft_wrap=True)
        simulation = directory.recipe.build(directory.federation(self.cache))
        ranks = simulation.ranks
        with directory.locked() if ranks.first else nullcontext():
            ranks.meet()  # from here on no other process changes the checkpoints
            for refusal in directory.restore(simulation):
                err.print(f"fairwind: {refusal}; an earlier one is used", soft_wrap=True)
            if not ranks.first:
                return help_along(simulation)
            err.print(f"going on at round {simulation.round} of {simulation.settings.rounds}")
            _train(directory, simulation, self.checkpoint_every)
        return None


@dataclass(frozen=True)
class Report:
    """Write a finished comparison's report page and figures anew, and show its table."""

    directory: tyro.conf.Positional[Path]
    """The comparison's directory."""

    def run(self) -> None:
        RunDirectory.open(self.directory)
        if not (self.directory / RESULTS).exists():
            raise InputError(
                f"{self.directory} has no results yet: finish it with 'fairwind resume {self.directory}'"
            )
        _show(self.directory)


def _load(spec: str, where: Where) -> Federation:
    """The data of a setup, with a line on what it is where it comes from files."""
    federation = setups.federation(spec, where, say, join())
    if federation.origin:
        files = ", ".join(file["file"] for file in federation.origin["source"])
        say("; ".join([f"{federation.name}, from {files}", *federation.origin.get("notes", [])]))
        say("measuring every client's loss before training")
    return federation


def _train(directory: RunDirectory, simulation: Simulation, checkpoint_every: float) -> None:
    """The rounds that are left, then the results."""
    advance(directory, simulation, checkpoint_every, f"fairwind resume {directory.path}")
    directory.write_models(simulation)
    directory.write_results(simulation)
    _show(directory.path)


def _show(path: Path) -> None:
    """The table on the terminal, and the page."""
    from fairwind.report import summary_table, write_report  # charts need a second to load

    try:
        out.print(summary_table(json.loads((path / RESULTS).read_text())))
        write_report(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"the report of {path} cannot be written: {first_line(error)}") from error
    out.print(f"report: {path / 'report.html'}", soft_wrap=True, markup=False)
